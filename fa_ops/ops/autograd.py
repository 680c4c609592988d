"""The Autograd kernels of attention, and results that have no gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from fa_ops import tracing
from fa_ops.call import checks
from fa_ops.call.call import PACKED, Call, Saved
from fa_ops.call.options import (
    NO_OPERANDS,
    Gradients,
    Operands,
    new_operands,
    operand_set,
)
from fa_ops.ops import axes, library
from fa_ops.ops.schemas import Schema, call_by_name
from fa_ops.plans import planning, recognition
from fa_ops.plans.outputs import dense_outputs, packed_outputs
from fa_ops.plans.planning import Prepared
from fa_ops.plans.recognition import LastCall

# The Autograd kernels of attention, shared by the dense and the packed operators.


class Operators(NamedTuple):
    """A forward operator that returns lse, and those of its derivatives (`ops.derivatives`)."""

    forward: Schema
    backward: Schema
    jvp: Schema | None = None  # None: attention has no more derivatives
    backward_jvp: Schema | None = None


def refuse_gradient_of(alibi_slopes: Tensor | None) -> None:
    """Raise ValueError where ALiBi slopes require grad."""
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError(
            "alibi_slopes must not require grad: attention has no gradient for them; "
            "pass alibi_slopes.detach()"
        )


def refuse_tangent_of(alibi_slopes: Tensor | None) -> None:
    """Raise NotImplementedError where ALiBi slopes carry a forward-mode tangent."""
    if library.has_tangent(alibi_slopes):
        raise NotImplementedError(
            "alibi_slopes have no derivative; pass alibi_slopes without a tangent"
        )


class Recording(NamedTuple):
    """The state of an autograd node besides its tensors."""

    operators: Operators
    plan: Prepared
    with_lse: bool
    forward_mode: bool = False  # whether tangents may be asked for


def needs_grad(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> bool:
    """Whether a call records gradients. Raises ValueError if it would drop one."""
    if not torch.is_grad_enabled():
        return False
    refuse_gradient_of(operands.alibi_slopes)
    given = q, k, v, operands.attn_mask, operands.sinks, operands.term_values
    return any([t is not None and t.requires_grad for t in given])


def forward(
    operators: Operators, operator: OpOverload, keyset: torch.DispatchKeySet, q: Tensor, k: Tensor,
    v: Tensor, args: tuple, options: dict[str, Any], with_lse: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The Autograd kernel of a forward `operator`, which returns lse if `with_lse`."""
    signature, (operands, scalars) = (
        operators.forward.signature,
        operators.forward.bind(args, options),
    )
    is_next = library.is_device_kernel_next(keyset.raw_repr())
    recorded = needs_grad(q, k, v, operands)
    if forward_mode := library.is_forward_mode():
        recorded |= _has_tangent(operators, operator, q, k, v, operands)
    if not recorded:
        if not is_next:
            return library.redispatch(operator, keyset, q, k, v, *args, **options)
        results = planning.run(signature, q, k, v, operands, scalars, with_lse)
        return results if with_lse else results[0]
    if is_next and not tracing.is_watched():
        plan = planning.plan_of(signature, q, k, v, operands, planning.with_backend(scalars))
    else:
        call = signature.call(None, None, None, NO_OPERANDS, scalars)
        run = partial(_redispatch, operators.forward, keyset, call)
        plan = Prepared(run, signature, call.options, scalars, operand_set(operands))
    recording = Recording(operators, plan, with_lse, forward_mode)
    return library.apply(Attention, recording, q, k, v, *plan.operands.select(operands))


def forward_kernel(operators: Operators, operator: OpOverload, with_lse: bool = True) -> Callable:
    """`forward` as the dispatcher calls it."""

    def kernel(keyset, q, k, v, *args, **options):
        return forward(operators, operator, keyset, q, k, v, args, options, with_lse)

    return kernel


def _has_tangent(
    operators: Operators, operator: OpOverload, q: Tensor, k: Tensor, v: Tensor, operands: Operands
) -> bool:
    """Whether a call records tangents. Raises NotImplementedError if it would drop one."""
    floats = q, k, v, operands.attn_mask, operands.sinks
    if operators.jvp is None:
        library.reject_forward_ad(operator, *floats, operands.term_values)
    refuse_tangent_of(operands.alibi_slopes)
    return library.has_tangent(*floats)


def _redispatch(schema: Schema, keyset, call: Call, q, k, v, operands, with_lse):
    args, options = schema.arguments(call._replace(operands=operands))
    with library.recording():
        return library.redispatch(schema.operator, keyset, q, k, v, *args, **options)


# An operand that no result depends on. It is not saved as a tensor: a checkpoint that is computed
# again may have found runs by then, or have none any more, and must save equally many tensors.
_TILE_RUNS = ("tile_runs",)


class Attention(library.SingleLevelFunction):
    """forward(recording, query, key, value, *tensors) -> out, or (out, lse), or with maxima.

    `tensors` are the operands that the call has.
    """

    @staticmethod
    def forward(ctx, recording, q, k, v, *tensors):
        """Run the forward plan and save its tensors."""
        plan = recording.plan
        operands = NO_OPERANDS
        if tensors:
            operands = new_operands(plan.operands.places((*tensors, None)))
        out, lse, *maxima = plan.run(q, k, v, operands, True)
        saved = tensors
        if plan.operands.names[-1:] == _TILE_RUNS:
            *saved, ctx.tile_runs = tensors
        ctx.save_for_backward(q, k, v, out, lse, *saved)
        if recording.forward_mode:
            ctx.save_for_forward(q, k, v, out, lse, *tensors)
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        if maxima:
            ctx.mark_non_differentiable(*maxima)
            return out, lse, *maxima
        return (out, lse) if recording.with_lse else out

    @staticmethod
    def jvp(ctx, _, q_t, k_t, v_t, *others_t):
        """Tangents of the results, by the operator."""
        q, k, v, out, lse, *others = ctx.saved_tensors
        operators, plan, with_lse, _ = ctx.recording
        given = {"query": q, "key": k, "value": v}
        given |= {"out": out, "lse": lse, "query_t": q_t, "key_t": k_t, "value_t": v_t}
        for name, x, t in zip(plan.operands.names, others, others_t):
            given |= {name: x, f"{name}_t": t}
        out_t, lse_t, _ = call_by_name(operators.jvp.operator, plan.options._asdict() | given)
        return (out_t, lse_t) if with_lse else out_t

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None, _=None):
        """Gradients by the backward plan, or by the operator where it must be seen."""
        q, k, v, out, lse, *others = ctx.saved_tensors
        if ctx.recording.plan.operands.names[-1:] == _TILE_RUNS:
            others.append(ctx.tile_runs)
        if grad_out is None and grad_lse is None:  # as behind a double backward
            pairs = zip((None, q, k, v, *others), ctx.needs_input_grad)
            return tuple([torch.zeros_like(x) if needed else None for x, needed in pairs])
        given = torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, q, k, v, out, lse
        traced = tracing.is_traced_by_dynamo()  # which cannot trace the question that follows
        if traced or not library.is_autocast_enabled() or tracing.is_compiling():
            return _gradients(ctx.recording, ctx.needs_input_grad, given, others, traced)
        with library.without_autocast():
            return _gradients(ctx.recording, ctx.needs_input_grad, given, others, traced)


def _gradients(
    recording: Recording, needs: tuple, given: tuple, others: list, traced: bool
) -> tuple:
    """Those of the arguments of `Attention.forward`, of which `needs` tells which need one."""
    plan, is_needed = recording.plan, needs[4:]
    names, operands, mask_grad = plan.operands.names, NO_OPERANDS, False
    if others:
        if traced:  # Dynamo cannot trace an itemgetter
            operands = Operands(**dict(zip(names, others)))
        else:
            operands = new_operands(plan.operands.places((*others, None)))
        mask_grad = names[0] == "attn_mask" and is_needed[0]
    last = plan.last_backward
    # what ran the last backward pass of the plan, if this one differs in addresses alone
    if (
        last is not None
        and not (torch.is_grad_enabled() or tracing.is_watched())
        and last.outcome[0] == recognition.settings(given[2], mask_grad)
        and last.matches(*given, *others)
    ):
        grads = last.outcome[1](*given, operands)
    else:
        grads = _planned_gradients(recording, mask_grad, given, others, operands)
    if True not in is_needed:
        return None, *grads[:3], *[None] * len(others)
    pairs = zip(names, is_needed, strict=True)
    of_others = [getattr(grads, name) if needed else None for name, needed in pairs]
    return None, *grads[:3], *of_others


def _planned_gradients(
    recording: Recording, mask_grad: bool, given: tuple, others: list, operands: Operands
):
    """At least the gradients of query, key and value, by the operator if it must be dispatched."""
    grad_out, grad_lse, q, k, v, out, lse = given
    plan = recording.plan
    is_direct = library.can_bypass_dispatcher(*given, *others) and all(
        g is None or library.have_same_dispatch_keys(g, lse) for g in (grad_out, grad_lse)
    )
    if is_direct:
        saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
        run = planning.prepared_backward(
            plan.signature, plan.options, plan.scalars, q, k, v, operands, saved
        ).run
        matches = recognition.like(*given, *others)
        plan.last_backward = LastCall(matches, (recognition.settings(q, mask_grad), run))
        return run(*given, operands)
    schema = recording.operators.backward
    args, options = schema.arguments(Call(q, k, v, operands, plan.options))
    if mask_grad:
        options["mask_grad"] = True
    names = axes.RESULTS[schema.operator._opname]
    grads = Gradients(**dict(zip(names, schema.operator(*given, *args, **options))))
    return grads if mask_grad else grads._replace(attn_mask=None)


def run_backward(call: Call, saved: Saved) -> Gradients:
    """Run the backward pass, as the kernel of a backward operator."""
    if saved.grad_out is None or saved.out is None or saved.lse is None:
        checks.given(grad_out=saved.grad_out, out=saved.out, lse=saved.lse)
    q, k, v, operands, signature = call.query, call.key, call.value, call.operands, call.signature
    scalars = signature.scalars(call.options)
    plan = planning.prepared_backward(signature, call.options, scalars, q, k, v, operands, saved)
    given = saved.grad_out, saved.grad_lse, q, k, v, saved.out, saved.lse
    return Gradients(*plan.run(*given, operands))


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
            f"{ctx.operator.name()} has no derivative: double backward is not implemented; "
            f"{library.DIFFERENTIABLE}"
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


def without_gradient(operator: OpOverload, reason: str) -> Callable:
    """The Autograd kernel of an operator that refuses tensors which require grad, for a reason."""

    def kernel(keyset, *args, **options):
        tensors = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
        library.reject_forward_ad(operator, *tensors)
        if any(t.requires_grad for t in tensors):
            checks.no_gradients(axes.bind(operator, args, options), reason)
        return library.redispatch(operator, keyset, *args, **options)

    return kernel


# The other kernels of an operator whose arguments are those of a call: the plan that is run, and
# the results of fake tensors.


def forward_functions(schema: Schema, with_lse: bool = True) -> tuple[Callable, Callable]:
    """The kernel of a forward operator, which returns lse if `with_lse`, and its fake."""
    signature, outputs = schema.signature, dense_outputs
    if signature is PACKED:
        outputs = packed_outputs

    def forward(q, k, v, *args, **options):
        results = planning.run(signature, q, k, v, *schema.bind(args, options), with_lse)
        return results if with_lse else results[0]

    def fake(q, k, v, *args, **options):
        planning.check(schema.call(q, k, v, args, options), real=False, signature=signature)
        results = outputs(q, v)
        if signature.results > 2:
            return *results, torch.empty_like(results[1])
        return results if with_lse else results[0]

    return forward, fake


def backward_functions(schema: Schema) -> tuple[Callable, Callable]:
    """The kernel of a backward operator, and its fake; absent gradients are empty tensors."""
    names = axes.RESULTS[schema.operator._opname]

    def backward(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
        saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
        grads = run_backward(schema.call(q, k, v, args, options), saved)
        found = [getattr(grads, name) for name in names]
        return tuple([q.new_empty(0) if x is None else x for x in found])

    def fake(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
        saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
        call = schema.call(q, k, v, args, options)._replace(saved=saved)
        planning.check(call, real=False, signature=schema.signature)
        given = call.operands._asdict() | {"query": q, "key": k, "value": v}
        if not mask_grad:
            given["attn_mask"] = None
        found = [given[name] for name in names]
        return tuple([q.new_empty(0) if x is None else torch.empty_like(x) for x in found])

    return backward, fake


# Results whose gradients raise NotImplementedError instead of being missing.


def undifferentiable(message: str, inputs: Sequence[Tensor], *results: Tensor) -> tuple:
    """The results, with a gradient that raises if one of the inputs requires grad."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Undifferentiable.apply(message, len(results), *results, *inputs)
    return results


def differentiable_once(what: str) -> Callable:
    """A decorator for the backward of an autograd.Function, whose own derivative then raises.

    Backward is called with (ctx, saved tensors, *gradients), as they may be unpacked only once.
    torch's `once_differentiable` returns gradients that count as constants if the gradients that
    arrive require no grad, even though those of attention depend on the saved tensors.
    """

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def first(ctx, *grads):
            saved = ctx.saved_tensors
            with torch.no_grad():
                found = backward(ctx, saved, *grads)
            if not torch.is_grad_enabled():
                return found
            inputs = [x for x in (*grads, *saved) if x is not None]
            message = f"{what} has no second derivative: double backward is not implemented"
            results = iter(undifferentiable(message, inputs, *(x for x in found if x is not None)))
            return tuple(None if x is None else next(results) for x in found)

        return first

    return decorate


class _Undifferentiable(torch.autograd.Function):
    """forward(message, number of results, *results, *inputs) -> results"""

    @staticmethod
    def forward(ctx, message, count, *tensors):
        ctx.message = message
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ctx.message)
