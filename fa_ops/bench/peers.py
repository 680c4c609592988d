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
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops.bench.problems import Problem
from fa_ops.cli import options
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
    if not options.words(only):
        return [i for i in known if i.default]
    names = options.matching(only, [i.name for i in known], "implementation")
    return [i for i in known if i.name in names]
