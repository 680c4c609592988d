"""Attention over lists of blocks: makes lists of tiles of the lists, and launches the kernels.

Nothing has an element for each pair of a query and a key: a union has at most the entries of its
lists, and the inverse an entry for each of theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.selected import bounds_of, lists_by_sequence
from fa_ops.backends.triton.backward import (
    laid_out_as,
    layout_of,
    restored_gradients,
    rows_contiguous,
    sinks_gradient,
    strides_of,
    written_like,
)
from fa_ops.backends.triton.configs import Tile, backward_tiles, forward_tile
from fa_ops.backends.triton.launch import (
    LOG2E,
    Class,
    Launch,
    Layout,
    aligned,
    architecture,
    bind,
    empty,
    narrowed,
    needs_copies,
    padded,
    precision,
    widths,
)
from fa_ops.backends.triton.selected_kernels import (
    forward_kernel,
    is_gathered,
    key_grad_kernel,
    key_sum_kernel,
    query_grad_kernel,
    union_kernel,
)
from fa_ops.call.call import Call
from fa_ops.call.options import Gradients

MAX_LISTS = 16  # of a program's rows, as bits of a word
UNION_ROWS = 64  # of a program with several lists, at most
MAX_SELECTED_SCALE = 1e30
_CHUNK = 256  # entries of lists that are compared at once, at most
_ITEMS = 1024  # programs that add up the inverse of the lists of a head, at least
_WORD_BITS = 31  # blocks of a unit, as bits of a word of the inverse
_launches: dict[tuple, Launch] = {}


class RowDivision(NamedTuple):
    """How the rows of lists are divided over programs."""

    lists: int  # whose rows a program has
    parts: int  # of the rows of one list
    block_m: int

    @classmethod
    def of(cls, list_rows: int, most: int) -> RowDivision:
        """The division into blocks of up to `most` rows."""
        if list_rows >= min(most, UNION_ROWS):
            block = min(most, padded(list_rows))
            return cls(1, -(-list_rows // block), block)
        lists = min(MAX_LISTS, min(most, UNION_ROWS) // list_rows)
        return cls(lists, 1, padded(lists * list_rows))


@dataclasses.dataclass
class SelectedProblem:
    """The tensors and sizes of a call, whose rows are aligned."""

    call: Call

    def __post_init__(self) -> None:
        q, _, v = self.call[:3]
        (self.B, self.Hq, self.Sq, D), (self.Hkv, self.Sk, Dv) = q.shape, v.shape[1:]
        self.dims, self.group, self.size = (
            (D, Dv),
            self.Hq // self.Hkv,
            self.call.options.block_size,
        )
        self.bounds, self.ranges = None, None
        if self.call.operands.cu_seqlens is not None or self.call.operands.key_ranges is not None:
            self.bounds = bounds_of(self.call)
            self.ranges = torch.stack((self.bounds.low, self.bounds.high), -1).int()
        lists, counts, self.query_block = lists_by_sequence(self.call)
        self.query_block = min(self.query_block, self.Sq)
        self.lists = lists.contiguous()
        self.counts = None if counts is None else counts.contiguous()
        self.list_rows = self.query_block * self.group

    @property
    def first(self) -> Tensor | None:
        """int32 (Sq,): where block 0 of a query begins; None for 0."""
        return None if self.call.operands.cu_seqlens is None else self.bounds.first.int()

    @property
    def is_causal(self) -> bool:
        """Whether positions bound the keys of rows; `ranges` bound them already."""
        return self.call.options.is_causal

    def constants(self, tile: Tile) -> dict[str, Any]:
        """The constexpr parameters that the kernels share, without those of their walks."""
        return {**widths(self.dims), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}

    def kind(self) -> dict[str, Any]:
        """The last constexpr parameters of the kernels."""
        scale = self.call.scale
        return {"EXTREME": abs(scale) > 1e30, "PRECISION": precision(self.call.query.dtype)}

    @property
    def range_stride(self) -> int:
        """Between the ranges of batch elements."""
        return 0 if self.ranges is None or len(self.ranges) == 1 else self.ranges.stride(0)


def _launch(
    kernel: Any, grid: int, args: tuple, constants: Mapping[str, Any], tile: Tile, q: Tensor,
    layout: Layout, names: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Launch a kernel, compiled on first use. names: the tensors with strides in `args`."""
    dtypes = tuple(x.dtype if isinstance(x, Tensor) else None if x is None else int for x in args)
    key = (kernel, dtypes, tuple(constants.values()), tile, layout, q.device)
    launch = _launches.get(key)
    if launch is None:
        divisors = layout.divisors(names, q.dtype) if names else {}
        launch = _launches[key] = bind(
            kernel, args, constants, tile.options(), device=q.device, divisors=divisors,
            wide=layout.wide,
        )  # fmt: skip
    launch((grid, 1, 1), args)


def _layout(of: Mapping[str, Tensor]) -> Layout:
    """Of tensors (B, H, S, X): wide if offsets within a batch element need 64 bits."""
    found = layout_of(of, strides_of(of), 1)
    spans = (x.stride(1) * x.shape[1] + x.stride(2) * (x.shape[2] + 256) for x in of.values())
    return found._replace(wide=max(spans) >= 1 << 31)


_PLAIN = Layout(aligned=True, wide=False)
_SMALL, _WARP = Tile(1, 1, 4, 2), Tile(1, 1, 1, 2)  # options of kernels without products


class Unions(NamedTuple):
    """The tiles of each group of lists, int64 (heads, groups, 1 + capacity)."""

    words: Tensor
    tile: int  # keys of a word
    groups: int
    capacity: int
    strides: tuple[int, int]  # between batch elements, and heads


def unions_of(problem: SelectedProblem, lists: int, tile: int) -> Unions:
    """The tiles of `tile` keys of each group of `lists` lists, or whole blocks for 0."""
    p, (B, H, rows, n) = problem, problem.lists.shape
    tile = tile or p.size
    groups, per_block = -(-rows // lists), -(-min(p.size, p.Sk) // tile)
    capacity = lists * n * per_block
    words = torch.empty((B * H, groups, 1 + capacity), dtype=torch.int64, device=p.lists.device)
    args = (
        p.lists, p.counts, p.first, words, n, rows, groups, p.Sq, p.Sk, p.query_block, capacity
    )  # fmt: skip
    constants = {
        "SIZE": p.size, "TILE": tile, "CAUSAL": p.is_causal, "LISTS": lists,
        "CHUNK": min(_CHUNK, max(32, padded(lists * n))),
    }  # fmt: skip
    _launch(union_kernel, B * H * groups, args, constants, _WARP, p.lists, _PLAIN)
    of_head = groups * (1 + capacity)
    strides = (0 if B == 1 else H * of_head, 0 if H == 1 else of_head)
    return Unions(words, tile, groups, capacity, strides)


def _walk(problem: SelectedProblem, tile: Tile) -> tuple[RowDivision, Unions, Tile]:
    """The division of rows, the unions and the tile of a kernel that walks keys."""
    rows = RowDivision.of(problem.list_rows, tile.block_m)
    block_n = tile.block_n
    if not is_gathered(problem.size):
        while problem.size % block_n:
            block_n //= 2
    unions = unions_of(problem, rows.lists, 0 if is_gathered(problem.size) else block_n)
    warps, stages = tile.num_warps, tile.num_stages
    if rows.lists > 1:  # two programs on a multiprocessor: dq in 0.73 of the time on an H200
        stages = min(2, stages)
    if rows.block_m < tile.block_m and max(problem.dims) <= 256:
        warps = max(4, warps * rows.block_m // tile.block_m)
    return rows, unions, dataclasses.replace(
        tile, block_m=rows.block_m, block_n=block_n, num_warps=warps, num_stages=stages
    )  # fmt: skip


def _walk_constants(problem: SelectedProblem, rows: RowDivision, unions: Unions) -> dict[str, Any]:
    return {
        "SIZE": problem.size, "TILE": unions.tile, "GROUP": problem.group, "LISTS": rows.lists,
        "CAUSAL": problem.is_causal,
    }  # fmt: skip


def selected_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Attention over lists: out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    q, k, v = call[:3]
    named = {"q": q, "k": k, "v": v}
    layout = _layout(named)
    if needs_copies(layout, q.dtype, q.shape[3], v.shape[3]):
        out, lse = selected_forward(aligned(call))
        return narrowed(out, v.shape[3]), lse
    p = SelectedProblem(call)
    arch, scale, Dv = architecture(q.device), call.scale, v.shape[3]
    tile = forward_tile(arch, q.dtype, max(p.dims), Class(right=True), precision(q.dtype))
    rows, unions, tile = _walk(p, tile)
    sizes, row = (p.B, p.Hq, p.Sq), p.Hq * Dv
    out = empty((*sizes, Dv), (p.Sq * row, Dv, row, 1), q.dtype, q.get_device())
    lse = empty(sizes, (p.Hq * p.Sq, p.Sq, 1), torch.float32, q.get_device())
    sinks = call.operands.sinks
    args = (
        q, k, v, out, lse, None if sinks is None else sinks.contiguous(), p.ranges, unions.words,
        *strides_of(named), p.range_stride, *unions.strides, unions.capacity, p.Hkv, p.Sq, p.Sk,
        p.query_block, unions.groups, rows.parts, scale * LOG2E,
    )  # fmt: skip
    constants = p.constants(tile) | _walk_constants(p, rows, unions)
    constants |= {"FOLD": 1e-30 < scale < 1e30} | p.kind()
    grid = p.B * p.Hkv * unions.groups * rows.parts
    _launch(forward_kernel, grid, args, constants, tile, q, layout, tuple(named))
    return out, lse


class Inverse(NamedTuple):
    """The lists that have each unit of keys, see `key_grad_kernel`."""

    words: Tensor  # int32, of several blocks int64
    offsets: Tensor  # int64 (heads * units + 1,)
    first_items: Tensor  # int32, likewise
    first_slots: Tensor  # int32 (heads * units,)
    unit: int  # keys of a unit
    units: int
    items: int  # at most
    slots: int  # at most
    longest: int  # words of an item


def inverse_of(problem: SelectedProblem, block_n: int) -> Inverse:
    """The inverse of a call's lists, in units that fill tiles of `block_n` keys."""
    p, t, (B, H, rows, n) = problem, problem.call.operands, problem.lists.shape
    device, lists = p.lists.device, p.lists.long()
    blocks = max(1, min(block_n // p.size, _WORD_BITS))
    unit = blocks * p.size
    row = torch.arange(rows, device=device).view(1, 1, -1, 1)
    if t.cu_seqlens is None:
        units, start_unit, first = -(-p.Sk // unit), 0, 0
        high = torch.full_like(row, p.Sk)
        if p.is_causal:
            high = high.minimum(((row + 1) * p.query_block).clamp(max=p.Sq) + (p.Sk - p.Sq))
    else:
        first, high = p.bounds.first.view(1, 1, -1, 1), p.bounds.high[:, None, :, None]
        units = p.Sk // unit + len(t.cu_seqlens) + 1
        start_unit = first // unit + p.bounds.sequence.view(1, 1, -1, 1) + 1
    valid = (lists >= 0) & (lists <= p.Sk // p.size) & (first + lists * p.size < high.amax(0))
    if p.counts is not None:
        valid &= torch.arange(n, device=device) < p.counts.unsqueeze(-1)
    head = torch.arange(B * H, device=device).view(B, H, 1, 1)
    code = (head * units + start_unit + lists // blocks) * rows + row
    code = code * blocks + lists % blocks
    last = B * H * units * rows * blocks
    code = torch.where(valid, code, last).flatten().sort().values
    is_new = torch.ones_like(code, dtype=torch.bool)
    is_new[1:] = code[1:] != code[:-1]
    borders = torch.arange(B * H * units + 1, device=device) * (rows * blocks)
    offsets = torch.searchsorted(code, borders)
    if blocks == 1:
        words = torch.where(is_new, code % rows, -1).int()
    else:
        words, offsets = _with_blocks(code, is_new, offsets, rows, blocks)
    # a program adds up at most twice the average, less where units are fewer than fill a GPU
    least = _ITEMS // -(-unit // block_n)
    longest = max(1, min(2 * len(code) // (B * H * units), len(code) // least))
    own = (offsets.diff() + longest - 1).div(longest, rounding_mode="floor").clamp(min=1)
    shared = torch.where(own > 1, own, 0)
    first_items = torch.nn.functional.pad(own.cumsum(0), (1, 0)).int()
    first_slots = (shared.cumsum(0) - shared).int()
    more = len(code) // longest
    slots = more + min(more, B * H * units)
    items = B * H * units + more
    return Inverse(
        words, offsets, first_items, first_slots, unit, units, items, slots, longest
    )  # fmt: skip


def _with_blocks(
    code: Tensor, is_new: Tensor, offsets: Tensor, rows: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """Words with a bit for each block of a unit that a list has, and offsets, of sorted codes."""
    pair = code // blocks  # the unit and the list
    bit = torch.where(is_new, 1 << (code % blocks), 0)
    is_first = torch.ones_like(is_new)
    is_first[1:] = pair[1:] != pair[:-1]
    place = is_first.cumsum(0) - 1
    words = torch.zeros_like(code).scatter_add_(0, place, bit)
    words = words.scatter_add_(0, place, torch.where(is_first, pair % rows << 32, 0))
    before = torch.nn.functional.pad(is_first.cumsum(0), (1, 0))
    return words, before[offsets]


def selected_backward(call: Call) -> Gradients:
    """Gradients of attention over lists; always deterministic."""
    (q, k, v), (grad_out, grad_lse, out, lse, _) = call[:3], call.saved
    grad_out, out = rows_contiguous(grad_out), rows_contiguous(out)
    named = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out}
    layout = _layout(named)
    if needs_copies(layout, q.dtype, q.shape[3], v.shape[3]):
        return restored_gradients(selected_backward(aligned(call)), q, k, v)
    p = SelectedProblem(call)
    query_tile, key_tile = backward_tiles(
        architecture(q.device), q.dtype, max(p.dims), precision(q.dtype)
    )
    dq, dk, dv = map(written_like, (q, k, v))
    rows = torch.empty((2, p.B, p.Hkv, p.Sq, p.group), dtype=torch.float32, device=q.device)
    grads = named | {"dq": dq}
    _query_gradient(p, query_tile, grads, lse, grad_lse, rows)
    _key_gradients(p, key_tile, {**grads, "dk": dk, "dv": dv}, rows)
    dsinks, sinks = None, call.operands.sinks
    if sinks is not None:
        row_lse, row_delta = rows.transpose(3, 4).reshape(2, p.B, p.Hq, p.Sq)
        dsinks = sinks_gradient(row_lse, row_delta, sinks)
    dq, dk, dv = (laid_out_as(g, x) for g, x in zip((dq, dk, dv), (q, k, v)))
    return Gradients(dq, dk, dv, sinks=dsinks)


def _query_gradient(
    p: SelectedProblem, tile: Tile, named: dict[str, Tensor], lse: Tensor,
    grad_lse: Tensor | None, statistics: Tensor,
) -> None:  # fmt: skip
    """Write dq and the statistics (2, B, Hkv, Sq, group) of rows."""
    rows, unions, tile = _walk(p, tile)
    names = ("q", "k", "v", "grad_out", "out", "dq")
    of = {name: named[name] for name in names}
    q, k, v, grad_out, out, dq = of.values()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    strides = strides_of(of)
    args = (
        q, k, v, grad_out, out, lse.contiguous(), grad_lse, dq, *statistics, p.ranges,
        unions.words, *strides, p.range_stride, *unions.strides, unions.capacity, p.Hkv, p.Sq,
        p.Sk, p.query_block, unions.groups, rows.parts, p.call.scale * LOG2E,
    )  # fmt: skip
    constants = p.constants(tile) | _walk_constants(p, rows, unions) | p.kind()
    layout = _layout(of)
    grid = p.B * p.Hkv * unions.groups * rows.parts
    _launch(query_grad_kernel, grid, args, constants, tile, q, layout, names)


def _key_gradients(
    p: SelectedProblem, tile: Tile, named: dict[str, Tensor], statistics: Tensor
) -> None:
    """Write dk and dv."""
    inverse, ends = inverse_of(p, tile.block_n), p.call.operands.cu_seqlens
    names = ("q", "k", "v", "grad_out", "dk", "dv")
    of = {name: named[name] for name in names}
    q, k, v, grad_out, dk, dv = of.values()
    strides, (lists_b, lists_h) = strides_of(of), p.lists.shape[:2]
    repetitions = p.B * p.Hkv // (lists_b * lists_h)
    parts = -(-inverse.unit // tile.block_n)
    width = sum(map(padded, p.dims))
    size = max(1, repetitions * inverse.slots * parts), tile.block_n, width
    partials = torch.empty(size, dtype=torch.float32, device=q.device)
    batch = 0 if ends is None else len(ends) - 1
    ends = None if ends is None else ends.contiguous()
    lists = (batch, inverse.units, lists_b, lists_h)
    list_rows = p.list_rows if p.list_rows < tile.block_m else 0
    args = (
        q, k, v, grad_out, *statistics, p.ranges, inverse.words, inverse.offsets,
        inverse.first_items, inverse.first_slots, ends, dk, dv, partials, *strides, p.range_stride,
        p.Hkv, p.Sq, p.Sk, p.query_block, *lists, inverse.items, inverse.slots, inverse.longest,
        p.call.scale * LOG2E,
    )  # fmt: skip
    shared = {
        "SIZE": p.size, "UNIT": inverse.unit, "GROUP": p.group, "LIST_ROWS": list_rows,
        "BY_HEADS": p.query_block >= tile.block_m, "CAUSAL": p.is_causal,
    }  # fmt: skip
    constants = p.constants(tile) | shared | p.kind()
    layout = _layout(of)
    _launch(
        key_grad_kernel, parts * inverse.items * repetitions, args, constants, tile, q, layout,
        names,
    )  # fmt: skip
    if not inverse.slots:
        return
    args = (
        partials, inverse.first_items, inverse.first_slots, ends, dk, dv, *strides[-6:], p.Hkv,
        p.Sk, *lists, inverse.slots,
    )  # fmt: skip
    constants = {**widths(p.dims), "BLOCK_N": tile.block_n, "UNIT": inverse.unit}
    grid = parts * lists_b * lists_h * inverse.units * repetitions
    _launch(key_sum_kernel, grid, args, constants, _SMALL, q, layout, ("dk", "dv"))
