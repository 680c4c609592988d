"""Outputs before they are computed, and calls with nothing to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import MASK_BLOCKS, MERGE, MERGE_INTO, PACKED, Call, Plan, general
from fa_ops.checks import FP8, lse_dtype
from fa_ops.types import Cache, Gradients, Packing, Quantization, Spec, mask_blocks_shape


def dense_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out, laid out (B, Sq, Hq, Dv) in memory, and lse; of e4m3 out is bfloat16."""
    B, Hq, Sq, _ = q.shape
    shape, dtype = (B, Hq, Sq, v.shape[3]), torch.bfloat16 if q.dtype == FP8 else q.dtype
    out = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=dtype, device=q.device)
    return out, q.new_empty((B, Hq, Sq), dtype=lse_dtype(q.dtype))


def packed_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    Tq, Hq, _ = q.shape
    lse = q.new_empty((Hq, Tq), dtype=lse_dtype(q.dtype))
    return q.new_empty((Tq, Hq, v.shape[2])), lse


def plan(call: Call) -> Plan:
    """The plan of an empty call: zeros, and of lse what a row without keys has."""
    if call.kind == MERGE:
        return Plan("empty", lambda call: _merged)
    if call.kind == MERGE_INTO:
        return Plan("empty", lambda call: _merged_into)
    if call.kind == MASK_BLOCKS:
        return Plan("empty", lambda call: _no_blocks)
    if call.kind == PACKED:
        return general("empty", _packed if call.saved is None else _packed_gradients)
    return general("empty", _dense if call.saved is None else _dense_gradients)


def _merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), torch.logsumexp(lses, 0)


def _merged_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    lse.copy_(torch.logaddexp(lse, part_lse))


def _no_blocks(mask: Tensor) -> Tensor:
    return torch.zeros(mask_blocks_shape(mask), dtype=torch.int32, device=mask.device)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, *options: Cache | Quantization | Spec
) -> tuple[Tensor, Tensor]:
    sinks = options[-1].sinks
    out, lse = dense_outputs(q, v)
    lse.copy_(float("-inf") if sinks is None else sinks.view(-1, 1))
    return out.zero_(), lse


def _packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec) -> tuple[Tensor, Tensor]:
    out, lse = packed_outputs(q, v)
    lse.fill_(float("-inf"))
    if spec.sinks is not None:
        torch.where(_in_a_sequence(q, packing), spec.sinks.view(-1, 1).to(lse), lse, out=lse)
    return out.zero_(), lse


def _in_a_sequence(q: Tensor, packing: Packing) -> Tensor:
    """Bool (Tq,): which query tokens belong to any sequence."""
    cu_seqlens = packing.cu_seqlens_q
    token = torch.arange(q.shape[0], device=q.device)
    return (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])


def _dense_gradients(
    grad_out, grad_lse, q, k, v, out, lse, spec: Spec, mask_grad: bool = False
) -> Gradients:
    """Without keys lse is the sink itself, so its gradient is all there is."""
    dmask = torch.zeros_like(spec.attn_mask) if mask_grad else None
    dsinks = None
    if spec.sinks is not None:
        zero = torch.zeros_like(spec.sinks)
        dsinks = zero if grad_lse is None else grad_lse.sum((0, 2)).to(spec.sinks.dtype)
    return Gradients(*(torch.zeros_like(t) for t in (q, k, v)), dmask, dsinks)


def _packed_gradients(
    grad_out, grad_lse, q, k, v, out, lse, packing: Packing, spec: Spec
) -> Gradients:
    """Without keys the lse of a token in a sequence is the sink itself."""
    dsinks = None
    if spec.sinks is not None:
        dsinks = torch.zeros_like(spec.sinks)
        if grad_lse is not None:
            dsinks += (grad_lse * _in_a_sequence(q, packing)).sum(1).to(dsinks)
    return Gradients(*(torch.zeros_like(t) for t in (q, k, v)), None, dsinks)
