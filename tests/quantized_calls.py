"""Calls of both entry points to attention with 8-bit products."""

from __future__ import annotations

from collections.abc import Callable

import fa_ops
from fa_ops.ops import quantized
from fa_ops.testing.quantized import QuantizedCase


def run(case: QuantizedCase, backend: str | None = None) -> tuple:
    """out and lse of the case, by the public function that it is a problem of."""
    function, args, options = public_call(case, backend)
    return function(*args, **options)


def public_call(case: QuantizedCase, backend: str | None = None) -> tuple[Callable, tuple, dict]:
    """The public function, its arguments and its keywords."""
    call = case.fresh()
    t, o = call.operands, call.options
    given = dict(
        is_causal=o.is_causal, scale=o.scale, window=(o.window_left, o.window_right),
        softcap=o.softcap, sinks=t.sinks, kv_lens=t.kv_lens, key_ranges=t.key_ranges,
        return_lse=True, backend=backend,
    )  # fmt: skip
    if t.q_scale is not None:
        given |= dict(q_scale=t.q_scale, k_scale=t.k_scale, v_scale=t.v_scale)
        return fa_ops.attention, call[:3], given
    given |= dict(qk_dtype=o.qk_dtype, smooth_key=o.smooth_key, rotate=o.rotate)
    return fa_ops.quantized_attention, call[:3], given


def operator_call(case: QuantizedCase) -> tuple[tuple, dict]:
    """The operator's arguments and keywords."""
    call = case.fresh()
    args, options = quantized.SCHEMA.arguments(call)
    return (*call[:3], *args), options
