"""Calls of both entry points to attention with 8-bit products."""

from __future__ import annotations

from collections.abc import Callable

import fa_ops
from fa_ops.testing.quantized import QuantizedCase
from tests.groups import groups


def run(case: QuantizedCase, backend: str | None = None) -> tuple:
    """out and lse of the case, by the public function that it is a problem of."""
    function, args, options = public_call(case, backend)
    return function(*args, **options)


def public_call(case: QuantizedCase, backend: str | None = None) -> tuple[Callable, tuple, dict]:
    """The public function, its arguments and its keywords."""
    q, k, v, how, spec = groups(case.fresh())
    options = dict(
        is_causal=spec.is_causal, scale=spec.scale, window=(spec.window_left, spec.window_right),
        softcap=spec.softcap, sinks=spec.sinks, kv_lens=spec.kv_lens, key_ranges=spec.key_ranges,
        return_lse=True, backend=backend,
    )  # fmt: skip
    if how.q_scale is not None:
        scales = dict(zip(how._fields, how[:3]))
        return fa_ops.attention, (q, k, v), scales | options
    flags = dict(zip(how._fields[3:], how[3:]))
    return fa_ops.quantized_attention, (q, k, v), flags | options


def call_of(case: QuantizedCase) -> tuple[tuple, dict]:
    """The operator's arguments and keywords."""
    q, k, v, how, spec = groups(case.fresh())
    names = "scale", "window_left", "window_right", "softcap", "sinks", "kv_lens", "key_ranges"
    options = {name: getattr(spec, name) for name in names}
    options |= dict(zip(how._fields[3:], how[3:]))
    return (q, k, v, *how[:3], spec.is_causal), options
