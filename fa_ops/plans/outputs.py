"""Outputs before they are computed, and calls with nothing to compute, or without features."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call.call import Call, Plan, Run, Saved, Tangents, general
from fa_ops.call.checks import FP8, lse_dtype
from fa_ops.call.options import Gradients, Operands, mask_blocks_shape


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
    if call.is_backward:
        return general("empty", _gradients)
    if call.tangents is not None:
        return general("empty", _tangents)
    return general("empty", _packed if call.is_packed else _dense)


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The merged states of no elements of `outs`."""
    return outs.new_empty(outs.shape[1:]), torch.logsumexp(lses, 0)


def merged_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """The same for one state into another, in place."""
    lse.copy_(torch.logaddexp(lse, part_lse))


def no_blocks(mask: Tensor) -> Tensor:
    """The `mask_blocks` of a mask without elements."""
    return torch.zeros(mask_blocks_shape(mask), dtype=torch.int32, device=mask.device)


def _dense(call: Call) -> tuple[Tensor, ...]:
    sinks = call.operands.sinks
    out, lse = dense_outputs(call.query, call.value)
    lse.copy_(float("-inf") if sinks is None else sinks.view(-1, 1))
    maxima = (torch.full_like(lse, float("-inf")),) if call.options.max_scores else ()
    return out.zero_(), lse, *maxima


def _packed(call: Call) -> tuple[Tensor, Tensor]:
    sinks = call.operands.sinks
    out, lse = packed_outputs(call.query, call.value)
    lse.fill_(float("-inf"))
    if sinks is not None:
        torch.where(_in_a_sequence(call), sinks.view(-1, 1).to(lse), lse, out=lse)
    return out.zero_(), lse


def _in_a_sequence(call: Call) -> Tensor:
    """Bool (Tq,): which query tokens belong to any sequence."""
    cu_seqlens = call.operands.cu_seqlens_q
    token = torch.arange(call.query.shape[0], device=cu_seqlens.device)
    return (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])


def _tangents(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without keys the lse of a row, or of a token in a sequence, is the sink itself."""
    saved, of_sinks = call.saved, call.tangents.sinks
    of_out, of_lse = torch.zeros_like(saved.out), torch.zeros_like(saved.lse)
    if of_sinks is not None:
        of_lse += of_sinks.view(-1, 1).to(of_lse)
        if call.is_packed:
            of_lse *= _in_a_sequence(call)
    return of_out, of_lse, None if saved.grad_out is None else torch.zeros_like(saved.lse)


def _gradients(call: Call) -> Gradients:
    """Gradients, or their tangents, which depend on the gradient of lse alone."""
    mask, sinks = call.operands.attn_mask, call.operands.sinks
    grad_lse = (call.saved if call.tangents is None else call.tangents).grad_lse
    dmask = torch.zeros_like(mask) if call.saved.mask_grad else None
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    if dsinks is not None and grad_lse is not None:
        if call.is_packed:
            dsinks += (grad_lse * _in_a_sequence(call)).sum(1).to(dsinks)
        else:
            dsinks = grad_lse.sum((0, 2)).to(sinks.dtype)
    values = call.operands.term_values
    dvalues = None if values is None else torch.zeros_like(values)
    return Gradients(*(torch.zeros_like(t) for t in call[:3]), dmask, dsinks, dvalues)


_FEATURES = 16  # in place of none at all, neither of keys nor of values


def with_features(call: Call) -> Call:
    """The call with zeros for the features that it lacks, so that every kernel can run it.

    They change no product. The head dimensions become equal, which backends support best.
    """
    q, k, v, tensors = _padded(call.query, call.key, call.value, call.operands)
    saved, tangents = (_wide_features(t, q.shape[-1]) for t in (call.saved, call.tangents))
    return call._replace(query=q, key=k, value=v, operands=tensors, saved=saved, tangents=tangents)


def adding_features(run: Run, call: Call) -> Run:
    """What runs a call, given what runs the call `with_features`."""
    outputs = packed_outputs if call.query.dim() == 3 else dense_outputs

    def forward(q, k, v, tensors, with_lse=True):
        *padded, tensors = _padded(q, k, v, tensors)
        out, *others = run(*padded, tensors, with_lse)
        return out if v.shape[-1] else outputs(q, v)[0], *others

    def backward(grad_out, grad_lse, q, k, v, out, lse, tensors):
        *padded, tensors = _padded(q, k, v, tensors)
        if not v.shape[-1]:
            grad_out = out = _wide(out, padded[2].shape[-1])
        return narrow(run(grad_out, grad_lse, *padded, out, lse, tensors), q, k, v)

    def narrow(grads, q, k, v):
        of_q, of_k, of_v, *others = grads
        if not q.shape[-1]:
            of_q, of_k = torch.empty_like(q), torch.empty_like(k)
        return Gradients(of_q, of_k, of_v if v.shape[-1] else torch.empty_like(v), *others)

    def with_tangents(q, k, v, tensors, saved, tangents):
        *padded, tensors = _padded(q, k, v, tensors)
        wide = [_wide_features(t, padded[0].shape[-1]) for t in (saved, tangents)]
        results = run(*padded, tensors, *wide)
        if call.is_backward:
            return narrow(results, q, k, v)
        return results[0] if v.shape[-1] else outputs(q, v)[0], *results[1:]

    if call.tangents is not None:
        return with_tangents
    return forward if call.saved is None else backward


def _wide_features(tensors: Saved | Tangents | None, width: int) -> Saved | Tangents | None:
    """Saved tensors, or tangents, with zeros for features that they lack."""
    if tensors is None:
        return None
    given = {n: getattr(tensors, n, None) for n in ("query", "key", "value", "grad_out", "out")}
    return tensors._replace(**{n: _wide(t, width) for n, t in given.items() if t is not None})


def _padded(
    q: Tensor, k: Tensor, v: Tensor, tensors: Operands
) -> tuple[Tensor, Tensor, Tensor, Operands]:
    D, Dv = q.shape[-1], v.shape[-1]
    width = D or Dv or _FEATURES
    if tensors.new_key is not None:
        new = _wide(tensors.new_key, width), _wide(tensors.new_value, width)
        tensors = tensors._replace(new_key=new[0], new_value=new[1])
    elif tensors.q_scale is not None and tensors.v_scale.dim() == 3 and not Dv:
        ones = tensors.v_scale.new_ones(*tensors.v_scale.shape[:2], width)  # one for each channel
        tensors = tensors._replace(v_scale=ones)
    return _wide(q, width), _wide(k, width), _wide(v, width), tensors


def _wide(t: Tensor, width: int) -> Tensor:
    """The tensor, or zeros with that many features in place of none."""
    return t if t.shape[-1] else t.new_zeros((*t.shape[:-1], width))
