"""Calls of the Hopper kernels without a plan: a function for each kind of call."""

from __future__ import annotations

from torch import Tensor

from fa_ops.backends import hopper
from fa_ops.backends.hopper import backward as dense_backward
from fa_ops.backends.hopper import forward as dense_forward
from fa_ops.backends.hopper import packed
from fa_ops.call.options import Cache, Spec

support_error = hopper.support_error
cache_error = hopper.cache_error
backward = dense_backward.backward
varlen_forward = packed.forward
varlen_backward = packed.backward


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Dense attention: out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    module = hopper._decoding_module(q, k, v, spec)
    if module is not None:
        return cache_forward(q, k, v, Cache(), spec)
    return dense_forward.forward(q, k, v, spec)


def cache_forward(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Attention over a key-value cache: out (B, Hq, Sq, Dv) and lse (B, Hq, Sq)."""
    module = hopper._cache_module(q, k, v, cache)
    if module is dense_forward:
        return dense_forward.cached_forward(q, k, v, cache, spec)
    return module.forward(q, k, v, cache, spec)
