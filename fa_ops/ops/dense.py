"""fa::attention, fa::attention_with_lse and fa::attention_backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import autograd, checks, library
from fa_ops.types import Gradients, Spec

ATTENTION = torch.ops.fa.attention.default
WITH_LSE = torch.ops.fa.attention_with_lse.default
BACKWARD = torch.ops.fa.attention_backward.default


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out, laid out (B, Sq, Hq, Dv) in memory, and lse."""
    B, Hq, Sq, _ = q.shape
    shape = (B, Hq, Sq, v.shape[3])
    out = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=q.dtype, device=q.device)
    return out, q.new_empty((B, Hq, Sq), dtype=library.lse_dtype(q.dtype))


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    spec = checks.dense(q, k, v, Spec(*args, **options), real=True)
    if not (q.numel() and k.numel()):
        out, lse = empty_outputs(q, v)
        lse.copy_(float("-inf") if spec.sinks is None else spec.sinks.view(-1, 1))
        return out.zero_(), lse
    return dispatch.select(q, k, v, spec).forward(q, k, v, spec)


def _attention(q, k, v, *args, **options):
    return _forward(q, k, v, *args, **options)[0]


def _fake(q, k, v, *args, **options):
    checks.dense(q, k, v, Spec(*args, **options))
    return empty_outputs(q, v)


def _attention_fake(q, k, v, *args, **options):
    return _fake(q, k, v, *args, **options)[0]


def _autograd(keyset, q, k, v, *args, **options):
    spec = Spec(*args, **options)
    if autograd.needs_grad(q, k, v, spec):
        return autograd.record(keyset, OPERATORS, None, q, k, v, spec)
    library.reject_forward_ad(WITH_LSE, q, k, v, spec.attn_mask, spec.sinks)
    return library.redispatch(WITH_LSE, keyset, q, k, v, *args, **options)


def _attention_autograd(keyset, q, k, v, *args, **options):
    spec = Spec(*args, **options)
    if autograd.needs_grad(q, k, v, spec):
        return autograd.record(keyset, OPERATORS, None, q, k, v, spec)[0]
    library.reject_forward_ad(ATTENTION, q, k, v, spec.attn_mask, spec.sinks)
    return library.redispatch(ATTENTION, keyset, q, k, v, *args, **options)


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    spec = Spec(*args, **options)
    spec = _check_backward(grad_out, grad_lse, q, k, v, out, lse, spec, mask_grad, real=True)
    if q.numel() and k.numel():
        spec = autograd.repeatable(spec)
        grad_out, out = checks.with_rows(grad_out), checks.with_rows(out)
        lse = lse.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        backend = dispatch.select(q, k, v, spec, backward=True)
        grads = backend.backward(grad_out, grad_lse, q, k, v, out, lse, spec, mask_grad)
    else:
        grads = _empty_gradients(grad_lse, q, k, v, spec, mask_grad)
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _empty_gradients(grad_lse, q, k, v, spec: Spec, mask_grad: bool) -> Gradients:
    """Without keys lse is the sink itself, so its gradient is all there is."""
    dmask = torch.zeros_like(spec.attn_mask) if mask_grad else None
    dsinks = None
    if spec.sinks is not None:
        zero = torch.zeros_like(spec.sinks)
        dsinks = zero if grad_lse is None else grad_lse.sum((0, 2)).to(spec.sinks.dtype)
    return Gradients(*(torch.zeros_like(t) for t in (q, k, v)), dmask, dsinks)


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    spec = Spec(*args, **options)
    _check_backward(grad_out, grad_lse, q, k, v, out, lse, spec, mask_grad)
    dmask = torch.empty_like(spec.attn_mask) if mask_grad else q.new_empty(0)
    dsinks = q.new_empty(0) if spec.sinks is None else torch.empty_like(spec.sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dmask, dsinks


def _check_backward(grad_out, grad_lse, q, k, v, out, lse, spec, mask_grad, real=False) -> Spec:
    spec = checks.dense(q, k, v, spec, real)
    checks.saved(grad_out, grad_lse, q, v, out, lse, real)
    if mask_grad:
        checks.mask_grad(spec)
    return spec


OPERATORS = autograd.Operators(WITH_LSE, BACKWARD, _forward, _backward)

library.register("attention", _attention, _attention_fake, _attention_autograd)
library.register("attention_with_lse", _forward, _fake, _autograd)
library.register(
    "attention_backward", _backward, _backward_fake, autograd.backward_kernel(BACKWARD)
)
