"""The CPU engine for every feature: a loop over tiles of scores, with memory linear in length.

Forward: online softmax (Milakov and Gimelshein, arXiv:1805.02867). Backward: recomputed weights
(Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ops.backends.cpu import layout
from fa_ops.backends.cpu.key_ranges import KeyRanges
from fa_ops.backends.cpu.scores import ScoreProblem, Scores, cut, without_nan
from fa_ops.types import Gradients, Spec


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, ranges: KeyRanges | None, first_batch: int
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype and lse (B, Hq, Sq); `ranges` are `attended_ranges(...)`."""
    problem = ScoreProblem(q, k, spec, ranges, first_batch)
    out = layout.empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=problem.dtype)
    for slab in problem.slabs():
        scores = Scores(problem, slab)
        values, bad = without_nan(slab.keys(v, problem.dtype))
        for rows in problem.row_blocks():
            o, m = _forward_rows(scores, values, bad, rows)
            slab.spread(out)[..., rows, :] = slab.unfold(o)
            slab.spread(lse)[..., rows] = slab.unfold(m).squeeze(-1)
    return out, lse


def _forward_rows(
    scores: Scores, v: Tensor, bad: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor]:
    """out (n, group * rows, Dv) and lse (n, group * rows, 1)."""
    spec, slab = scores.spec, scores.slab
    q = scores.queries(rows)
    lowest = torch.finfo(q.dtype).min  # not infinite: then no difference of maxima is NaN
    m, total = q.new_full((*q.shape[:2], 1), lowest), q.new_zeros(*q.shape[:2], 1)
    if spec.sinks is not None:
        sinks = slab.spread(spec.sinks.detach().to(q.dtype).view(1, -1, 1, 1))
        slab.unfold(m).copy_(sinks.clamp(lowest, -lowest))
        slab.unfold(total).copy_(sinks > float("-inf"))
    acc = q.new_zeros(*q.shape[:2], v.shape[2])
    touched = None if bad is None else torch.zeros_like(acc)
    for tile in scores.tiles(rows):
        s, _ = scores.of(q, tile)
        if touched is not None:
            touched += (s > float("-inf")).to(s.dtype) @ bad[:, tile.cols]
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        p = _exp_(s.sub_(top))
        shrink = _exp_(m.sub_(top))
        m = top
        total.mul_(shrink).add_(p.sum(-1, keepdim=True))
        if spec.dropout_p > 0:
            p.mul_(scores.survivors(tile))
        acc.mul_(shrink).baddbmm_(p, v[:, tile.cols])
    lse = m + total.log()
    if spec.sinks is not None:  # which may be +inf
        heads = slab.unfold(lse)
        torch.maximum(heads, sinks, out=heads)
    acc.div_(total.clamp_(min=1.0).mul_(_kept_share(spec)))  # a live row's top weight is exp(0)
    if touched is not None:
        acc.masked_fill_(touched > 0, float("nan"))
    return acc, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, spec: Spec, ranges: KeyRanges | None, mask_grad: bool,
    first_batch: int,
) -> Gradients:  # fmt: skip
    """Gradients of q, k and v, and of a float mask if `mask_grad`, by recomputing the weights."""
    problem = ScoreProblem(q, k, spec, ranges, first_batch)
    dtype = problem.dtype
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dmask = torch.zeros(spec.attn_mask.shape, dtype=dtype) if mask_grad else None
    # exp(s - lse) is the weight, and 0 in a dead row
    lse = lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1)
    for slab in problem.slabs():
        walk = _Backward(Scores(problem, slab), v, dmask)
        for rows in problem.row_blocks():
            do = slab.fold(grad_out, rows, dtype)
            delta = (do * slab.fold(out, rows, dtype)).sum(-1, keepdim=True)
            if grad_lse is not None:
                delta -= slab.fold(grad_lse.unsqueeze(-1), rows, dtype)
            rows_dq = walk.rows(rows, do, slab.fold(lse, rows, dtype), delta)
            slab.spread(dq)[..., rows, :] = slab.unfold(rows_dq)
        dk[slab.batches, slab.heads] = slab.unfold_keys(walk.scores.unscaled(walk.dk))
        dv[slab.batches, slab.heads] = slab.unfold_keys(walk.dv)
    if dmask is not None:
        dmask = torch.empty_like(spec.attn_mask).copy_(dmask)
    return Gradients(dq, dk, dv, dmask)


class _Backward:
    """The gradients of one slab; dk, dv and dmask accumulate over its blocks of rows.

    A row that holds or attends a NaN has NaN weights for the keys that it attends. Its inputs are
    set to 0, because products of the NaN with weights of 0 would spread it to masked keys.
    """

    def __init__(self, scores: Scores, v: Tensor, dmask: Tensor | None) -> None:
        self.scores = scores
        self.k = scores.clean_k
        self.v, _ = without_nan(scores.slab.keys(v, self.k.dtype))
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.dmask = None if dmask is None else scores.slab.spread(layout.four_dims(dmask))

    def rows(self, rows: slice, do: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Return dq of these rows, and add their share to dk, dv and dmask."""
        scores, spec = self.scores, self.scores.spec
        q = scores.queries(rows)
        bad = _bad_rows(q, do, lse, delta)
        if bad is not None:
            q, do, delta = (x.masked_fill(bad, 0.0) for x in (q, do, delta))
            lse = lse.masked_fill(bad, math.inf)
        dq = torch.zeros_like(q)
        for tile in scores.tiles(rows):
            s, capped = scores.of(q, tile)
            attended = None if bad is None else s != -math.inf
            p = _exp_(s.sub_(lse).clamp_(max=0.0))  # rounding of huge scores exceeds 0
            if bad is not None:
                p.masked_fill_(attended & bad, math.nan)
            dp = scores.problem.products("gradients", do, self.v[:, tile.cols])
            dropped = p
            if spec.dropout_p > 0:
                factor = scores.survivors(tile).div_(_kept_share(spec))
                dropped = p * factor
                dp.mul_(factor)
            self.dv[:, tile.cols].baddbmm_(dropped.transpose(1, 2), do)
            ds = dp.sub_(delta).mul_(p)
            if self.dmask is not None:
                part = cut(self.dmask, rows, tile.cols)
                part += scores.slab.unfold(ds).sum_to_size(part.shape)
            if capped is not None:
                slope = capped.square_().neg_().add_(1.0)
                ds.mul_(slope if scores.bad_keys is None else slope.nan_to_num_())
            dq.baddbmm_(ds, self.k[:, tile.cols])
            self.dk[:, tile.cols].baddbmm_(ds.transpose(1, 2), q)
        return dq.mul_(scores.scale)


def _bad_rows(q: Tensor, do: Tensor, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Rows with a non-finite input, bool (n, rows, 1), or None if there are none.

    An lse of Inf marks a row without keys.
    """
    sums = q.sum() + do.sum() + delta.sum()
    if math.isfinite(sums) and not lse.isnan().any():
        return None
    finite = torch.isfinite(q).all(-1, keepdim=True) & torch.isfinite(do).all(-1, keepdim=True)
    bad = ~(finite & torch.isfinite(delta)) | lse.isnan()
    return bad if bool(bad.any()) else None


def _exp_(x: Tensor) -> Tensor:
    """exp in place, by exp2: 0.5 ns per element; torch.exp takes 1, or 14 on underflow."""
    return x.mul_(1.0 / math.log(2.0)).exp2_()


def _kept_share(spec: Spec) -> float:
    return max(1.0 - spec.dropout_p, 2.0**-32)
