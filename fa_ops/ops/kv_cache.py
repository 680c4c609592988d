"""fa::attention_with_kv_cache, and fa::attention_with_kv_cache_append, which first writes new keys.

Neither has a gradient. Appending is an operator of its own because a schema declares a mutation for
every call: reading a cache must stay free of side effects for compilers and for version counters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import cache_checks, checks
from fa_ops.call.call import CACHED, Call
from fa_ops.call.options import Cache, Spec
from fa_ops.ops import axes, library
from fa_ops.plans import planning
from fa_ops.plans.outputs import dense_outputs

READ = torch.ops.fa.attention_with_kv_cache.default
APPEND = torch.ops.fa.attention_with_kv_cache_append.default


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


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    cache, spec = bind(*args, **options)
    return planning.run(Call(CACHED, q, k, v, spec, cache=cache))


def _append(q, k, v, key, value, *args, **options):
    if key is None or value is None:
        checks.given(key=key, value=value)
    results = _forward(q, k, v, *args, key=key, value=value, **options)
    written(k, v)
    return results


def written(k: Tensor, v: Tensor) -> None:
    """Increment the version counters of both caches; inference tensors have none."""
    caches = k, v
    if k.is_inference() or v.is_inference():
        caches = tuple(t for t in caches if not t.is_inference())
    torch.autograd.graph.increment_version(caches)


def _fake(q, k, v, *args, **options):
    cache_checks.cached(q, k, v, *bind(*args, **options))
    return dense_outputs(q, v)


def _append_fake(q, k, v, key, value, *args, **options):
    checks.given(key=key, value=value)
    return _fake(q, k, v, *args, key=key, value=value, **options)


_NO_GRADIENT = (
    "attention_with_kv_cache has no gradient; call it under torch.no_grad(), or use attention, "
    "which has one"
)


def _without_gradients(operator):
    def kernel(keyset, *args, **options):
        tensors = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
        library.reject_forward_ad(operator, *tensors)
        if any(t.requires_grad for t in tensors):
            checks.no_gradients(axes.bind(operator, args, options), _NO_GRADIENT)
        return library.redispatch(operator, keyset, *args, **options)

    return kernel


library.register("attention_with_kv_cache", _forward, _fake, _without_gradients(READ))
library.register(
    "attention_with_kv_cache_append", _append, _append_fake, _without_gradients(APPEND)
)
