"""Calls that repeat: what has passed every check once goes straight to its kernel.

The checks and the choice of a backend are most of the host time of a small call. None of them can
decide anything new for a call with the same shapes, strides, dtypes, devices and options, so such a
call is remembered with the function its backend prepared for it.

The doors look here before they call an operator, to leave the dispatcher out too. They may where
nothing watches: torch.compile, functorch, autocast, dispatch modes and the profiler get to see the
operator itself. The operators over a cache, which have no gradient, look here below all of those.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import cache_checks, checks, library
from fa_ops.types import Cache, Spec, is_decoding

_LIMIT = 1024
_runs: dict[tuple, Callable[..., Tensor] | None] = {}


def key_of(q: Tensor, k: Tensor, v: Tensor, tensors: tuple, *options) -> tuple | None:
    """What makes two eager calls the same, or None where the operator must see the call.

    `options` include the types of those that equal one of another type: 1 is no bool, which the
    checks have to say, and yet it equals True.
    """
    if not library.nobody_watches(q, k, v, *tensors):
        return None
    try:
        return signature(q, k, v, tensors, *options)
    except RuntimeError:  # a layout without sizes or strides, which the operator refuses
        return None


def signature(q: Tensor, k: Tensor, v: Tensor, tensors: tuple, *options) -> tuple:
    """What makes two calls the same. What the tensors hold makes no other call of it."""
    dtype, k_shape, v_shape = q.dtype, k.shape, v.shape
    key = (
        q.shape, q.stride(), k_shape, k.stride(), v_shape, v.stride(),
        dtype, k.dtype, v.dtype, q.device, k.device, v.device, dispatch.default, options,
    )  # fmt: skip
    if k_shape != v_shape:  # values may be part of the keys
        key += (k.data_ptr() == v.data_ptr(),)
    if dtype is torch.float32:
        key += (torch.backends.cuda.matmul.fp32_precision,)
    for t in tensors:
        key += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.device)
    return key


def options_of(key: tuple) -> tuple:
    """The options that `signature` was given."""
    return key[13]


def tensors_of(cache: Cache, spec: Spec) -> tuple[Tensor | None, ...]:
    """As what `prepare_cached` gives takes them."""
    small = (spec.kv_lens, cache.page_table, spec.key_ranges, spec.alibi_slopes, spec.sinks)
    return (*small, *cache[1:7], cache.unified_max)


def values_are_free(q: Tensor) -> bool:
    """Whether lengths and pages are never looked at: those of CPU tensors are, in every call."""
    return q.is_cuda


def find(key: tuple) -> Callable[..., Tensor] | None:
    try:
        return _runs.get(key)
    except TypeError:  # an option that cannot be hashed, about which the checks have more to say
        return None


def remember(key: tuple, run: Callable[..., Tensor] | None) -> None:
    if len(_runs) >= _LIMIT:
        _runs.clear()
    _runs[key] = run


def make_cached(
    key: tuple, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """What the backend of a call over a cache prepares for it, if it does.

    Raises what the operator would. Kernels want small tensors contiguous: calls with others go the
    long way.
    """
    if key in _runs or not values_are_free(q):
        return None
    cache_checks.cached(q, k, v, cache, spec, real=True)
    remember_cached(key, q, k, v, cache, spec)
    return _runs.get(key)


def remember_cached(key: tuple, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> None:
    """Keep what is prepared for a call over a cache that has passed its checks."""
    small = (cache.page_table, *cache[3:7], cache.unified_max, *spec[7:11])
    plain = all(t is None or t.is_contiguous() for t in small)
    new = cache.key is None or cache.key.numel() > 0
    if key in _runs or not (values_are_free(q) and plain and new and q.numel() and k.numel()):
        return
    if len(_runs) >= _LIMIT:
        _runs.clear()
    prepare = getattr(dispatch.select_cache(q, k, v, cache, spec), "prepare_cached", None)
    _runs[key] = prepare and prepare(q, k, v, cache, spec)


def make(key: tuple, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Callable[..., Tensor] | None:
    """What the call's backend prepares for it, if it does; the next call finds it by its key.

    Raises what the operator would. A cache that grows makes a new call in every step, so this is
    all that such a call goes through.
    """
    if key in _runs or q.device.type not in _DEVICES or not (q.numel() and k.numel() and v.numel()):
        return None
    checks.dense(q, k, v, spec, real=True)
    if len(_runs) >= _LIMIT:
        _runs.clear()
    backend = dispatch.select(q, k, v, spec)
    if spec.kv_lens is spec.key_ranges is spec.sinks is None:
        prepare = getattr(backend, "prepare", None)
        run = prepare and prepare(q, k, v, spec)
    else:
        run = _decoding(backend, q, k, v, spec)
    _runs[key] = run
    return run


_DEVICES = ("cpu", "cuda")  # the dispatcher has more to say about others


def _decoding(
    backend: ModuleType, q: Tensor, k: Tensor, v: Tensor, spec: Spec
) -> Callable[..., Tensor] | None:
    """Calls with kv_lens, key_ranges or sinks: those over a cache that nothing is added to."""
    prepare, cache = getattr(backend, "prepare_cached", None), Cache()
    small = (spec.kv_lens, spec.key_ranges, spec.sinks)
    plain = all(t is None or t.is_contiguous() for t in small)
    if not (prepare and plain and is_decoding(q.shape[2], k.shape[2], spec)):
        return None
    run = None if backend.cache_error(q, k, v, cache, spec) else prepare(q, k, v, cache, spec)
    if run is None:
        return None
    return lambda q, k, v, lens, ranges, sinks: run(
        False, q, k, v, lens, None, ranges, None, sinks
    )[0]
