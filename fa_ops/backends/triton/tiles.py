"""`fa::program_tiles`: runs of tiles that the mask of a program may keep, found by a GPU.

The rules of intervals are those of `fa_ops.programs.tiles`: applied to texts in place of numbers,
they write a function of Triton, of 32 boxes of tiles. A warp walks the boxes of one row or column
of tiles: first boxes of 32 tiles, of which it takes those apart that are mixed. Numbers are
float64, as on the host. Of terms, the least and the largest of each 128 and each 4096 elements are
found before, in another launch each. Nothing waits for the GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.launch import Launch, bind
from fa_ops.backends.triton.programs import compiled, places
from fa_ops.programs.expressions import COLUMN, DISTANCE, ROW, TILE
from fa_ops.programs.program import (
    MAX_RUNS,
    TILE_SIZE,
    ScoreProgram,
    padding_of_distances,
    parse,
)
from fa_ops.programs.tiles import Box, BoxAnalysis, differs

_GROUP = tl.constexpr(32)  # tiles of a box, and lanes of a warp
_SIZE = tl.constexpr(TILE_SIZE)
_RUNS = tl.constexpr(MAX_RUNS)
_CHUNK = 32 * TILE_SIZE  # elements of a box
MAX_LENGTH = 2**30  # queries, and keys, of which tiles are found
_launches: dict[tuple, Launch] = {}


# Functions of float64 that Triton's language lacks, or that lose NaN there.


@triton.jit
def least(a, b):
    """The smaller number, NaN if one is."""
    return tl.where((a != a) | (a < b), a, b)


@triton.jit
def largest(a, b):
    """The larger number, NaN if one is."""
    return tl.where((a != a) | (a > b), a, b)


@triton.jit
def truncated(x):
    """x rounded to 0."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def tanh64(x):
    """tanh(x) in float64: by a series near 0, where the quotient has no digits."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    return tl.where(square < 1e-6, near, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))


# Rules of intervals, applied to texts.


class _Text:
    """A number or a condition of the function that is written, or a constant."""

    def __init__(self, arrays: _Texts, text: str, constant: float | bool | None = None) -> None:
        self.arrays, self.text, self.constant = arrays, text, constant

    def _with(self, op: str, other: Any, turned: bool = False) -> _Text:
        pair = (other, self) if turned else (self, other)
        return self.arrays.operation(op, *pair)

    __hash__ = None

    def __neg__(self) -> _Text:
        return self._with("*", -1.0)


for _name, _op in {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}.items():  # fmt: skip
    setattr(_Text, f"__{_name}__", lambda a, b, op=_op: a._with(op, b))
    setattr(_Text, f"__r{_name}__", lambda a, b, op=_op: a._with(op, b, True))

_OPERATIONS: dict[str, Callable] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "<": np.less,
    "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal,
    "!=": np.not_equal, "&": np.logical_and, "|": np.logical_or,
}  # fmt: skip
_CALLS = {
    "abs": "tl.abs", "ceil": "tl.ceil", "exp": "tl.exp", "exp2": "tl.exp2", "expm1": "expm1",
    "floor": "tl.floor", "log": "tl.log", "log1p": "log1p", "log2": "tl.log2",
    "maximum": "largest", "minimum": "least", "sqrt": "tl.sqrt", "tanh": "tanh64",
    "trunc": "truncated",
}  # fmt: skip
_NAMES = {
    "least": least, "largest": largest, "truncated": truncated, "tanh64": tanh64,
}  # fmt: skip


class _Texts(SimpleNamespace):
    """The functions of `BoxAnalysis`, which write lines of Triton."""

    def __init__(self) -> None:
        super().__init__(**{name: functools.partial(self._call, name) for name in _CALLS})
        self.lines: list[str] = []
        self.known: dict[str, _Text] = {}

    def number(self, x: float) -> _Text:
        x = float(x)
        text = repr(x) if math.isfinite(x) else f'float("{x}")'
        return _Text(self, f"tl.full((), {text}, tl.float64)", x)

    def condition(self, x: bool) -> _Text:
        return _Text(self, f"tl.full((), {int(x)}, tl.int1)", bool(x))

    def line(self, text: str) -> _Text:
        """The result of an expression, by a name; equal ones are computed once."""
        if text not in self.known:
            name = f"x{len(self.known)}"
            self.lines.append(f"{name} = {text}")
            self.known[text] = _Text(self, name)
        return self.known[text]

    def operation(self, op: str, a: Any, b: Any) -> _Text:
        a, b = self._text(a), self._text(b)
        if a.constant is not None and b.constant is not None:
            return self._constant(_OPERATIONS[op], a, b)
        for x, y in ((a, b), (b, a)):
            if op in "&|" and x.constant is not None:
                return y if x.constant == (op == "&") else x
            if op == "+" and x.constant == 0.0 or op == "*" and x.constant == 1.0:
                return y
        return self.line(f"{a.text} {op} {b.text}")

    def where(self, condition: _Text, x: Any, y: Any) -> _Text:
        x, y = self._text(x), self._text(y)
        if condition.constant is not None:
            return x if condition.constant else y
        return self.line(f"tl.where({condition.text}, {x.text}, {y.text})")

    def isnan(self, x: _Text) -> _Text:
        return x != x

    def isfinite(self, x: _Text) -> _Text:
        return self.abs(x) < math.inf

    def zeros_like(self, x: _Text) -> _Text:
        return self.number(0.0)

    def _call(self, name: str, *args: Any) -> _Text:
        args = tuple(map(self._text, args))
        if all(a.constant is not None for a in args):
            return self._constant(getattr(np, name), *args)
        return self.line(f"{_CALLS[name]}({', '.join(a.text for a in args)})")

    def _constant(self, function: Callable, *args: _Text) -> _Text:
        with np.errstate(all="ignore"):
            found = function(*(np.asarray(a.constant)[()] for a in args))
        is_condition = isinstance(found, bool | np.bool_)
        return self.condition(found) if is_condition else self.number(found)

    def _text(self, x: Any) -> _Text:
        return x if isinstance(x, _Text) else self.number(x)


class _MaskWriter(BoxAnalysis):
    """The mask of a program over 32 boxes, as lines of a function of Triton."""

    def __init__(self, program: ScoreProgram) -> None:
        super().__init__(program, (), _Texts())
        line = self.arrays.line
        self.b, self.h = line("(b + none).to(tl.float64)"), line("(h + none).to(tl.float64)")
        last = "tl.minimum({}1 * {} + {}, {} - 1).to(tl.float64)"
        first = "({}0 * {}).to(tl.float64)"
        ranges = (
            (line(first.format(i, TILE_SIZE)),
             line(last.format(i, TILE_SIZE, TILE_SIZE - 1, size)))
            for i, size in (("i", "Sq"), ("j", "Sk"))
        )  # fmt: skip
        self.box = Box(*ranges)
        self.tables = tables_of(program)

    def _term(self, number: int, box: Box) -> tuple[_Text, _Text]:
        term, line = self.program.terms[number], self.arrays.line
        if term.domain == TILE:
            x = line(f"tl.load(t{number} + none).to(tl.float64)")
            return x, x
        if number in self.tables:
            row = _row(term)
            at = f"tables + ({self.tables.index(number)} * all_heads + {row}) * 2 * length"
            low = self.arrays.line(f"{at} + tl.cast(0, tl.int64)")
            high = self.arrays.line(f"{low.text} + length")
            places = {ROW: ("row_at",), COLUMN: ("column_at",)}.get(
                term.domain, ("distance_at", "distance_end")
            )
            ends = []
            for base, extreme in ((low, self.arrays.minimum), (high, self.arrays.maximum)):
                loads = [line(f"tl.load({base.text} + {place})") for place in places]
                ends.append(extreme(loads[0], loads[-1]) if len(loads) > 1 else loads[0])
            return ends[0], ends[1]
        return self._of_blocks(number)

    def _of_blocks(self, number: int) -> tuple[_Text, _Text]:
        """Of a term of blocks: of the four in which the box has corners, if there are no others."""
        line, arrays = self.arrays.line, self.arrays
        ends = []
        for i, size, n in zip("ij", ("Sq", "Sk"), self.program.terms[number].block, strict=True):
            first = line(f"{i}0 * {TILE_SIZE} // {n}")
            last = line(f"tl.minimum({i}1 * {TILE_SIZE} + {TILE_SIZE - 1}, {size} - 1) // {n}")
            ends.append((first, last))
        is_near = line(" & ".join(f"({last.text} - {first.text} <= 1)" for first, last in ends))
        corners = [
            line(f"tl.load(t{number} + tl.cast({r.text}, tl.int64) * across{number} + {c.text})"
                 ".to(tl.float64)")
            for r in ends[0] for c in ends[1]
        ]  # fmt: skip
        low = functools.reduce(arrays.minimum, corners)
        high = functools.reduce(arrays.maximum, corners)
        return arrays.where(is_near, low, -math.inf), arrays.where(is_near, high, math.inf)


def _row(term: Any) -> str:
    if term.by_batch and term.by_head:
        return "(b * heads + h)"
    return "b" if term.by_batch else "h" if term.by_head else "0"


def tables_of(program: ScoreProgram) -> list[int]:
    """The terms of a mask whose least and largest elements are found first."""
    used = BoxAnalysis(program, (), _Texts()).read
    return [i for i in used if program.terms[i].domain in (ROW, COLUMN, DISTANCE)]


@functools.lru_cache(1024)
def _classes_of(text: str) -> Any:
    """The function that says which of 32 boxes a mask may keep, and of which it may drop a part."""
    program = parse(text)
    writer = _MaskWriter(program)
    may, may_not = (x.text for x in writer.may_be(writer.box))
    lines = [f"none = tl.zeros([{_GROUP.value}], tl.int32)"]  # makes vectors of scalars
    lines += places(program, set(writer.read)) + writer.arrays.lines
    found = (f"none + tl.where({x}, 1, 0) != 0" for x in (may, may_not))
    lines.append(f"return {', '.join(found)}")
    body = "".join(f"    {line}\n" for line in lines)
    head = "def classes(i0, i1, j0, j1, at, b, h, given):\n"
    given = (
        "    row_at, column_at, distance_at, distance_end = at\n"
        "    values, indices, tables, batch, heads, all_heads, Sq, Sk, length = given\n"
    )
    return compiled(f"@triton.jit\n{head}{given}{body}", _NAMES)["classes"]


# Kernels.


@triton.jit(do_not_specialize=["length", "first", "stop", "chunks"])
def extremes_kernel(x, table, length: tl.int64, first: tl.int64, stop: tl.int64, chunks: tl.int32):
    """The least and largest of each 128 elements of a row of x, then of 4096: those from `first` to
    `stop`.

    x: (rows, length); table: float64 (rows, 2, 33 * chunks). NaN where an element is.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = chunk * _GROUP + tl.arange(0, _GROUP)
    at = block.to(tl.int64)[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    used = (at >= first) & (at < stop)
    v = tl.load(x + row * length + at, mask=used, other=0).to(tl.float64)
    is_nan = tl.max((v != v).to(tl.int32), 1) > 0
    low = tl.min(tl.where(used & (v == v), v, float("inf")), 1)
    high = tl.max(tl.where(used & (v == v), v, float("-inf")), 1)
    some = tl.max(is_nan.to(tl.int32), 0) > 0
    table += row * 2 * 33 * chunks
    tl.store(table + block, tl.where(is_nan, float("nan"), low))
    tl.store(table + 33 * chunks + block, tl.where(is_nan, float("nan"), high))
    whole = 32 * chunks + chunk
    tl.store(table + whole, tl.where(some, float("nan"), tl.min(low, 0)))
    tl.store(table + 33 * chunks + whole, tl.where(some, float("nan"), tl.max(high, 0)))


@triton.jit
def _boxes(first, size: tl.constexpr, line, is_row, m, n, zero, b, h, given, CLASSES: tl.constexpr):
    """Bits of 32 boxes of `size` tiles from tile `first` of a line on: kept ones, mixed ones."""
    total = tl.where(is_row, n, m)
    begin = first + tl.arange(0, _GROUP) * size
    inside = begin < total
    begin = tl.minimum(begin, total - 1)
    end = tl.minimum(begin + (size - 1), total - 1)
    i0, i1 = tl.where(is_row, line, begin), tl.where(is_row, line, end)
    j0, j1 = tl.where(is_row, begin, line), tl.where(is_row, end, line)
    low, high = i0 - j1 - 1 + zero, i1 - j0 + zero  # blocks of distances
    if size == 1:
        at = i0, j0, low, high
    else:
        chunks = given[8] // 33
        whole = 32 * chunks
        at = (
            tl.where(is_row, i0, whole + (i0 >> 5)), tl.where(is_row, whole + (j0 >> 5), j0),
            whole + tl.minimum(low >> 5, chunks - 1), whole + tl.minimum(high >> 5, chunks - 1),
        )  # fmt: skip
    may, may_not = CLASSES(i0, i1, j0, j1, at, b, h, given)
    bit = tl.full([_GROUP], 1, tl.int32) << tl.arange(0, _GROUP)
    kept = tl.sum(tl.where(inside & may, bit, 0), 0)
    return kept, tl.sum(tl.where(inside & may & may_not, bit, 0), 0)


@triton.jit
def _write_runs(out, count, total, tile, changed, kept, mixed_before, kept_before):
    """Starts and ends of runs among 32 tiles; how many runs have begun.

    Of `total` runs each of 16 pairs lists an equal share: its first tile, and twice the tile behind
    it, plus 1 if it is mixed.
    """
    lane = tl.arange(0, _GROUP)
    starts = ((changed & kept) >> lane) & 1
    ends = ((changed & kept_before) >> lane) & 1
    number = count + tl.cumsum(starts, 0)  # of runs that have begun
    r = number - 1
    slot = (_RUNS * (r + 1) - 1) // total
    is_first = (r == 0) | ((_RUNS * r - 1) // total != slot)
    tl.store(out + 1 + 2 * slot, tile, mask=(starts != 0) & is_first & (slot < _RUNS))
    r = number - starts - 1
    slot = (_RUNS * (r + 1) - 1) // total
    is_last = (_RUNS * (r + 2) - 1) // total != slot
    is_one = is_last & ((r == 0) | ((_RUNS * r - 1) // total != slot))
    mixed = tl.where(is_one, (mixed_before >> lane) & 1, 1)
    is_listed = (ends != 0) & is_last & (slot < _RUNS) & (r >= 0)
    tl.store(out + 2 + 2 * slot, 2 * tile + mixed, mask=is_listed)
    return count + tl.sum(starts, 0)


@triton.jit
def _walk(out, total, line, is_row, m, n, zero, b, h, given, CLASSES: tl.constexpr):
    """List the runs of a line as `_write_runs` does; how many there are."""
    tiles = tl.where(is_row, n, m)
    lane = tl.arange(0, _GROUP)
    count, last_kept, last_mixed = 0, 0, 0  # runs so far; the class of the last tile
    for first in range(0, tiles + 1, _GROUP * _GROUP):  # a tile behind the last one is empty
        kept_boxes, mixed_boxes = _boxes(
            first, _GROUP, line, is_row, m, n, zero, b, h, given, CLASSES
        )
        boxes = tl.minimum((tiles + _GROUP - first) // _GROUP, _GROUP)
        for g in range(0, boxes):
            kept, mixed = -((kept_boxes >> g) & 1), -((mixed_boxes >> g) & 1)
            start = first + g * _GROUP
            if mixed != 0:
                kept, mixed = _boxes(start, 1, line, is_row, m, n, zero, b, h, given, CLASSES)
            elif start + _GROUP > tiles:
                kept &= (tl.full((), 1, tl.int32) << tl.maximum(tiles - start, 0)) - 1
            kept_before, mixed_before = (kept << 1) | last_kept, (mixed << 1) | last_mixed
            changed = (kept ^ kept_before) | (mixed ^ mixed_before)
            if changed != 0:
                count = _write_runs(
                    out, count, total, start + lane, changed, kept, mixed_before, kept_before
                )
            last_kept, last_mixed = (kept >> 31) & 1, (mixed >> 31) & 1
    return count


@triton.jit(do_not_specialize=["batch", "heads", "all_heads", "Sq", "Sk", "length", "zero"])
def runs_kernel(
    values, indices, tables, out, batch: tl.int32, heads: tl.int32, all_heads: tl.int32,
    Sq: tl.int32, Sk: tl.int32, length: tl.int32, zero: tl.int32,
    BY_HEAD: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The runs of one line, a row or a column of tiles, of one batch and head.

    values, indices: the terms of a program; tables: of `extremes_kernel`, (terms, heads, 2, length)
    out: int32 (heads, m + n, 1 + 2 * MAX_RUNS); zero: the block of distances from 0 on
    """
    line, head = tl.program_id(0), tl.program_id(1)
    m, n = tl.cdiv(Sq, _SIZE), tl.cdiv(Sk, _SIZE)
    out += (head.to(tl.int64) * (m + n) + line) * (1 + 2 * _RUNS)
    is_row = line < m
    line = tl.where(is_row, line, line - m)
    b, h = head, head * 0
    if BY_HEAD:
        b, h = head // heads, head % heads
    given = values, indices, tables, batch, heads, all_heads, Sq, Sk, length
    total, count = 0, _RUNS + 0
    while total < count:  # once more where a line has more runs than are listed
        total = count
        tl.debug_barrier()
        count = _walk(out, total, line, is_row, m, n, zero, b, h, given, CLASSES)
    tl.debug_barrier()
    count = tl.minimum(count, _RUNS)
    slot = tl.arange(0, _RUNS)
    used = slot < count
    start = tl.load(out + 1 + 2 * slot, mask=used, other=0)
    stop = tl.load(out + 2 + 2 * slot, mask=used, other=0)
    tl.store(out, count)
    tl.store(out + 1 + 2 * slot, start, mask=slot >= count)
    tl.store(out + 2 + 2 * slot, tl.where(used, stop - 2 * start, 0))


@functools.lru_cache(1024)
def _read(text: str) -> tuple[ScoreProgram, tuple[bool, bool], list[int]]:
    """A program, whether its mask differs by batch and head, and the terms that have tables."""
    program = parse(text)
    return program, differs(program), tables_of(program)


def program_tiles(
    text: str, values: Tensor | None, indices: Tensor | None, sizes: tuple[int, int, int, int],
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Runs as of `fa_ops.programs.tiles.tile_runs`, int32 on the device, without waiting for it.

    `values` and `indices` are the packed terms of the program, which has a mask; `sizes` (B, H, Sq,
    Sk) are at least 1.
    """
    program, (by_batch, by_head), listed = _read(text)
    B, H, Sq, Sk = sizes
    shape = B if by_batch else 1, H if by_head else 1
    m, n = -(-Sq // TILE_SIZE), -(-Sk // TILE_SIZE)
    out = torch.empty((*shape, m + n, 1 + 2 * MAX_RUNS), dtype=torch.int32, device=device)
    tables, chunks = _tables(program, listed, values, indices, sizes, shape, device)
    zero = padding_of_distances(Sk) // TILE_SIZE
    args = (values, indices, tables, out, B, H, math.prod(shape), Sq, Sk, 33 * chunks, zero)
    types = tuple(t if t is None else t.dtype for t in (values, indices))
    key = text, types, tables is None, by_head, device.index
    launch = _launches.get(key)
    if launch is None:
        constants = {"BY_HEAD": by_head, "CLASSES": _classes_of(text)}
        launch = _launches[key] = bind(
            runs_kernel, args, constants, {"num_warps": 1}, device=device
        )
    launch((m + n, math.prod(shape), 1), args)
    return out


def _tables(
    program: ScoreProgram, listed: list[int], values: Tensor | None, indices: Tensor | None,
    sizes: tuple, shape: tuple[int, int], device: torch.device,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """The least and largest elements of terms, float64 (terms, heads, 2, 33 * chunks), chunks."""
    if not listed:
        return None, 0
    Sq, Sk = sizes[2:]
    ends = {ROW: (0, Sq), COLUMN: (0, Sk)}
    zero = padding_of_distances(Sk)
    ends[DISTANCE] = zero - Sk + 1, zero + Sq
    longest = max(program.terms[i].length(Sq, Sk) for i in listed)
    chunks = -(-longest // _CHUNK)
    tables = torch.empty(
        (len(listed), math.prod(shape), 2, 33 * chunks), dtype=torch.float64, device=device
    )
    views = program.views(values, indices, *sizes)
    for table, i in zip(tables.unbind(0), listed, strict=True):
        x, (first, stop) = views[i].detach(), ends[program.terms[i].domain]
        args = x, table, x.shape[2], first, stop, chunks
        key = x.dtype, device.index
        launch = _launches.get(key)
        if launch is None:
            launch = _launches[key] = bind(
                extremes_kernel, args, {}, {"num_warps": 4}, device=device
            )
        launch((chunks, x.shape[0] * x.shape[1], 1), args)
    return tables, chunks
