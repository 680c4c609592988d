"""The CPU backend: aten's flash kernel where it fits, one blockwise loop for everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends import selected
from fa_ops.backends.cpu import torch_kernel
from fa_ops.backends.cpu.dense import backward, forward
from fa_ops.backends.cpu.quantized import quantized_forward
from fa_ops.backends.cpu.sequences import (
    append,
    cache_forward,
    tangents_of,
    varlen_backward,
    varlen_forward,
)
from fa_ops.backends.mask_blocks import mask_blocks  # noqa: F401 - for fa::mask_blocks
from fa_ops.call.call import Call, Plan, Run, append_then_attend, general, general_plan
from fa_ops.call.options import dtype_name


def available_error() -> str | None:
    """Return None: this backend runs everywhere."""
    return None


def supports(call: Call) -> str | None:
    """Why this backend cannot run the call, or None."""
    return device_error(call.query) if call.is_quantized else support_error(call.query)


def plan(call: Call) -> Plan:
    """The plan of a call on this backend."""
    if call.is_quantized:
        return general("8-bit forward", quantized_forward)
    if call.is_selected:
        is_backward = call.is_backward
        kernel = "backward over lists" if is_backward else "forward over lists"
        return general(kernel, selected.backward if is_backward else selected.forward)
    if call.is_cached and call.writes_cache:
        reader = _reader_plan(call.read_only())
        plan = append_then_attend(Plan("append", _append_run), reader)
        return plan._replace(kernel=reader.kernel)
    return _reader_plan(call)


def _reader_plan(call: Call) -> Plan:
    """The plan of calls that write nothing."""
    functions = forward, backward, varlen_forward, varlen_backward, cache_forward, tangents_of
    whole = general_plan(call, *functions)
    return Plan(whole.kernel, lambda call: torch_kernel.prepare(call, whole.prepare(call)))


def _append_run(call: Call) -> Run:
    """What writes the new keys and values of calls, and rotates their queries."""
    options = call.options

    def write(q, k, v, operands):
        # `ops.kv_cache` tells autograd of the new version, once
        with torch_kernel.below_autograd():
            return append(Call(q, k, v, operands, options))

    return write


def append_error(call: Call) -> str | None:
    """Why this backend cannot write new keys for another one."""
    return "appends and attends in one call"


def merge_error(outs: Tensor) -> str | None:
    """Why this backend cannot merge states, or None."""
    return support_error(outs)


def mask_blocks_error(mask: Tensor) -> str | None:
    """Why this backend cannot summarise a mask, or None."""
    return device_error(mask)


def support_error(q: Tensor) -> str | None:
    """Why this backend cannot attend such tensors, or None."""
    if reason := device_error(q):
        return reason
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"runs float16, bfloat16, float32 and float64, got {dtype_name(q.dtype)}"
    return None


def device_error(q: Tensor) -> str | None:
    """Why this backend cannot read a tensor, or None."""
    return None if q.device.type == "cpu" else f"runs on CPU tensors, got {q.device.type}"


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs (N, ..., Dv) and lses (N, ...) of disjoint keys, merged to out (..., Dv), lse (...)."""
    no_keys = lses == float("-inf")
    if bool(no_keys.any()):
        outs = outs.masked_fill(no_keys.unsqueeze(-1), 0.0)  # may be NaN there
    highest, most = lses.amax(0), torch.finfo(lses.dtype).max
    top = highest.clamp(max=most)  # a state whose lse is +inf, as a sink's, has all weight
    top = top.masked_fill_(top == float("-inf"), 0.0)
    shares = torch.exp(lses.clamp(max=most) - top)
    total = shares.sum(0)
    shares.div_(total.clamp(min=1.0)).unsqueeze_(-1)  # the largest share is exp(0) before
    acc = lses.new_zeros(outs.shape[1:])
    for out, share in zip(outs, shares):
        acc.addcmul_(out, share)
    return acc.to(outs.dtype), torch.maximum(top + total.log(), highest)
