"""The CPU backend: aten's flash kernel where it fits, one blockwise loop for everything else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ops.backends import quantization, selected
from fa_ops.backends.cpu import torch_kernel
from fa_ops.backends.cpu.dense import backward, forward
from fa_ops.backends.cpu.scores import KeyRanges, attended_ranges, cut
from fa_ops.backends.cpu.sequences import (
    append,
    cache_forward,
    tangents_of,
    varlen_backward,
    varlen_forward,
)
from fa_ops.backends.mask_blocks import mask_blocks  # noqa: F401 - for fa::mask_blocks
from fa_ops.backends.quantization import WEIGHT_SCALE, Quantised
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


# 8-bit products: the numbers are 8-bit ones, their arithmetic is float32.
#
# A loop over heads and blocks of query rows, each with all its keys, so memory is linear in length.

LOG2E = math.log2(math.e)
SCORES = 2**20  # scores of a block of rows


def quantized_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, bfloat16 for e4m3, and lse (B, Hq, Sq) in float32."""
    q, k, v = call[:3]
    B, Hq, Sq, _ = q.shape
    Sk, group = k.shape[2], Hq // k.shape[1]
    eight = quantization.quantised(call, torch.float32)
    ranges = attended_ranges(call)
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    out = torch.empty_permuted((B, Hq, Sq, v.shape[3]), (0, 2, 1, 3), dtype=dtype)
    lse = torch.empty(B, Hq, Sq, dtype=torch.float32)
    step = max(1, SCORES // Sk)
    for b in range(B):
        for h in range(Hq):
            head = _Head(eight, ranges, call, b, h, h // group)
            for start in range(0, Sq, step):
                rows = slice(start, min(start + step, Sq))
                o, m = head.attend(rows)
                out[b, h, rows], lse[b, h, rows] = o, m.squeeze(-1)
    return out, lse


class _Head:
    """The numbers of one query head and of its key head."""

    def __init__(
        self, eight: Quantised, ranges: KeyRanges | None, call: Call, b: int, h: int, kv_h: int
    ) -> None:
        self.q, self.k, self.v = eight.query[b, h], eight.key[b, kv_h], eight.value[b, kv_h]
        self.q_scale = _part(eight.q_scale, b, h) * call.scale
        self.k_scale = _part(eight.k_scale, b, kv_h).transpose(0, 1)
        self.v_scale = _part(eight.v_scale, b, kv_h)
        self.offset = None if eight.offset is None else eight.offset[b, h]
        sinks = call.operands.sinks
        self.sink = None if sinks is None else sinks[h].float()
        self.softcap = call.options.softcap
        self.ranges = None if ranges is None else KeyRanges(*(_part(x, b, h) for x in ranges))

    def attend(self, rows: slice) -> tuple[Tensor, Tensor]:
        """out (rows, Dv) and lse (rows, 1)."""
        q_scale = cut(self.q_scale, rows, slice(None))
        offset = None if self.offset is None else self.offset[rows]
        t = (self.q[rows] @ self.k.T).mul_(q_scale).mul_(self.k_scale)
        if self.softcap > 0:
            t.div_(self.softcap).tanh_().mul_(self.softcap)
        t.mul_(LOG2E)
        if self.ranges is not None:
            j = torch.arange(t.shape[1], dtype=torch.int32)
            lo, hi = (cut(x, rows, slice(None)) for x in self.ranges)
            t.masked_fill_(~((j >= lo) & (j < hi)), -math.inf)
        m = t.amax(-1, keepdim=True).ceil_()
        m.masked_fill_(m == -math.inf, 0.0)
        w = quantization.round_weights_(t, m)
        total = w.sum(-1, keepdim=True).div_(WEIGHT_SCALE)
        top = m
        if self.sink is not None:
            sink = (self.sink if offset is None else self.sink - offset) * LOG2E
            finite = torch.finfo(torch.float32)
            sink = sink.clamp(max=finite.max)
            m = torch.where(total > 0, m, sink.clamp(min=finite.min))
            top = torch.maximum(m, sink)
            total = total * torch.exp2(m - top) + torch.exp2(sink - top)
            w.mul_(torch.exp2(m - top))
        lse = top * math.log(2.0) + total.log()
        if offset is not None:
            lse = lse + offset
        if self.sink is not None:  # which may be +inf
            lse = torch.maximum(lse, self.sink)
        total = total.masked_fill(total == 0.0, 1.0).mul_(WEIGHT_SCALE)
        return (w @ self.v).mul_(self.v_scale).div_(total), lse


def _part(x: Tensor, b: int, h: int) -> Tensor:
    """The matrix of one head of a tensor that may be broadcast over batches and heads."""
    return x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
