"""Tangents of attention and of its gradients on the CPU, tile by tile, in linear memory.

With scores z, weights p, lse L and a dot for a tangent: the tangent of L is mu = sum p z., that of
out is sum p (z. - mu) v + sum p v., and the score gradients dz = p (a - delta), a = grad_out . v,
have the tangent dz (z. - mu) + p (a. - delta.). Tangents of scores are taken relative to a number
of each row near their mean, as they may have a large one in common.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ops.backends.cpu import scores as layout
from fa_ops.backends.cpu.dense import exp_, kept_share
from fa_ops.backends.cpu.scores import (
    ScoreProblem,
    Scores,
    ScoreTile,
    Slab,
    attended_ranges,
    cut,
    without_nan,
)
from fa_ops.call.call import Call
from fa_ops.call.options import Gradients


def jvp(call: Call, first_batch: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tangents of out and lse, and the sum of grad_out times the former, if grad_out is given."""
    q, v, grad_out = call.query, call.value, call.saved.grad_out
    problem = ScoreProblem(call, attended_ranges(call), first_batch)
    of_out, of_lse = layout.empty_out(q, v), torch.empty(q.shape[:3], dtype=problem.dtype)
    dot = None if grad_out is None else torch.empty_like(of_lse)
    for slab in problem.slabs():
        walk = _SlabTangents(problem, slab)
        for rows in problem.row_blocks():
            o, m = walk.jvp(rows)
            slab.spread(of_out)[..., rows, :] = slab.unfold(o)
            slab.spread(of_lse)[..., rows] = slab.unfold(m).squeeze(-1)
            if dot is not None:
                products = (o * walk.fold(grad_out, rows)).sum(-1, keepdim=True)
                slab.spread(dot)[..., rows] = slab.unfold(products).squeeze(-1)
    return of_out, of_lse, dot


def backward_jvp(call: Call, first_batch: int = 0) -> Gradients:
    """Tangents of the gradients of query, key and value, of a float mask, and of sinks."""
    (q, k, v), saved, mask = call[:3], call.saved, call.operands.attn_mask
    problem = ScoreProblem(call, attended_ranges(call), first_batch)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dmask = torch.zeros(mask.shape, dtype=problem.dtype) if saved.mask_grad else None
    for slab in problem.slabs():
        walk = _SlabTangents(problem, slab)
        walk.dk, walk.dv = torch.zeros_like(walk.k), torch.zeros_like(walk.v)
        if dmask is not None:
            walk.dmask = slab.spread(layout.four_dims(dmask))
        for rows in problem.row_blocks():
            slab.spread(dq)[..., rows, :] = slab.unfold(walk.backward(rows))
        dk[slab.batches, slab.heads] = slab.unfold_keys(walk.dk)
        dv[slab.batches, slab.heads] = slab.unfold_keys(walk.dv)
    if dmask is not None:
        dmask = torch.empty_like(mask).copy_(dmask)
    return Gradients(dq, dk, dv, dmask, _of_sinks_gradient(call))


def _sums(call: Call) -> tuple[Tensor, Tensor]:
    """delta = grad_out . out - grad_lse, and its tangent, (B, Hq, Sq)."""
    saved, t, wide = call.saved, call.tangents, call.saved.lse.dtype

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bhsd,bhsd->bhs", a.to(wide), b.to(wide))

    delta = dot(saved.grad_out, saved.out)
    of_delta = dot(saved.grad_out, t.out) if t.grad_dot is None else t.grad_dot.clone()
    if t.grad_out is not None:
        of_delta += dot(t.grad_out, saved.out)
    if saved.grad_lse is not None:
        delta -= saved.grad_lse
    if t.grad_lse is not None:
        of_delta -= t.grad_lse
    return delta, of_delta


def _sink_share(sinks: Tensor, lse: Tensor) -> Tensor:
    """The weight of a sink, which is all of it where it is +inf."""
    most = torch.finfo(lse.dtype).max
    share = torch.exp(sinks.clamp(max=most) - lse.clamp(max=most))
    return share.masked_fill_(lse == -math.inf, 0.0)  # a sink of -inf in a row without keys


def _of_sinks_gradient(call: Call) -> Tensor | None:
    """The tangent of -w delta summed over rows, w the weight of the sink."""
    sinks, t, lse = call.operands.sinks, call.tangents, call.saved.lse
    if sinks is None:
        return None
    delta, of_delta = _sums(call)
    of_sink = -t.lse
    if t.sinks is not None:
        of_sink = of_sink + t.sinks.to(lse.dtype).view(-1, 1)
    share = _sink_share(sinks.to(lse.dtype).view(-1, 1), lse)
    return -(share * (of_sink * delta + of_delta)).sum((0, 2)).to(sinks.dtype)


class _SlabTangents:
    """The tangents of one slab; those of dk, dv and dmask accumulate over its blocks of rows.

    A row that holds or attends a NaN has NaN for results, and so have the gradients of the keys
    that it attends. Its inputs are set to 0, because products of the NaN with weights of 0 would
    spread it to masked keys.
    """

    def __init__(self, problem: ScoreProblem, slab: Slab) -> None:
        self.call, self.problem, self.slab = problem.call, problem, slab
        self.scores, t = Scores(problem, slab), problem.call.tangents
        self.k = self.scores.clean_k
        (self.v, bad_v), (self.k_t, bad_k_t), (self.v_t, bad_v_t) = map(
            self._keys, (self.call.value, t.key, t.value)
        )
        self.bad_keys = None if bad_k_t is None else bad_k_t.amax(-1, keepdim=True)
        found = [bad for bad in (bad_v, bad_v_t) if bad is not None]
        self.bad_values = sum(found[1:], found[0]) if found else None
        self.mask_t = None
        if t.attn_mask is not None:
            self.mask_t = slab.spread(layout.four_dims(t.attn_mask))
        self.is_backward = problem.call.is_backward
        self.delta, self.of_delta = _sums(problem.call) if self.is_backward else (None, None)
        self.dk = self.dv = self.dmask = None

    def _keys(self, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if x is None else without_nan(self.slab.keys(x, self.problem.dtype))

    def fold(self, x: Tensor | None, rows: slice) -> Tensor | None:
        """Rows of (B, Hq, Sq, D) or (B, Hq, Sq) as (n, group * rows, D or 1)."""
        if x is None:
            return None
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        return self.slab.fold(x, rows, self.problem.dtype)

    def _score_tangents(
        self, q: Tensor, q_t: Tensor | None, tile: ScoreTile, s: Tensor, capped: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tangents of scores, and of the products before the softcap; q and q_t are scaled."""
        u_t = None
        for a, b in ((q_t, self.k), (q, self.k_t)):
            if a is None or b is None:
                continue
            b = b[:, tile.cols]
            if u_t is None:
                u_t = self.problem.products("tangents", a, b)
            else:
                u_t.baddbmm_(a, b.transpose(1, 2))
        if u_t is None:
            u_t = self.problem.buffer("tangents", *s.shape).zero_()
        z_t = u_t if capped is None else u_t * (1.0 - capped.square())
        if self.mask_t is not None:
            self.slab.unfold(z_t).add_(cut(self.mask_t, tile.rows, tile.cols))
            z_t.masked_fill_(s == -math.inf, 0.0)
        return z_t, u_t

    def _rows(self, rows: slice, *others: Tensor | None) -> tuple:
        """(bad, arguments of scores, scaled queries and their tangents, lse, *others)."""
        scores, lse = self.scores, self.fold(self.call.saved.lse, rows)
        arguments, q = scores.queries(rows), self.fold(self.call.query, rows) * scores.scale
        q_t = self.fold(self.call.tangents.query, rows)
        q_t = None if q_t is None else q_t * scores.scale
        tensors = [arguments, q, q_t, *others]
        bad = _bad_rows(lse, [x for x in (q, q_t, *others) if x is not None])
        if bad is not None:
            tensors = [None if x is None else x.masked_fill(bad, 0.0) for x in tensors]
            lse = lse.masked_fill(bad, math.inf)
        # exp(s - lse) is the weight, and 0 in a row without keys
        return bad, *tensors[:3], lse.masked_fill(lse == -math.inf, math.inf), *tensors[3:]

    def _weights(self, s: Tensor, lse: Tensor, bad: Tensor | None, fill: float) -> Tensor:
        attended = None if bad is None else s != -math.inf
        p = exp_(s.sub_(lse).clamp_(max=0.0))  # rounding of huge scores exceeds 0
        return p if bad is None else p.masked_fill_(bad, 0.0).masked_fill_(attended & bad, fill)

    def jvp(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Tangents of out and lse of these rows."""
        scores, dropout_p = self.scores, self.scores.options.dropout_p
        bad, arguments, q, q_t, lse = self._rows(rows)
        shape = (*q.shape[:2], 1)
        acc, total = q.new_zeros(*q.shape[:2], self.v.shape[2]), q.new_zeros(shape)
        reference, seen = q.new_zeros(shape), torch.zeros(shape, dtype=torch.bool)
        touched = torch.zeros(shape, dtype=torch.bool)
        touched_features = None if self.bad_values is None else torch.zeros_like(acc)
        for tile in scores.tiles(rows):
            s, capped = scores.of(arguments, tile)
            attended = s != -math.inf
            z_t, _ = self._score_tangents(q, q_t, tile, s, capped)
            if not seen.all():  # the mean over the first keys that a row attends
                count = attended.sum(-1, keepdim=True)
                mean = (z_t * attended).sum(-1, keepdim=True).div_(count.clamp(min=1))
                reference, seen = torch.where(seen, reference, mean), seen | (count > 0)
            if bad is not None:
                touched |= (attended & bad).any(-1, keepdim=True)
            if self.bad_keys is not None:
                touched |= attended.to(q.dtype) @ self.bad_keys[:, tile.cols] > 0
            if touched_features is not None:
                touched_features += attended.to(q.dtype) @ self.bad_values[:, tile.cols]
            p = self._weights(s, lse, bad, 0.0)
            moved = z_t.sub_(reference).mul_(p)
            total += moved.sum(-1, keepdim=True)
            if dropout_p > 0:
                factor = scores.survivors(tile).div_(kept_share(dropout_p))
                moved.mul_(factor), p.mul_(factor)
            acc.baddbmm_(moved, self.v[:, tile.cols])
            if self.v_t is not None:
                acc.baddbmm_(p, self.v_t[:, tile.cols])
        self._add_sink(rows, total, reference)
        acc -= total * self.fold(self.call.saved.out, rows)
        if touched_features is not None:
            acc.masked_fill_(touched_features > 0, math.nan)
        acc.masked_fill_(touched, math.nan)
        return acc, total.add_(reference).masked_fill_(touched, math.nan)

    def _add_sink(self, rows: slice, total: Tensor, reference: Tensor) -> None:
        sinks, of_sinks = self.call.operands.sinks, self.call.tangents.sinks
        if sinks is None:
            return

        def heads(x: Tensor) -> Tensor:
            return self.slab.spread(x.to(total.dtype).view(1, -1, 1, 1))

        lse = self.slab.unfold(self.fold(self.call.saved.lse, rows))
        difference = -self.slab.unfold(reference)
        if of_sinks is not None:
            difference = difference + heads(of_sinks)
        self.slab.unfold(total).addcmul_(_sink_share(heads(sinks), lse), difference)

    def backward(self, rows: slice) -> Tensor:
        """Tangents of dq of these rows; adds their share to those of dk, dv and dmask."""
        scores, saved, t = self.scores, self.call.saved, self.call.tangents
        dropout_p, cap = scores.options.dropout_p, scores.cap
        rows_of = saved.grad_out, t.grad_out, t.lse, self.delta, self.of_delta
        bad, arguments, q, q_t, lse, do, do_t, mu, delta, of_delta = self._rows(
            rows, *(self.fold(x, rows) for x in rows_of)
        )
        dq = torch.zeros_like(q)
        for tile in scores.tiles(rows):
            s, capped = scores.of(arguments, tile)
            z_t, u_t = self._score_tangents(q, q_t, tile, s, capped)
            p = self._weights(s, lse, bad, math.nan)
            keys, values = self.k[:, tile.cols], self.v[:, tile.cols]
            a = self.problem.products("gradients", do, values)
            a_t = torch.zeros((), dtype=q.dtype) if do_t is None else do_t @ values.transpose(1, 2)
            if self.v_t is not None:
                a_t = a_t + do @ self.v_t[:, tile.cols].transpose(1, 2)
            moved, dropped = (z_t - mu).mul_(p), p
            if dropout_p > 0:
                factor = scores.survivors(tile).div_(kept_share(dropout_p))
                a, a_t, dropped = a.mul_(factor), a_t * factor, p * factor
            ds = a.sub_(delta)
            ds_t = (a_t - of_delta) * p + ds * moved
            weights_t = moved if dropout_p == 0 else moved * factor
            self.dv[:, tile.cols].baddbmm_(weights_t.transpose(1, 2), do)
            if do_t is not None:
                self.dv[:, tile.cols].baddbmm_(dropped.transpose(1, 2), do_t)
            ds.mul_(p)
            if self.dmask is not None:
                part = cut(self.dmask, rows, tile.cols)
                part += self.slab.unfold(ds_t).sum_to_size(part.shape)
            if capped is not None:
                slope = 1.0 - capped.square()
                slope = slope if scores.bad_keys is None else slope.nan_to_num_()
                bend = (u_t * slope).mul_(capped).mul_(ds).mul_(2.0 / max(cap, 1e-30))
                ds, ds_t = ds.mul_(slope), ds_t.mul_(slope).sub_(bend)
            dq.baddbmm_(ds_t, keys)
            dk = self.dk[:, tile.cols].baddbmm_(ds_t.transpose(1, 2), q)
            if self.k_t is not None:
                dq.baddbmm_(ds, self.k_t[:, tile.cols])
            if q_t is not None:
                dk.baddbmm_(ds.transpose(1, 2), q_t)
        return dq.mul_(scores.scale)


def _bad_rows(lse: Tensor, tensors: list[Tensor]) -> Tensor | None:
    """Rows with a non-finite input, bool (n, rows, 1), or None. An lse may be infinite."""
    if math.isfinite(sum(float(x.sum()) for x in tensors)) and not lse.isnan().any():
        return None
    bad = lse.isnan()
    for x in tensors:
        bad = bad | ~torch.isfinite(x).all(-1, keepdim=True)
    return bad if bool(bad.any()) else None
