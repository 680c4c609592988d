"""Attention in steps over keys of several processes, with the gradients in steps too.

Partial results are merged by their log-sum-exps in float32. In the backward pass keys and values
are exchanged again, and their gradients return to the processes that own them. A process stores no
tensor of the size of the whole sequence, unless one step has the keys of all processes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.call.call import DENSE, Call, Run, Saved, attention_call
from fa_ops.distributed.layout import Segment
from fa_ops.distributed.schedule import (
    LinearBias,
    Mask,
    Parts,
    Step,
    StepCall,
    StepPlan,
    document_of,
    positions,
    rows_of,
)
from fa_ops.distributed.transport import Exchange, PeerExchange, kept_keys
from fa_ops.ops import autograd, dense, library, merge
from fa_ops.ops.autograd import differentiable_once
from fa_ops.plans import planning


class StepOptions(NamedTuple):
    """The options that all calls share."""

    scale: float | None
    softcap: float
    deterministic: bool
    backend: str | None


class Job(NamedTuple):
    """What a call computes, besides tensors that may require grad."""

    plan: StepPlan
    keeps_keys: bool  # whether received keys are kept for the backward pass
    outside: Tensor | None  # bool (S,): tokens of no document, which have no sink either
    exchange: Exchange | PeerExchange
    options: StepOptions
    slopes: Tensor | None  # ALiBi, float32 (Hq,) or (B, Hq)
    dropout: RowWords | None = None

    def sinks_in_calls(self, sinks: Tensor | None) -> bool:
        """Whether the operator adds the sinks, as each row has one call; saves a rounding."""
        biased = any(isinstance(call.alibi, LinearBias) for call in self.plan.calls)
        return sinks is not None and self.plan.parts < 2 and not biased


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job, keeps_keys: bool = False
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """out and lse of the keys of all steps, and with `keeps_keys` those received, by step."""
    partial, sinks_in_calls = PartialResult(q, v, job.plan.parts), job.sinks_in_calls(sinks)
    kept = {}
    with job.exchange.forward_pass(job.plan, k, v):
        for number, step, (keys, values), held in job.exchange.keys(job.plan, k, v):
            if held is not None and keeps_keys:
                kept[number] = held.x
            for call in step.calls:
                tensors = (
                    q[call.batches, :, call.rows], keys[call.batches, :, call.keys],
                    values[call.batches, :, call.keys],
                )  # fmt: skip
                part_call, row_terms = operator_call(job, call, *tensors)
                if sinks_in_calls:
                    part_call = part_call.changed(sinks=sinks.detach())
                part, part_lse = forward(part_call)
                partial.add(call, part, part_lse if row_terms is None else part_lse + row_terms)
    return *partial.finish(sinks, sinks_in_calls, job.outside), kept


class AttentionInSteps(torch.autograd.Function):
    """apply(query, key, value, sinks, job) -> (out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, job: Job):
        """Attend the keys of all steps."""
        keeps_keys = job.keeps_keys and any(ctx.needs_input_grad)
        out, lse, kept = attend(q, k, v, sinks, job, keeps_keys)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *kept.values())
        ctx.job, ctx.kept = job, tuple(kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("context parallel attention")
    def backward(ctx, tensors, grad_out, grad_lse):
        """Gradients of query, key, value and sinks."""
        q, k, v, out, lse, sinks, *kept = tensors
        job, plan = ctx.job, ctx.job.plan
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        saved, arriving = (grad_out, grad_lse, q, out, lse), None
        dq, own = TokenSum(q, plan.query_parts), [TokenSum(x, plan.key_parts) for x in (k, v)]
        with job.exchange.backward_pass(plan, k, v, job.keeps_keys):
            if job.keeps_keys:
                steps = kept_keys(plan, dict(zip(ctx.kept, kept)), k, v)
            else:
                steps = (found[:3] for found in job.exchange.keys(plan, k, v))
            for number, step, buffers in steps:
                grads = _gradients(job, step, saved, buffers, dq)
                _add_own(plan, step, own, grads)
                if arriving is not None:
                    _receive(own, *arriving)
                arriving = job.exchange.gradients(plan, number, grads, k, v)
            if arriving is not None:
                _receive(own, *arriving)
        dsinks = None if sinks is None else sinks_gradient(grad_out, grad_lse, out, lse, sinks)
        return dq.result(), *(total.result() for total in own), dsinks, None


class PartialResult:
    """The result over the keys so far.

    Where rows have at most two partial results, these are merged in float32 and rounded once, in
    place. More are summed in float32.
    """

    def __init__(self, q: Tensor, v: Tensor, parts: int) -> None:
        self.dtype, self.sum_dtype = q.dtype, sum_dtype(q)
        self.wide = self.sum_dtype if parts > 2 else q.dtype
        self.shape = (*q.shape[:3], v.shape[3])
        self.device, self.out, self.lse = q.device, None, None
        self.covered, self.pieces = WrittenTokens(), [] if parts < 2 else None

    def add(self, call: StepCall, part: Tensor, part_lse: Tensor) -> None:
        """Merge the result of a call, which attends keys that no other call of its rows does."""
        if self.pieces is not None:
            self.pieces.append((call, part, part_lse))
            return
        is_new = self.covered.add((call.batches, call.rows))
        if self.out is None and part.shape == self.shape:  # nothing to merge with, no copy
            self.out, self.lse = part.to(self.wide), part_lse
            return
        self._allocate()
        out = self.out[call.batches, :, call.rows]
        lse = self.lse[call.batches, :, call.rows]
        if is_new:
            out.copy_(part)
            lse.copy_(part_lse)
            return
        merge_into(out, lse, part, part_lse)

    def _join(self) -> None:
        """Put results of different rows together."""
        pieces, self.pieces = sorted(self.pieces or (), key=lambda piece: piece[0].rows.start), None
        ends = [0, *(call.rows.stop for call, _, _ in pieces)]
        starts = [*(call.rows.start for call, _, _ in pieces), self.shape[2]]
        if pieces and starts == ends and all(x.shape[0] == self.shape[0] for _, x, _ in pieces):
            _, outs, lses = zip(*pieces, strict=True)
            if len(outs) == 1:
                self.out, self.lse = outs[0], lses[0]
                return
            self.out = torch.cat([x.transpose(1, 2) for x in outs], 1).transpose(1, 2)
            self.lse = torch.cat(lses, 2)
        for piece in pieces if self.out is None else ():
            self.add(*piece)

    def _allocate(self) -> None:
        """Results of rows without keys."""
        if self.out is None:
            B, H, S, D = self.shape
            out = torch.zeros(B, S, H, D, dtype=self.wide, device=self.device)
            self.out = out.transpose(1, 2)
            lse = torch.full((B, H, S), float("-inf"), dtype=self.sum_dtype, device=self.device)
            self.lse = lse

    def finish(
        self, sinks: Tensor | None, are_added: bool, outside: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The result with sinks in the denominator, in the query's dtype.

        With `are_added`, the results of rows that have a key include the sinks already.
        """
        self._join()
        self._allocate()
        out, lse = self.out, self.lse
        if sinks is None:
            return out.to(self.dtype), lse
        column = sinks.detach().to(lse.dtype).view(1, -1, 1).expand_as(lse)
        if are_added:
            lse = torch.where(lse == float("-inf"), column, lse)
        else:
            lse = torch.logaddexp(lse, column)
            kept = torch.exp(self.lse - lse).masked_fill_(lse == float("-inf"), 0.0)
            out = out * kept.unsqueeze(-1)
        if outside is not None:
            lse = lse.masked_fill(outside, float("-inf"))
        return out.to(self.dtype), lse


def operator_call(
    job: Job, step: StepCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Call, Tensor | None]:
    """The operator's call with these queries, keys and values, and what is added to its lse."""
    scale, softcap, deterministic, backend = job.options
    ranges = step.ranges
    if ranges is not None:
        ranges = _on_device(job.plan, ranges, q.device)
    call = attention_call(
        q, k, v, is_causal=step.is_causal, scale=scale, window_left=step.left,
        window_right=step.right, softcap=softcap, key_ranges=ranges, deterministic=deterministic,
        backend=backend,
    )  # fmt: skip
    if job.dropout is not None:
        words = job.dropout.of_call(step)
        call = call.changed(dropout_p=job.dropout.p, dropout_seed=words)
    if step.alibi is False:
        return call, None
    slopes = job.slopes if job.slopes.dim() == 1 else job.slopes[step.batches]
    if step.alibi is True:
        return call.changed(alibi_slopes=slopes), None
    wide = sum_dtype(q)
    slopes = slopes.to(wide).view(-1, slopes.shape[-1], 1)
    key_terms, row_terms = (
        slopes * _on_device(job.plan, terms, q.device).to(wide) for terms in step.alibi
    )
    return call.changed(attn_mask=key_terms.unsqueeze(2)), row_terms


def _on_device(plan: StepPlan, x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the plan on a device, copied once."""
    if x.device == device:
        return x
    key = (id(x), device)
    if key not in plan.device_tensors:
        plan.device_tensors[key] = x.to(device)
    return plan.device_tensors[key]


def _gradients(job: Job, step: Step, saved: tuple, buffers: tuple, dq: TokenSum) -> tuple:
    """The gradients of a step's keys and values; those of queries are added to dq.

    Where a step attends keys of this process in one call, those of the keys that the call attends.
    """
    grad_out, grad_lse, q, out, lse = saved
    calls, grads = step.calls, None
    for call in calls:
        at = (call.batches, slice(None), call.rows)
        tensors = q[at], *(x[call.batches, :, call.keys] for x in buffers)
        part_call, row_terms = operator_call(job, call, *tensors)
        part_lse = lse[at] if row_terms is None else lse[at] - row_terms
        part_grad_lse = None if grad_lse is None else grad_lse[at]
        saved = Saved(grad_out[at], part_grad_lse, out[at], part_lse)
        parts = backward(part_call._replace(saved=saved))
        dq.add((call.batches, call.rows), parts[0])
        is_whole = len(calls) == 1 and parts[1].shape == buffers[0].shape
        if is_whole or step.attends_own_keys_in_one_call:
            return tuple(parts[1:3])
        if grads is None:
            grads = [torch.zeros_like(x, dtype=sum_dtype(q)) for x in buffers]
        for total, part in zip(grads, parts[1:3]):
            total[call.batches, :, call.keys].add_(part)
    return tuple(torch.zeros_like(x) for x in buffers) if grads is None else tuple(grads)


def _add_own(plan: StepPlan, step: Step, own: list[TokenSum], grads: tuple) -> None:
    """Add a step's gradients of this process's own keys."""
    if not step.own or not step.calls:
        return
    if step.attends_own_keys_in_one_call:
        call = step.calls[0]
        for total, x in zip(own, grads, strict=True):
            total.add((call.batches, call.keys), x)
        return
    pairs = zip(rows_of(plan.keys, step.own), rows_of(step.buffer, step.own), strict=True)
    for rows, there in pairs:
        for total, x in zip(own, grads, strict=True):
            total.add((slice(None), rows), x[:, :, there])


def _receive(own: list[TokenSum], received: list, waiting) -> None:
    """Add the gradients that other processes return."""
    waiting.wait()
    for rows, *pair in received:
        for total, x in zip(own, pair, strict=True):
            total.add((slice(None), rows), x)


def sinks_gradient(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor
) -> Tensor:
    """The part of sinks' gradient that comes from these rows.

    A sink of weight w scales out by (1 - w), and its derivative of lse is w. Rows outside every
    document have lse = -inf.
    """
    most = torch.finfo(lse.dtype).max  # the lse of a sink of +inf is +inf
    weight = torch.exp(sinks.to(lse.dtype).clamp(max=most).view(1, -1, 1) - lse.clamp(max=most))
    weight = weight.masked_fill(lse == float("-inf"), 0.0)
    slope = -(grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        slope = slope + grad_lse
    return (weight * slope).sum((0, 2)).to(sinks.dtype)


# Sums of results that each belong to some of the tokens.

Place = tuple[slice, slice]  # rows of the batch, and tokens


class WrittenTokens:
    """The tokens that have been written so far."""

    def __init__(self) -> None:
        self.places: list[tuple[int | None, int, int]] = []  # None: all rows of the batch

    def add(self, place: Place) -> bool:
        """Whether the place is new, and shares no token with those before."""
        batches, rows = place
        b, start, stop = batches.start, rows.start, rows.stop
        is_new = all(
            (a != b and a is not None and b is not None) or high <= start or stop <= low
            for a, low, high in self.places
        )
        self.places.append((b, start, stop))
        return is_new


class TokenSum:
    """A sum of tensors (B, H, rows, D) over some tokens each, rounded once.

    A sum of two is rounded once in any dtype. More are summed in float32.
    """

    def __init__(self, like: Tensor, parts: Parts) -> None:
        self.like = like
        if max((count for _, _, count in parts), default=0) <= 2:
            parts = ((0, like.shape[2], 2),)
        self.sums = [(a, b, _Sum(like[:, :, a:b], count)) for a, b, count in parts]

    def add(self, place: Place, x: Tensor) -> None:
        """Add a tensor, which belongs to the sum from now on."""
        batches, rows = place
        for start, stop, total in self.sums:
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                piece = x[:, :, low - rows.start : high - rows.start]
                total.add((batches, slice(low - start, high - start)), piece)

    def result(self) -> Tensor:
        """The sum, in the dtype and with the strides of `like`."""
        like = self.like
        if len(self.sums) == 1:
            total = self.sums[0][2].result()
            if total.dtype == like.dtype and total.stride() == like.stride():
                return total
        out = torch.empty_like(like)
        for start, stop, total in self.sums:
            out[:, :, start:stop].copy_(total.result())
        return out


class _Sum:
    """The sum of tensors in one dtype. The first one with all tokens becomes the sum."""

    def __init__(self, like: Tensor, count: int) -> None:
        self.like, self.total, self.covered = like, None, WrittenTokens()
        self.wide = sum_dtype(like) if count > 2 else like.dtype
        self.first: tuple[Place, Tensor] | None = None  # waits for one that has all tokens

    def add(self, place: Place, x: Tensor) -> None:
        if self.total is not None:
            self._add(place, x)
        elif x.shape == self.like.shape:
            self._begin(x)
        elif self.first is None:
            self.first = place, x
        else:
            self._begin(None)
            self._add(place, x)

    def result(self) -> Tensor:
        if self.total is None:
            self._begin(None)
        return self.total

    def _begin(self, whole: Tensor | None) -> None:
        like, first = self.like, self.first
        given = [x for x in (whole, first and first[1]) if x is not None]
        wide = functools.reduce(torch.promote_types, (x.dtype for x in given), self.wide)
        if whole is None:
            self.total = torch.zeros_like(like, dtype=wide)
        else:
            self.total = whole.to(wide)
            self.covered.add((slice(None), slice(0, like.shape[2])))
        if first is not None:
            self._add(*first)

    def _add(self, place: Place, x: Tensor) -> None:
        there = self.total[place[0], :, place[1]]
        if self.covered.add(place):
            there.copy_(x)
        else:
            there.add_(x)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which partial results are summed."""
    return torch.promote_types(x.dtype, torch.float32)


# Dropout of a whole sequence, of which each call of the operator computes a part.
#
# A weight is dropped by the hash of its place in the whole. The operator is given a word for each
# of its rows, which has everything of the hash but the key.


class RowWords(NamedTuple):
    """What the rows of a process drop."""

    p: float
    words: Tensor  # int32 (B, Hq, S), for keys of the whole sequence

    def of_call(self, call: StepCall) -> Tensor:
        """The words with which a call drops what belongs to its rows and keys."""
        words = self.words[call.batches, :, call.rows]
        return dropout.from_key(words, call.first_key)


def row_words(
    seed: Tensor, mask: Mask, queries: tuple[Segment, ...], B: int, heads: slice, Hq: int
) -> Tensor:
    """The words of these tokens for some of the `Hq` query heads, int32 (B, heads, tokens).

    Documents are a batch, as in `attention_varlen`: rows and keys are numbered in each of them.
    """
    device, i = seed.device, positions(queries)
    index = torch.arange(heads.start, heads.stop, device=device).view(1, -1, 1)
    if mask.cu_seqlens is None:
        b = torch.arange(B, device=device).view(-1, 1, 1)
        return dropout.row_words(seed, b * Hq + index, i.to(device))
    document, start = (x.to(device) for x in document_of(mask, i))
    words = dropout.row_words(seed, document * Hq + index, i.to(device) - start)
    return dropout.from_key(words, -start)


# The operator's calls in a step, by their plans where the dispatcher would have nothing to do.

_merging: dict[tuple, Run] = {}


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse. Nothing is recorded for a gradient."""
    if library.can_bypass_dispatcher(*call[:3], *call.operands):
        with library.below_autograd():
            scalars = DENSE.scalars(call.options)
            return planning.run(DENSE, *call[:3], call.operands, scalars)
    return dense.OPERATORS.forward.run(call)


def backward(call: Call) -> tuple[Tensor, ...]:
    """The gradients of q, k and v."""
    grad_out, grad_lse, out, lse, _ = call.saved
    given = grad_out, grad_lse, *call[:3], out, lse
    if library.can_bypass_dispatcher(*given, *call.operands) and all(
        g is None or library.have_same_dispatch_keys(g, lse) for g in (grad_out, grad_lse)
    ):
        with library.below_autograd():
            return autograd.run_backward(call._replace(saved=None), call.saved)[:3]
    args, options = dense.OPERATORS.backward.arguments(call)
    return torch.ops.fa.attention_backward(*given, *args, **options)[:3]


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a result over other keys into out (B, H, S, D) and lse (B, H, S), in place."""
    kind = (out.dtype, part.dtype, out.shape[3], out.device, out.numel() == 0)
    run = _merging.get(kind)
    if run is None:
        run = _merging[kind] = merge.merger_into(out)
    run(out, lse, part, part_lse)
