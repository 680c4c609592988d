"""The operators of derivatives, and their own derivatives, of which they are made as well.

With x = query, key, value, a float attn_mask and sinks, and y = the gradients of out and lse:

    jvp(x; x_t)                      tangents of out and lse
    backward(x; y)                   gradients by x
    backward_jvp(x; x_t; y, y_t)     tangents of these gradients

As a Hessian is symmetric, these give all derivatives of the first and second order except for
forward mode over forward mode: the gradient of `<backward(x; y), w>` is jvp(x; w) by y and
backward_jvp(x; w; y, 0) by x, and the gradient of `<jvp(x; x_t), y>` is backward_jvp(x; x_t; y, 0)
by x and backward(x; y) by x_t. What is saved of the forward pass depends on x and has no gradient
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fa_ops.call import checks
from fa_ops.call.call import Call, Saved, Tangents
from fa_ops.ops import axes, library
from fa_ops.ops.autograd import (
    Operators,
    backward_functions,
    refuse_gradient_of,
    refuse_tangent_of,
)
from fa_ops.ops.schemas import Schema, call_by_name
from fa_ops.plans import planning
from fa_ops.plans.outputs import dense_outputs, packed_outputs

_X = ("query", "key", "value", "attn_mask", "sinks")
_Y = ("grad_out", "grad_lse")
_THIRD = (
    "fa::attention_backward_jvp has no derivative: attention has derivatives of the first and "
    "second order"
)
_FORWARD_OVER_FORWARD = (
    "fa::attention_jvp has no forward-mode derivative: use jvp of grad, or jacfwd of jacrev, for "
    "second derivatives"
)


def _tangents(names: tuple[str, ...], values: tuple) -> dict[str, Any]:
    return {f"{name}_t": t for name, t in zip(names, values)}


def _run(operator: OpOverload, given: dict[str, Any], **others: Any) -> tuple:
    """Call an operator by names; autocast would change the precision of its kernel."""
    with library.without_autocast():
        return call_by_name(operator, given | others)


def _zeros(t: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if t is None else t


class _Derivative(library.SingleLevelFunction):
    """forward(keyset, operators, operator, names, *values): all arguments, to be tracked."""

    leading = 4

    @staticmethod
    def forward(ctx, keyset, operators, operator, names, *values):
        """Run the operator below autograd and save its arguments, and the results of jvp."""
        call = dict(zip(names, values))
        with library.recording():
            results = operator.redispatch(keyset & library.AFTER_AUTOGRAD, **call)
        ctx.operators, ctx.names = operators, names
        tensors = {n: x for n, x in call.items() if isinstance(x, Tensor)}
        ctx.given, ctx.options = tuple(tensors), {n: x for n, x in call.items() if n not in tensors}
        if operator is operators.jvp.operator:
            tensors |= {"out_t": results[0], "lse_t": results[1]}
        ctx.saved = tuple(tensors)
        ctx.save_for_backward(*tensors.values())
        if library.is_forward_mode():
            ctx.save_for_forward(*tensors.values())
        ctx.set_materialize_grads(False)
        pairs = zip(axes.RESULTS[operator._opname], results)
        absent = [x for n, x in pairs if n == "grad_dot" or axes.is_absent(n, x)]
        ctx.mark_non_differentiable(*absent)
        return results


def _call(ctx) -> dict[str, Any]:
    """The arguments by name."""
    return ctx.options | dict(zip(ctx.saved, ctx.saved_tensors))


def _needs(ctx) -> dict[str, bool]:
    """Which arguments need a gradient."""
    return dict(zip(ctx.names, ctx.needs_input_grad[_Derivative.leading :]))


def _gradients(ctx, found: dict[str, Tensor | None]) -> tuple:
    """What `backward` returns, given gradients by name."""
    needs = _needs(ctx)
    return *[None] * _Derivative.leading, *[found.get(n) if needs[n] else None for n in ctx.names]


def _results(operators: Operators) -> tuple[str, ...]:
    return axes.RESULTS[operators.backward.operator._opname]


def _without_placeholders(operators: Operators, grads: tuple) -> tuple:
    return tuple(None if axes.is_absent(n, g) else g for n, g in zip(_results(operators), grads))


class AttentionBackward(_Derivative):
    """The gradients of attention."""

    @staticmethod
    def jvp(ctx, *tangents):
        """The operator itself where y alone has tangents, in which it is linear."""
        operators, call = ctx.operators, _call(ctx)
        given = _tangents(ctx.names, tangents[_Derivative.leading :])
        if all(given.get(f"{n}_t") is None for n in _X):
            y = {"grad_out": _zeros(given["grad_out_t"], call["grad_out"])}
            grads = _run(operators.backward.operator, call | y, grad_lse=given["grad_lse_t"])
            return _without_placeholders(operators, grads)
        if given["out_t"] is None or given["lse_t"] is None:
            found = _run(operators.jvp.operator, call | given)
            given |= dict(zip(("out_t", "lse_t", "grad_dot"), found))
        grads = _run(operators.backward_jvp.operator, call | given)
        return _without_placeholders(operators, grads)

    @staticmethod
    def backward(ctx, *cotangents):
        """By y the operator of tangents, by x that of the gradients' tangents."""
        operators, call, needs = ctx.operators, _call(ctx), _needs(ctx)
        of = _tangents(_results(operators), cotangents)
        out_t, lse_t, grad_dot = _run(operators.jvp.operator, call | of)
        found = {"grad_out": out_t, "grad_lse": lse_t}
        if any(needs.get(n) for n in _X):
            of |= {"out_t": out_t, "lse_t": lse_t, "grad_dot": grad_dot}
            of["mask_grad"] = needs.get("attn_mask", False)
            grads = _run(operators.backward_jvp.operator, call | of)
            found |= dict(zip(_results(operators), grads))
        return _gradients(ctx, found)


class AttentionJvp(_Derivative):
    """The tangents of attention, linear in those of x."""

    @staticmethod
    def jvp(ctx, *tangents):
        """The operator itself where x has no tangents."""
        given = _tangents(ctx.names, tangents[_Derivative.leading :])
        if any(given.get(f"{n}_t") is not None for n in _X):
            raise NotImplementedError(_THIRD if "grad_out" in ctx.given else _FORWARD_OVER_FORWARD)
        of = {f"{n}_t": given.get(f"{n}_t_t") for n in _X}
        if all(t is None for t in of.values()):
            return None, None, None
        return *_run(ctx.operators.jvp.operator, _call(ctx) | of, grad_out=None)[:2], None

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        """By x the tangents of gradients, by the tangents the gradients themselves."""
        operators, call, needs = ctx.operators, _call(ctx), _needs(ctx)
        y = {"grad_out": _zeros(grad_out, call["out"]), "grad_lse": grad_lse}
        found = {}
        if any(needs.get(n) for n in _X):
            of = y | {"mask_grad": needs.get("attn_mask", False)}
            grads = _run(operators.backward_jvp.operator, call | of)
            found |= dict(zip(_results(operators), grads))
        if any(needs.get(f"{n}_t") for n in _X):
            of = y | {"mask_grad": needs.get("attn_mask_t", False)}
            grads = _run(operators.backward.operator, call | of)
            found |= _tangents(_results(operators), grads)
        return _gradients(ctx, found)


class AttentionBackwardJvp(_Derivative):
    """The tangents of gradients: linear in all tangents, and self-adjoint in those of x.

    `torch.autograd.functional.hvp` differentiates by these. Derivatives by x and y, which are of
    the third order, raise where they are computed.
    """

    @staticmethod
    def jvp(ctx, *tangents):
        """Raise NotImplementedError."""
        raise NotImplementedError(_THIRD)

    @staticmethod
    def backward(ctx, *cotangents):
        """By the tangents of x and y."""
        functions = dict(zip(ctx.given, ctx.next_functions))
        if any(_is_executed(functions.get(n, (None,))[0]) for n in (*_X, *_Y)):
            raise NotImplementedError(_THIRD)
        operators, call, needs = ctx.operators, _call(ctx), _needs(ctx)
        of = _tangents(_results(operators), cotangents)
        out_t, lse_t, grad_dot = _run(operators.jvp.operator, call | of)
        found = {"grad_out_t": out_t, "grad_lse_t": lse_t}
        if any(needs.get(f"{n}_t") for n in _X):
            of |= {"grad_out_t": None, "grad_lse_t": None}
            of |= {"out_t": out_t, "lse_t": lse_t, "grad_dot": grad_dot}
            of["mask_grad"] = needs.get("attn_mask_t", False)
            grads = _run(operators.backward_jvp.operator, call | of)
            found |= _tangents(_results(operators), grads)
        return _gradients(ctx, found)


def _is_executed(node: Any) -> bool:
    """Whether the backward pass in progress computes the gradient that goes to this node."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad asks for
        return True


# Registration


def _described(schema: Schema, args: tuple, options: dict[str, Any], mask_grad: bool) -> Call:
    """The call of an operator, whose schema begins with its tensors."""
    tensors, rest = schema.leading(args)
    q, k, v = (tensors[n] for n in ("query", "key", "value"))
    saved = Saved(*(tensors.get(n) for n in (*_Y, "out", "lse")), mask_grad)
    call = schema.call(q, k, v, rest, options)
    names = {n: n if n == "grad_dot" else f"{n}_t" for n in Tangents._fields}
    if schema.operator._opname.endswith("_backward_jvp"):
        checks.given(out_t=tensors["out_t"], lse_t=tensors["lse_t"])
    tangents = Tangents(**{n: tensors.get(x) for n, x in names.items()})
    return call._replace(saved=saved, tangents=tangents)


def _results_of_backward(call: Call, grads: tuple) -> tuple:
    """Gradients as their operator returns them: empty where there are none."""
    grads = (*grads[:3], grads[4]) if call.is_packed else grads[:5]
    return tuple(call.query.new_empty(0) if g is None else g for g in grads)


def _kernels(schema: Schema) -> tuple[Callable, Callable]:
    """The kernel of an operator with tangents, and its fake."""

    def described(args, options, mask_grad):
        return _described(schema, args, options, mask_grad)

    def kernel(*args, mask_grad=False, **options):
        call = described(args, options, mask_grad)
        with library.without_autocast():
            results = planning.run_tangents(call)
        if call.is_backward:
            return _results_of_backward(call, results)
        return *results[:2], call.query.new_empty(0) if results[2] is None else results[2]

    def fake(*args, mask_grad=False, **options):
        call = described(args, options, mask_grad)
        planning.check(call, real=False)
        (q, k, v), saved, sinks = call[:3], call.saved, call.operands.sinks
        if not call.is_backward:
            of_lse = torch.empty_like(saved.lse, memory_format=torch.contiguous_format)
            dot = q.new_empty(0) if saved.grad_out is None else torch.empty_like(of_lse)
            outputs = packed_outputs if call.is_packed else dense_outputs
            return outputs(q, v)[0], of_lse, dot
        mask = torch.empty_like(call.operands.attn_mask) if mask_grad else None
        grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), mask)
        return _results_of_backward(
            call, (*grads, None if sinks is None else torch.empty_like(sinks))
        )

    return kernel, fake


def _autograd_kernel(function: type, operators: Operators, operator: OpOverload) -> Callable:
    def kernel(keyset, *args, **options):
        call = axes.bind(operator, args, options)
        slopes = call.get("alibi_slopes")
        refuse_tangent_of(slopes)
        tensors = [t for t in call.values() if isinstance(t, Tensor)]
        recorded = library.has_tangent(*tensors)
        if torch.is_grad_enabled():
            refuse_gradient_of(slopes)
            recorded = recorded or any(t.requires_grad for t in tensors)
        if not recorded:  # as in a `jvp`, where forward mode is off, but not for transforms below
            with library.forward_mode_below():
                return operator.redispatch(keyset & library.AFTER_AUTOGRAD, *args, **options)
        return library.apply(function, keyset, operators, operator, tuple(call), *call.values())

    return kernel


def register(operators: Operators) -> None:
    """Register the three operators of derivatives of a forward operator."""
    name = operators.backward.operator._opname
    kernel = _autograd_kernel(AttentionBackward, operators, operators.backward.operator)
    library.register(name, *backward_functions(operators.backward), kernel)
    for schema, function in (
        (operators.jvp, AttentionJvp),
        (operators.backward_jvp, AttentionBackwardJvp),
    ):
        operator = schema.operator
        kernel = _autograd_kernel(function, operators, operator)
        library.register(operator._opname, *_kernels(schema), kernel)
