"""fa::attention_varlen and its backward: sequences packed along the token dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import autograd, checks, library
from fa_ops.types import Packing, Spec

VARLEN = torch.ops.fa.attention_varlen.default
BACKWARD = torch.ops.fa.attention_varlen_backward.default


def bind(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options,
) -> tuple[Packing, Spec]:
    """The operators' arguments after query, key and value."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return packing, Spec(None, dropout_p, is_causal, **options)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    Tq, Hq, _ = q.shape
    return q.new_empty((Tq, Hq, v.shape[2])), q.new_empty(
        (Hq, Tq), dtype=library.lse_dtype(q.dtype)
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    packing, spec = checks.packed(q, k, v, *bind(*args, **options), real=True)
    if not (q.numel() and k.numel()):
        out, lse = empty_outputs(q, v)
        lse.fill_(float("-inf"))
        if spec.sinks is not None:
            torch.where(_in_a_sequence(q, packing), spec.sinks.view(-1, 1).to(lse), lse, out=lse)
        return out.zero_(), lse
    return dispatch.select(q, k, v, spec).varlen_forward(q, k, v, packing, spec)


def _in_a_sequence(q: Tensor, packing: Packing) -> Tensor:
    """Bool (Tq,): which query tokens belong to any sequence."""
    ends = packing.cu_seqlens_q
    token = torch.arange(q.shape[0], device=q.device)
    return (token >= ends[0]) & (token < ends[-1])


def _fake(q, k, v, *args, **options):
    checks.packed(q, k, v, *bind(*args, **options))
    return empty_outputs(q, v)


def _autograd(keyset, q, k, v, *args, **options):
    packing, spec = bind(*args, **options)
    if autograd.needs_grad(q, k, v, spec):
        return autograd.record(keyset, OPERATORS, packing, q, k, v, spec)
    library.reject_forward_ad(VARLEN, q, k, v, spec.sinks)
    return library.redispatch(VARLEN, keyset, q, k, v, *args, **options)


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, **options):
    packing, spec = checks.packed(q, k, v, *bind(*args, **options), real=True)
    checks.saved(grad_out, grad_lse, q, v, out, lse, real=True)
    if not (q.numel() and k.numel()):
        return _empty_gradients(grad_lse, q, k, v, packing, spec)
    spec = autograd.repeatable(spec)
    grad_out, out = checks.with_rows(grad_out), checks.with_rows(out)
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    backend = dispatch.select(q, k, v, spec, backward=True)
    grads = backend.varlen_backward(grad_out, grad_lse, q, k, v, out, lse, packing, spec)
    return *grads[:3], q.new_empty(0) if grads.sinks is None else grads.sinks


def _empty_gradients(grad_lse, q, k, v, packing: Packing, spec: Spec) -> tuple[Tensor, ...]:
    """Without keys the lse of a token in a sequence is the sink itself."""
    dsinks = q.new_empty(0)
    if spec.sinks is not None:
        dsinks = torch.zeros_like(spec.sinks)
        if grad_lse is not None:
            dsinks += (grad_lse * _in_a_sequence(q, packing)).sum(1).to(dsinks)
    return *(torch.zeros_like(t) for t in (q, k, v)), dsinks


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, **options):
    packing, spec = bind(*args, **options)
    checks.packed(q, k, v, packing, spec)
    checks.saved(grad_out, grad_lse, q, v, out, lse)
    dsinks = q.new_empty(0) if spec.sinks is None else torch.empty_like(spec.sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


OPERATORS = autograd.Operators(VARLEN, BACKWARD, _forward, _backward)

library.register("attention_varlen", _forward, _fake, _autograd)
library.register(
    "attention_varlen_backward", _backward, _backward_fake, autograd.backward_kernel(BACKWARD)
)
