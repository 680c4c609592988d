"""The CPU engine that calls aten's flash kernel, on pieces of a call that the kernel supports.

Differences of that kernel from this library's semantics: causal is aligned at the top left; an
empty row's lse is 0.0; an empty input divides by zero and kills the process; scaling after masking
turns -inf into +inf if the scale is negative; 0 * NaN spreads a NaN in k or v to rows that do not
attend it; a row whose scores are all NaN and fewer than a vector counts as empty. Fp16 and bf16 run
in fp32, because the kernel's half-precision code needs matrix units: the backward of
(1, 8, 2048, 64), causal, one thread with AVX2, takes 0.23 s in fp32, 1.4 s in bf16, 2.3 s in fp16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.cpu import layout
from fa_ops.backends.cpu.key_ranges import attended_ranges
from fa_ops.types import Gradients, Spec, default_scale

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


MIN_PIECE_SCORES = 2**16  # fewer scores per batch element do not repay a kernel call each
VECTOR = 16  # elements of the longest SIMD vector that aten is compiled for


class Piece(NamedTuple):
    """Rows that attend the same keys; if causal, each attends one key more than the row before."""

    batches: slice
    rows: slice
    keys: slice
    causal: bool

    def queries(self, x: Tensor) -> Tensor:
        """The piece's rows of (B, Hq, Sq, ...)."""
        return _cut(_cut(x, 0, self.batches), 2, self.rows)

    def memory(self, x: Tensor) -> Tensor:
        """The piece's keys of (B, Hkv, Sk, ...)."""
        return _cut(_cut(x, 0, self.batches), 2, self.keys)

    def parts(self) -> list[tuple[slice, bool]]:
        """(keys, causal) of each kernel call: a rectangle of full rows and a causal square."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        if not self.causal or rows == 1:
            return [(slice(0, keys), False)]
        square = (slice(keys - rows, keys), True)
        return [square] if rows == keys else [(slice(0, keys - rows), False), square]

    def has_few_keys(self) -> bool:
        """Whether a kernel call has fewer keys than a vector."""
        return any(keys.stop - keys.start < VECTOR for keys, _ in self.parts())


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """Narrow x, or return x itself if the part is all of it: a view costs a microsecond."""
    size = part.stop - part.start
    return x if size == x.shape[dim] else x.narrow(dim, part.start, size)


def plan(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[Piece] | None:
    """Pieces with disjoint batches, or None if the kernel cannot run; other rows are empty."""
    if spec.softcap > 0 or spec.dropout_p > 0 or spec.alibi_slopes is not None:
        return None
    if q.shape[3] != v.shape[3] or default_scale(spec, q.shape[3]) <= 0:
        return None
    if spec.kv_lens is None and spec.key_ranges is None:
        pieces = _fixed_pieces(spec, q, k)
    else:
        pieces = _pieces(spec, q, k)
    if pieces is None:
        return None
    masked = [piece for piece in pieces if piece.causal]
    if spec.attn_mask is not None:
        if pieces != [_everything(q, k)] or not _mask_fits(spec.attn_mask, q):
            return None
        masked = pieces
    clean = all(_finite(piece.memory(x)) for piece in masked for x in (k, v))
    short = [piece for piece in pieces if piece.has_few_keys()]
    clean = clean and all(_finite(x) for p in short for x in (p.queries(q), p.memory(k)))
    return pieces if clean else None


def plan_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spec: Spec
) -> list[Piece] | None:
    """The same as `plan`, for the gradients.

    The kernel takes exp(s - lse) as the weight, which is wrong if scores are so large that rounding
    matters, and multiplies weights of 0 by gradients that may be NaN.
    """
    pieces = plan(q, k, v, spec)
    largest = 0.01 / torch.finfo(lse.dtype).eps
    for piece in pieces or ():
        rows = piece.queries(lse)
        longest = layout.longest_row(piece.queries(q)) * layout.longest_row(piece.memory(k))
        highest = rows.masked_fill(rows == -math.inf, 0.0).abs().amax()
        scores = default_scale(spec, q.shape[3]) * longest
        if not (scores.item() <= largest and highest.item() <= largest):
            return None
        if (piece.causal or spec.attn_mask is not None) and not _finite(piece.queries(grad_out)):
            return None
    return pieces


def _everything(q: Tensor, k: Tensor) -> Piece:
    return Piece(slice(0, q.shape[0]), slice(0, q.shape[2]), slice(0, k.shape[2]), False)


def _fixed_pieces(spec: Spec, q: Tensor, k: Tensor) -> list[Piece] | None:
    """Pieces of a call without kv_lens and key_ranges."""
    Sq, Sk, left = q.shape[2], k.shape[2], spec.window_left
    right = 0 if spec.is_causal else spec.window_right
    whole = _everything(q, k)
    if Sq == 1:  # at the last position: nothing is to its right
        return [whole if left < 0 else whole._replace(keys=slice(max(0, Sk - 1 - left), Sk))]
    if 0 <= left < Sk - 1 or 0 < right < Sq - 1:
        return None
    return [whole._replace(rows=slice(max(0, Sq - Sk), Sq), causal=True) if right == 0 else whole]


def _pieces(spec: Spec, q: Tensor, k: Tensor) -> list[Piece] | None:
    (B, Hq, Sq, _), Sk = q.shape, k.shape[2]
    ranges = attended_ranges(spec, Sq, Sk)
    if ranges.lo.shape[1] > 1:
        return None
    alike = all(bool((x == x[:1]).all()) for x in ranges)
    if not alike and Hq * Sq * Sk < MIN_PIECE_SCORES:
        return None
    pieces = []
    for b in range(1 if alike else B):
        batches = slice(0, B) if alike else slice(b, b + 1)
        found = _pieces_of_batch(batches, ranges.lo[b].flatten(), ranges.hi[b].flatten(), Sq)
        if found is None:
            return None
        pieces += found
    return pieces


def _pieces_of_batch(batches: slice, lo: Tensor, hi: Tensor, Sq: int) -> list[Piece] | None:
    """One piece with these key ranges; [] if all rows are empty; None if they do not form one."""
    live = (lo < hi).nonzero()
    if not len(live):
        return []
    rows = slice(int(live[0]), int(live[-1]) + 1)
    keys = slice(int(lo[rows.start]), int(hi[rows.stop - 1]))
    if len(lo) == 1:
        return [Piece(batches, slice(0, Sq), keys, False)]
    if len(live) != rows.stop - rows.start or bool((lo[rows] != keys.start).any()):
        return None
    steps = hi[rows].diff()
    causal = bool(steps.any())
    return None if causal and bool((steps != 1).any()) else [Piece(batches, rows, keys, causal)]


def _mask_fits(mask: Tensor, q: Tensor) -> bool:
    """Whether the mask has the kernel's dtype, or is one row, which is cheap to convert."""
    dtype = layout.accumulator(q.dtype)
    return mask.dtype == dtype or mask.dim() < 2 or mask.shape[-2] == 1


def _finite(x: Tensor) -> bool:
    """Whether x has no NaN or Inf. A sum that overflows gives False too, which only costs time."""
    return math.isfinite(x.sum(dtype=layout.accumulator(x.dtype)).item())


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return layout.four_dims(mask.detach().to(dtype))


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, pieces: list[Piece]
) -> tuple[Tensor, Tensor]:
    """out and lse, given the pieces of `plan`."""
    wide = layout.accumulator(q.dtype)
    if _whole(pieces, q):
        out, lse = _attend(q, pieces[0].memory(k), pieces[0].memory(v), spec, pieces[0])
        return layout.bshd(out, q.dtype), lse.contiguous()
    out = layout.empty_out(q, v).zero_()
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wide)
    if spec.sinks is not None:
        lse.copy_(spec.sinks.view(-1, 1))
    for piece in pieces:
        o, m = _attend(piece.queries(q), piece.memory(k), piece.memory(v), spec, piece)
        piece.queries(out).copy_(o)
        piece.queries(lse).copy_(m)
    return out, lse


def _whole(pieces: list[Piece], q: Tensor) -> bool:
    """Whether one piece covers all rows of all batches."""
    return len(pieces) == 1 and pieces[0].queries(q).shape == q.shape


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, piece: Piece) -> tuple[Tensor, Tensor]:
    """out and lse of one piece's tensors, in fp32 (fp64 for fp64)."""
    wide = layout.accumulator(q.dtype)
    q, k, v = (layout.with_rows(x, wide) for x in (q, k, v))
    bias = _bias(spec.attn_mask, wide)
    options = {"attn_mask": bias, "scale": default_scale(spec, q.shape[3])}
    (out, lse), *rest = (
        _forward(q, _cut(k, 2, keys), _cut(v, 2, keys), 0.0, causal, **options)
        for keys, causal in piece.parts()
    )
    for o, m in rest:
        out = out.lerp_(o, torch.sigmoid(m - lse).unsqueeze(-1))
        lse = torch.logaddexp(lse, m)
    if bias is not None:
        lse = lse.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
    if spec.sinks is not None:
        total = torch.logaddexp(lse, spec.sinks.to(wide).view(-1, 1))
        dead = total == float("-inf")
        out.mul_(torch.exp(lse - total).masked_fill_(dead, 0.0).unsqueeze(-1))
        lse = total
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    spec: Spec, pieces: list[Piece],
) -> Gradients:  # fmt: skip
    """Gradients, summed over the pieces.

    With the whole row's out and lse, the kernel's gradients of any part of its keys are exact.
    """
    wide = layout.accumulator(q.dtype)
    options = {"attn_mask": _bias(spec.attn_mask, wide), "scale": default_scale(spec, q.shape[3])}
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # dead: exp(s - lse) = 0
    if _whole(pieces, q) and pieces[0].parts() == [(slice(0, k.shape[2]), pieces[0].causal)]:
        tensors = (layout.with_rows(x, wide) for x in (grad_out, q, k, v, out))
        grads = list(_backward(*tensors, lse, 0.0, pieces[0].causal, **options))
        return Gradients(*(_like(grads.pop(0), x) for x in (q, k, v)))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for piece in pieces:
        do, qs, o = (layout.with_rows(piece.queries(x), wide) for x in (grad_out, q, out))
        total = torch.zeros_like(qs)
        for keys, causal in piece.parts():
            ks, vs = (layout.with_rows(_cut(piece.memory(x), 2, keys), wide) for x in (k, v))
            grads = _backward(do, qs, ks, vs, o, piece.queries(lse), 0.0, causal, **options)
            total += grads[0]
            _cut(piece.memory(dk), 2, keys).copy_(grads[1])
            _cut(piece.memory(dv), 2, keys).copy_(grads[2])
        piece.queries(dq).copy_(total)
    return Gradients(dq, dk, dv)


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient in x's dtype and in the memory layout of `torch.empty_like(x)`."""
    target = torch.empty_like(x)
    same = grad.dtype == x.dtype and grad.stride() == target.stride()
    return grad if same else target.copy_(grad)
