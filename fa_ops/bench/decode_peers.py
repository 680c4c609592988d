"""Who is measured at decoding: ours, and what people use instead over the layout it prefers."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops import dispatch
from fa_ops.bench.decode_problems import Data, DecodeProblem
from fa_ops.bench.peers import Call, Implementation
from fa_ops.cli import options


def _ours(backend: str | None) -> list[Implementation]:
    """The operator with one backend, over both layouts of a cache."""

    def build(p: DecodeProblem, data: Data) -> Call:
        width = p.Dv or p.D
        given: dict = {"num_splits": 1} if p.unsplit else {}
        given |= {"is_causal": True} if p.queries > 1 else {}
        given |= {"key_ranges": data.ranges} if p.padding else {}
        given |= {"unified_max": data.guesses} if p.unified else {}
        call = functools.partial(fa_ops.attention_with_kv_cache, backend=backend, **given)
        return lambda q, k, v: call(q, k, v[..., :width], data.lens, data.table)

    name = f"fa_ops {backend}" if backend else "fa_ops"
    return [
        Implementation(name, build, ours=True),
        Implementation(f"{name} bshd", build, "bshd", ours=True),
    ]


def _plain(p: DecodeProblem) -> None:
    if p.page or p.fp8 or p.ragged or p.padding or p.shared or p.unsplit:
        raise NotImplementedError("takes neither pages nor fp8, lengths, padding or shared values")
    if p.queries > 1:
        raise NotImplementedError("aligns causal queries at the first key")


def _sdpa(name: str, backend: SDPBackend) -> Implementation:
    def build(p: DecodeProblem, data: Data) -> Call:
        _plain(p)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=p.Hq != p.Hkv)

    return Implementation(f"sdpa {name}", build, context=lambda: sdpa_kernel(backend))


def _flex(p: DecodeProblem, data: Data) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    _plain(p)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, enable_gqa=p.Hq != p.Hkv)


def _flash_attn_3(p: DecodeProblem, data: Data) -> Call:
    names = ("flash_attn_interface", "fa3_fwd_interface", "tokenspeed_fa3.flash_attn_interface")
    found = [name for name in names if importlib.util.find_spec(name.split(".")[0])]
    function = importlib.import_module((found or names)[0]).flash_attn_with_kvcache
    if p.fp8 or p.padding or p.shared or p.unsplit:
        raise NotImplementedError("measured with neither fp8, padding nor shared values")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x if p.page else x.transpose(1, 2) for x in (k, v))
        given: dict = {"page_table": data.table} if p.page else {}
        given |= {"cache_seqlens": data.lens, "causal": p.queries > 1}
        out = function(q.transpose(1, 2), k, v, **given)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


PEERS = [
    _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    _sdpa("flash", SDPBackend.FLASH_ATTENTION),
    Implementation("flash-attn 3", _flash_attn_3, "bshd"),
    Implementation("flex", _flex),
]


def ours(backends: str | None) -> list[Implementation]:
    """Ours: what is chosen by itself, or each backend that is named."""
    names = options.words(backends) or [None]
    for name in names:
        if name not in (None, *dispatch.AUTO["cuda"]):
            known = ", ".join(dispatch.AUTO["cuda"])
            raise typer.BadParameter(f"no backend that decodes on CUDA is called {name!r}: {known}")
    return [one for name in names for one in _ours(name)]
