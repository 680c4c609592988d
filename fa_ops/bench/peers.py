"""The implementations that are compared, each with the memory layout it prefers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops.bench import command
from fa_ops.bench.problems import DecodeData, DecodeProblem, Problem
from fa_ops.plans import dispatch

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
E4M3 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation; `build` prepares the call of a problem, or raises if it cannot."""

    name: str
    build: Callable[..., Call]  # its arguments: the problem, and the device or the caches
    layout: str = "bhsd"
    ours: bool = False
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
    default: bool = True  # measured without being named in --only
    takes_bias: bool = False  # as the call's fourth argument


def _ours(backend: str) -> Implementation:
    def build(problem: Problem, device: str) -> Call:
        return lambda q, k, v, bias=None: fa_ops.attention(
            q, k, v, bias, is_causal=problem.causal, backend=backend
        )

    return Implementation(f"fa_ops {backend}", build, ours=True, takes_bias=True)


def _sdpa(name: str, backend: SDPBackend, default: bool = True) -> Implementation:
    def build(problem: Problem, device: str) -> Call:
        gqa = problem.Hq != problem.Hkv
        return lambda q, k, v, bias=None: F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=problem.causal, enable_gqa=gqa
        )

    context = functools.partial(sdpa_kernel, backend)
    return Implementation(f"sdpa {name}", build, context=context, default=default, takes_bias=True)


def compiled_flex(**options) -> Callable[..., Tensor]:
    """FlexAttention, compiled with static shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    # Each problem is a specialisation; beyond dynamo's limit it would run uncompiled.
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, **options)


def _flex(name: str, default: bool = True, **compiling) -> Implementation:
    def build(problem: Problem, device: str) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask

        compiled = compiled_flex(**compiling)
        block_mask = None
        if problem.causal:
            block_mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, problem.S, problem.S, device=device
            )
        gqa = problem.Hq != problem.Hkv
        return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)

    return Implementation(name, build, default=default)


def import_first(*modules: str) -> ModuleType:
    """The first module that is installed; the names are those of different wheels."""
    installed = [module for module in modules if importlib.util.find_spec(module.split(".")[0])]
    return importlib.import_module((installed or modules)[0])


def _flash_attn(name: str, *modules: str) -> Implementation:
    def build(problem: Problem, device: str) -> Call:
        function = import_first(*modules).flash_attn_func

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=problem.causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return call

    return Implementation(name, build, layout="bshd")


def per_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3 with one scale, the simplest quantisation."""
    scale = x.float().abs().amax() / 448.0
    return (x.float() / scale).to(E4M3), scale


def scaled_call(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Callable[[], Tensor]:
    """A call of `attention` of q, k and v in e4m3 with a scale each, which are made now."""
    numbers, scales = zip(*(per_tensor(x) for x in (q, k, v)))
    options = dict(zip(("q_scale", "k_scale", "v_scale"), scales), is_causal=causal)
    return functools.partial(fa_ops.attention, *numbers, **options)


def quantized_rows(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors in e4m3 and (B, S, H, D) memory order, and a scale for each."""
    numbers, scales = zip(*(per_tensor(x) for x in tensors))
    rows = [x.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3) for x in numbers]
    return rows, list(scales)


def scaled_flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False
) -> Callable[[], object]:
    """The same by FlashAttention 3, whose output is (B, S, H, Dv)."""
    function = import_first("flash_attn_interface", "fa3_fwd_interface").flash_attn_func
    rows, scales = quantized_rows(q, k, v)
    names = "q_descale", "k_descale", "v_descale"
    descales = {name: s.expand(k.shape[:2]) for name, s in zip(names, scales)}
    return functools.partial(function, *rows, causal=causal, **descales)


def failure(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    message = str(error).strip() or "no message"
    return f"{type(error).__name__}: {message.splitlines()[0][:160]}"


def implementations(device: str) -> list[Implementation]:
    """All implementations for a device; `build` or the first call of one may still fail."""
    ours = [
        _ours(name)
        for name, unavailable in dispatch.backends()
        if unavailable is None and name != "reference" and (name == "cpu") == (device == "cpu")
    ]
    sdpa = [
        _sdpa("flash", SDPBackend.FLASH_ATTENTION),
        _sdpa("math", SDPBackend.MATH, default=device == "cpu"),
    ]
    if device == "cpu":
        return [*ours, *sdpa, _flex("flex", default=False)]
    return [
        *ours,
        _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        _sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION, default=False),
        *sdpa,
        _flex("flex"),
        _flex("flex autotuned", default=False, mode="max-autotune-no-cudagraphs"),
        _flash_attn("flash-attn 2", "flash_attn"),
        _flash_attn("flash-attn 3", "flash_attn_interface", "fa3_fwd_interface"),
        _flash_attn("flash-attn 4", "flash_attn.cute"),
    ]


def choose(device: str, only: str | None = None) -> list[Implementation]:
    """The default implementations, or those whose name contains one of the comma-separated words.

    Raises:
        typer.BadParameter: no name contains one of the words.
    """
    known = implementations(device)
    if not command.words(only):
        return [i for i in known if i.default]
    names = command.matching(only, [i.name for i in known], "implementation")
    return [i for i in known if i.name in names]


# FlashInfer over pages, and with 8-bit products, for the benchmarks.
#
# Its wrappers plan a problem before any call is timed. Calls write into an output that is allocated
# once, as the wrappers would otherwise fill a new one with zeros.

_WORKSPACE = 512 * 2**20  # bytes for the results of parts of the keys


def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def _pages(p: DecodeProblem, data: DecodeData) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pages of each row begin, all pages, and the number of keys in each last page."""
    counts = (data.lens + p.page - 1) // p.page
    starts = torch.zeros(p.B + 1, dtype=torch.int32, device=counts.device)
    starts[1:] = counts.cumsum(0)
    used = torch.arange(data.table.shape[1], device=counts.device) < counts[:, None]
    return starts, data.table[used], (data.lens - 1) % p.page + 1


def _rows(p: DecodeProblem, data: DecodeData) -> Tensor:
    """Where the queries of each row begin."""
    return torch.arange(p.B + 1, dtype=torch.int32, device=data.lens.device) * p.queries


def _planned_mla(p: DecodeProblem, data: DecodeData, backend: str) -> Callable[..., object]:
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


def _planned(p: DecodeProblem, data: DecodeData, backend: str) -> Callable[..., object]:
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


def _flashinfer(backend: str) -> Implementation:
    def build(p: DecodeProblem, data: DecodeData) -> Call:
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
FLASHINFER_PEERS = [_flashinfer("fa2"), _flashinfer("fa3")]


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


def _decode_ours(backend: str | None) -> list[Implementation]:
    """The operator with one backend, over both layouts of a cache."""

    def build(p: DecodeProblem, data: DecodeData) -> Call:
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


def _decode_sdpa(name: str, backend: SDPBackend) -> Implementation:
    def build(p: DecodeProblem, data: DecodeData) -> Call:
        _check_plain(p)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=p.Hq != p.Hkv)

    return Implementation(f"sdpa {name}", build, context=lambda: sdpa_kernel(backend))


def _decode_flex(p: DecodeProblem, data: DecodeData) -> Call:
    _check_plain(p)
    compiled = compiled_flex()
    return lambda q, k, v: compiled(q, k, v, enable_gqa=p.Hq != p.Hkv)


def _decode_flash_attn_3(p: DecodeProblem, data: DecodeData) -> Call:
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


DECODE_PEERS = [
    _decode_sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    _decode_sdpa("flash", SDPBackend.FLASH_ATTENTION),
    Implementation("flash-attn 3", _decode_flash_attn_3, "bshd"),
    *FLASHINFER_PEERS,
    Implementation("flex", _decode_flex),
]


def decoders(backends: str | None) -> list[Implementation]:
    """Our implementations: each named backend, or the one that is selected automatically."""
    names = command.words(backends) or [None]
    for name in names:
        if name not in (None, *dispatch.AUTO["cuda"]):
            known = ", ".join(dispatch.AUTO["cuda"])
            raise typer.BadParameter(f"no backend that decodes on CUDA is called {name!r}: {known}")
    return [implementation for name in names for implementation in _decode_ours(name)]
