"""fa::attention_with_kv_cache, and its twin that first writes new keys and values into the cache.

Neither has a gradient. The twin is an operator of its own because a declared mutation is one for
every call: reading a cache must stay free of side effects for compilers and for version counters.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import cache_checks, library, prepared
from fa_ops.types import Cache, Spec, has_room, longer, without_new

READ = torch.ops.fa.attention_with_kv_cache.default
APPEND = torch.ops.fa.attention_with_kv_cache_append.default

# Reports page numbers and lengths out of range on the GPU too, at the price of a synchronisation.
DEBUG = os.environ.get("FA_OPS_DEBUG", "0") not in ("", "0")


def bind(
    kv_lens: Tensor,
    page_table: Tensor | None = None,
    is_causal: bool = False,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    unified_max: Tensor | None = None,
    **options,
) -> tuple[Cache, Spec]:
    """The operators' arguments after the caches."""
    cache = Cache(
        page_table, key, value, k_scale, v_scale, rotary_cos, rotary_sin, rotary_interleaved,
        num_splits, batch_invariant, unified_max,
    )  # fmt: skip
    return cache, Spec(None, 0.0, is_causal, kv_lens=kv_lens, **options)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out, laid out (B, Sq, Hq, Dv) in memory, and lse."""
    B, Hq, Sq, _ = q.shape
    shape = (B, Hq, Sq, v.shape[3])
    out = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=q.dtype, device=q.device)
    return out, q.new_empty((B, Hq, Sq), dtype=library.lse_dtype(q.dtype))


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    given, asked = bind(*args, **options)
    call = None
    if not DEBUG and prepared.values_are_free(q):
        tensors = prepared.cached_tensors(given, asked)
        plain = (*given[7:10], *asked[2:7], asked.backend)
        call = prepared.signature(q, k, v, tensors, "operator", *plain)
        run = prepared.find(call)
        if run is not None:
            return run(True, q, k, v, *tensors)
    cache, spec = cache_checks.cached(q, k, v, given, asked, real=True)
    if q.device.type == "cpu" or (DEBUG and not torch.cuda.is_current_stream_capturing()):
        cache_checks.values(q, k, cache, spec)
    nothing_new = cache.key is None or not cache.key.numel()
    if not has_room(k, cache) or (nothing_new and not q.numel()):
        out, lse = empty_outputs(q, v)
        lse.copy_(float("-inf") if spec.sinks is None else spec.sinks.view(-1, 1))
        return out.zero_(), lse
    if nothing_new:
        cache = cache._replace(key=None, value=None)
    writer = dispatch.select_writer(q, k, v, cache, spec)
    if writer is not None:
        q = writer.cache_write(q, k, v, cache, spec)
        cache, spec = without_new(cache), longer(spec, cache)
    results = dispatch.select_cache(q, k, v, cache, spec).cache_forward(q, k, v, cache, spec)
    if call is not None and writer is None:
        sides = {"window_left": spec.window_left, "window_right": spec.window_right}
        prepared.make_cached(call, q, k, v, given, asked._replace(**sides))
    return results


def _append(q, k, v, key, value, *args, **options):
    results = _forward(q, k, v, *args, key=key, value=value, **options)
    written(k, v)
    return results


def written(k: Tensor, v: Tensor) -> None:
    """Tell autograd that both caches have changed; inference tensors have no version."""
    torch.autograd.graph.increment_version(tuple(t for t in (k, v) if not t.is_inference()))


def _fake(q, k, v, *args, **options):
    cache_checks.cached(q, k, v, *bind(*args, **options))
    return empty_outputs(q, v)


def _append_fake(q, k, v, key, value, *args, **options):
    return _fake(q, k, v, *args, key=key, value=value, **options)


def _without_gradients(operator):
    def kernel(keyset, *args, **options):
        tensors = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
        library.reject_forward_ad(operator, *tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise ValueError(
                "attention_with_kv_cache has no gradient, but an argument requires grad: call it "
                "under torch.no_grad(), or use attention, which has one"
            )
        return library.redispatch(operator, keyset, *args, **options)

    return kernel


library.register("attention_with_kv_cache", _forward, _fake, _without_gradients(READ))
library.register(
    "attention_with_kv_cache_append", _append, _append_fake, _without_gradients(APPEND)
)
