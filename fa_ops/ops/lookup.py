"""The route of an eager call, and the plan that runs it if there has been a call like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import dispatch, planning
from fa_ops.call import Tensors
from fa_ops.ops import library
from fa_ops.ops.library import Route
from fa_ops.planning import Latest, Prepared
from fa_ops.types import NO_TENSORS

# read on every call
_is_grad_enabled = torch.is_grad_enabled
_open_blocks = dispatch.open_blocks


class Found(NamedTuple):
    """How a call is run."""

    route: Route
    plan: Prepared | None = None
    geometry: tuple | None = None  # for `planning.prepare`, where there is no plan yet


_WITHOUT_PLAN = {route: Found(route) for route in Route}


def find(
    kind: str, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, scalars: tuple,
    has_gradient: bool = False,
) -> Found:  # fmt: skip
    """How a call with these arguments, whatever their types, is run.

    Plans are for the route DIRECT, and RECORD where calls of this kind have a gradient. The last
    call with the same options is tried first: to compare tensors with those of another call, in
    C++, takes a third of the time that it takes to describe and look up their geometry.
    """
    if library.is_dispatched():
        return _WITHOUT_PLAN[Route.DISPATCH]
    given = (q, k, v) if tensors is NO_TENSORS else (q, k, v, *tensors)
    backend = dispatch.chosen() if _open_blocks() else dispatch.default
    options = (
        kind, len(given), _is_grad_enabled(), backend, scalars, tuple(map(type, scalars)),
    )  # fmt: skip
    try:
        latest = planning.latest_calls.get(options)
        if latest is not None:
            for t in given:
                if t is not None and t.is_nested:  # of strided layout: comparing strides aborts
                    latest = None
    except (TypeError, AttributeError):  # an option without a hash, or no tensor: checks refuse it
        latest = None
    if latest is not None and latest.matches(*given):
        return latest.found
    route = library.route_by_tensors(*given)
    if not (route is Route.DIRECT or (route is Route.RECORD and has_gradient)):
        return _WITHOUT_PLAN[route]
    geometry = planning.key_of(kind, q, k, v, tensors, scalars)
    plan = planning.prepared(geometry)
    if plan is None:
        return Found(route, None, geometry)
    found = Found(route, plan)
    if plan.latest is None or plan.latest is latest or plan.latest.found != found:
        plan.latest = Latest(found, _test_of(*given))
    planning.keep_latest(options, plan.latest)
    return found


def _test_of(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None) -> Callable[..., bool]:
    """A test whether a call with other tensors has the geometry of one with these."""
    are_like, precision = library.like(q, k, v, *tensors), planning.precision_of(q.dtype)
    shared = None if k.shape == v.shape else k.data_ptr() == v.data_ptr()
    if precision is None and shared is None:
        return are_like

    def matches(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None) -> bool:
        return (
            are_like(q, k, v, *tensors)
            and (shared is None or (k.data_ptr() == v.data_ptr()) is shared)
            and precision == planning.precision_of(q.dtype)
        )

    return matches
