"""fa::attention_varlen and fa::attention_varlen_backward: sequences packed along the token dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import autograd, library
from fa_ops.types import Packing, Spec

VARLEN = torch.ops.fa.attention_varlen.default
BACKWARD = torch.ops.fa.attention_varlen_backward.default
OPERATORS = autograd.Operators(VARLEN, BACKWARD)


def bind(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options,
) -> tuple[Packing, Spec]:  # fmt: skip
    """The operators' arguments after query, key and value."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return packing, Spec(None, dropout_p, is_causal, **options)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    Tq, Hq, _ = q.shape
    return q.new_empty((Tq, Hq, v.shape[2])), q.new_empty((Hq, Tq), dtype=library.lse_dtype(q.dtype))


def _varlen(q, k, v, *args, **options):
    packing, spec = bind(*args, **options)
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        out, lse = empty_outputs(q, v)
        return out.zero_(), lse.fill_(float("-inf"))
    return dispatch.select(q, k, v, spec).varlen_forward(q, k, v, packing, spec)


def _varlen_fake(q, k, v, *args, **options):
    return empty_outputs(q, v)


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, **options):
    packing, spec = bind(*args, **options)
    if not spec.deterministic and torch.are_deterministic_algorithms_enabled():
        spec = spec._replace(deterministic=True)
    backend = dispatch.select(q, k, v, spec)
    grads = backend.varlen_backward(grad_out, grad_lse, q, k, v, out, lse, packing, spec)
    return *grads[:3], q.new_empty(0) if grads.sinks is None else grads.sinks


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, **options):
    _, spec = bind(*args, **options)
    dsinks = q.new_empty(0) if spec.sinks is None else torch.empty_like(spec.sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


def _varlen_autograd(keyset, q, k, v, *args, **options):
    packing, spec = bind(*args, **options)
    if autograd.needs_grad(q, k, v, spec):
        return autograd.record(keyset, OPERATORS, packing, q, k, v, spec)
    library.reject_forward_ad("attention_varlen", q, k, v, spec.sinks)
    return VARLEN.redispatch(keyset & library.AFTER_AUTOGRAD, q, k, v, *args, **options)


library.register("attention_varlen", _varlen, _varlen_fake, _varlen_autograd)
library.register("attention_varlen_backward", _backward, _backward_fake, autograd.backward_kernel(BACKWARD))
