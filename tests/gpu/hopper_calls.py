"""Calls of the Hopper kernels without a plan: a function for each kind of call."""

from __future__ import annotations

from torch import Tensor

from fa_ops.backends import hopper
from fa_ops.backends.hopper import backward as dense_backward
from fa_ops.backends.hopper import forward as dense_forward
from fa_ops.backends.hopper import packed
from fa_ops.call.call import Call, is_decoding

support_error = hopper.support_error
cache_error = hopper.cache_error
backward = dense_backward.backward
varlen_forward = packed.forward
varlen_backward = packed.backward


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Dense attention: out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    if is_decoding(call) and hopper._cache_module(call).cache_error(call) is None:
        return cache_forward(call)
    return dense_forward.forward(call)


def cache_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Attention over a key-value cache: out (B, Hq, Sq, Dv) and lse (B, Hq, Sq)."""
    module = hopper._cache_module(call)
    return (module.cached_forward if module is dense_forward else module.forward)(call)
