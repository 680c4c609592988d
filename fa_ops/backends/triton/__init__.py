"""The portable GPU backend: Triton kernels for NVIDIA GPUs of compute capability 8.0 and newer.

`primitives` is what the kernels share, `arguments` turns a Spec into kernel arguments, `launch`
compiles a kernel once per key and runs it without Triton's per-call lookup, and `configs` holds the
tiles. With TRITON_INTERPRET=1 in the environment the same kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.triton import short_rows
from fa_ops.backends.triton.arguments import size_error
from fa_ops.backends.triton.backward import backward, varlen_backward
from fa_ops.backends.triton.cached import attends_whole_rows, cache_forward, prepare_append
from fa_ops.backends.triton.configs import holds_short_rows, holds_wide_single
from fa_ops.backends.triton.decode import cache_error, prepare_cached
from fa_ops.backends.triton.eight_bit import architecture_error, quantized_forward
from fa_ops.backends.triton.forward import forward, varlen_forward
from fa_ops.backends.triton.launch import INTERPRETED, architecture, interpreter_error
from fa_ops.backends.triton.masks import mask_blocks
from fa_ops.backends.triton.merge import merge_into, merge_states
from fa_ops.call.call import (
    APPEND,
    CACHED,
    DENSE,
    MASK_BLOCKS,
    MERGE,
    MERGE_INTO,
    PACKED,
    QUANTIZED,
    Call,
    Plan,
    decoding,
    general,
)
from fa_ops.call.options import (
    MAX_DECODING_QUERIES,
    MAX_HEAD_DIM,
    MAX_QUANTIZED_HEAD_DIM,
    Spec,
    dtype_name,
    has_short_gradients,
    has_short_rows,
    is_decoding,
    queries_of_kv_head,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_SINGLE_GRADIENT_DIM = 256  # of float32 in 99 KB of shared memory


def available_error() -> str | None:
    """Why this backend cannot run on this machine at all."""
    if INTERPRETED or torch.cuda.is_available() and torch.version.hip is None:
        return None
    return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, to try its kernels on the CPU)"


def supports(call: Call) -> str | None:
    """Why this backend cannot run the call, and what can."""
    q, k, v = call.query, call.key, call.value
    if call.kind == APPEND and queries_of_kv_head(q, k, call.cache) <= MAX_DECODING_QUERIES:
        return "appends and attends in one call where there are few queries"
    if call.cache is not None:
        return cache_error(q, k, v, call.cache, call.spec)
    if call.kind == QUANTIZED:
        return _quantized_error(q, k, v, call.spec)
    if call.kind == MASK_BLOCKS:
        return _device_error(q.device) or size_error(q.shape[2], q.shape[3])
    if call.kind in (MERGE, MERGE_INTO):
        q = k = v = q.reshape(-1, 1, q.shape[-1])
        return support_error(q, k, v, call.spec)
    return interpreter_error(q) or support_error(q, k, v, call.spec) or _backward_error(call)


def plan(call: Call) -> Plan:
    """The plan of a call on this backend."""
    if call.kind == MASK_BLOCKS:
        return Plan("mask blocks", lambda call: mask_blocks)
    if call.kind == MERGE:
        return Plan("merge", lambda call: merge_states)
    if call.kind == MERGE_INTO:
        return Plan("merge", lambda call: merge_into)
    if call.kind == APPEND:
        return Plan("append", prepare_append)
    if call.kind == QUANTIZED:
        return general("8-bit forward", quantized_forward)
    q, k, v, saved = call.query, call.key, call.value, call.saved
    if saved is not None:
        if call.kind != DENSE:
            return general("backward", varlen_backward)
        is_short = has_short_gradients(q, k, v, call.spec, saved.mask_grad)
        if is_short and _holds_short_rows(call):
            return Plan("backward of short rows", short_rows.prepare_backward)
        return general("backward", backward)
    if call.kind == PACKED:
        return general("forward", varlen_forward)
    if call.kind == CACHED:
        if attends_whole_rows(call):
            return general("append and forward" if call.writes_cache else "forward", cache_forward)
        return Plan("split-KV decoding", prepare_cached)
    if is_decoding(q.shape[2], call.num_keys, call.spec):
        return decoding(Plan("split-KV decoding", prepare_cached))
    if has_short_rows(q, k, v, call.spec) and _holds_short_rows(call):
        return Plan("forward of short rows", short_rows.prepare)
    return general("forward", forward)


def _holds_short_rows(call: Call) -> bool:
    q, k, v = call.query, call.key, call.value
    tokens, widest = max(q.shape[2], k.shape[2]), max(q.shape[3], v.shape[3])
    return holds_short_rows(architecture(q.device), tokens, widest, call.saved is not None)


def _quantized_error(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    """Why this backend cannot run a call with 8-bit products."""
    dtypes = (*_DTYPES, torch.float8_e4m3fn)
    reason = architecture_error(q)
    return reason or support_error(q, k, v, spec, dtypes, MAX_QUANTIZED_HEAD_DIM)


def _backward_error(call: Call) -> str | None:
    """Why this backend can compute a call's result but not its gradients, or None."""
    q, widest = call.query, max(call.query.shape[-1], call.value.shape[-1])
    is_wide = widest > MAX_SINGLE_GRADIENT_DIM and q.dtype == torch.float32
    if call.saved is None or not is_wide or q.device.type != "cuda":
        return None
    if holds_wide_single(architecture(q.device)):
        return None
    return (
        f"has gradients of float32 for head dimensions up to {MAX_SINGLE_GRADIENT_DIM} on a GPU "
        f"with less than 128 KB of shared memory, got {widest}; the reference backend takes any"
    )


def support_error(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, dtypes: tuple[torch.dtype, ...] = _DTYPES,
    max_head_dim: int = MAX_HEAD_DIM,
) -> str | None:  # fmt: skip
    """Why this backend cannot run this call, and what can."""
    if reason := _device_error(q.device):
        return reason
    if q.dtype not in dtypes:
        found = dtype_name(q.dtype)
        return f"takes float16, bfloat16 and float32, got {found}; for float64 use the CPU"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > max_head_dim:
        return (
            f"takes head dimensions up to {max_head_dim}, got {widest}; "
            "the reference backend takes any"
        )
    axis = 2 if q.dim() == 4 else 0
    return size_error(q.shape[axis], k.shape[axis])


def _device_error(device: torch.device) -> str | None:
    """Why this backend cannot run on the device, and what can."""
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"runs on CUDA tensors, got {device.type}; the cpu and reference backends run on it"
    if device.type == "cuda" and architecture(device) < 80:
        name = torch.cuda.get_device_name(device)
        return f"needs compute capability 8.0, {name} has {architecture(device) / 10}"
    return None
