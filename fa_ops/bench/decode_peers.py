"""What decoding is compared with: FlashInfer, flash-attn, FlexAttention and SDPA."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops.bench.decode_problems import Data, DecodeProblem
from fa_ops.bench.peers import (
    E4M3,
    Call,
    Implementation,
    compiled_flex,
    import_first,
    quantized_rows,
)
from fa_ops.cli import options
from fa_ops.plans import dispatch

# FlashInfer over pages, and with 8-bit products, for the benchmarks.
#
# Its wrappers plan a problem before any call is timed. Calls write into an output that is allocated
# once, as the wrappers would otherwise fill a new one with zeros.

_WORKSPACE = 512 * 2**20  # bytes for the results of parts of the keys


def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def _pages(p: DecodeProblem, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pages of each row begin, all pages, and the number of keys in each last page."""
    counts = (data.lens + p.page - 1) // p.page
    starts = torch.zeros(p.B + 1, dtype=torch.int32, device=counts.device)
    starts[1:] = counts.cumsum(0)
    used = torch.arange(data.table.shape[1], device=counts.device) < counts[:, None]
    return starts, data.table[used], (data.lens - 1) % p.page + 1


def _rows(p: DecodeProblem, data: Data) -> Tensor:
    """Where the queries of each row begin."""
    return torch.arange(p.B + 1, dtype=torch.int32, device=data.lens.device) * p.queries


def _planned_mla(p: DecodeProblem, data: Data, backend: str) -> Callable[..., object]:
    """A function of queries, keys and output; values are the first features of the keys."""
    wrapper = import_first("flashinfer").mla.BatchMLAPagedAttentionWrapper(
        _workspace(data.q.device), backend=backend
    )
    starts, pages, _ = _pages(p, data)
    wrapper.plan(
        qo_indptr=_rows(p, data), kv_indptr=starts, kv_indices=pages, kv_len_arr=data.lens,
        num_heads=p.Hq, head_dim_ckv=p.Dv, head_dim_kpe=p.D - p.Dv, page_size=p.page,
        causal=p.queries > 1, sm_scale=p.D**-0.5, q_data_type=p.dtype, kv_data_type=p.dtype,
    )  # fmt: skip

    def call(queries: Tensor, k: Tensor, v: Tensor, out: Tensor) -> object:
        q_nope, q_pe = queries[..., : p.Dv], queries[..., p.Dv :]
        ckv, kpe = k[:, :, 0, : p.Dv], k[:, :, 0, p.Dv :]
        return wrapper.run(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv, kpe_cache=kpe, out=out)

    return call


def _planned(p: DecodeProblem, data: Data, backend: str) -> Callable[..., object]:
    """A function of queries, keys, values and output."""
    flashinfer, workspace = import_first("flashinfer"), _workspace(data.q.device)
    starts, pages, last = _pages(p, data)
    shape = p.Hq, p.Hkv, p.D, p.page
    dtypes = {"q_data_type": p.dtype, "kv_data_type": p.dtype}
    if p.queries == 1:
        # Tensor cores share the keys of a group of query heads.
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend=backend
        )
        wrapper.plan(starts, pages, last, *shape, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(_rows(p, data), starts, pages, last, *shape, causal=True, **dtypes)
    return lambda queries, k, v, out: wrapper.run(queries, (k, v), out=out)


def _implementation(backend: str) -> Implementation:
    def build(p: DecodeProblem, data: Data) -> Call:
        import_first("flashinfer")
        if not p.page or p.fp8 or p.padding or p.only_ours:
            raise NotImplementedError("measured over pages of 16-bit keys alone")
        run = (_planned_mla if p.shared else _planned)(p, data, backend)
        queries = data.q.transpose(1, 2).flatten(0, 1).contiguous()  # in the order that it takes
        out = queries.new_empty(*queries.shape[:2], p.Dv or p.D)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            run(queries, k, v, out)
            return out.unflatten(0, (p.B, p.queries)).transpose(1, 2)

        return call

    return Implementation(f"flashinfer {backend}", build)


# Kernels after FlashAttention 2 and 3; by default it decodes with the former on Hopper.
FLASHINFER_PEERS = [_implementation("fa2"), _implementation("fa3")]


def flashinfer_scaled_call(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False
) -> Callable[[], Tensor]:
    """A call of q, k and v in e4m3 with a scale each, whose output is (B, S, Hq, D) in bfloat16."""
    flashinfer = import_first("flashinfer")
    (B, Hq, S, D), (_, Hkv, Sk, _) = q.shape, k.shape
    rows, scales = quantized_rows(q, k, v)
    packed = [x.flatten(0, 1) for x in rows]
    factors = [scale.repeat(heads) for scale, heads in zip(scales, (Hq, Hkv, Hkv))]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        _workspace(q.device), "NHD", backend="fa3"
    )
    ends = torch.arange(B + 1, dtype=torch.int32, device=q.device)
    wrapper.plan(
        ends * S, ends * Sk, Hq, Hkv, D, causal=causal,
        q_data_type=E4M3, kv_data_type=E4M3, o_data_type=torch.bfloat16,
    )  # fmt: skip
    out = torch.empty(B * S, Hq, D, dtype=torch.bfloat16, device=q.device)

    def call() -> Tensor:
        wrapper.run(*packed, *factors, out=out)
        return out.view(B, S, Hq, D)

    return call


# The implementations of the decoding benchmark, each with the cache layout it prefers.


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
    *FLASHINFER_PEERS,
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
