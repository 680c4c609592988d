"""Eager calls that repeat: what has passed every check once goes straight to its kernel.

The checks, the dispatcher and the choice of a backend are most of the host time of a small call.
None of them can decide anything new for a call with the same shapes, strides, dtypes, devices and
options, so such a call is remembered with the function its backend prepared for it. That holds for
calls without gradients whose only tensor options are kv_lens and key_ranges and that nothing
watches: torch.compile, functorch, autocast, dispatch modes and the profiler get to see the operator
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import library
from fa_ops.types import Cache, Spec, is_decoding

_LIMIT = 1024
_runs: dict[tuple, Callable[..., Tensor] | None] = {}


def key_of(q: Tensor, k: Tensor, v: Tensor, tensors: tuple, *options) -> tuple | None:
    """What makes two calls the same, or None where a call must not be remembered.

    What the tensors hold makes no other call of it. `options` include the types of those that equal
    one of another type: 1 is no bool, which the checks have to say, and yet it equals True.
    """
    if not (type(q) is type(k) is type(v) is Tensor and library.nobody_watches(q, k, v)):
        return None
    try:
        key = [
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, dispatch.default, *options,
        ]  # fmt: skip
        for t in tensors:
            if t is None:
                key.append(None)
            elif type(t) is Tensor and not t.requires_grad:
                key += (t.shape, t.stride(), t.dtype, t.device)
            else:
                return None
    except RuntimeError:  # a layout without sizes or strides, which the operator refuses
        return None
    return tuple(key)


def find(key: tuple) -> Callable[..., Tensor] | None:
    try:
        return _runs.get(key)
    except TypeError:  # an option that cannot be hashed, about which the checks have more to say
        return None


def remember_cached(key: tuple, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> None:
    """The same for a call over a cache.

    Those of values need a CPU tensor, and kernels want small tensors contiguous: such calls go the
    long way.
    """
    small = (cache.page_table, *cache[3:7], cache.unified_max, *spec[7:11])
    plain = all(t is None or t.is_contiguous() for t in small)
    new = cache.key is None or cache.key.numel() > 0
    if key in _runs or not (q.is_cuda and plain and new and q.numel() and k.numel()):
        return
    if len(_runs) >= _LIMIT:
        _runs.clear()
    prepare = getattr(dispatch.select_cache(q, k, v, cache, spec), "prepare_cached", None)
    _runs[key] = prepare and prepare(q, k, v, cache, spec)


def remember(key: tuple, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> None:
    """Keep what the call's backend prepares for it, if it does. The call has passed its checks."""
    if key in _runs or q.is_meta or not (q.numel() and k.numel() and v.numel()):
        return
    if len(_runs) >= _LIMIT:
        _runs.clear()
    backend = dispatch.select(q, k, v, spec)
    if spec.kv_lens is spec.key_ranges is None:
        prepare = getattr(backend, "prepare", None)
        _runs[key] = prepare and prepare(q, k, v, spec)
    else:
        _runs[key] = _bounded(backend, q, k, v, spec)


def _bounded(
    backend: ModuleType, q: Tensor, k: Tensor, v: Tensor, spec: Spec
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor] | None:
    """Calls with kv_lens or key_ranges that are decoding: over a cache that nothing is added to."""
    prepare, cache = getattr(backend, "prepare_cached", None), Cache()
    plain = all(t is None or t.is_contiguous() for t in (spec.kv_lens, spec.key_ranges))
    if not (prepare and plain and is_decoding(q.shape[2], k.shape[2], spec)):
        return None
    run = None if backend.cache_error(q, k, v, cache, spec) else prepare(q, k, v, cache, spec)
    if run is None:
        return None
    return lambda q, k, v, kv_lens, ranges: run(False, q, k, v, kv_lens, None, ranges)[0]
