"""The portable GPU backend: Triton kernels for NVIDIA GPUs of compute capability 8.0 and newer.

`primitives` is what the kernels share, `launch` turns a call's options into kernel arguments,
compiles a kernel once per key and runs it without Triton's per-call lookup, and `configs` holds the
tiles. With TRITON_INTERPRET=1 in the environment the same kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.triton import short_rows
from fa_ops.backends.triton.backward import backward, varlen_backward
from fa_ops.backends.triton.cached import attends_whole_rows, cache_forward, prepare_append
from fa_ops.backends.triton.configs import holds_short_rows, holds_wide_single
from fa_ops.backends.triton.decode import cache_error, prepare_cached
from fa_ops.backends.triton.eight_bit import architecture_error, quantized_forward
from fa_ops.backends.triton.forward import forward, varlen_forward
from fa_ops.backends.triton.launch import INTERPRETED, architecture, interpreter_error, size_error
from fa_ops.backends.triton.masks import mask_blocks  # noqa: F401 - for fa::mask_blocks
from fa_ops.backends.triton.merge import merge_into, merge_states  # noqa: F401 - for fa::merge_states
from fa_ops.backends.triton.selected import selected_backward, selected_forward
from fa_ops.backends.triton.tangents import MAX_TANGENT_DIM, backward_jvp, jvp
from fa_ops.backends.triton.tiles import MAX_LENGTH, program_tiles  # noqa: F401 - for fa::program_tiles
from fa_ops.call.call import (
    Call,
    Plan,
    attention_call,
    decoding,
    general,
    has_short_gradients,
    has_short_rows,
    is_decoding,
    queries_of_kv_head,
)
from fa_ops.call.options import (
    MAX_DECODING_QUERIES,
    MAX_HEAD_DIM,
    MAX_QUANTIZED_HEAD_DIM,
    MAX_SELECTED_GRADIENT_DIM,
    dtype_name,
)
from fa_ops.programs.program import program_error

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_SINGLE_GRADIENT_DIM = 256  # of float32 in 99 KB of shared memory


def available_error() -> str | None:
    """Why this backend cannot run on this machine at all."""
    if INTERPRETED or torch.cuda.is_available() and torch.version.hip is None:
        return None
    return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, to try its kernels on the CPU)"


def supports(call: Call) -> str | None:
    """Why this backend cannot run the call, and what can."""
    if call.is_paged and call.is_packed:
        return "attends packed queries over pages as rows of a cache"
    if call.is_cached:
        return cache_error(call)
    if call.is_quantized:
        return _quantized_error(call)
    if call.tangents is not None:
        return interpreter_error(call.query) or _tangents_error(call)
    text = call.options.program
    if text is not None and (reason := program_error(text)):
        return f"{reason}; the reference backend runs it"
    if call.is_selected:
        return interpreter_error(call.query) or _selected_error(call)
    return interpreter_error(call.query) or support_error(call) or _backward_error(call)


def plan(call: Call) -> Plan:
    """The plan of a call on this backend."""
    if call.is_quantized:
        return general("8-bit forward", quantized_forward)
    if call.is_selected:
        if call.is_backward:
            return general("backward of lists", selected_backward)
        return general("forward of lists", selected_forward)
    if call.tangents is not None:
        if call.is_backward:
            return general("tangents of backward", backward_jvp)
        return general("tangents", jvp)
    if call.is_backward:
        if call.is_packed:
            return general("backward", varlen_backward)
        if has_short_gradients(call) and not call.is_programmed and _holds_short_rows(call):
            return Plan("backward of short rows", short_rows.prepare_backward)
        return general("backward", backward)
    if call.is_packed:
        return general("forward", varlen_forward)
    if call.is_cached:
        if attends_whole_rows(call):
            return general("append and forward" if call.writes_cache else "forward", cache_forward)
        return Plan("split-KV decoding", prepare_cached)
    if is_decoding(call) and not call.is_programmed:
        return decoding(Plan("split-KV decoding", prepare_cached))
    if has_short_rows(call) and not call.is_programmed and _holds_short_rows(call):
        return Plan("forward of short rows", short_rows.prepare)
    return general("forward", forward)


def append_error(call: Call) -> str | None:
    """Why this backend cannot write the new keys of a call for another one, or None."""
    if queries_of_kv_head(call) <= MAX_DECODING_QUERIES:
        return "appends and attends in one call where there are few queries"
    return cache_error(call)


def append_plan(call: Call) -> Plan:
    """The plan that writes the new keys of a call and rotates its queries."""
    return Plan("append", prepare_append)


def merge_error(outs: Tensor) -> str | None:
    """Why this backend cannot merge states, or None."""
    rows = outs.reshape(-1, 1, outs.shape[-1])
    return support_error(attention_call(rows, rows, rows))


def mask_blocks_error(mask: Tensor) -> str | None:
    """Why this backend cannot summarise a mask of four dimensions, or None."""
    return _device_error(mask.device) or size_error(mask.shape[2], mask.shape[3])


def program_tiles_error(device: torch.device, sizes: tuple[int, int, int, int]) -> str | None:
    """Why this backend cannot find the tiles of a program's mask, or None."""
    if max(sizes[2:]) > MAX_LENGTH:
        return f"finds tiles of up to {MAX_LENGTH} queries and keys, got {max(sizes[2:])}"
    return _device_error(device)


def _holds_short_rows(call: Call) -> bool:
    q, k, v = call.query, call.key, call.value
    tokens, widest = max(q.shape[2], k.shape[2]), max(q.shape[3], v.shape[3])
    return holds_short_rows(architecture(q.device), tokens, widest, call.saved is not None)


def _quantized_error(call: Call) -> str | None:
    """Why this backend cannot run a call with 8-bit products."""
    dtypes = (*_DTYPES, torch.float8_e4m3fn)
    reason = architecture_error(call.query)
    return reason or support_error(call, dtypes, MAX_QUANTIZED_HEAD_DIM)


def _selected_error(call: Call) -> str | None:
    """Why this backend cannot run a call with lists of blocks, and what can."""
    if reason := support_error(call):
        return reason
    if queries_of_kv_head(call) >= 1 << 31:
        return f"takes up to 2**31 rows of a key head, got {queries_of_kv_head(call)}"
    widest = max(call.query.shape[-1], call.value.shape[-1])
    if call.saved is not None and widest > MAX_SELECTED_GRADIENT_DIM:
        return (
            f"has gradients of lists of blocks for head dimensions up to "
            f"{MAX_SELECTED_GRADIENT_DIM}, got {widest}; the reference backend takes any"
        )
    return None


def _tangents_error(call: Call) -> str | None:
    """Why this backend cannot run a call with tangents, and what can."""
    if reason := support_error(call, max_head_dim=MAX_TANGENT_DIM):
        return reason
    mask, saved = call.operands.attn_mask, call.saved
    if not (call.options.deterministic and saved.mask_grad):
        return None
    full = (*call.query.shape[:3], call.key.shape[2])
    if mask.shape == full:
        return None
    return (
        "sums the tangent of the gradient of a broadcast attn_mask by atomics, which "
        "deterministic=True excludes; the reference backend can run it"
    )


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
    call: Call, dtypes: tuple[torch.dtype, ...] = _DTYPES, max_head_dim: int = MAX_HEAD_DIM
) -> str | None:
    """Why this backend cannot run a dense or packed call, and what can."""
    q, k, v = call[:3]
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
