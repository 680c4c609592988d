"""fa::attention_with_kv_cache, and fa::attention_with_kv_cache_append, which first writes new keys.

Neither has a gradient. Appending is an operator of its own because a schema declares a mutation for
every call: reading a cache must stay free of side effects for compilers and for version counters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.call import CACHED
from fa_ops.ops import autograd, library
from fa_ops.ops.schemas import Schema
from fa_ops.plans import planning
from fa_ops.plans.outputs import dense_outputs

READ = torch.ops.fa.attention_with_kv_cache.default
APPEND = torch.ops.fa.attention_with_kv_cache_append.default
READING, APPENDING = Schema(READ, CACHED), Schema(APPEND, CACHED)


def _append(q, k, v, key, value, *args, **options):
    if key is None or value is None:
        checks.given(key=key, value=value)
    results = planning.run(CACHED, q, k, v, *APPENDING.bind((key, value, *args), options))
    written(k, v)
    return results


def written(k: Tensor, v: Tensor) -> None:
    """Increment the version counters of both caches; inference tensors have none."""
    caches = k, v
    if k.is_inference() or v.is_inference():
        caches = tuple(t for t in caches if not t.is_inference())
    torch.autograd.graph.increment_version(caches)


def _append_fake(q, k, v, key, value, *args, **options):
    checks.given(key=key, value=value)
    planning.check(APPENDING.call(q, k, v, (key, value, *args), options), real=False)
    return dense_outputs(q, v)


_NO_GRADIENT = (
    "attention_with_kv_cache has no gradient; call it under torch.no_grad(), or use attention, "
    "which has one"
)

library.register(
    "attention_with_kv_cache", *autograd.forward_functions(READING),
    autograd.without_gradient(READ, _NO_GRADIENT),
)  # fmt: skip
library.register(
    "attention_with_kv_cache_append", _append, _append_fake,
    autograd.without_gradient(APPEND, _NO_GRADIENT),
)  # fmt: skip
