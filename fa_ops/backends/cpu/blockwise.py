"""Every feature, in one loop over tiles of scores; memory linear in the sequence lengths.

Forward: online softmax (Milakov and Gimelshein, arXiv:1805.02867). Backward: recomputed weights (Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.backends.cpu import layout
from fa_ops.backends.cpu.runs import Runs
from fa_ops.types import Gradients, Spec, default_scale

ROWS, COLS = 256, 512  # of one tile; query heads that share a kv head count as rows
TILE = 2**18  # scores of all heads of a tile, per thread: 1 MiB in fp32, about an L2 cache


class Slab(NamedTuple):
    """Batches and kv heads that are worked on together: n = batches * heads of them, with `group` query heads each."""

    batches: slice
    heads: slice
    group: int

    def spread(self, x: Tensor) -> Tensor:
        """(B or 1, Hq or 1, ...) to this slab's (batches or 1, heads or 1, group or 1, ...), a view."""
        x = x if x.shape[0] == 1 else x[self.batches]
        return (
            x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (-1, self.group))[:, self.heads]
        )

    def rows(self, x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """(B, Hq, Sq, D) to (n, group * rows, D)."""
        x = self.spread(x)[..., rows, :]
        return x.flatten(2, 3).flatten(0, 1).to(dtype)

    def keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, Hkv, Sk, D) to (n, Sk, D)."""
        return x[self.batches, self.heads].flatten(0, 1).to(dtype)


def _slabs(B: int, Hkv: int, group: int, tile: int) -> Iterator[Slab]:
    """`tile`: scores of one kv head's tile."""
    n = max(1, TILE * torch.get_num_threads() // tile)
    heads, batches = min(n, Hkv), max(1, n // Hkv)
    for b in range(0, B, batches):
        for h in range(0, Hkv, heads):
            yield Slab(slice(b, min(b + batches, B)), slice(h, min(h + heads, Hkv)), group)


def _cut(x: Tensor, rows: slice, cols: slice) -> Tensor:
    """The tile of (..., Sq or 1, Sk or 1)."""
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., cols]


def _blocks(start: int, stop: int, step: int) -> Iterator[slice]:
    """Nearly equal blocks of at most `step`."""
    count = -(-(stop - start) // step)
    step = -(-(stop - start) // max(count, 1))
    for i in range(start, stop, max(step, 1)):
        yield slice(i, min(i + step, stop))


class Tile(NamedTuple):
    rows: slice
    cols: slice
    keep: Tensor | None  # bool, broadcastable to (batches, heads, group, rows, cols); None: all


class Scores:
    """The scores of one slab, tile by tile; both passes walk the same tiles."""

    def __init__(
        self, slab: Slab, q: Tensor, k: Tensor, spec: Spec, runs: Runs | None, first_batch: int
    ) -> None:
        self.slab, self.spec, self.first_batch = slab, spec, first_batch
        self.Hq, self.Sq, self.Sk = q.shape[1], q.shape[2], k.shape[2]
        self.dtype = layout.accumulator(q.dtype)
        self.q, self.k = q, slab.keys(k, self.dtype)
        self.scale = default_scale(spec, q.shape[3]) / (spec.softcap or 1.0)
        self.runs = None if runs is None else Runs(*(slab.spread(x) for x in runs))
        self.block_rows = max(1, min(self.Sq, ROWS // slab.group))
        self.block_cols = max(COLS, TILE // (slab.group * self.block_rows))
        self.mask = self.bias = self.slopes = None
        if spec.attn_mask is not None:
            mask = slab.spread(spec.attn_mask[(None,) * (4 - spec.attn_mask.dim())].detach())
            self.mask, self.bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
        if spec.alibi_slopes is not None:
            self.slopes = slab.spread(spec.alibi_slopes.view(-1, self.Hq, 1, 1)).to(self.dtype)
        self.lens = (
            torch.tensor(self.Sk)
            if spec.kv_lens is None
            else slab.spread(spec.kv_lens.view(-1, 1, 1, 1))
        )
        self.buffers: dict[str, Tensor] = {}

    def row_blocks(self) -> Iterator[slice]:
        return _blocks(0, self.Sq, self.block_rows)

    def queries(self, rows: slice) -> Tensor:
        """Scaled so that their products are scores (with softcap: the arguments of tanh)."""
        return self.slab.rows(self.q, rows, self.dtype) * self.scale

    def tiles(self, rows: slice) -> Iterator[Tile]:
        """The tiles of these rows that hold a score to be kept."""
        start, stop, first, last = 0, self.Sk, 0, self.Sk
        if self.runs is not None:
            runs = Runs(*(_cut(x, rows, slice(None)) for x in self.runs))
            (start, stop), (first, last) = runs.span(), runs.core()
        for cols in _blocks(start, stop, self.block_cols):
            keep = None
            if cols.start < first or cols.stop > last:
                j = torch.arange(cols.start, cols.stop)
                keep = (j >= runs.lo) & (j < runs.hi)
            if self.mask is not None:
                mask = _cut(self.mask, rows, cols)
                keep = mask if keep is None else keep & mask
                if not keep.any():
                    continue
            yield Tile(rows, cols, keep)

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised memory that is reused from tile to tile: fresh pages cost more than the arithmetic on them."""
        size = torch.Size(shape).numel()
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype)
        return self.buffers[name][:size].view(shape)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a (n, rows, D) times the transpose of b (n, cols, D), in a buffer."""
        return torch.bmm(
            a, b.transpose(1, 2), out=self.buffer(name, (a.shape[0], a.shape[1], b.shape[1]))
        )

    def per_head(self, s: Tensor) -> Tensor:
        """(n, group * rows, X) as (batches, heads, group, rows, X)."""
        return s.unflatten(1, (self.slab.group, -1)).unflatten(
            0, (-1, self.slab.heads.stop - self.slab.heads.start)
        )

    def tile(self, q: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """The scores (n, group * rows, cols), and the softcap's tanh where there is one."""
        s = self.product("scores", q, self.k[:, tile.cols])
        capped = None
        if self.spec.softcap > 0:
            capped = torch.tanh(s, out=self.buffer("capped", s.shape))
            torch.mul(capped, self.spec.softcap, out=s)
        heads = self.per_head(s)
        if self.slopes is not None:
            i = torch.arange(tile.rows.start, tile.rows.stop).view(-1, 1)
            distance = (
                i - torch.arange(tile.cols.start, tile.cols.stop) + (self.lens - self.Sq)
            ).abs()
            heads.addcmul_(self.slopes, distance.to(self.dtype), value=-1)
        if self.bias is not None:
            heads.add_(_cut(self.bias, tile.rows, tile.cols))
        if tile.keep is not None:
            heads.masked_fill_(~tile.keep, float("-inf"))
        return s, capped

    def survivors(self, tile: Tile) -> Tensor:
        """Bool (n, group * rows, cols): the weights that dropout keeps."""
        batches = torch.arange(self.slab.batches.start, self.slab.batches.stop) + self.first_batch
        index = batches.view(-1, 1) * self.Hq + torch.arange(self.Hq)
        index = index.unflatten(1, (-1, self.slab.group))[:, self.slab.heads].flatten(0, 1)
        i = torch.arange(tile.rows.start, tile.rows.stop).view(-1, 1)
        j = torch.arange(tile.cols.start, tile.cols.stop)
        keep = dropout.keep_mask(
            self.spec.dropout_seed, index[:, :, None, None], i, j, self.spec.dropout_p
        )
        return keep.flatten(1, 2)


def _kept_share(spec: Spec) -> float:
    return max(1.0 - spec.dropout_p, 2.0**-32)


def _finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(x with 0 for every NaN and Inf, where they were); (x, None) if there are none."""
    if bool(torch.isfinite(x.sum())):
        return x, None
    bad = ~torch.isfinite(x)
    return (x.masked_fill(bad, 0.0), bad.to(x.dtype)) if bool(bad.any()) else (x, None)


def _tile_size(q: Tensor, k: Tensor) -> int:
    group = q.shape[1] // k.shape[1]
    rows = group * max(1, min(q.shape[2], ROWS // group))
    return rows * min(k.shape[2], max(COLS, TILE // rows))


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, runs: Runs | None, first_batch: int = 0
) -> tuple[Tensor, Tensor]:
    out = layout.empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=layout.accumulator(q.dtype))
    for slab in _slabs(q.shape[0], k.shape[1], q.shape[1] // k.shape[1], _tile_size(q, k)):
        scores = Scores(slab, q, k, spec, runs, first_batch)
        values = slab.keys(v, scores.dtype)
        for rows in scores.row_blocks():
            o, m = _forward_rows(scores, values, rows)
            slab.spread(out)[..., rows, :] = scores.per_head(o)
            slab.spread(lse)[..., rows] = scores.per_head(m).squeeze(-1)
    return out, lse


def _forward_rows(scores: Scores, values: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """out (n, group * rows, Dv) and lse (n, group * rows, 1)."""
    spec = scores.spec
    q = scores.queries(rows)
    lowest = torch.finfo(q.dtype).min  # rather than -inf: differences of maxima are never NaN
    m, total = q.new_full((*q.shape[:2], 1), lowest), q.new_zeros((*q.shape[:2], 1))
    if spec.sinks is not None:
        sinks = scores.slab.spread(spec.sinks.detach().to(q.dtype).view(1, -1, 1, 1))
        scores.per_head(m).copy_(sinks.clamp(min=lowest))
        scores.per_head(total).copy_(sinks > float("-inf"))
    acc = q.new_zeros((*q.shape[:2], values.shape[2]))
    clean, bad = _finite(values)
    touched = None if bad is None else torch.zeros_like(acc)
    for tile in scores.tiles(rows):
        s, _ = scores.tile(q, tile)
        if touched is not None:
            touched += (s > float("-inf")).to(s.dtype) @ bad[:, tile.cols]
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        p = s.sub_(top).exp_()
        shrink = m.sub_(top).exp_()
        m = top
        total.mul_(shrink).add_(p.sum(-1, keepdim=True))
        if spec.dropout_p > 0:
            p.mul_(scores.survivors(tile))
        acc.mul_(shrink).baddbmm_(p, clean[:, tile.cols])
    lse = m + total.log()
    acc.div_(total.clamp(min=1.0).mul_(_kept_share(spec)))  # a live row's largest weight is exp(0)
    if touched is not None:
        acc.masked_fill_(touched > 0, float("nan"))
    return acc, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: Spec,
    runs: Runs | None, mask_grad: bool = False, first_batch: int = 0,
) -> Gradients:  # fmt: skip
    dtype = layout.accumulator(q.dtype)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dmask = torch.zeros(spec.attn_mask.shape, dtype=dtype) if mask_grad else None
    weight = lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(
        -1
    )  # a dead row's weights are exp(-inf)
    for slab in _slabs(q.shape[0], k.shape[1], q.shape[1] // k.shape[1], _tile_size(q, k)):
        scores = Scores(slab, q, k, spec, runs, first_batch)
        pass_ = _Backward(scores, v, dmask)
        for rows in scores.row_blocks():
            do, o = slab.rows(grad_out, rows, dtype), slab.rows(out, rows, dtype)
            delta = (do * o).sum(-1, keepdim=True)
            if grad_lse is not None:
                delta -= slab.rows(grad_lse.unsqueeze(-1), rows, dtype)
            rows_dq = pass_.rows(rows, do, slab.rows(weight, rows, dtype), delta)
            slab.spread(dq)[..., rows, :] = scores.per_head(rows_dq)
        n = (-1, slab.heads.stop - slab.heads.start)
        dk[slab.batches, slab.heads] = pass_.dk.mul_(spec.softcap or 1.0).unflatten(0, n)
        dv[slab.batches, slab.heads] = pass_.dv.unflatten(0, n)
    return Gradients(dq, dk, dv, None if dmask is None else dmask.to(spec.attn_mask.dtype))


class _Backward:
    """The gradients of one slab."""

    def __init__(self, scores: Scores, v: Tensor, dmask: Tensor | None) -> None:
        self.scores = scores
        self.v, _ = _finite(scores.slab.keys(v, scores.dtype))
        # A NaN key's own rows are NaN through their weights; zeroed here, it leaves the others alone.
        self.k, _ = _finite(scores.k)
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.dmask = None
        if dmask is not None:
            self.dmask = scores.slab.spread(dmask[(None,) * (4 - dmask.dim())])

    def rows(self, rows: slice, do: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Add to dk, dv and dmask what these rows give; return their dq."""
        scores, spec = self.scores, self.scores.spec
        q = scores.queries(rows)
        dq = torch.zeros_like(q)
        for tile in scores.tiles(rows):
            s, capped = scores.tile(q, tile)
            p = s.sub_(lse).exp_()
            dp = scores.product("gradients", do, self.v[:, tile.cols])
            kept = p
            if spec.dropout_p > 0:
                factor = scores.survivors(tile) / _kept_share(spec)
                kept = p * factor
                dp.mul_(factor)
            self.dv[:, tile.cols].baddbmm_(kept.transpose(1, 2), do)
            ds = dp.sub_(delta).mul_(p)
            if self.dmask is not None:
                part = _cut(self.dmask, rows, tile.cols)
                part += scores.per_head(ds).sum_to_size(part.shape)
            if capped is not None:
                ds.mul_(capped.square_().neg_().add_(1.0))
            dq.baddbmm_(ds, self.k[:, tile.cols])
            self.dk[:, tile.cols].baddbmm_(ds.transpose(1, 2), q)
        return dq.mul_(default_scale(spec, q.shape[2]))
