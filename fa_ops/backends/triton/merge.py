"""merge_states: attention over a union of disjoint key sets from the attention over each."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.arguments import padded
from fa_ops.backends.triton.launch import Launch, bind
from fa_ops.types import ALIGNMENT

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
    den = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for n in range(0, states):
        s = tl.load(lses + n * rows + row, mask=inside, other=float("-inf"))
        attended = (
            keep & (s != float("-inf"))[:, None]
        )  # the out of a state without keys may be NaN
        x = tl.load(outs + n * rows * D + tile, mask=attended, other=0.0).to(tl.float32)
        m_new = tl.maximum(m, s)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = tl.exp(s - base), tl.exp(m - base)
        acc = acc * alpha[:, None] + x * p[:, None]
        den = den * alpha + p
        m = m_new
    tl.store(lse + row, m + tl.log(den), mask=inside)
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
