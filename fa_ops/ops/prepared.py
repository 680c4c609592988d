"""Calls that repeat: what has passed every check once goes straight to its kernel.

The checks and the choice of a backend are most of the host time of a small call. None of them can
decide anything new for a call with the same shapes, strides, dtypes, devices and options, so such a
call is remembered with the function its backend prepared for it. They ask little about the number
of keys: what they have said holds for a family of calls, so that a cache which grows by a token in
every step is checked once, and each of its lengths has only to be prepared.

The doors look here before they call an operator, to leave the dispatcher out too. They may where
nothing watches: torch.compile, functorch, autocast, dispatch modes and the profiler get to see the
operator itself. The operators over a cache, which have no gradient, look here below all of those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import cache_checks, checks, library
from fa_ops.types import Cache, Spec, has_room, is_decoding, is_long, rows_are_aligned

_LIMIT = 1024
_runs: dict[tuple, Callable[..., Tensor] | None] = {}
# How (q, k, v, cache, spec) of a family that has passed its checks is prepared.
_ways: dict[tuple, Callable[..., Callable[..., Tensor] | None]] = {}


def key_of(q: Tensor, k: Tensor, v: Tensor, tensors: tuple, *options) -> tuple | None:
    """What makes two eager calls the same, or None where the operator must see the call.

    `options` include the types of those that equal one of another type: 1 is no bool, which the
    checks have to say, and yet it equals True.
    """
    if not library.nobody_watches(q, k, v, *tensors):
        return None
    try:
        return signature(q, k, v, tensors, *options)
    except (AttributeError, RuntimeError):  # None, or a layout without sizes or strides: refused
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


def cached_tensors(cache: Cache, spec: Spec) -> tuple[Tensor | None, ...]:
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


def _family(key: tuple, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple | None:
    """What makes two calls over contiguous caches the same to checks and backends: of the number
    of keys and of strides, what these ask. None where they refuse the call."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return None
    q_shape, q_strides, k_shape, k_strides, v_shape, v_strides, *rest = key
    return (
        q_shape, q_strides, k_shape[:2], k_shape[3], v_shape[:2], v_shape[3],
        k_shape[2] == v_shape[2], is_decoding(q_shape[2], k_shape[2], spec),
        is_long(q_shape[2], k_shape[2]), k_strides[3], v_strides[3], k_strides == v_strides,
        rows_are_aligned(q, k, v), *rest,
    )  # fmt: skip


def _keep(known: dict, key: tuple, value):
    if len(known) >= _LIMIT:
        known.clear()
    known[key] = value
    return value


def remember(key: tuple, run: Callable | None) -> Callable | None:
    return _keep(_runs, key, run)


def make_cached(
    key: tuple, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """What the backend of a call over a cache prepares for it, if it does.

    Raises what the operator would.
    """
    if key in _runs or not (values_are_free(q) and q.numel() and has_room(k, cache)):
        return None
    # of a cache that is written to, the checks ask every stride
    by_itself = cache.page_table is not None or cache.key is not None
    family = key if by_itself else _family(key, q, k, v, spec)
    way = _ways.get(family)
    if way is None:
        cache_checks.cached(q, k, v, cache, spec, real=True)
        way = _keep(_ways, family, _way_cached(q, k, v, cache, spec))
    return remember(key, way(q, k, v, cache, spec))


def _way_cached(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> Callable[..., Callable[..., tuple[Tensor, Tensor | None]] | None]:
    """Kernels want small tensors contiguous: calls with others go the long way."""
    small = (cache.page_table, *cache[3:7], cache.unified_max, *spec[7:11])
    plain = all(t is None or t.is_contiguous() for t in small)
    if not plain or (cache.key is not None and not cache.key.numel()):
        return _nothing
    if dispatch.select_writer(q, k, v, cache, spec) is not None:
        return _nothing
    return getattr(dispatch.select_cache(q, k, v, cache, spec), "prepare_cached", _nothing)


def make(key: tuple, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Callable[..., Tensor] | None:
    """What the call's backend prepares for it, if it does; the next call finds it by its key.

    Raises what the operator would.
    """
    if key in _runs or q.device.type not in _DEVICES or not (q.numel() and k.numel() and v.numel()):
        return None
    family = _family(key, q, k, v, spec)
    way = _ways.get(family)
    if way is None:
        checks.dense(q, k, v, spec, real=True)
        way = _keep(_ways, family, _way(dispatch.select(q, k, v, spec), q, k, v, spec))
    return remember(key, way(q, k, v, Cache(), spec))


_DEVICES = ("cpu", "cuda")  # the dispatcher has more to say about others


def _way(
    backend: ModuleType, q: Tensor, k: Tensor, v: Tensor, spec: Spec
) -> Callable[..., Callable[..., Tensor] | None]:
    """Calls that decode are those over a cache that nothing is added to; only they are prepared
    with kv_lens, key_ranges or sinks."""
    small = [t for t in (spec.kv_lens, spec.key_ranges, spec.sinks) if t is not None]
    prepare = getattr(backend, "prepare_cached", None)
    if prepare and is_decoding(q.shape[2], k.shape[2], spec):
        plain = all(t.is_contiguous() for t in small)
        if plain and backend.cache_error(q, k, v, Cache(), spec) is None:
            return functools.partial(_decoding, prepare)
    prepare = getattr(backend, "prepare", None)
    if small or prepare is None:
        return _nothing
    return lambda q, k, v, cache, spec: prepare(q, k, v, spec)


def _decoding(prepare: Callable, *call: Tensor | Cache | Spec) -> Callable[..., Tensor] | None:
    run = prepare(*call)
    return run and (
        lambda q, k, v, lens=None, ranges=None, sinks=None: run(
            False, q, k, v, lens, None, ranges, None, sinks
        )[0]
    )


def _nothing(*call: object) -> None:
    """For calls that always go the long way."""
