"""Attention over a union of disjoint key sets from the attention over each."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.launch import Launch, bind, padded
from fa_ops.backends.triton.primitives import LARGEST
from fa_ops.call.options import ALIGNMENT

_ROWS = 16
_launches: dict[tuple, Launch] = {}


@triton.jit(do_not_specialize=["states", "rows"])
def merge_kernel(
    outs, lses, out, lse, states: tl.int32, rows: tl.int64,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge outs (states, rows, D) and lses (states, rows); one program per BLOCK rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)[None, :]
    inside = row < rows
    tile = row[:, None] * D + cols
    keep = inside[:, None] & (cols < D)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    highest, den = m, tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for n in range(0, states):
        s = tl.load(lses + n * rows + row, mask=inside, other=float("-inf"))
        attended = (
            keep & (s != float("-inf"))[:, None]
        )  # the out of a state without keys may be NaN
        x = tl.load(outs + n * rows * D + tile, mask=attended, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, s)
        s = tl.minimum(s, LARGEST, propagate_nan=tl.PropagateNan.ALL)  # +inf has all weight
        m_new = tl.maximum(m, s)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = tl.exp(s - base), tl.exp(m - base)
        acc = acc * alpha[:, None] + x * p[:, None]
        den = den * alpha + p
        m = m_new
    tl.store(lse + row, tl.maximum(m + tl.log(den), highest, propagate_nan=tl.PropagateNan.ALL),
             mask=inside)  # fmt: skip
    weight = tl.where(den == 0.0, 0.0, 1.0 / den)
    tl.store(out + tile, (acc * weight[:, None]).to(out.dtype.element_ty), mask=keep)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge contiguous outs (N, ..., Dv) and fp32 lses (N, ...) to out (..., Dv) and lse (...)."""
    D = outs.shape[-1]
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=lses.dtype, device=lses.device)
    rows = prod(lse.shape)
    args = (outs, lses, out, lse, outs.shape[0], rows)
    aligned = D * outs.element_size() % ALIGNMENT == 0 and outs.data_ptr() % ALIGNMENT == 0
    key = (outs.dtype, D, aligned, outs.get_device())
    launch = _launches.get(key)
    if launch is None:
        constants = {"D": D, "BLOCK_D": padded(D), "BLOCK": _ROWS}
        divisors = dict.fromkeys(("outs", "out"), ALIGNMENT) if aligned else None
        options = {"num_warps": 4}
        launch = bind(merge_kernel, args, constants, options, device=outs.device, divisors=divisors)
        _launches[key] = launch
    launch((-(-rows // _ROWS), 1, 1), args)
    return out, lse


@triton.jit(do_not_specialize=["rows", "lse_b", "lse_h", "part_lse_b", "part_lse_h"])
def merge_into_kernel(
    out, lse, part, part_lse, rows: tl.int32,
    out_b: tl.int64, out_h: tl.int64, out_s: tl.int64, lse_b: tl.int64, lse_h: tl.int64,
    part_b: tl.int64, part_h: tl.int64, part_s: tl.int64,
    part_lse_b: tl.int64, part_lse_h: tl.int64,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge part into out, (B, H, rows, D) both; one program per BLOCK rows of a head."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = row < rows
    cols = tl.arange(0, BLOCK_D)[None, :]
    lse_at = lse + b * lse_b + h * lse_h + row
    one = tl.load(lse_at, mask=inside, other=float("-inf"))
    other = tl.load(
        part_lse + b * part_lse_b + h * part_lse_h + row, mask=inside, other=float("-inf")
    )
    top = tl.maximum(one, other)
    base = tl.where(top == float("-inf"), 0.0, top)
    share, part_share = tl.exp(one - base), tl.exp(other - base)
    total = share + part_share
    keep = inside[:, None] & (cols < D)
    wide_row = row.to(tl.int64)[:, None]
    out_at = out + b * out_b + h * out_h + wide_row * out_s + cols
    # the out of a state without keys may be NaN
    x = tl.load(out_at, mask=keep & (share > 0.0)[:, None], other=0.0).to(tl.float32)
    part_at = part + b * part_b + h * part_h + wide_row * part_s + cols
    y = tl.load(part_at, mask=keep & (part_share > 0.0)[:, None], other=0.0).to(tl.float32)
    weight = tl.where(total == 0.0, 0.0, 1.0 / total)
    merged = (x * share[:, None] + y * part_share[:, None]) * weight[:, None]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=keep)
    tl.store(lse_at, base + tl.log(total), mask=inside)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a result over other keys into out (B, H, S, D) and its fp32 lse (B, H, S), in place."""
    B, H, S, D = out.shape
    strides = (*out.stride()[:3], *lse.stride()[:2], *part.stride()[:3], *part_lse.stride()[:2])
    args = (out, lse, part, part_lse, S, *strides)
    aligned = all(_is_aligned(x) for x in (out, part))
    key = (out.dtype, part.dtype, D, aligned, out.get_device())
    launch = _launches.get(key)
    if launch is None:
        constants = {"D": D, "BLOCK_D": padded(D), "BLOCK": _ROWS}
        divisors = dict.fromkeys(("out", "part"), ALIGNMENT) | dict.fromkeys(
            ("out_b", "out_h", "out_s", "part_b", "part_h", "part_s"), 8
        )
        launch = _launches[key] = bind(
            merge_into_kernel, args, constants, {"num_warps": 4}, device=out.device,
            divisors=divisors if aligned else None,
        )  # fmt: skip
    launch((-(-S // _ROWS), H, B), args)


def _is_aligned(x: Tensor) -> bool:
    """Whether all rows start at multiples of ALIGNMENT bytes and of 8 elements."""
    return x.data_ptr() % ALIGNMENT == 0 and not any(stride % 8 for stride in x.stride()[:3])
