"""Attention of packed queries over pages by one kernel, where a backend has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa_ops import checks, dispatch, planning, tracing
from fa_ops.argument_types import checked_options, sides
from fa_ops.call import PAGED, Call, PagedTensors
from fa_ops.ops import library
from fa_ops.ops.library import Route
from fa_ops.types import Cache, Packing, Spec

BACKEND = "hopper"  # which has the kernel

_LIMIT = 1024
_refused: dict[tuple, None] = {}  # geometries that it does not support


def attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, options: dict[str, Any],
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out (Tq, Hq, Dv) and lse (Hq, Tq) of a checked call, or None where no kernel does it."""
    tensors = tensors_of(cu_seqlens_q, kv_lens, page_table, options)
    if not _may_run(query, key, value, tensors, options):
        return None
    scalars = _scalars(options, BACKEND)
    geometry = planning.key_of(PAGED, query, key, value, tensors, scalars)
    plan = planning.prepared(geometry)
    if plan is None:
        if _is_refused(geometry):
            return None
        call = _described(query, key, value, tensors, scalars)
        if _refusal(call) is not None:
            if len(_refused) >= _LIMIT:
                _refused.clear()
            _refused[geometry] = None
            return None
        plan = planning.prepare(geometry, call, scalars)
    return plan.run(query, key, value, tensors)


def _is_refused(geometry: tuple | None) -> bool:
    try:
        return geometry in _refused
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        return False


def call_of(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, options: dict[str, Any],
) -> Call | None:  # fmt: skip
    """The call that a kernel would run, as the backend sees it, or None."""
    tensors = tensors_of(cu_seqlens_q, kv_lens, page_table, options)
    if not _may_run(query, key, value, tensors, options):
        return None
    call = _described(query, key, value, tensors, _scalars(options, BACKEND))
    return planning.normalised(call) if _refusal(call) is None else None


def check_options(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, options: dict[str, Any],
) -> None:  # fmt: skip
    """Raise ValueError or TypeError unless the options of a call are legal.

    In a graph only for slopes: the operator that the graph calls checks all others.
    """
    tensors = tensors_of(cu_seqlens_q, kv_lens, page_table, options)
    if not tracing.is_compiling():
        scalars = _scalars(options, options.get("backend"))
        call = _described(query, key, value, tensors, scalars)
        checks.options(query, call.spec, page_table.shape[0], query.shape[1])
        return
    slopes = tensors.alibi_slopes
    if slopes is not None and slopes.dim() != 1:
        expected = page_table.shape[0], query.shape[1]
        if slopes.shape != expected:
            raise ValueError(f"alibi_slopes must have shape {expected}, got {tuple(slopes.shape)}")


def tensors_of(
    cu_seqlens_q: Tensor, kv_lens: Tensor, page_table: Tensor, options: dict[str, Any]
) -> PagedTensors:
    """The tensors of a call besides query, key and value."""
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    return PagedTensors(cu_seqlens_q, kv_lens, page_table, slopes, sinks)


def _scalars(options: dict[str, Any], backend: str | None) -> tuple:
    """The scalars of a call, in the order of `Scalars`."""
    left, right = sides(options.get("window"))
    return (
        options.get("is_causal", False), 0.0, options.get("scale"), left, right,
        options.get("softcap", 0.0), False, backend,
    )  # fmt: skip


def _described(
    query: Tensor, key: Tensor, value: Tensor, tensors: PagedTensors, scalars: tuple
) -> Call:
    """The call, types checked."""
    checked = checked_options(query, key, value, tensors, scalars)
    packing = Packing(tensors.cu_seqlens_q, tensors.cu_seqlens_q)
    spec = Spec(None, 0.0, scalars[0], **checked)
    return Call(PAGED, query, key, value, spec, packing, Cache(tensors.page_table))


def _refusal(call: Call) -> str | None:
    """Why no kernel runs the call, or None."""
    planning.check(call)
    return dispatch.refusal(BACKEND, planning.normalised(call))


def _may_run(
    query: Tensor, key: Tensor, value: Tensor, tensors: PagedTensors, options: dict[str, Any]
) -> bool:
    """Whether the caller leaves the choice of a backend open, or asks for that one, and nothing
    stands between the call and a kernel."""
    name = options.get("backend") or dispatch.chosen() or "auto"
    return (
        query.is_cuda
        and name in ("auto", BACKEND)
        and options.get("key_ranges") is None
        and not options.get("num_splits")  # which the kernel would choose by itself
        and not planning.DEBUG  # where lengths and pages are checked, in calls over a cache
        and min(key.numel(), value.numel(), tensors.page_table.numel()) > 0
        and _is_direct(query, key, value, tensors)
    )


def _is_direct(query: Tensor, key: Tensor, value: Tensor, tensors: PagedTensors) -> bool:
    """Whether the dispatcher would do nothing.

    Autocast casts queries to the cache's dtype.
    """
    route = library.route_of(query, key, value, *tensors)
    if route is Route.AUTOCAST and query.dtype == key.dtype:
        with library.without_autocast():
            route = library.route_of(query, key, value, *tensors)
    return route is Route.DIRECT
