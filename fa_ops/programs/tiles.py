"""Classes of tiles of a mask by interval analysis, and runs of tiles as kernels read them.

Numbers of a tile are intervals, conditions are pairs (may be true, may be false). A tile is empty
if its mask may not be true, full if it may not be false, and mixed otherwise: mixed is right for
any tile, so no approximation changes a result. Of terms, tables of block minima and maxima give the
interval of a range of elements.

NumPy computes this on the host, boxes of tiles first; or operations of torch on a device, of each
tile, which wait for nothing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fa_ops.programs.expressions import (
    BOOL,
    COLUMN,
    DISTANCE,
    FLOAT,
    INT,
    ROW,
    TILE,
    Linear,
    Node,
    linear_forms,
    order,
)
from fa_ops.programs.program import MAX_RUNS, TILE_SIZE, ScoreProgram, padding_of_distances

EMPTY, FULL, MIXED = 0, 1, 2
GROUP = 32  # tiles of a side of a box, whose class is tried first
_CHUNK = 2**16  # tiles of which intervals are computed at once
_KEPT = 4 * MAX_RUNS  # runs of a column before they are merged
_INF = float("inf")
_ERROR = 1e-5  # relative, of float32 arithmetic of a few operations

Interval = tuple[np.ndarray, np.ndarray]


# What computes intervals: NumPy, or torch on a device.

_FUNCTIONS = (
    "abs ceil exp exp2 expm1 floor isfinite isnan log log1p log2 maximum minimum sqrt tanh trunc "
    "where zeros_like"
).split()


def _numpy() -> SimpleNamespace:
    functions = {name: getattr(np, name) for name in _FUNCTIONS}
    return SimpleNamespace(**functions, number=np.float64, condition=np.asarray)


def _torch() -> SimpleNamespace:
    functions = {name: getattr(torch, name) for name in _FUNCTIONS}
    # numbers are on the CPU: one element may be combined with tensors of any device
    number = lambda x: torch.tensor(float(x), dtype=torch.float64)  # noqa: E731
    return SimpleNamespace(**functions, number=number, condition=torch.tensor)


_NUMPY, _TORCH = _numpy(), _torch()


class Box(NamedTuple):
    """Ranges of queries and keys, first and last ones, that broadcast."""

    q: Interval
    k: Interval


class _RangeTable:
    """The least and largest element of any range of an array, by blocks of elements."""

    def __init__(self, x: np.ndarray) -> None:
        x = np.asarray(x, np.float64)
        self.block = 8 if len(x) <= 2**16 else 32
        rest = -len(x) % self.block
        blocks = np.pad(x, (0, rest), mode="edge").reshape(-1, self.block)
        self.levels = [(blocks.min(1), blocks.max(1))]
        while (step := 1 << (len(self.levels) - 1)) < len(self.levels[0][0]):
            lo, hi = self.levels[-1]
            if len(lo) <= step:
                break
            self.levels.append(
                (np.minimum(lo[:-step], lo[step:]), np.maximum(hi[:-step], hi[step:]))
            )

    def of(self, first: np.ndarray, last: np.ndarray) -> Interval:
        """The interval of the elements from `first` to `last`, or of some more."""
        top = len(self.levels[0][0]) - 1
        a = np.clip(first.astype(np.int64) // self.block, 0, top)
        z = np.clip(last.astype(np.int64) // self.block, a, top)
        level = np.frexp(z - a + 1.0)[1] - 1
        if level.size and level.min() == level.max():
            lo, hi = self.levels[min(int(level.flat[0]), len(self.levels) - 1)]
            end = np.clip(z - (1 << int(level.flat[0])) + 1, 0, len(lo) - 1)
            start = np.minimum(a, len(lo) - 1)
            return np.minimum(lo[start], lo[end]), np.maximum(hi[start], hi[end])
        least, most = np.empty(a.shape), np.empty(a.shape)
        for n in np.unique(level):
            at = level == n
            lo, hi = self.levels[min(int(n), len(self.levels) - 1)]
            start = np.minimum(a[at], len(lo) - 1)
            end = np.clip(z[at] - (1 << int(n)) + 1, 0, len(lo) - 1)
            least[at], most[at] = np.minimum(lo[start], lo[end]), np.maximum(hi[start], hi[end])
        return least, most


class BoxAnalysis:
    """The mask of a program over boxes of queries and keys; `arrays` computes with numbers."""

    def __init__(self, program: ScoreProgram, sizes: tuple, arrays: SimpleNamespace) -> None:
        self.program, self.sizes, self.arrays = program, sizes, arrays
        self.nodes = order(program.mask)
        self.forms = linear_forms(program.mask)
        self.b, self.h = arrays.number(0), arrays.number(0)
        self.read = [i for i in range(len(program.terms)) if self._reads(i)]

    def _reads(self, number: int) -> bool:
        return any(n.op == "term" and n.value == number for n in self.nodes)

    def may_be(self, box: Box) -> tuple:
        """Whether the mask may be true, and whether it may be false, somewhere in each box."""
        values: dict[Node, Interval] = {}
        for node in self.nodes:
            values[node] = self._interval(node, [values[a] for a in node.args], values, box)
        return values[self.program.mask]

    def _interval(self, node: Node, args: list, values: dict, box: Box) -> tuple:
        xp = self.arrays
        if node.op == "const":
            if node.type == BOOL:
                return xp.condition(node.value), xp.condition(not node.value)
            return xp.number(node.value), xp.number(node.value)
        if node.op == "argument":
            at = {"q": box.q, "k": box.k, "b": (self.b, self.b), "h": (self.h, self.h)}[node.value]
            return at[0], at[1]
        if node.op == "term":
            found = self._term(node.value, box)
            is_float = self.program.terms[node.value].type == FLOAT
            return _widened(xp, found) if is_float else found
        form = self.forms.get(node)
        if form is not None and list(form.factors) != [node]:
            return _of_sum(xp, form, values)
        if node.op in ("lt", "le", "eq") and node.args[0].type == INT:
            difference = self.forms[node.args[0]].plus(self.forms[node.args[1]], -1)
            return _compared(node.op, _of_sum(xp, difference, values))
        found = _operation(xp, node, args)
        return _widened(xp, found) if node.type == FLOAT else found

    def _term(self, number: int, box: Box) -> Interval:
        raise NotImplementedError


class MaskIntervals(BoxAnalysis):
    """The mask of a program for one batch and head, by NumPy."""

    def __init__(
        self, program: ScoreProgram, terms: list[Tensor], b: int, h: int, sizes: tuple
    ) -> None:
        super().__init__(program, sizes, _NUMPY)
        self.b, self.h = float(b), float(h)
        self.tables: dict[int, Any] = {}
        Sq, Sk = sizes[2:]
        for i in self.read:
            x, term = terms[i], program.terms[i]
            values = x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1)].detach().cpu().numpy()
            if term.domain == TILE:
                self.tables[i] = np.float64(values[0])
            elif term.domain in (ROW, COLUMN):
                self.tables[i] = _RangeTable(values[: Sq if term.domain == ROW else Sk])
            elif term.domain == DISTANCE:
                zero = padding_of_distances(Sk)
                self.tables[i] = _RangeTable(values[zero - Sk + 1 : zero + Sq])
            else:
                rows, columns = (-(-n // s) for n, s in zip((Sq, Sk), term.block, strict=True))
                self.tables[i] = values[: rows * columns].reshape(rows, columns)

    def classes(self, box: Box) -> np.ndarray:
        """uint8: EMPTY, FULL or MIXED of each box."""
        with np.errstate(all="ignore"):
            may, may_not = self.may_be(box)
        found = np.where(may, np.where(may_not, MIXED, FULL), EMPTY).astype(np.uint8)
        return np.broadcast_to(found, np.broadcast_shapes(box.q[0].shape, box.k[0].shape))

    def _term(self, number: int, box: Box) -> Interval:
        term, table = self.program.terms[number], self.tables[number]
        (q0, q1), (k0, k1) = box
        if term.domain == TILE:
            return table, table
        if term.domain == ROW:
            return table.of(q0, q1)
        if term.domain == COLUMN:
            return table.of(k0, k1)
        if term.domain == DISTANCE:
            least = self.sizes[3] - 1
            return table.of(*np.broadcast_arrays(q0 - k1 + least, q1 - k0 + least))
        rows, columns = term.block
        first = (q0 // rows).astype(np.int64), (k0 // columns).astype(np.int64)
        is_one = ((q1 // rows) == first[0]) & ((k1 // columns) == first[1])
        corner = table[first].astype(np.float64)
        return np.where(is_one, corner, table.min()), np.where(is_one, corner, table.max())


class _TileIntervals(BoxAnalysis):
    """The mask of a program for all batches, heads and tiles, by operations of torch.

    Numbers broadcast to (B or 1, H or 1, m, n).
    """

    def __init__(
        self, program: ScoreProgram, terms: list[Tensor], sizes: tuple, device: torch.device
    ) -> None:
        super().__init__(program, sizes, _TORCH)
        self.terms, self.device = terms, device
        B, H, Sq, Sk = sizes
        by_batch, by_head = differs(program)
        if by_batch:
            self.b = self._count(B).view(-1, 1, 1, 1)
        if by_head:
            self.h = self._count(H).view(-1, 1, 1)
        self.tiles = tuple(-(-size // TILE_SIZE) for size in (Sq, Sk))
        rows, columns = self._count(self.tiles[0]).view(-1, 1), self._count(self.tiles[1])
        first, last = (x * TILE_SIZE for x in (rows, columns)), []
        starts = tuple(first)
        for start, size in zip(starts, (Sq, Sk), strict=True):
            last.append((start + (TILE_SIZE - 1)).clamp(max=size - 1))
        self.box = Box((starts[0], last[0]), (starts[1], last[1]))

    def _count(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device).double()

    def _term(self, number: int, box: Box) -> Interval:
        term, x = self.program.terms[number], self.terms[number].detach()
        (m, n), (Sq, Sk) = self.tiles, self.sizes[2:]
        if term.domain == TILE:
            found = x.double().unsqueeze(-1)
            return found, found
        if term.domain == ROW:
            return tuple(y[..., :m].unsqueeze(-1) for y in _extremes(x, 0, Sq))
        if term.domain == COLUMN:
            return tuple(y[..., :n].unsqueeze(-2) for y in _extremes(x, 0, Sk))
        if term.domain == DISTANCE:
            zero = padding_of_distances(Sk)
            rows = torch.arange(m, device=self.device).unsqueeze(-1) + zero // TILE_SIZE
            at = rows - torch.arange(n, device=self.device)  # of the distances from 0 on
            lo, hi = _extremes(x, zero - Sk + 1, zero + Sq)
            return torch.minimum(lo[..., at - 1], lo[..., at]), torch.maximum(
                hi[..., at - 1], hi[..., at]
            )
        rows, columns = term.block
        (q0, q1), (k0, k1) = box
        first = q0 // rows, k0 // columns
        is_one = ((q1 // rows) == first[0]) & ((k1 // columns) == first[1])
        corner = x[..., (first[0] * -(-Sk // columns) + first[1]).long()].double()
        least, most = (y.double()[..., None, None] for y in (x.amin(-1), x.amax(-1)))
        return torch.where(is_one, corner, least), torch.where(is_one, corner, most)


def _extremes(x: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """The least and largest of each 128 elements, of those from `first` to `stop` alone."""
    x, at = x.double(), torch.arange(x.shape[-1], device=x.device)
    is_used = (at >= first) & (at < stop)
    parts = (torch.where(is_used, x, end).unflatten(-1, (-1, TILE_SIZE)) for end in (_INF, -_INF))
    low, high = parts
    return low.amin(-1), high.amax(-1)


def _widened(xp: SimpleNamespace, interval: Interval) -> Interval:
    """The interval of a float with the error of float32, everything where it is NaN."""
    lo, hi = interval
    error = _ERROR * xp.maximum(xp.abs(lo), xp.abs(hi)) + 1e-30
    error = xp.where(xp.isfinite(error), error, 0.0)
    unknown = xp.isnan(lo) | xp.isnan(hi)
    return xp.where(unknown, -_INF, lo - error), xp.where(unknown, _INF, hi + error)


def _of_sum(xp: SimpleNamespace, form: Linear, values: dict[Node, Interval]) -> Interval:
    """The interval of a sum with factors; of each part on its own, so exact for indices."""
    lo = hi = xp.number(form.constant)
    for node, factor in form.factors.items():
        a, z = values[node]
        first, last = (a, z) if factor > 0 else (z, a)
        lo, hi = lo + factor * first, hi + factor * last
    return lo, hi


def _compared(op: str, difference: Interval) -> tuple[np.ndarray, np.ndarray]:
    lo, hi = difference
    if op == "lt":
        return lo < 0, hi >= 0
    if op == "le":
        return lo <= 0, hi > 0
    return (lo <= 0) & (hi >= 0), (lo != 0) | (hi != 0)


_GROWING = frozenset("exp exp2 expm1 log log2 log1p sqrt tanh floor ceil trunc".split())


def _operation(xp: SimpleNamespace, node: Node, args: list) -> tuple:
    """The interval of an operation's result, or what it may be."""
    op = node.op
    if node.type == BOOL:
        return _condition(xp, op, node, args)
    if op == "where":
        (may, may_not), x, y = args
        lo = xp.minimum(xp.where(may, x[0], _INF), xp.where(may_not, y[0], _INF))
        hi = xp.maximum(xp.where(may, x[1], -_INF), xp.where(may_not, y[1], -_INF))
        return lo, hi
    if op in ("to_int", "to_float") and node.args[0].type == BOOL:
        may, may_not = args[0]
        return xp.where(may_not, 0.0, 1.0), xp.where(may, 1.0, 0.0)
    (lo, hi), (least, most) = args[0], args[-1]
    if op == "to_int":
        return xp.trunc(lo), xp.trunc(hi)
    if op in ("to_float", "detach"):
        return lo, hi
    if op in _GROWING:
        return getattr(xp, op)(lo), getattr(xp, op)(hi)
    if op in ("min", "max"):
        extreme = xp.minimum if op == "min" else xp.maximum
        return extreme(lo, least), extreme(hi, most)
    if op == "abs":
        inside = (lo <= 0) & (hi >= 0)
        nearest = xp.minimum(xp.abs(lo), xp.abs(hi))
        return xp.where(inside, 0.0, nearest), xp.maximum(xp.abs(lo), xp.abs(hi))
    if op in ("add", "sub"):
        return (lo + least, hi + most) if op == "add" else (lo - most, hi - least)
    if op == "neg":
        return -hi, -lo
    if op == "mul":
        a, b, c, d = lo * least, lo * most, hi * least, hi * most
        low = xp.minimum(xp.minimum(a, b), xp.minimum(c, d))  # NaN where one of them is
        high = xp.maximum(xp.maximum(a, b), xp.maximum(c, d))
        unknown = xp.isnan(low)
        return xp.where(unknown, -_INF, low), xp.where(unknown, _INF, high)
    return _of_divisor(xp, node, lo, hi) or (xp.number(-_INF), xp.number(_INF))


def _of_divisor(xp: SimpleNamespace, node: Node, lo: np.ndarray, hi: np.ndarray) -> Interval | None:
    """Operations whose second argument is a positive constant."""
    if len(node.args) != 2 or node.args[1].op != "const" or node.args[1].value <= 0:
        return None
    n = node.args[1].value
    if node.op == "div":
        return lo / n, hi / n
    if node.op == "floordiv":
        return xp.floor(lo / n), xp.floor(hi / n)
    if node.op == "quot":
        return xp.trunc(lo / n), xp.trunc(hi / n)
    if node.op == "shr" and n < 63:
        return xp.floor(lo / 2.0**n), xp.floor(hi / 2.0**n)
    if node.op == "shl" and n < 31:
        return lo * 2.0**n, hi * 2.0**n
    if node.op == "mod":
        period = xp.floor(lo / n)
        same = period == xp.floor(hi / n)
        return xp.where(same, lo - period * n, 0.0), xp.where(same, hi - period * n, n - 1.0)
    if node.op == "bitand":
        return xp.zeros_like(lo), xp.where(lo >= 0, xp.minimum(hi, xp.number(n)), xp.number(n))
    return None


def _condition(xp: SimpleNamespace, op: str, node: Node, args: list) -> tuple:
    if op in ("lt", "le", "eq") and node.args[0].type == FLOAT:
        (lo, hi), (least, most) = args
        may, may_not = _compared(op, (lo - most, hi - least))
        unknown = xp.isnan(lo - most) | xp.isnan(hi - least)
        return may | unknown, may_not | unknown
    if op == "not":
        return args[0][1], args[0][0]
    (a, not_a), (b, not_b) = args[-2:] if op == "where" else (args[0], args[-1])
    if op == "and":
        return a & b, not_a | not_b
    if op == "or":
        return a | b, not_a & not_b
    if op == "where":
        may, may_not = args[0]
        return (may & a) | (may_not & b), (may & not_a) | (may_not & not_b)
    if op in ("xor", "eq"):
        differ, agree = (a & not_b) | (not_a & b), (a & b) | (not_a & not_b)
        return (differ, agree) if op == "xor" else (agree, differ)
    return xp.condition(True), xp.condition(True)


def _ranges(first: np.ndarray, size: int, total: int) -> Interval:
    start = first.astype(np.float64) * size
    return start, np.minimum(start + size, total) - 1


def classes(intervals: MaskIntervals, block: tuple[int, int]) -> np.ndarray:
    """uint8 (blocks of queries, blocks of keys): the class of each block."""
    Sq, Sk = intervals.sizes[2:]
    rows, columns = (-(-n // size) for n, size in zip((Sq, Sk), block, strict=True))
    found = np.empty((rows, columns), np.uint8)
    step = max(1, _CHUNK // columns)
    across = np.arange(columns)[None]
    for i in range(0, rows, step):
        part = np.arange(i, min(i + step, rows))[:, None]
        box = Box(_ranges(part, block[0], Sq), _ranges(across, block[1], Sk))
        found[i : i + step] = intervals.classes(box)
    return found


def _strip(intervals: MaskIntervals, first: int) -> np.ndarray:
    """The classes of up to GROUP rows of tiles; boxes of tiles are tried first."""
    Sq, Sk = intervals.sizes[2:]
    m, n = (-(-size // TILE_SIZE) for size in (Sq, Sk))
    rows, groups, side = min(GROUP, m - first), -(-n // GROUP), GROUP * TILE_SIZE
    start, stop = first * TILE_SIZE, min((first + rows) * TILE_SIZE, Sq)
    q = np.full((1, 1), float(start)), np.full((1, 1), stop - 1.0)
    coarse = intervals.classes(Box(q, _ranges(np.arange(groups)[None], side, Sk)))[0]
    found = np.repeat(coarse[None], rows, 0)[:, :, None].repeat(GROUP, 2)
    mixed = np.flatnonzero(coarse == MIXED)
    step = max(1, _CHUNK // (rows * GROUP))
    tile_rows = _ranges(np.arange(first, first + rows)[:, None, None], TILE_SIZE, Sq)
    for i in range(0, len(mixed), step):
        part = mixed[i : i + step]
        columns = part[None, :, None] * GROUP + np.arange(GROUP)
        box = Box(tile_rows, _ranges(np.minimum(columns, n - 1), TILE_SIZE, Sk))
        found[:, part] = intervals.classes(box)
    return found.reshape(rows, -1)[:, :n]


def tile_states(program: ScoreProgram, terms: list[Tensor], sizes: tuple) -> Tensor:
    """uint8 (B or 1, H or 1, m, n): the class of each tile, on the CPU."""
    B, H = (size if one else 1 for size, one in zip(sizes, differs(program)))
    grid = [-(-size // TILE_SIZE) for size in sizes[2:]]
    states = np.empty((B, H, *grid), np.uint8)
    for b in range(B):
        for h in range(H):
            intervals = MaskIntervals(program, terms, b, h, sizes)
            for first in range(0, grid[0], GROUP):
                strip = _strip(intervals, first)
                states[b, h, first : first + len(strip)] = strip
    return torch.from_numpy(states)


# Estimates, in seconds of one core of a server.

_OF_ANALYSIS, _OF_HEAD, _OF_STRIP, _OF_NODE = 1e-3, 3e-4, 2e-4, 1.2e-8
_RATE = 5e10  # floating-point operations a second, of a thread
SAVED = 0.5  # the share of a call that tiles are assumed to save
OF_BACKWARD = 2.5  # times the forward pass


def seconds_of_analysis(program: ScoreProgram, sizes: tuple) -> float:
    """The time in which the tiles of a mask are classified on the host."""
    m, n = (-(-size // TILE_SIZE) for size in sizes[2:])
    heads = math.prod(size for size, one in zip(sizes, differs(program)) if one)
    of_tiles = _OF_NODE * m * n * len(order(program.mask))
    return _OF_ANALYSIS + heads * (_OF_HEAD + _OF_STRIP * -(-m // GROUP) + of_tiles)


def seconds_on_cpu(pairs: float, features: int) -> float:
    """The time of a forward pass of this many queries times keys, and features of both products."""
    return 2.0 * pairs * features / (_RATE * torch.get_num_threads())


def differs(program: ScoreProgram) -> tuple[bool, bool]:
    """Whether the mask of a program differs by batch, and by head."""
    needs = {n.value for n in order(program.mask) if n.op == "argument"}
    used = [program.terms[n.value] for n in order(program.mask) if n.op == "term"]
    return (
        "b" in needs or any(t.by_batch for t in used),
        "h" in needs or any(t.by_head for t in used),
    )


def tile_runs(
    program: ScoreProgram, terms: list[Tensor], sizes: tuple[int, int, int, int]
) -> Tensor:
    """Runs of tiles that the mask of a program may keep, on the CPU.

    int32 (B or 1, H or 1, m + n, 1 + 2 MAX_RUNS), for each of m rows and n columns of tiles of 128
    queries and 128 keys: the number of runs, then of each its first tile, and twice its length,
    plus 1 if some of its tiles are mixed. With more than MAX_RUNS, neighbours are one mixed run.
    """
    B, H = (size if one else 1 for size, one in zip(sizes, differs(program)))
    m, n = (-(-size // TILE_SIZE) for size in sizes[2:])
    found = np.zeros((B, H, m + n, 1 + 2 * MAX_RUNS), np.int32)
    for b in range(B):
        for h in range(H):
            intervals = MaskIntervals(program, terms, b, h, sizes)
            columns = _Columns(n)
            for first in range(0, m, GROUP):
                strip = _strip(intervals, first)
                changed = np.ones(strip.shape, bool)
                np.not_equal(strip[:, 1:], strip[:, :-1], out=changed[:, 1:])
                at = np.flatnonzero(changed)  # a fifth of the time of two dimensions
                lines, starts = np.divmod(at, n)
                rows = found[b, h, first : first + len(strip)]
                _write(rows, lines, starts, strip.reshape(-1)[at], n)
                columns.add(first, strip)
            _write(found[b, h, m:], *columns.runs(), m)
    return torch.from_numpy(found)


class _Columns:
    """Runs of each column of tiles, as rows of tiles are added."""

    def __init__(self, n: int) -> None:
        self.last = np.full(n, 255, np.uint8)
        self.count = np.zeros(n, np.int64)
        self.starts = np.zeros((n, _KEPT), np.int32)
        self.classes = np.zeros((n, _KEPT), np.uint8)

    def add(self, first: int, strip: np.ndarray) -> None:
        """Add rows; a column with too many runs keeps one that is mixed for all that follow."""
        before = np.concatenate((self.last[None], strip[:-1]))
        rows, columns = np.divmod(np.flatnonzero(strip != before), strip.shape[1])
        self.last = strip[-1].copy()
        ends = np.searchsorted(rows, np.arange(len(strip) + 1))
        for i in np.flatnonzero(ends[1:] > ends[:-1]):
            changed = columns[ends[i] : ends[i + 1]]
            room = changed[self.count[changed] < _KEPT]
            self.starts[room, self.count[room]] = first + i
            self.classes[room, self.count[room]] = strip[i, room]
            self.count[room] += 1
            full = changed[self.count[changed] == _KEPT]
            is_last = self.starts[full, _KEPT - 1] == first + i
            self.classes[full, _KEPT - 1] = np.where(is_last, strip[i, full], MIXED)

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The column, start and class of each run."""
        columns, at = np.nonzero(np.arange(_KEPT) < self.count[:, None])
        return columns, self.starts[columns, at], self.classes[columns, at]


def _write(
    out: np.ndarray, lines: np.ndarray, starts: np.ndarray, kinds: np.ndarray, total: int
) -> None:
    """The runs of rows or columns (`lines`) of `total` tiles, given where classes change."""
    stops = np.append(starts[1:], total)
    stops[np.append(lines[1:] != lines[:-1], False)] = total
    kept = kinds != EMPTY
    lines, starts, stops, mixed = lines[kept], starts[kept], stops[kept], kinds[kept] == MIXED
    count = np.bincount(lines, minlength=len(out))
    before = np.cumsum(count) - count
    for line in np.flatnonzero(count > MAX_RUNS):
        _merge(out[line], *(x[before[line] :][: count[line]] for x in (starts, stops, mixed)))
    few = count[lines] <= MAX_RUNS
    place = (np.arange(len(lines)) - before[lines])[few]
    lines, starts, stops, mixed = lines[few], starts[few], stops[few], mixed[few]
    out[:, 0] = np.minimum(count, MAX_RUNS)
    out[lines, 1 + 2 * place] = starts
    out[lines, 2 + 2 * place] = (stops - starts) * 2 + mixed


def _merge(out: np.ndarray, starts: np.ndarray, stops: np.ndarray, mixed: np.ndarray) -> None:
    """MAX_RUNS runs in place of more."""
    first = np.linspace(0, len(starts), MAX_RUNS, endpoint=False).astype(np.int64)
    last = np.append(first[1:], len(starts)) - 1
    mixed = np.where(first == last, mixed[first], True)
    out[1::2] = starts[first]
    out[2::2] = (stops[last] - starts[first]) * 2 + mixed


def states_of_runs(runs: Tensor, m: int, n: int) -> Tensor:
    """The classes of tiles that runs list, uint8 (B or 1, H or 1, m, n)."""
    count, pairs = runs[..., :m, 0], runs[..., :m, 1:].unflatten(-1, (MAX_RUNS, 2))
    first, coded = pairs.unbind(-1)
    used = torch.arange(MAX_RUNS, device=runs.device) < count.unsqueeze(-1)
    tile = torch.arange(n, device=runs.device)
    inside = (tile >= first.unsqueeze(-1)) & (tile < (first + (coded >> 1)).unsqueeze(-1))
    inside = inside & used.unsqueeze(-1)
    mixed = (inside & (coded & 1).bool().unsqueeze(-1)).any(-2)
    states = torch.where(inside.any(-2), FULL, EMPTY)
    return torch.where(mixed, MIXED, states).to(torch.uint8)


# Runs by operations of torch, which read nothing on the host: of a mask on a device, and of what a
# BlockMask lists.


def tile_runs_on(
    device: torch.device, program: ScoreProgram, terms: list[Tensor],
    sizes: tuple[int, int, int, int],
) -> Tensor:  # fmt: skip
    """Runs as of `tile_runs`, on a device; with more than MAX_RUNS the last one has all others."""
    intervals = _TileIntervals(program, terms, sizes, device)
    may, may_not = intervals.may_be(intervals.box)
    shape = *(n if one else 1 for n, one in zip(sizes, differs(program))), *intervals.tiles
    is_kept, is_mixed = (x.to(device).expand(shape) for x in (may, may & may_not))
    lines = _listed_runs(is_kept, is_mixed)
    return torch.cat((lines, _listed_runs(is_kept.mT, is_mixed.mT)), 2)


def runs_of_blocks(
    states: Tensor, block: tuple[int, int], sizes: tuple[int, int, int, int], keep_full: bool
) -> Tensor | None:
    """Runs as of `tile_runs`, of blocks that are empty (0), mixed (1) or full (2).

    `states` is int8 (B or 1, H or 1, blocks of queries, blocks of keys). Unless `keep_full`, full
    tiles are mixed ones. None where blocks are neither parts of tiles nor made of them.
    """
    if not all(n % TILE_SIZE == 0 or TILE_SIZE % n == 0 for n in block):
        return None
    for dim, n, size in zip((2, 3), block, sizes[2:], strict=True):
        tile = torch.arange(-(-size // TILE_SIZE), device=states.device)
        part = torch.arange(max(TILE_SIZE // n, 1), device=states.device)
        covered = (tile.unsqueeze(-1) * TILE_SIZE // n + part).clamp(max=states.shape[dim] - 1)
        found = states.index_select(dim, covered.flatten()).unflatten(dim, tuple(covered.shape))
        least, most = found.amin(dim + 1), found.amax(dim + 1)
        states = torch.where(least == most, least, 1)  # 0 and 2 alone are of all parts
    is_mixed = states == 1 if keep_full else states > 0
    lines = [_listed_runs(states > 0, is_mixed)]
    lines.append(_listed_runs((states > 0).transpose(2, 3), is_mixed.transpose(2, 3)))
    return torch.cat(lines, 2)


def _listed_runs(is_kept: Tensor, is_mixed: Tensor) -> Tensor:
    """The runs of lines of tiles, the last dimension: int32 (B or 1, H or 1, lines, 33)."""
    n = is_kept.shape[-1]
    kind = is_kept.int() + is_mixed
    starts = is_kept & (kind != torch.nn.functional.pad(kind, (1, 0))[..., :n])
    number = starts.cumsum(-1, dtype=torch.int64)  # from 1, and 0 before the first
    count = number[..., -1:]
    # of a run its slot; the last slot takes all that follow, and another one empty tiles
    slot = torch.where(is_kept, (number - 1).clamp(max=MAX_RUNS - 1), MAX_RUNS)
    tile = torch.arange(n, device=kind.device).expand(slot.shape)
    empty = torch.zeros((*slot.shape[:-1], MAX_RUNS + 1), dtype=torch.int64, device=kind.device)
    behind = empty.scatter_reduce(-1, slot, tile + 1, "amax")
    first = (empty + n).scatter_reduce(-1, slot, tile, "amin")
    mixed = empty.scatter_reduce(-1, slot, is_mixed.long(), "amax")
    is_last = torch.arange(MAX_RUNS + 1, device=kind.device) == MAX_RUNS - 1
    mixed = torch.where(is_last & (count > MAX_RUNS), 1, mixed)
    pairs = torch.stack((first, (behind - first) * 2 + mixed), -1)
    pairs = torch.where((behind > 0).unsqueeze(-1), pairs, 0)[..., :MAX_RUNS, :].flatten(-2)
    return torch.cat((count.clamp(max=MAX_RUNS), pairs), -1).to(torch.int32)
