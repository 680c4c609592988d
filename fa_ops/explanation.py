"""Why a call runs as it does: which backend, which kernel, by which route."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import dispatch, planning
from fa_ops.call import CACHED, DENSE, PACKED, Call
from fa_ops.dispatch import CallExplanation
from fa_ops.ops import library
from fa_ops.types import Cache, Packing, Spec


def explain(query: Tensor, key: Tensor, value: Tensor, **options: object) -> CallExplanation:
    """Explain which backend and which kernel would run a call, and why other backends would not.

    Nothing is computed or compiled.

    Args:
        query: as the call takes it, here and below.
        key: ``key_cache`` of :func:`attention_with_kv_cache`.
        value: ``value_cache`` likewise.
        **options: the other arguments of :func:`attention`, :func:`attention_varlen` (which has
            ``cu_seqlens_q``) or :func:`attention_with_kv_cache` (any of whose own arguments makes
            it that; ``page_table=None`` does too), by name. ``window_left`` and ``window_right``
            are accepted instead of ``window``, as the operators have them.

    Returns:
        ``backend`` and ``kernel``, None where no backend can run the call; ``route``: "direct"
        where the call's plan is run at once, "record" where autograd records it, "dispatch" where
        PyTorch's dispatcher takes part; ``reasons``: a string for each backend that refuses the
        call, None for those that could run it. Printed, all of it in lines.

    Raises:
        ValueError: arguments that make no legal call, or the name of an unknown backend.
        TypeError: a dtype that is not accepted, or an argument that no call has.

    Example:
        >>> print(fa_ops.explain(q, k, v, is_causal=True))
        backend: cpu
        kernel: forward
        route: direct
          hopper: needs a CUDA device
          triton: ...
          cpu: can run this
          reference: can run this
    """
    call = _described(query, key, value, options)
    dispatch.check_name(call.spec.backend or "auto")
    planning.check(call)
    call = planning.normalised(call)
    reasons = {name: dispatch.refusal(name, call) for name in dispatch.BACKENDS}
    route = library.route_of(query, key, value, *call.tensors).value
    try:
        backend = dispatch.choose(call).__name__.rpartition(".")[2]
    except NotImplementedError:
        return CallExplanation(None, None, route, reasons)
    return CallExplanation(backend, planning.plan_for(call).kernel, route, reasons)


_OF_CACHES = frozenset(Cache._fields)
_OF_PACKING = frozenset(Packing._fields)


def _described(query: Tensor, key: Tensor, value: Tensor, options: dict) -> Call:
    options.pop("return_lse", None)
    if (window := options.pop("window", None)) is not None:
        left, right = (-1 if side is None else side for side in window)
        options |= {"window_left": left, "window_right": right}
    cache = {name: options.pop(name) for name in _OF_CACHES & options.keys()}
    packing = {name: options.pop(name) for name in _OF_PACKING & options.keys()}
    if options.get("dropout_p", 0.0) > 0.0:
        options["dropout_seed"] = query.new_zeros(1, dtype=torch.int64)
    spec = Spec(**options)
    if packing:
        return Call(PACKED, query, key, value, spec, Packing(**packing))
    if cache:
        return Call(CACHED, query, key, value, spec, cache=Cache(**cache))
    return Call(DENSE, query, key, value, spec)
