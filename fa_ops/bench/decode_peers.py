"""The implementations of the decoding benchmark, each with the cache layout it prefers."""

from __future__ import annotations

import functools

import torch.nn.functional as F
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops import dispatch
from fa_ops.bench import flashinfer_peers
from fa_ops.bench.decode_problems import Data, DecodeProblem
from fa_ops.bench.peers import Call, Implementation, compiled_flex, import_first
from fa_ops.cli import options


def _ours(backend: str | None) -> list[Implementation]:
    """The operator with one backend, over both layouts of a cache."""

    def build(p: DecodeProblem, data: Data) -> Call:
        width = p.Dv or p.D
        arguments: dict = {"num_splits": 1} if p.unsplit else {}
        arguments |= {"batch_invariant": True} if p.invariant else {}
        arguments |= {"is_causal": True} if p.queries > 1 else {}
        arguments |= {"key_ranges": data.ranges} if p.padding else {}
        arguments |= {"unified_max": data.estimates} if p.unified else {}
        arguments |= {"k_scale": data.k_scale, "v_scale": data.v_scale} if p.scales else {}
        call = functools.partial(fa_ops.attention_with_kv_cache, backend=backend, **arguments)
        return lambda q, k, v: call(q, k, v[..., :width], data.lens, data.table)

    name = f"fa_ops {backend}" if backend else "fa_ops"
    return [
        Implementation(name, build, ours=True),
        Implementation(f"{name} bshd", build, "bshd", ours=True),
    ]


def _check_plain(p: DecodeProblem) -> None:
    """Raise NotImplementedError for problems that SDPA and FlexAttention cannot compute."""
    if p.page or p.fp8 or p.ragged or p.padding or p.shared or p.only_ours:
        raise NotImplementedError("supports no pages, fp8, lengths, padding or shared values")
    if p.queries > 1:
        raise NotImplementedError("aligns causal queries at the first key")


def _sdpa(name: str, backend: SDPBackend) -> Implementation:
    def build(p: DecodeProblem, data: Data) -> Call:
        _check_plain(p)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=p.Hq != p.Hkv)

    return Implementation(f"sdpa {name}", build, context=lambda: sdpa_kernel(backend))


def _flex(p: DecodeProblem, data: Data) -> Call:
    _check_plain(p)
    compiled = compiled_flex()
    return lambda q, k, v: compiled(q, k, v, enable_gqa=p.Hq != p.Hkv)


def _flash_attn_3(p: DecodeProblem, data: Data) -> Call:
    names = ("flash_attn_interface", "fa3_fwd_interface", "tokenspeed_fa3.flash_attn_interface")
    function = import_first(*names).flash_attn_with_kvcache
    if p.fp8 or p.padding or p.shared or p.only_ours:
        raise NotImplementedError("measured with neither fp8, padding nor shared values")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x if p.page else x.transpose(1, 2) for x in (k, v))
        arguments: dict = {"page_table": data.table} if p.page else {}
        arguments |= {"cache_seqlens": data.lens, "causal": p.queries > 1}
        out = function(q.transpose(1, 2), k, v, **arguments)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


PEERS = [
    _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    _sdpa("flash", SDPBackend.FLASH_ATTENTION),
    Implementation("flash-attn 3", _flash_attn_3, "bshd"),
    *flashinfer_peers.PEERS,
    Implementation("flex", _flex),
]


def ours(backends: str | None) -> list[Implementation]:
    """Our implementations: each named backend, or the one that is selected automatically."""
    names = options.words(backends) or [None]
    for name in names:
        if name not in (None, *dispatch.AUTO["cuda"]):
            known = ", ".join(dispatch.AUTO["cuda"])
            raise typer.BadParameter(f"no backend that decodes on CUDA is called {name!r}: {known}")
    return [implementation for name in names for implementation in _ours(name)]
