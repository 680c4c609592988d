"""fa::attention, fa::attention_with_lse and fa::attention_backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import autograd, library
from fa_ops.types import Spec

ATTENTION = torch.ops.fa.attention.default
WITH_LSE = torch.ops.fa.attention_with_lse.default
BACKWARD = torch.ops.fa.attention_backward.default
OPERATORS = autograd.Operators(WITH_LSE, BACKWARD)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out, laid out (B, Sq, Hq, Dv) in memory, and lse."""
    B, Hq, Sq, _ = q.shape
    out = q.new_empty((B, Sq, Hq, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((B, Hq, Sq), dtype=library.lse_dtype(q.dtype))


def _run(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        out, lse = empty_outputs(q, v)
        lse.copy_(float("-inf") if spec.sinks is None else spec.sinks.view(-1, 1))
        return out.zero_(), lse
    return dispatch.select(q, k, v, spec).forward(q, k, v, spec)


def _with_lse(q, k, v, *args, **options):
    return _run(q, k, v, Spec(*args, **options))


def _attention(q, k, v, *args, **options):
    return _run(q, k, v, Spec(*args, **options))[0]


def _with_lse_fake(q, k, v, *args, **options):
    return empty_outputs(q, v)


def _attention_fake(q, k, v, *args, **options):
    return empty_outputs(q, v)[0]


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    spec = Spec(*args, **options)
    if not spec.deterministic and torch.are_deterministic_algorithms_enabled():
        spec = spec._replace(deterministic=True)
    backend = dispatch.select(q, k, v, spec)
    grads = backend.backward(grad_out, grad_lse, q, k, v, out, lse, spec, mask_grad)
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    spec = Spec(*args, **options)
    dmask = torch.empty_like(spec.attn_mask) if mask_grad else q.new_empty(0)
    dsinks = q.new_empty(0) if spec.sinks is None else torch.empty_like(spec.sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dmask, dsinks


def _attention_autograd(keyset, q, k, v, *args, **options):
    spec = Spec(*args, **options)
    if autograd.needs_grad(q, k, v, spec):
        return autograd.record(keyset, OPERATORS, None, q, k, v, spec)[0]
    library.reject_forward_ad("attention", q, k, v, spec.attn_mask, spec.sinks)
    return ATTENTION.redispatch(keyset & library.AFTER_AUTOGRAD, q, k, v, *args, **options)


def _with_lse_autograd(keyset, q, k, v, *args, **options):
    spec = Spec(*args, **options)
    if autograd.needs_grad(q, k, v, spec):
        return autograd.record(keyset, OPERATORS, None, q, k, v, spec)
    library.reject_forward_ad("attention_with_lse", q, k, v, spec.attn_mask, spec.sinks)
    return WITH_LSE.redispatch(keyset & library.AFTER_AUTOGRAD, q, k, v, *args, **options)


library.register("attention", _attention, _attention_fake, _attention_autograd)
library.register("attention_with_lse", _with_lse, _with_lse_fake, _with_lse_autograd)
library.register("attention_backward", _backward, _backward_fake, autograd.backward_kernel(BACKWARD))
