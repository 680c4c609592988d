"""Sinks of +inf and NaN in every kind of call, for the tests of all backends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import fa_ops

INFINITE = 1  # the head with such a sink, of four
ENDS = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
LENS = torch.tensor([11, 0], dtype=torch.int32)  # a row without keys


def _dense(q, k, v, sinks, **options):
    return fa_ops.attention(q, k, v, sinks=sinks, return_lse=True, **options)


def _packed(q, k, v, sinks, **options):
    """As (1, H, T, D)."""
    tokens = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = ENDS.to(q.device)
    out, lse = fa_ops.attention_varlen(*tokens, ends, ends, sinks=sinks, return_lse=True, **options)
    return out.transpose(0, 1)[None], lse[None]


def _cached(q, k, v, sinks, **options):
    lens = LENS.to(q.device)
    return fa_ops.attention_with_kv_cache(q, k, v, lens, sinks=sinks, return_lse=True, **options)


def _quantized(q, k, v, sinks, **options):
    return fa_ops.quantized_attention(q, k, v, sinks=sinks, return_lse=True, **options)


def _few_queries(q, k, v, sinks, **options):
    """One query, and enough keys to be divided."""
    k, v = (x.repeat(1, 1, 64, 1) for x in (k, v))
    return _dense(q[:, :, :1], k, v, sinks, **options)


WITH_GRADIENTS: dict[str, tuple[Callable, dict]] = {
    "dense": (_dense, {}),
    "causal": (_dense, {"is_causal": True}),
    "softcap": (_dense, {"softcap": 3.0}),
    "lengths": (_dense, {"kv_lens": LENS}),
    "packed": (_packed, {"is_causal": True}),
}
CALLS = WITH_GRADIENTS | {
    "cache": (_cached, {}),
    "few queries": (_few_queries, {}),
    "8 bits": (_quantized, {"is_causal": True}),
    "8 bits, rows without keys": (_quantized, {"kv_lens": LENS}),
}


def _inputs(device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, 13, 16) for heads in (4, 2, 2)]
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def _sinks(q: Tensor, infinite: float) -> Tensor:
    sinks = torch.tensor([0.3, infinite, 0.1, -0.2], dtype=torch.float32)
    return sinks.to(q.device)


def _on(device: str, options: dict) -> dict:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}


def check_results(name: str, backend: str, device: str = "cpu", dtype=torch.float32) -> None:
    """A sink of +inf leaves no weight to keys, one of NaN gives NaN, and other heads stay."""
    function, options = CALLS[name]
    q, k, v = _inputs(device, dtype)
    options = _on(device, options) | {"backend": backend}
    usual = function(q, k, v, _sinks(q, 0.5), **options)
    out, lse = function(q, k, v, _sinks(q, math.inf), **options)
    attended = slice(0, 10) if name == "packed" else slice(None)  # the tokens of sequences
    assert (out[:, INFINITE] == 0).all()
    assert (lse[:, INFINITE, attended] == math.inf).all()
    for found, expected in zip((out, lse), usual):
        assert torch.equal(found[:, [0, 2, 3]], expected[:, [0, 2, 3]])
    out, lse = function(q, k, v, _sinks(q, math.nan), **options)
    has_keys = (usual[0][:, INFINITE] != 0).any(-1)
    assert out[:, INFINITE][has_keys].isnan().all() and lse[:, INFINITE][has_keys].isnan().all()
    assert torch.equal(out[:, [0, 2, 3]], usual[0][:, [0, 2, 3]])


def check_gradients(name: str, backend: str, device: str = "cpu", dtype=torch.float32) -> None:
    """They are those of the other heads; the sink's is that of the lse, which is the sink."""
    function, options = WITH_GRADIENTS[name]
    options = _on(device, options) | {"backend": backend}
    found = []
    for infinite in (math.inf, 0.5):
        given = [x.requires_grad_() for x in _inputs(device, dtype)]
        given.append(_sinks(given[0], infinite).requires_grad_())
        out, lse = function(*given, **options)
        torch.manual_seed(1)
        grad_out, grad_lse = (torch.randn(x.shape).to(x) for x in (out, lse))
        attended = slice(0, 10) if name == "packed" else slice(None)
        of_sink = grad_lse[:, INFINITE, attended].sum()
        if infinite != math.inf:  # the gradients of all other heads
            grad_out[:, INFINITE], grad_lse[:, INFINITE] = 0.0, 0.0
        found.append(torch.autograd.grad((out, lse), given, (grad_out, grad_lse)))
    grads, expected = found
    expected[3][INFINITE] = of_sink
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for x, y in zip(grads, expected):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)


def check_merging(backend: str, device: str = "cpu") -> None:
    """A state whose lse is +inf, as that of a sink among the states, has all weight."""
    torch.manual_seed(0)
    outs, lses = torch.randn(3, 2, 5, 8, device=device), torch.randn(3, 2, 5, device=device)
    lses[1, 0], lses[2, 0, 0] = math.inf, -math.inf
    outs.requires_grad_(), lses.requires_grad_()
    with fa_ops.use_backend(backend):
        out, lse = fa_ops.merge_states(outs, lses)
    assert (lse[0] == math.inf).all() and lse[1].isfinite().all()
    assert torch.equal(out[0], outs[1, 0]) and out.isfinite().all()
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    of_outs, of_lses = torch.autograd.grad((out, lse), (outs, lses), (grad_out, grad_lse))
    assert torch.equal(of_outs[1, 0], grad_out[0]) and torch.equal(of_lses[1, 0], grad_lse[0])
    assert not of_outs[[0, 2], 0].any() and not of_lses[[0, 2], 0].any()
