"""Attention in steps over keys of several processes, with the gradients in steps too.

Partial results are merged by their log-sum-exps in float32. In the backward pass keys and values
are exchanged again, and their gradients return to the processes that own them. A process stores no
tensor of the size of the whole sequence, unless one step has the keys of all processes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.options import Spec
from fa_ops.distributed import step_calls
from fa_ops.distributed.dropout import RowWords
from fa_ops.distributed.exchange import Exchange, kept_keys
from fa_ops.distributed.partial_sums import Covered, TokenSum, sum_dtype
from fa_ops.distributed.schedule import Step, StepPlan, rows_of
from fa_ops.distributed.step_calls import LinearBias, StepCall
from fa_ops.distributed.transport import PeerExchange
from fa_ops.ops.autograd import differentiable_once


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
    partial, sinks_in_calls = Partial(q, v, job.plan.parts), job.sinks_in_calls(sinks)
    kept = {}
    with job.exchange.forward_pass(job.plan, k, v):
        for number, step, (keys, values), held in job.exchange.keys(job.plan, k, v):
            if held is not None and keeps_keys:
                kept[number] = held.x
            for call in step.calls:
                spec, row_terms = arguments(job, call, q)
                if sinks_in_calls:
                    spec = spec._replace(sinks=sinks.detach())
                part, part_lse = step_calls.forward(
                    q[call.batches, :, call.rows],
                    keys[call.batches, :, call.keys],
                    values[call.batches, :, call.keys],
                    spec,
                )
                partial.add(call, part, part_lse if row_terms is None else part_lse + row_terms)
    return *partial.finish(sinks, sinks_in_calls, job.outside), kept


class StepwiseAttention(torch.autograd.Function):
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


class Partial:
    """The result over the keys so far.

    Where rows have at most two partial results, these are merged in float32 and rounded once, in
    place. More are summed in float32.
    """

    def __init__(self, q: Tensor, v: Tensor, parts: int) -> None:
        self.dtype, self.sum_dtype = q.dtype, sum_dtype(q)
        self.wide = self.sum_dtype if parts > 2 else q.dtype
        self.shape = (*q.shape[:3], v.shape[3])
        self.device, self.out, self.lse = q.device, None, None
        self.covered, self.pieces = Covered(), [] if parts < 2 else None

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
        step_calls.merge_into(out, lse, part, part_lse)

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


def arguments(job: Job, call: StepCall, q: Tensor) -> tuple[Spec, Tensor | None]:
    """The operator's options in a call, and what is added to its lse."""
    scale, softcap, deterministic, backend = job.options
    ranges = call.ranges
    if ranges is not None:
        ranges = _on_device(job.plan, ranges, q.device)
    spec = Spec(
        None, 0.0, call.is_causal, scale, call.left, call.right, softcap,
        key_ranges=ranges, deterministic=deterministic, backend=backend,
    )  # fmt: skip
    if job.dropout is not None:
        words = job.dropout.of_call(call)
        spec = spec._replace(dropout_p=job.dropout.p, dropout_seed=words)
    if call.alibi is False:
        return spec, None
    slopes = job.slopes if job.slopes.dim() == 1 else job.slopes[call.batches]
    if call.alibi is True:
        return spec._replace(alibi_slopes=slopes), None
    wide = sum_dtype(q)
    slopes = slopes.to(wide).view(-1, slopes.shape[-1], 1)
    key_terms, row_terms = (
        slopes * _on_device(job.plan, terms, q.device).to(wide) for terms in call.alibi
    )
    return spec._replace(attn_mask=key_terms.unsqueeze(2)), row_terms


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
        spec, row_terms = arguments(job, call, q)
        parts = step_calls.backward(
            grad_out[at], None if grad_lse is None else grad_lse[at], q[at],
            *(x[call.batches, :, call.keys] for x in buffers),
            out[at], lse[at] if row_terms is None else lse[at] - row_terms, spec,
        )  # fmt: skip
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
