"""Eager calls: how one is run, by a plan or by its operator, and what the last one like it used."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.call import Call, Signature
from fa_ops.call.options import NO_OPERANDS, Operands
from fa_ops.call.python_types import checked_call
from fa_ops.ops import autocast, autograd, kv_cache, library
from fa_ops.ops.library import Route
from fa_ops.ops.schemas import Schema
from fa_ops.plans import dispatch, planning, recognition
from fa_ops.plans.planning import Prepared

# Runs the public functions once their arguments are collected.
#
# A plan runs eager calls that need not go through PyTorch's dispatcher; the operator runs all
# others.


class PublicFunction(NamedTuple):
    """What the runner of calls needs to know of a public function."""

    signature: Signature
    # (call, with_lse): the operator that runs it, which may return no lse if not with_lse
    schema: Callable[[Call, bool], Schema]
    cast: Callable  # of `ops.autocast`
    gradient: autograd.Operators | None = None
    refuse_gradients: Callable[..., None] | None = None  # of tensors; None: the operator does


def run(
    query: Tensor, key: Tensor, value: Tensor, operands: Operands, scalars: tuple,
    function: PublicFunction, with_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """out, or (out, lse), or also the largest scores, of a call.

    `scalars` are in the order of the function's signature.
    """
    route, plan, geometry = find(function, query, key, value, operands, scalars)
    if route is Route.RECORD:
        if function.refuse_gradients is not None:
            function.refuse_gradients(query, key, value, *operands)
        elif operands.alibi_slopes is not None:
            autograd.refuse_gradient_of(operands.alibi_slopes)
    if plan is None:
        if route is Route.AUTOCAST:
            cast = function.cast
            return autocast.below(
                run, cast, query, key, value, operands, scalars, function, with_lse
            )
        call = checked_call(function.signature, query, key, value, operands, scalars)
        others = () if geometry is None else function.signature.operands.select(operands)
        if geometry is None or not library.is_strided(query, key, value, *others):
            schema = function.schema(call, with_lse)
            results = schema.run(call)
            if not schema.has_lse or function.signature.results > 2:
                return results
            out, lse = results  # which may stand for tensors that are traced
            return (out, lse) if with_lse else out
        plan = planning.prepare(geometry, call, scalars)
    if route is Route.RECORD and function.gradient is not None:
        recording = autograd.Recording(function.gradient, plan, with_lse)
        others = plan.operands.select(operands)
        return autograd.Attention.apply(recording, query, key, value, *others)
    results = plan.run(query, key, value, operands, with_lse)
    if operands.new_key is not None:
        kv_cache.written(key, value)
    return results if with_lse else results[0]


_LIMIT = 1024
_refused: dict[tuple, None] = {}  # geometries that `run_on` found to be refused


def run_on(
    backend: str, signature: Signature, query: Tensor, key: Tensor, value: Tensor,
    operands: Operands, scalars: tuple,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out and lse by the one backend that has a kernel for such calls, or None where it refuses.

    Nothing stands between the call and its plan: its route is DIRECT.
    """
    geometry = planning.key_of(signature, query, key, value, operands, scalars)
    plan = planning.prepared(geometry)
    if plan is None:
        if _is_refused(geometry):
            return None
        call = checked_call(signature, query, key, value, operands, scalars)
        planning.check(call)
        if dispatch.refusal(backend, planning.normalised(call)) is not None:
            if len(_refused) >= _LIMIT:
                _refused.clear()
            _refused[geometry] = None
            return None
        plan = planning.prepare(geometry, call, scalars)
    return plan.run(query, key, value, operands)


def _is_refused(geometry: tuple | None) -> bool:
    try:
        return geometry is not None and geometry in _refused
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        return False


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
    function: PublicFunction, q: Tensor, k: Tensor, v: Tensor, operands: Operands, scalars: tuple
) -> Found:
    """How a call with these arguments, whatever their types, is run.

    Plans are for the route DIRECT, and RECORD where the function has a gradient. The last call with
    the same options is tried first.
    """
    if library.is_dispatched():
        return _WITHOUT_PLAN[Route.DISPATCH]
    signature, given = function.signature, (q, k, v)
    if operands is not NO_OPERANDS:
        given = q, k, v, *signature.operands.select(operands)
    backend = backend_option.chosen() if _open_blocks() else backend_option.default
    options = (
        signature, len(given), _is_grad_enabled(), backend, scalars, tuple(map(type, scalars)),
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
    if not (route is Route.DIRECT or (route is Route.RECORD and function.gradient is not None)):
        return _WITHOUT_PLAN[route]
    geometry = planning.key_of(signature, q, k, v, operands, scalars)
    plan = planning.prepared(geometry)
    if plan is None:
        return Found(route, None, geometry)
    found = Found(route, plan)
    recognition.note(options, plan, found, recognition.like_call, given, last)
    return found
