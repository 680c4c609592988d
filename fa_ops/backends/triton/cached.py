"""Attention over a key-value cache: append, then the forward kernel for many queries, and the
decoding kernels for all other calls. e4m3 caches are converted for the forward kernel."""

from __future__ import annotations

from torch import Tensor

from fa_ops.backends import conversion
from fa_ops.backends.triton import decode
from fa_ops.backends.triton.append import bind_cache, prepare_cache
from fa_ops.backends.triton.arguments import Layout
from fa_ops.backends.triton.dequantize import dequantized
from fa_ops.backends.triton.forward import forward, paged_forward
from fa_ops.backends.triton.launch import needs_copies
from fa_ops.call.call import CACHED, Call, Run
from fa_ops.call.options import MAX_HEAD_DIM, Cache, Spec, is_prefill


def cache_forward(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Append the new keys and values, if any, then attend."""
    call = Call(CACHED, q, k, v, spec, cache=cache)
    if not attends_whole_rows(call):
        return decode.cache_forward(q, k, v, cache, spec)
    if call.writes_cache:
        q = _append(q, k, v, cache, spec)
    spec = call.without_new().spec
    if k.dtype != q.dtype:
        k, v, cache = dequantized(q, k, v, cache, spec.kv_lens)
    if cache.page_table is None:
        return forward(q, k, v, spec)
    return paged_forward(q, decode.Memory.of(k, v, cache), spec)


def attends_whole_rows(call: Call) -> bool:
    """Whether the forward kernel attends a cache, each program with all keys of its queries."""
    q, k, v, cache = call.query, call.key, call.value, call.cache
    if cache.num_splits or cache.batch_invariant or cache.unified_max is not None:
        return False
    D, Dv = q.shape[3], v.shape[3]
    if call.spec.key_ranges is not None or not is_prefill(q) or max(D, Dv) > MAX_HEAD_DIM:
        return False
    is_converted = k.dtype != q.dtype
    if is_converted and conversion.error(q, k, v, cache) is not None:
        return False
    if cache.page_table is None:
        return True
    # Unaligned tensors are copied, but not all pages. Converted pages are new memory.
    k, v = (q, q) if is_converted else (k, v)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    return not needs_copies(Layout.of(q, k, v, strides), q.dtype, D, Dv)


def prepare_append(call: Call) -> Run:
    """A function that appends new keys and values.

    It returns the queries, rotated if need be, and kv_lens with the new keys.
    """
    q, k, v, cache, spec = call.query, call.key, call.value, call.cache, call.spec
    capacity = decode.Memory.of(k, v, cache).capacity
    write = bind_cache(q, k, v, cache, spec.kv_lens, capacity, counts=True)

    def run(q, k, v, tensors):
        t = tensors
        return write(
            q, k, v, t.kv_lens, t.page_table, t.new_key, t.new_value, t.k_scale, t.v_scale,
            t.rotary_cos, t.rotary_sin,
        )  # fmt: skip

    return run


def _append(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> Tensor:
    return prepare_cache(q, k, v, cache, spec.kv_lens, decode.Memory.of(k, v, cache).capacity)
