"""The Autograd kernels of attention, shared by the dense and the packed operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from fa_ops.ops import library
from fa_ops.types import Packing, Spec, keywords


class Operators(NamedTuple):
    """A forward operator that returns lse, and its backward; and what they run where there is no
    one to see that they are called, which leaves the dispatcher out."""

    forward: OpOverload
    backward: OpOverload
    forward_kernel: Callable[..., tuple[Tensor, Tensor]]
    backward_kernel: Callable[..., tuple[Tensor, ...]]


def arguments(packing: Packing | None, spec: Spec) -> tuple[tuple, dict]:
    """What follows query, key and value in an operator's call: positional arguments, keywords."""
    if packing is None:
        return spec[:3], keywords(spec)
    return (*packing, *spec[1:3]), keywords(spec)


def needs_grad(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> bool:
    """Whether a call records gradients. Raises ValueError if it would drop one."""
    if not torch.is_grad_enabled():
        return False
    slopes, mask, sinks = spec.alibi_slopes, spec.attn_mask, spec.sinks
    if slopes is not None and slopes.requires_grad:
        raise ValueError(
            "alibi_slopes must not require grad: attention has no gradient for them; "
            "pass alibi_slopes.detach()"
        )
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (mask is not None and mask.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )


def record(
    keyset,
    operators: Operators,
    packing: Packing | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
) -> tuple[Tensor, Tensor]:
    """Run the forward operator and record its gradient: (out, lse)."""
    differentiable = q, k, v, spec.attn_mask, spec.sinks
    return library.apply(Attention, keyset, operators, packing, spec, *differentiable)


class Attention(library.SingleLevelFunction):
    """forward(keyset, operators, packing, spec, *differentiable), of which the last two are the
    spec's."""

    @staticmethod
    def forward(ctx, keyset, operators, packing, spec, q, k, v, attn_mask, sinks):
        args, options = arguments(packing, spec)
        rest = spec if packing is None else (*packing, *spec)
        tensors = [x if isinstance(x, Tensor) else None for x in rest]
        if library.may_leave_dispatcher_out(q, k, v, *tensors):
            with library.below_autograd():
                out, lse = operators.forward_kernel(q, k, v, *args, **options)
        else:
            with library.recording():
                out, lse = library.redispatch(operators.forward, keyset, q, k, v, *args, **options)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.plain = [x if t is None else None for t, x in zip(tensors, rest)]
        ctx.operators, ctx.packed = operators, packing is not None
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        rest = [x if t is None else t for t, x in zip(tensors, ctx.plain)]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        args, options = arguments(*_unflatten(ctx.packed, rest))
        *_, of_mask, of_sinks = ctx.needs_input_grad
        if of_mask:
            options["mask_grad"] = True
        given = grad_out, grad_lse, q, k, v, out, lse
        backward = ctx.operators.backward
        if (
            not torch.is_grad_enabled()
            and library.may_leave_dispatcher_out(*given, *tensors)
            and all(g is None or library.dispatched_alike(g, lse) for g in given[:2])
        ):
            backward = ctx.operators.backward_kernel
        dq, dk, dv, *others = backward(*given, *args, **options)
        dmask, dsinks = others[0] if of_mask else None, others[-1] if of_sinks else None
        return None, None, None, None, dq, dk, dv, dmask, dsinks


def _unflatten(packed: bool, rest) -> tuple[Packing | None, Spec]:
    if not packed:
        return None, Spec(*rest)
    n = len(Packing._fields)
    return Packing(*rest[:n]), Spec(*rest[n:])


class NoSecondDerivative(library.SingleLevelFunction):
    """forward(keyset, operator, names, *values, *args): options come split, to be tracked."""

    @staticmethod
    def forward(ctx, keyset, operator, names, *values):
        ctx.operator = operator
        options = dict(zip(names, values, strict=False))
        args = values[len(names) :]
        with library.recording():
            return operator.redispatch(keyset & library.AFTER_AUTOGRAD, *args, **options)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{ctx.operator.name()} has no derivative: double backward is not implemented"
        )


def backward_kernel(operator: OpOverload):
    """The Autograd kernel of a backward operator: a second derivative raises, never a silent 0."""

    def kernel(keyset, *args, **options):
        tensors = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
        library.reject_forward_ad(operator, *tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            split = (tuple(options), *options.values(), *args)
            return library.apply(NoSecondDerivative, keyset, operator, *split)
        return operator.redispatch(keyset & library.AFTER_AUTOGRAD, *args, **options)

    return kernel


def repeatable(spec: Spec) -> Spec:
    """The spec of a backward pass: torch's global switch asks for bitwise repeatability too."""
    if spec.deterministic or not torch.are_deterministic_algorithms_enabled():
        return spec
    return spec._replace(deterministic=True)
