"""The Autograd kernels of attention, shared by the dense and the packed operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from fa_ops import planning
from fa_ops.call import Call, Run, Saved, Tensors
from fa_ops.ops import library
from fa_ops.types import NO_TENSORS, Gradients, keywords


class Operators(NamedTuple):
    """A forward operator that returns lse, and its backward."""

    forward: OpOverload
    backward: OpOverload


def arguments(call: Call) -> tuple[tuple, dict]:
    """What follows query, key and value in an operator's call: positional arguments, keywords."""
    spec = call.spec
    first = (spec.attn_mask,) if call.packing is None else call.packing
    return (*first, spec.dropout_p, spec.is_causal), keywords(spec)


def needs_grad(call: Call) -> bool:
    """Whether a call records gradients. Raises ValueError if it would drop one."""
    if not torch.is_grad_enabled():
        return False
    refuse_gradient_of(call.spec.alibi_slopes)
    given = call.query, call.key, call.value, call.spec.attn_mask, call.spec.sinks
    return any(t is not None and t.requires_grad for t in given)


def refuse_gradient_of(alibi_slopes: Tensor | None) -> None:
    """Raise ValueError where ALiBi slopes require grad."""
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError(
            "alibi_slopes must not require grad: attention has no gradient for them; "
            "pass alibi_slopes.detach()"
        )


class Recording(NamedTuple):
    """What a node of autograd runs and keeps besides tensors."""

    operators: Operators
    call: Call  # without tensors
    scalars: tuple  # as `planning.key_of` takes them
    run: Run
    with_lse: bool


def without_gradient(operator: OpOverload, keyset, call: Call, with_lse: bool, *args, **options):
    """Run the forward operator from inside its Autograd kernel, with nothing recorded."""
    spec = call.spec
    library.reject_forward_ad(
        operator, call.query, call.key, call.value, spec.attn_mask, spec.alibi_slopes, spec.sinks
    )
    if library.is_device_kernel_next(keyset.raw_repr()):
        out, lse = planning.run(call, with_lse)
        return (out, lse) if with_lse else out
    return library.redispatch(operator, keyset, call.query, call.key, call.value, *args, **options)


def record(
    operators: Operators, keyset: torch.DispatchKeySet, call: Call, with_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the forward operator from inside its Autograd kernel and record its gradient."""
    options = call.without_tensors()
    run = partial(_run_or_redispatch, operators.forward, keyset, options)
    recording = Recording(operators, options, planning.scalars_of(call), run, with_lse)
    tensors = () if call.tensors is NO_TENSORS else call.tensors
    return library.apply(Attention, recording, call.query, call.key, call.value, *tensors)


def _run_or_redispatch(operator, keyset, options: Call, q, k, v, tensors, with_lse):
    call = options.with_tensors(tensors)._replace(query=q, key=k, value=v)
    if library.can_bypass_dispatcher(q, k, v, *tensors):
        with library.below_autograd():
            return planning.run(call)
    args, keyword_args = arguments(call)
    with library.recording():
        return library.redispatch(operator, keyset, q, k, v, *args, **keyword_args)


class Attention(library.SingleLevelFunction):
    """forward(recording, query, key, value, *tensors) -> out, or (out, lse).

    `tensors` are those of `call.Tensors`, or none.
    """

    @staticmethod
    def forward(ctx, recording, q, k, v, *tensors):
        """Run the forward plan and save its tensors."""
        named = _named(recording.call, tensors)
        out, lse = recording.run(q, k, v, named, True)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        return (out, lse) if recording.with_lse else out

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        """Gradients by the backward plan, or by the operator where it must be seen."""
        recording = ctx.recording
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if not tensors:
            saved = Saved(grad_out, grad_lse, out, lse)
            return None, *_gradients(recording, q, k, v, NO_TENSORS, saved)[:3]
        named = _named(recording.call, tensors)
        is_needed = dict(zip(named._fields, ctx.needs_input_grad[4:], strict=True))
        saved = Saved(grad_out, grad_lse, out, lse, is_needed.get("attn_mask", False))
        grads = _gradients(recording, q, k, v, named, saved)
        of_tensors = [getattr(grads, name) if is_needed[name] else None for name in named._fields]
        return None, *grads[:3], *of_tensors


def _named(call: Call, tensors: tuple) -> Tensors:
    return type(call.tensors)(*tensors) if tensors else NO_TENSORS


def _gradients(recording: Recording, q, k, v, tensors: Tensors, saved: Saved) -> tuple:
    """Those of query, key and value at least; by the backward operator where it must be seen."""
    grad_out, grad_lse, out, lse, mask_grad = saved
    given = grad_out, grad_lse, q, k, v, out, lse
    is_direct = library.can_bypass_dispatcher(*given, *tensors) and all(
        g is None or library.have_same_dispatch_keys(g, lse) for g in (grad_out, grad_lse)
    )
    if is_direct:
        call, scalars = recording.call, recording.scalars
        run = planning.prepared_backward(call, scalars, q, k, v, tensors, saved).run
        return run(*given, tensors)
    call = recording.call.with_tensors(tensors)
    args, options = arguments(call)
    if mask_grad:
        options["mask_grad"] = True
    *grads, dsinks = recording.operators.backward(*given, *args, **options)
    return Gradients(*grads[:3], grads[3] if mask_grad else None, dsinks)


def run_backward(call: Call, saved: Saved) -> Gradients:
    """What a backward operator's kernel runs."""
    q, k, v, tensors = call.query, call.key, call.value, call.tensors
    scalars = planning.scalars_of(call)
    run = planning.prepared_backward(call, scalars, q, k, v, tensors, saved).run
    return Gradients(*run(saved.grad_out, saved.grad_lse, q, k, v, saved.out, saved.lse, tensors))


class NoSecondDerivative(library.SingleLevelFunction):
    """forward(keyset, operator, names, *values, *args): options come split, to be tracked."""

    @staticmethod
    def forward(ctx, keyset, operator, names, *values):
        """Run the backward operator below autograd."""
        ctx.operator = operator
        options = dict(zip(names, values, strict=False))
        args = values[len(names) :]
        with library.recording():
            return operator.redispatch(keyset & library.AFTER_AUTOGRAD, *args, **options)

    @staticmethod
    def backward(ctx, *grads):
        """Raise NotImplementedError."""
        raise NotImplementedError(
            f"{ctx.operator.name()} has no derivative: double backward is not implemented"
        )


def backward_kernel(operator: OpOverload) -> Callable:
    """The Autograd kernel of a backward operator: a second derivative raises, never a silent 0."""

    def kernel(keyset, *args, **options):
        tensors = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
        library.reject_forward_ad(operator, *tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            split = (tuple(options), *options.values(), *args)
            return library.apply(NoSecondDerivative, keyset, operator, *split)
        return operator.redispatch(keyset & library.AFTER_AUTOGRAD, *args, **options)

    return kernel
