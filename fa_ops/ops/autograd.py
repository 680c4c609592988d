"""The Autograd kernels of attention, shared by the dense and the packed operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import library
from fa_ops.types import Packing, Spec, keywords


class Operators(NamedTuple):
    """A forward operator that returns lse, and its backward."""

    forward: torch._ops.OpOverload
    backward: torch._ops.OpOverload


def arguments(packing: Packing | None, spec: Spec) -> tuple[tuple, dict]:
    """What follows query, key and value in a call of an operator: positional arguments and keywords."""
    if packing is None:
        return spec[:3], keywords(spec)
    return (*packing, *spec[1:3]), keywords(spec)


def needs_grad(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> bool:
    """Whether a call records gradients. Raises ValueError where it would have to for a tensor that has none."""
    if not torch.is_grad_enabled():
        return False
    slopes, mask, sinks = spec.alibi_slopes, spec.attn_mask, spec.sinks
    if slopes is not None and slopes.requires_grad:
        raise ValueError("alibi_slopes must not require grad: attention has no gradient for them, pass slopes.detach()")
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (mask is not None and mask.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )


class Attention(library.SingleLevelFunction):
    """forward(keyset, operators, packed, q, k, v, *rest); rest is a Spec's fields, behind a Packing's if packed."""

    @staticmethod
    def forward(ctx, keyset, operators, packed, q, k, v, *rest):
        packing, spec = _unflatten(packed, rest)
        args, options = arguments(packing, spec)
        with library.lower_levels():
            out, lse = operators.forward.redispatch(keyset & library.AFTER_AUTOGRAD, q, k, v, *args, **options)
        tensors = [x if isinstance(x, Tensor) else None for x in rest]
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.plain = [None if isinstance(x, Tensor) else x for x in rest]
        ctx.operators, ctx.packed = operators, packed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        rest = [x if t is None else t for t, x in zip(tensors, ctx.plain, strict=True)]
        packing, spec = _unflatten(ctx.packed, rest)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        args, options = arguments(packing, spec)
        first = 6 + (len(Packing._fields) if ctx.packed else 0)
        wanted = dict(zip(Spec._fields, ctx.needs_input_grad[first:], strict=True))
        if wanted["attn_mask"]:
            options["mask_grad"] = True
        dq, dk, dv, *others = ctx.operators.backward(grad_out, grad_lse, q, k, v, out, lse, *args, **options)
        grads = dict.fromkeys(Spec._fields)
        if wanted["attn_mask"]:
            grads["attn_mask"] = others[0]
        if wanted["sinks"]:
            grads["sinks"] = others[-1]
        return None, None, None, dq, dk, dv, *([None] * (first - 6)), *grads.values()


class NoSecondDerivative(library.SingleLevelFunction):
    @staticmethod
    def forward(ctx, keyset, operator, options, *args):
        ctx.operator = operator
        with library.lower_levels():
            return operator.redispatch(keyset & library.AFTER_AUTOGRAD, *args, **options)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{ctx.operator} has no derivative: double backward through attention is not implemented")


def _unflatten(packed: bool, rest) -> tuple[Packing | None, Spec]:
    if not packed:
        return None, Spec(*rest)
    n = len(Packing._fields)
    return Packing(*rest[:n]), Spec(*rest[n:])


def record(keyset, operators: Operators, packing: Packing | None, q, k, v, spec: Spec) -> tuple[Tensor, Tensor]:
    """Run the forward operator with gradients recorded: (out, lse). The backward runs on the backend chosen now."""
    if spec.backend is None and dispatch.default is not None:
        spec = spec._replace(backend=dispatch.default)
    return library.apply(Attention, keyset, operators, packing is not None, q, k, v, *(packing or ()), *spec)


def backward_kernel(operator: torch._ops.OpOverload):
    """The Autograd kernel of a backward operator: a second derivative raises instead of being silently zero."""

    def kernel(keyset, *args, **options):
        tensors = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
        library.reject_forward_ad(operator.name(), *tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return library.apply(NoSecondDerivative, keyset, operator, options, *args)
        return operator.redispatch(keyset & library.AFTER_AUTOGRAD, *args, **options)

    return kernel
