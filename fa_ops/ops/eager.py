"""Eager calls: how one is run, by a plan or by its operator, and what the last one like it used."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.call import DENSE, OPERANDS_OF, PACKED, Call
from fa_ops.call.options import NO_OPERANDS, Operands, Spec
from fa_ops.call.python_types import checked_options, checked_packing
from fa_ops.ops import autocast, autograd, dense, library, varlen
from fa_ops.ops.library import Route
from fa_ops.plans import planning, recognition
from fa_ops.plans.planning import Prepared
from fa_ops.plans.recognition import LastCall

# Runs `attention` and `attention_varlen` once their arguments are collected.
#
# A plan runs eager calls that need not go through PyTorch's dispatcher; the operator runs all
# others.


def attend(
    query: Tensor, key: Tensor, value: Tensor, operands: Operands,
    scalars: tuple, kind: str, with_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """out, or (out, lse), of a dense or a packed call; `scalars` are those of `planning.key_of`."""
    route, plan, geometry = find(kind, query, key, value, operands, scalars, True)
    if route is Route.AUTOCAST:
        cast = autocast.cast_attention
        return autocast.below(attend, cast, query, key, value, operands, scalars, kind, with_lse)
    if route is Route.RECORD and operands.alibi_slopes is not None:
        autograd.refuse_gradient_of(operands.alibi_slopes)
    if plan is None:
        options = checked_options(query, key, value, operands, scalars)
        args = _positional(operands, scalars, kind)
        if geometry is None or not library.is_strided(query, key, value, *operands):
            return _by_operator(query, key, value, args, options, kind, with_lse)
        call = _described(query, key, value, args, options, kind)
        plan = planning.prepare(geometry, call, scalars)
    if route is Route.RECORD:
        operators = dense.OPERATORS if kind == DENSE else varlen.OPERATORS
        recording = autograd.Recording(operators, plan, with_lse)
        others = plan.operands.select(operands)
        return autograd.Attention.apply(recording, query, key, value, *others)
    out, lse = plan.run(query, key, value, operands, with_lse)
    return (out, lse) if with_lse else out


def _positional(operands: Operands, scalars: tuple, kind: str) -> tuple:
    """The operators' positional arguments after value."""
    is_causal, dropout_p, *_ = scalars
    if kind == DENSE:
        return operands.attn_mask, dropout_p, is_causal
    ends = operands.cu_seqlens_q, operands.cu_seqlens_k
    return *checked_packing(*ends, *scalars[-2:]), dropout_p, is_causal


def _by_operator(
    query: Tensor, key: Tensor, value: Tensor, args: tuple, options: dict[str, Any], kind: str,
    with_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if kind == DENSE:
        operator = dense.WITH_LSE if with_lse else dense.ATTENTION
        return operator(query, key, value, *args, **options)
    out, lse = varlen.VARLEN(query, key, value, *args, **options)
    return (out, lse) if with_lse else out


def _described(
    query: Tensor, key: Tensor, value: Tensor, args: tuple, options: dict[str, Any], kind: str
) -> Call:
    if kind == DENSE:
        return Call(DENSE, query, key, value, Spec(*args, **options))
    packing, spec = varlen.bind(*args, **options)
    return Call(PACKED, query, key, value, spec, packing)


# The route of an eager call, and the plan that runs it if there has been a call like it.

# read on every call
_is_grad_enabled = torch.is_grad_enabled
_open_blocks = backend_option.open_blocks


class Found(NamedTuple):
    """How a call is run."""

    route: Route
    plan: Prepared | None = None
    geometry: tuple | None = None  # for `planning.prepare`, where there is no plan yet


_WITHOUT_PLAN = {route: Found(route) for route in Route}


def find(
    kind: str, q: Tensor, k: Tensor, v: Tensor, operands: Operands, scalars: tuple,
    has_gradient: bool = False,
) -> Found:  # fmt: skip
    """How a call with these arguments, whatever their types, is run.

    Plans are for the route DIRECT, and RECORD where calls of this kind have a gradient. The last
    call with the same options is tried first: to compare tensors with those of another call, in
    C++, takes a third of the time that it takes to describe and look up their geometry.
    """
    if library.is_dispatched():
        return _WITHOUT_PLAN[Route.DISPATCH]
    given = q, k, v
    if operands is not NO_OPERANDS:
        given = q, k, v, *OPERANDS_OF[kind].select(operands)
    backend = backend_option.chosen() if _open_blocks() else backend_option.default
    options = (
        kind, len(given), _is_grad_enabled(), backend, scalars, tuple(map(type, scalars)),
    )  # fmt: skip
    try:
        last = recognition.last_calls.get(options)
        if (
            last is not None
            # of strided layout: comparing strides aborts
            and not (q.is_nested or k.is_nested or v.is_nested)
            and last.matches(*given)
        ):
            return last.outcome
    # an option without a hash, or no tensor, or not even comparable to None: checks refuse it
    except (TypeError, AttributeError, ValueError, RuntimeError):
        last = None
    route = library.route_by_tensors(*given)
    if not (route is Route.DIRECT or (route is Route.RECORD and has_gradient)):
        return _WITHOUT_PLAN[route]
    geometry = planning.key_of(kind, q, k, v, operands, scalars)
    plan = planning.prepared(geometry)
    if plan is None:
        return Found(route, None, geometry)
    found = Found(route, plan)
    if plan.last_call is None or plan.last_call is last or plan.last_call.outcome != found:
        plan.last_call = LastCall(recognition.like_call(*given), found)
    recognition.keep(options, plan.last_call)
    return found
