"""Attention with 8-bit products on CPU: the numbers are 8-bit ones, their arithmetic is float32.

A loop over heads and blocks of query rows, each with all its keys, so memory is linear in length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ops.backends import quantization
from fa_ops.backends.cpu.scores import KeyRanges, attended_ranges, cut
from fa_ops.backends.quantization import WEIGHT_SCALE, Quantised
from fa_ops.call.call import Call

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
