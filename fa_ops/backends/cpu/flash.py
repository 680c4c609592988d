"""Calls that aten's CPU flash kernel can run, split into pieces that it gets right.

Its traps: causal is aligned at the top left, a dead row's lse is 0.0, an empty input is a division by zero that kills the process, and
0 * NaN spreads a NaN in v to rows that don't attend it. Fp16 and bf16 run in fp32: the kernel's own half-precision paths need matrix
units to be fast (backward, one thread, AVX2, (1, 8, 2048, 64) causal: fp32 0.23 s, bf16 1.4 s, fp16 2.3 s).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.cpu import layout
from fa_ops.backends.cpu.runs import Runs
from fa_ops.types import Gradients, Spec, default_scale

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Piece(NamedTuple):
    """Rows that attend the same keys, or (causal) the last row all of them and each row before it one key less."""

    batches: slice
    rows: slice
    keys: slice
    causal: bool

    def queries(self, x: Tensor) -> Tensor:
        return x[self.batches, :, self.rows]

    def memory(self, x: Tensor) -> Tensor:
        return x[self.batches, :, self.keys]

    def parts(self) -> list[tuple[slice, bool]]:
        """The keys (relative to the piece) as a rectangle that every row attends and a causal square."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        if not self.causal or rows == 1:
            return [(slice(0, keys), False)]
        square = (slice(keys - rows, keys), True)
        return [square] if rows == keys else [(slice(0, keys - rows), False), square]


def plan(q: Tensor, k: Tensor, v: Tensor, spec: Spec, runs: Runs | None) -> list[Piece] | None:
    """Pieces with one batch range each, or None where the kernel does not fit; rows in no piece are dead."""
    if (
        q.shape[3] != v.shape[3]
        or spec.softcap > 0
        or spec.alibi_slopes is not None
        or spec.dropout_p > 0
    ):
        return None
    B, _, Sq, _ = q.shape
    mask = spec.attn_mask
    if runs is None:
        if mask is not None and not (_mask_fits(mask, q) and _finite(v)):
            return None
        return [Piece(slice(0, B), slice(0, Sq), slice(0, k.shape[2]), False)]
    if mask is not None or runs.lo.shape[1] > 1 or not _finite(v):
        return None
    same = runs.lo.shape[0] == 1 or bool(
        (runs.lo == runs.lo[:1]).all() & (runs.hi == runs.hi[:1]).all()
    )
    pieces = []
    for b in range(1 if same else B):
        found = _piece(
            slice(0, B) if same else slice(b, b + 1), runs.lo[b].flatten(), runs.hi[b].flatten(), Sq
        )
        if found is None:
            return None
        pieces += found
    return pieces


def _piece(batches: slice, lo: Tensor, hi: Tensor, Sq: int) -> list[Piece] | None:
    """The piece that these runs of one batch make, [] if every row is dead, None if they make none."""
    live = (lo < hi).nonzero().flatten()
    if not len(live):
        return []
    first, last = int(live[0]), int(live[-1])
    keys = slice(int(lo[first]), int(hi[last]))
    if len(lo) == 1:
        return [Piece(batches, slice(0, Sq), keys, False)]
    if len(live) != last - first + 1 or bool((lo[first : last + 1] != keys.start).any()):
        return None
    steps = hi[first : last + 1].diff()
    rows = slice(first, last + 1)
    if not bool(steps.any()):
        return [Piece(batches, rows, keys, False)]
    return [Piece(batches, rows, keys, True)] if bool((steps == 1).all()) else None


def _mask_fits(mask: Tensor, q: Tensor) -> bool:
    """Whether the mask is already what the kernel wants, or small enough to convert."""
    one_row = mask.dim() < 2 or mask.shape[-2] == 1
    return one_row or mask.dtype == layout.accumulator(q.dtype)


def _finite(x: Tensor) -> bool:
    """False if x holds a NaN or Inf; may be False too if its sum overflows, which costs time only."""
    return bool(torch.isfinite(x.sum(dtype=layout.accumulator(x.dtype))))


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    dtype = layout.accumulator(q.dtype)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
    mask = mask.detach().to(dtype)
    return mask.view((1,) * (4 - mask.dim()) + mask.shape)


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, pieces: list[Piece]
) -> tuple[Tensor, Tensor]:
    wide = layout.accumulator(q.dtype)
    bias, scale = _bias(spec.attn_mask, q), default_scale(spec, q.shape[3])
    out = lse = None
    whole = len(pieces) == 1 and pieces[0].queries(q).shape == q.shape
    if not whole:
        out = layout.empty_out(q, v).zero_()
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide)
        if spec.sinks is not None:
            lse.copy_(spec.sinks.view(-1, 1))
    for piece in pieces:
        o, m = _attend(
            *(x.to(wide) for x in (piece.queries(q), piece.memory(k), piece.memory(v))),
            bias,
            scale,
            piece,
        )
        if spec.sinks is not None:
            o, m = _with_sinks(o, m, spec.sinks)
        if whole:
            return layout.bshd(o, q.dtype), m.contiguous()
        piece.queries(out).copy_(o)
        piece.queries(lse).copy_(m)
    return out, lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, piece: Piece
) -> tuple[Tensor, Tensor]:
    states = []
    for keys, causal in piece.parts():
        states.append(
            _forward(q, k[:, :, keys], v[:, :, keys], 0.0, causal, attn_mask=bias, scale=scale)
        )
    (out, lse), *rest = states
    if bias is not None:
        lse = lse.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
    for o, m in rest:
        out = torch.lerp(out, o, torch.sigmoid(m - lse).unsqueeze(-1))
        lse = torch.logaddexp(lse, m)
    return out, lse


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    share = torch.exp(lse - total).masked_fill(total == float("-inf"), 0.0)
    return out * share.unsqueeze(-1), total


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: Spec,
    pieces: list[Piece],
) -> Gradients:
    """The kernel needs only the probabilities exp(s - lse) and sum(grad_out * out): with both of the whole row, parts and sinks are right."""
    wide = layout.accumulator(q.dtype)
    bias, scale = _bias(spec.attn_mask, q), default_scale(spec, q.shape[3])
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # a dead row's weights are exp(-inf)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for piece in pieces:
        do, qs, o = (piece.queries(x).to(wide) for x in (grad_out, q, out))
        ks, vs, m = piece.memory(k).to(wide), piece.memory(v).to(wide), piece.queries(lse)
        dq, dk, dv = piece.queries(grads[0]), piece.memory(grads[1]), piece.memory(grads[2])
        for keys, causal in piece.parts():
            parts = _backward(
                do,
                qs,
                ks[:, :, keys],
                vs[:, :, keys],
                o,
                m,
                0.0,
                causal,
                attn_mask=bias,
                scale=scale,
            )
            dq += parts[0]
            dk[:, :, keys] = parts[1]
            dv[:, :, keys] = parts[2]
    return Gradients(*grads)
