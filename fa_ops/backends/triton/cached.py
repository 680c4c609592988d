"""Attention over a key-value cache: append, then the forward kernel for many queries of a
contiguous cache, and the decoding kernels for all other calls."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fa_ops.backends.triton import decode
from fa_ops.backends.triton.decode_append import prepare_cache
from fa_ops.backends.triton.forward import forward
from fa_ops.types import Cache, Spec, is_prefill, longer, writes


def cache_forward(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Append the new keys and values, if any, then attend."""
    if not _is_dense(q, k, v, cache, spec):
        return decode.cache_forward(q, k, v, cache, spec)
    if writes(cache):
        q = cache_write(q, k, v, cache, spec)
    return forward(q, k, v, longer(spec, cache))


def cache_write(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> Tensor:
    """Append the new keys and values only. Returns the queries, rotated if requested."""
    return prepare_cache(q, k, v, cache, spec.kv_lens, decode.Memory.of(k, v, cache).capacity)


def prepare_cached(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Prepare calls with other tensors of the same shapes, strides and dtypes; None for prefill,
    whose calls are too long to gain from it."""
    dense = _is_dense(q, k, v, cache, spec)
    return None if dense else decode.prepare_cached(q, k, v, cache, spec)


def _is_dense(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> bool:
    if cache.num_splits or cache.batch_invariant or cache.unified_max is not None:
        return False
    if cache.page_table is not None or k.dtype != q.dtype or spec.key_ranges is not None:
        return False
    return is_prefill(q) and max(q.shape[3], v.shape[3]) <= 256
