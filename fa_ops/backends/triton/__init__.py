"""The portable GPU tier: Triton kernels for NVIDIA GPUs of compute capability 8.0 and newer.

`primitives` is what the kernels share, `arguments` turns a Spec into kernel arguments, `launch`
compiles a kernel once per key and runs it without Triton's per-call lookup, and `configs` holds the
tiles. With TRITON_INTERPRET=1 in the environment the same kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.triton.arguments import size_error
from fa_ops.backends.triton.backward import backward, varlen_backward
from fa_ops.backends.triton.cached import cache_forward, cache_write, prepare_cached
from fa_ops.backends.triton.decode import cache_error
from fa_ops.backends.triton.forward import forward, varlen_forward
from fa_ops.backends.triton.launch import INTERPRETED, architecture
from fa_ops.backends.triton.merge import merge_states
from fa_ops.types import Spec

__all__ = [
    "available_error",
    "backward",
    "cache_error",
    "cache_forward",
    "cache_write",
    "forward",
    "merge_states",
    "prepare_cached",
    "support_error",
    "varlen_backward",
    "varlen_forward",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def available_error() -> str | None:
    """Why this backend cannot run on this machine at all."""
    if INTERPRETED or torch.cuda.is_available() and torch.version.hip is None:
        return None
    return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, to try its kernels on the CPU)"


def support_error(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    """Why this backend cannot run this call, and what can."""
    device = q.device
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"runs on CUDA tensors, got {device.type}; the cpu and reference backends run on it"
    if device.type == "cuda" and architecture(device) < 80:
        name = torch.cuda.get_device_name(device)
        return f"needs compute capability 8.0, {name} has {architecture(device) / 10}"
    if q.dtype not in _DTYPES:
        return f"takes float16, bfloat16 and float32, got {q.dtype}; for float64 use the CPU"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > 256:
        return f"takes head dimensions up to 256, got {widest}; the reference backend takes any"
    axis = 2 if q.dim() == 4 else 0
    return size_error(q.shape[axis], k.shape[axis])
