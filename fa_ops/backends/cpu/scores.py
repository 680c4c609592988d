"""Scores of a block on the CPU: layouts and dtypes, attended keys, masks, and states of tiles."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.backends.mask_blocks import EMPTY, FULL, listed_states
from fa_ops.call.call import Call
from fa_ops.call.options import MASK_BLOCK, Operands
from fa_ops.programs import tiles
from fa_ops.programs.evaluation import Elements, integers_of
from fa_ops.programs.program import parse

# Memory layouts and dtypes of the CPU engines.


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, sums and lse: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype` with contiguous rows that do not overlap, except for broadcast rows.

    torch gives the result of an operation on overlapping rows another order of dimensions.
    """
    x = x.to(dtype)
    *sizes, width = x.shape
    *strides, last = x.stride()
    apart = all(stride >= width or stride == 0 or size == 1 for size, stride in zip(sizes, strides))
    return x if apart and (last == 1 or width == 1) else x.contiguous()


def longest_row(x: Tensor) -> Tensor:
    """The largest Euclidean norm of a row; not finite if x is not."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=accumulator(x.dtype)).amax()


def bshd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B, H, S, D) in `dtype`, laid out (B, S, H, D) in memory; x itself if it is already."""
    if x.dtype == dtype and x.transpose(1, 2).is_contiguous():
        return x
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=dtype).copy_(x)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised (B, Hq, Sq, Dv), laid out (B, Sq, Hq, Dv) in memory."""
    B, Hq, Sq, _ = q.shape
    return torch.empty_permuted((B, Hq, Sq, v.shape[3]), (0, 2, 1, 3), dtype=q.dtype)


def four_dims(mask: Tensor) -> Tensor:
    """View a mask that broadcasts to (B, Hq, Sq, Sk) with four dimensions."""
    return mask[(None,) * (4 - mask.dim())]


# Tiles of attention scores for the blockwise forward and backward passes.

# Measured on AVX2 with 1 MiB of L2 (docs/performance/cpu.md). ROWS counts the rows of all query
# heads that share a kv head; a slab has 1 MiB of fp32 scores per thread.
ROWS, COLS, SLAB = 128, 256, 2**18


def blocks(start: int, stop: int, step: int) -> Iterator[slice]:
    """Split [start, stop) into nearly equal blocks of at most `step`."""
    if start < stop:
        count = -(-(stop - start) // step)
        step = -(-(stop - start) // count)
    for i in range(start, stop, step):
        yield slice(i, min(i + step, stop))


class Slab(NamedTuple):
    """n batches x kv heads that one tile covers, each with the rows of `group` query heads."""

    batches: slice
    heads: slice  # kv heads
    group: int

    def spread(self, x: Tensor) -> Tensor:
        """View (B or 1, Hq or 1, ...) as the slab's (batches, heads, group, ...), or 1s of them."""
        x = x if x.shape[0] == 1 else x[self.batches]
        if x.shape[1] == 1:
            return x.unsqueeze(2)
        return x.unflatten(1, (-1, self.group))[:, self.heads]

    def fold(self, x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return `rows` of (B, Hq, Sq, D) as (n, group * rows, D)."""
        return self.spread(x)[..., rows, :].flatten(2, 3).flatten(0, 1).to(dtype)

    def unfold(self, x: Tensor) -> Tensor:
        """View (n, group * rows, X) as (batches, heads, group, rows, X)."""
        n = (-1, self.heads.stop - self.heads.start)
        return x.unflatten(1, (self.group, -1)).unflatten(0, n)

    def keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the slab's heads of (B, Hkv, Sk, D) as (n, Sk, D)."""
        return x[self.batches, self.heads].flatten(0, 1).to(dtype)

    def unfold_keys(self, x: Tensor) -> Tensor:
        """View (n, Sk, X) as (batches, heads, Sk, X)."""
        return x.unflatten(0, (-1, self.heads.stop - self.heads.start))


class ScoreTile(NamedTuple):
    """A block of rows and columns of the scores, and which of them are masked."""

    rows: slice
    cols: slice
    edge: slice  # the columns of the tile that `keep` covers; all others are attended
    keep: Tensor | None  # bool, broadcastable to (batches, heads, group, rows, edge)
    biased: bool  # whether a float mask changes its scores


_TERMS = slice(Operands._fields.index("term_values"), Operands._fields.index("tile_runs"))


class ScoreProblem:
    """The scores of one call, divided into slabs of heads and blocks of rows."""

    def __init__(self, call: Call, ranges: KeyRanges | None, first_batch: int) -> None:
        q, k = call.query, call.key
        self.call, self.q, self.k = call, q, k
        self.ranges, self.first_batch = ranges, first_batch
        self.dtype = accumulator(q.dtype)
        self.group = q.shape[1] // k.shape[1]
        self.rows = max(1, min(q.shape[2], ROWS // self.group))
        rows = self.rows * self.group
        self.cols = min(k.shape[2], max(COLS, ROWS * COLS // rows))
        self.heads = max(1, SLAB * torch.get_num_threads() // (rows * self.cols))
        self.states = None  # of the mask's tiles, as `listed_states` returns them
        if call.operands.mask_blocks is not None:
            self.states = listed_states(call.operands.mask_blocks, call.operands.attn_mask)
        self.program = parse(call.options.program) if call.is_programmed else None
        if call.operands.tile_runs is not None:
            grid = (-(-x.shape[2] // MASK_BLOCK) for x in (q, k))
            self.states = tiles.states_of_runs(call.operands.tile_runs, *grid)
        elif self.program is not None and self.program.mask is not None:
            self.states = self._found_states()
        self.buffers: dict[str, Tensor] = {}

    def _found_states(self) -> Tensor | None:
        """The states of the tiles of the program's mask, where they take less time than they save.

        Calls of graphs and of transforms come without runs.
        """
        (B, Hq, Sq, D), Sk, Dv = self.q.shape, self.k.shape[2], self.call.value.shape[3]
        if max(Sq, Sk) <= MASK_BLOCK or not min(B, Hq, Sq, Sk):
            return None
        pairs = float(B * Hq * Sq * Sk)
        if self.ranges is not None:
            keys = (self.ranges.hi - self.ranges.lo).clamp(min=0).expand(B, Hq, Sq, 1)
            pairs = float(keys.sum(dtype=torch.float64))
        times = 1.0 + tiles.OF_BACKWARD * self.call.is_backward
        saved = tiles.SAVED * times * tiles.seconds_on_cpu(pairs, D + Dv)
        if tiles.seconds_of_analysis(self.program, (B, Hq, Sq, Sk)) > saved:
            return None
        terms = self.program.views(*self.call.operands[_TERMS], B, Hq, Sq, Sk)
        return tiles.tile_states(self.program, terms, (B, Hq, Sq, Sk))

    def slabs(self) -> Iterator[Slab]:
        """Divide the batches and kv heads into slabs."""
        B, Hkv = self.k.shape[:2]
        for batches in blocks(0, B, max(1, self.heads // Hkv)):
            for heads in blocks(0, Hkv, self.heads):
                yield Slab(batches, heads, self.group)

    def row_blocks(self) -> Iterator[slice]:
        """Divide the query rows into blocks."""
        return blocks(0, self.q.shape[2], self.rows)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Return uninitialised memory that tiles reuse: page faults cost more than the sums."""
        size = torch.Size(shape).numel()
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype)
        return self.buffers[name][:size].view(shape)

    def products(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Multiply a (n, rows, D) by the transpose of b (n, cols, D) into the buffer `name`."""
        out = self.buffer(name, a.shape[0], a.shape[1], b.shape[1])
        return torch.bmm(a, b.transpose(1, 2), out=out)


class Scores:
    """The scores of one slab."""

    def __init__(self, problem: ScoreProblem, slab: Slab) -> None:
        call, self.problem, self.slab = problem.call, problem, slab
        self.operands, self.options, self.program = call.operands, call.options, problem.program
        self.Hq, self.Sq, self.Sk = *problem.q.shape[1:3], problem.k.shape[2]
        self.k = slab.keys(problem.k, problem.dtype)
        self.clean_k, self.bad_keys = without_nan(self.k)
        # an upper bound of the scores before ALiBi and mask; not finite if q or k is not
        self.scale = call.scale
        longest = longest_row(slab.spread(problem.q)) * longest_row(self.k)
        self.bound = abs(self.scale) * longest.item()
        self.cap = _cap_that_matters(self.options.softcap, self.bound, problem.dtype)
        self.factor = _factor(self.scale, self.cap, problem.dtype)
        self.ranges = self.keep = self.bias = self.slopes = self.states = None
        if problem.ranges is not None:
            self.ranges = KeyRanges(*(slab.spread(x) for x in problem.ranges))
        if self.operands.attn_mask is not None:
            mask = slab.spread(four_dims(self.operands.attn_mask.detach()))
            self.keep, self.bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
        if problem.states is not None:
            self.states = MaskStates(slab.spread(problem.states))
        if self.operands.alibi_slopes is not None:
            slopes = self.operands.alibi_slopes.to(problem.dtype).view(-1, self.Hq, 1, 1)
            self.slopes = slab.spread(slopes)
            # query i has position i + offset
            self.offset = slab.spread(key_lengths(call)) - self.Sq
        if self.program is not None:
            values, indices, B = *self.operands[_TERMS], problem.q.shape[0]
            views = self.program.views(values, indices, B, self.Hq, self.Sq, self.Sk)
            self.terms = [slab.spread(x) for x in views]
            self.integers = integers_of(self.program.roots)
            index = torch.arange(max(B, self.Hq), dtype=self.integers)
            batches, heads = index[:B].view(-1, 1, 1, 1), index[: self.Hq].view(1, -1, 1, 1)
            self.index = {"b": slab.spread(batches), "h": slab.spread(heads)}
        # masked scores too: an infinite slope times a distance of 0 is NaN
        self.may_be_nan = not (
            math.isfinite(self.bound)
            and (self.program is None or self.program.score is None)
            and (self.bias is None or _finite_or_low(self.bias))
            and (self.slopes is None or bool(self.slopes.isfinite().all()))
        )

    def queries(self, rows: slice) -> Tensor:
        """Queries scaled so that products with keys are scores, or arguments of softcap's tanh."""
        return self.slab.fold(self.problem.q, rows, self.problem.dtype) * self.factor

    def unscaled(self, dk: Tensor) -> Tensor:
        """Convert sums over scaled queries to gradients of keys, in place."""
        return dk.mul_(self.scale / self.factor) if self.cap and self.factor else dk

    def tiles(self, rows: slice) -> Iterator[ScoreTile]:
        """Tiles of these rows that may have an attended key."""
        start, stop, first, last = 0, self.Sk, 0, self.Sk
        if self.ranges is not None:
            ranges = KeyRanges(*(cut(x, rows, slice(None)) for x in self.ranges))
            (start, stop), (first, last) = ranges.span(), ranges.core()
        for cols in blocks(start, stop, self.problem.cols):
            state = TileState.MIXED if self.states is None else self.states.of(rows, cols)
            if state is TileState.EMPTY:
                continue
            # of a programmed call the states are those of the program's mask alone
            is_mixed = state is TileState.MIXED or self.program is not None
            low = cols.start if cols.start < first else max(cols.start, last)
            high = cols.stop if cols.stop > last else min(cols.stop, first)
            masks = []
            if self.keep is not None and is_mixed:
                masks.append(cut(self.keep, rows, cols))
            applies = self.program is not None and self.program.mask is not None
            if applies and state is TileState.MIXED:
                masks += self.elements(rows, cols).evaluate(self.program.mask)
            edge, keep = cols if masks else slice(low, high), None
            if low < high:
                j = torch.arange(edge.start, edge.stop, dtype=torch.int32)
                keep = (j >= ranges.lo) & (j < ranges.hi)
            for mask in masks:
                keep = mask if keep is None else keep & mask
            if masks and not keep.any():
                continue
            masked = slice(edge.start - cols.start, edge.stop - cols.start)
            yield ScoreTile(rows, cols, masked, keep, self.bias is not None and is_mixed)

    def of(self, q: Tensor, tile: ScoreTile) -> tuple[Tensor, Tensor | None]:
        """Scores (n, group * rows, cols), -inf where masked.

        And the softcap's tanh, or the scores before the program, or None.
        """
        s = self.problem.products("scores", q, self.k[:, tile.cols])
        capped = None
        if self.program is not None and self.program.score is not None:
            capped = s
            (value,) = self.elements(tile.rows, tile.cols, s).evaluate(self.program.score)
            shape = self.slab.unfold(s).shape
            if value.shape != shape or self.program.score.op == "term":  # which is not ours
                value = value.expand(shape).clone(memory_format=torch.contiguous_format)
            s = value.reshape(s.shape)
        if self.cap:
            capped = torch.tanh(s, out=self.problem.buffer("capped", *s.shape))
            torch.mul(capped, self.cap, out=s)
        heads = self.slab.unfold(s)
        if self.slopes is not None:
            i, j = self._indices(tile)
            distance = (i + self.offset - j).abs()
            heads.addcmul_(self.slopes, distance.to(s.dtype), value=-1)
        if tile.biased:
            bias = cut(self.bias, tile.rows, tile.cols)
            heads.add_(bias)
            if self.may_be_nan:
                heads.masked_fill_(bias == -math.inf, -math.inf)
        if tile.keep is not None:
            self._mask(heads[..., tile.edge], tile.keep)
        return s, capped

    def elements(self, rows: slice, cols: slice, s: Tensor | None = None) -> Elements:
        """What the program reads of a tile with the scores `s`."""
        i = torch.arange(rows.start, rows.stop, dtype=self.integers).view(-1, 1)
        j = torch.arange(cols.start, cols.stop, dtype=self.integers)
        arguments = self.index | {"q": i, "k": j}
        if s is not None:
            arguments["score"] = self.slab.unfold(s)
        return Elements(
            self.program, arguments, self.terms, rows, cols, self.Sk, self.problem.dtype
        )

    def _mask(self, s: Tensor, keep: Tensor) -> None:
        """Set masked scores to -inf. Clamping is 9 times faster than filling, but keeps NaN."""
        if not self.may_be_nan:
            s.clamp_max_(keep.to(s.dtype).sub_(0.5).mul_(math.inf))
        else:
            s.masked_fill_(~keep, -math.inf)

    def survivors(self, tile: ScoreTile) -> Tensor:
        """Dropout's mask (n, group * rows, cols): 1 where a weight is kept, else 0."""
        i, j = self._indices(tile)
        seed, p = self.operands.dropout_seed, self.options.dropout_p
        if dropout.is_words(seed):
            keep = dropout.kept(self.slab.spread(seed.unsqueeze(3))[..., tile.rows, :], j, p)
        else:
            b = torch.arange(self.problem.q.shape[0]).view(-1, 1, 1, 1) + self.problem.first_batch
            index = self.slab.spread(b * self.Hq + torch.arange(self.Hq).view(-1, 1, 1))
            keep = dropout.keep_mask(seed, index, i, j, p)
        return keep.flatten(2, 3).flatten(0, 1).to(self.k.dtype)

    @staticmethod
    def _indices(tile: ScoreTile) -> tuple[Tensor, Tensor]:
        i = torch.arange(tile.rows.start, tile.rows.stop, dtype=torch.int32)
        return i.view(-1, 1), torch.arange(tile.cols.start, tile.cols.stop, dtype=torch.int32)


def _cap_that_matters(cap: float, bound: float, dtype: torch.dtype) -> float:
    """The softcap, or 0 if its tanh would change no score by a bit."""
    info = torch.finfo(dtype)
    return 0.0 if bound <= cap * info.eps**0.5 or cap > info.max else cap


def _factor(scale: float, cap: float, dtype: torch.dtype) -> float:
    """The factor of products q.k: the scale, divided by the softcap if there is one.

    With a tiny cap it is limited to what cannot overflow; tanh is 1 there all the same.
    """
    if not cap:
        return scale
    largest = torch.finfo(dtype).max ** 0.5
    return max(-largest, min(scale / cap, largest))


def without_nan(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with each NaN and Inf replaced by 0, and a 0/1 mask of where they were, or None."""
    if bool(torch.isfinite(x.sum())):
        return x, None
    bad = ~torch.isfinite(x)
    return (x.masked_fill(bad, 0.0), bad.to(x.dtype)) if bool(bad.any()) else (x, None)


def _finite_or_low(x: Tensor) -> bool:
    """False if x holds a NaN or +Inf; -Inf masks a score."""
    return bool(x.sum() < math.inf)


def cut(x: Tensor, rows: slice, cols: slice) -> Tensor:
    """Slice rows and columns of (..., Sq or 1, Sk or 1), keeping dimensions of size 1."""
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., cols]


# The keys that each query row attends, as one half-open key range per row.
#
# Causal masks, windows, `kv_lens` and `key_ranges` each leave a row one range, and so does any
# combination of them.


class KeyRanges(NamedTuple):
    """Row i attends the keys lo <= j < hi; a dead row has lo = Sk and hi = 0.

    Both int32, (B or 1, Hq or 1, Sq or 1, 1).
    """

    lo: Tensor
    hi: Tensor

    def span(self) -> tuple[int, int]:
        """The smallest range that contains every row's; empty (first >= last) if all rows are."""
        return int(self.lo.min()), int(self.hi.max())

    def core(self) -> tuple[int, int]:
        """The range of keys that every row attends; empty (first >= last) if there is none."""
        return int(self.lo.max()), int(self.hi.min())


def key_lengths(call: Call) -> Tensor:
    """Number of keys per batch element, int32 (B or 1, 1, 1, 1)."""
    Sk, lens = call.key.shape[2], call.operands.kv_lens
    if lens is None:
        return torch.full((1, 1, 1, 1), Sk, dtype=torch.int32)
    return lens.clamp(0, Sk).view(-1, 1, 1, 1)


def attended_ranges(call: Call) -> KeyRanges | None:
    """The key range of every row, in O(Sq) memory, or None if every row attends every key."""
    Sq, Sk, ranges = call.query.shape[2], call.key.shape[2], call.operands.key_ranges
    left = call.options.window_left
    right = 0 if call.options.is_causal else call.options.window_right
    bounded = right >= 0 or left >= 0
    if not bounded and call.operands.kv_lens is None and ranges is None:
        return None
    hi = key_lengths(call)
    lo = torch.zeros_like(hi)
    if bounded:
        diagonal = torch.arange(Sq, dtype=torch.int32).view(Sq, 1) + (hi - Sq)
        if right >= 0:
            hi = torch.minimum(hi, diagonal + (min(right, Sq) + 1))
        if left >= 0:
            lo = diagonal - min(left, Sk)
    if ranges is not None:
        first, last = ranges.split(1, -1)
        lo, hi = torch.maximum(lo, first), torch.minimum(hi, last)
    lo, hi = torch.broadcast_tensors(lo.clamp(min=0), hi.clamp(max=Sk))
    dead = hi <= lo
    return KeyRanges(lo.masked_fill(dead, Sk), hi.masked_fill(dead, 0))


# The effect of a mask on a tile of scores, from the tile states of `fa::mask_blocks`.

# A blockwise loop takes up to 1.5 times as long as aten's kernel, which visits every tile.
_SHARE_THAT_PAYS = 0.6


class TileState(enum.Enum):
    """The effect of a mask on a tile."""

    EMPTY = "masks every score out"
    FULL = "changes no score"
    MIXED = "must be read"


class MaskStates:
    """The states of the tiles of some heads, (..., m, n), as Python lists."""

    def __init__(self, states: Tensor) -> None:
        heads = states.flatten(0, -3)
        self.kept = (heads != EMPTY).any(0).tolist()
        self.full = (heads == FULL).all(0).tolist()

    def of(self, rows: slice, cols: slice) -> TileState:
        """The effect of the mask on these rows and columns of the scores in all heads."""
        down, across = _tiles(rows, len(self.kept)), _tiles(cols, len(self.kept[0]))
        if not any(self.kept[i][j] for i in down for j in across):
            return TileState.EMPTY
        full = all(self.full[i][j] for i in down for j in across)
        return TileState.FULL if full else TileState.MIXED


def _tiles(part: slice, count: int) -> range:
    """The tiles that a slice touches; a dimension with one tile may be shared by all of it."""
    if count == 1:
        return range(1)
    return range(part.start // MASK_BLOCK, -(-part.stop // MASK_BLOCK))


def skipping_pays(operands: Operands) -> bool:
    """Whether `mask_blocks` leave so few tiles that a loop over them is faster than all of them."""
    if operands.mask_blocks is None:
        return False
    states = listed_states(operands.mask_blocks, operands.attn_mask)
    return int((states != EMPTY).sum()) <= _SHARE_THAT_PAYS * states.numel()
