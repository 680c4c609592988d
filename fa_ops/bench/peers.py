"""Who is measured: our backends and what people use instead, each in the layout it prefers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops import dispatch
from fa_ops.bench.problems import Problem
from fa_ops.cli import options

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One competitor. `build` does what belongs to a problem, once; it may refuse by raising."""

    name: str
    build: Callable[..., Call]  # of the problem, and the device or the caches
    layout: str = "bhsd"
    ours: bool = False
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
    default: bool = True  # measured unless asked otherwise


def _ours(backend: str) -> Implementation:
    def build(problem: Problem, device: str) -> Call:
        return lambda q, k, v: fa_ops.attention(q, k, v, is_causal=problem.causal, backend=backend)

    return Implementation(f"fa_ops {backend}", build, ours=True)


def _sdpa(name: str, backend: SDPBackend, default: bool = True) -> Implementation:
    def build(problem: Problem, device: str) -> Call:
        gqa = problem.Hq != problem.Hkv
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, enable_gqa=gqa
        )

    return Implementation(
        f"sdpa {name}", build, context=lambda: sdpa_kernel(backend), default=default
    )


def _flex(name: str, default: bool = True, **compiling) -> Implementation:
    def build(problem: Problem, device: str) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Each problem is a specialisation; past dynamo's limit on those it would run uncompiled.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, **compiling)
        block_mask = None
        if problem.causal:
            block_mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, problem.S, problem.S, device=device
            )
        gqa = problem.Hq != problem.Hkv
        return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)

    return Implementation(name, build, default=default)


def _flash_attn(name: str, *modules: str) -> Implementation:
    """`modules`: where its wheels put it, the official name first."""

    def build(problem: Problem, device: str) -> Call:
        found = [module for module in modules if importlib.util.find_spec(module.split(".")[0])]
        function = importlib.import_module((found or modules)[0]).flash_attn_func

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=problem.causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return call

    return Implementation(name, build, layout="bshd")


def implementations(device: str) -> list[Implementation]:
    """All that may run on such a device; whether one does, its `build` and first call tell."""
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
        *sdpa,
        _flex("flex"),
        _flex("flex autotuned", default=False, mode="max-autotune-no-cudagraphs"),
        _flash_attn("flash-attn 2", "flash_attn"),
        _flash_attn("flash-attn 3", "flash_attn_interface", "fa3_fwd_interface"),
        _flash_attn("flash-attn 4", "flash_attn.cute"),
    ]


def choose(device: str, only: str | None = None) -> list[Implementation]:
    """The defaults, or those whose name contains one of the comma-separated words.

    Raises typer.BadParameter for a word that no name contains.
    """
    known = implementations(device)
    if not options.words(only):
        return [i for i in known if i.default]
    names = options.matching(only, [i.name for i in known], "implementation")
    return [i for i in known if i.name in names]
