"""The forward kernel: one program per block of query rows of a head, over the keys they attend."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.alignment import aligned, narrowed, needs_copies, scaled
from fa_ops.backends.triton.arguments import Class, Layout, arguments, padded, precision
from fa_ops.backends.triton.configs import Tile, forward_tile
from fa_ops.backends.triton.decode import Memory, decode
from fa_ops.backends.triton.launch import Launch, address, architecture, bind, empty
from fa_ops.backends.triton.primitives import (
    LN2,
    LOG2E,
    attended,
    dropout_keep,
    dropout_rows,
    find_sequence,
    key_bounds,
    load_ranges,
    load_rows,
    load_tile,
    scores,
    store_tile,
)
from fa_ops.types import Cache, Packing, Spec, is_decoding


@triton.jit(do_not_specialize=["Sq", "Sk", "batch", "threshold", "window_left", "window_right"])
def forward_kernel(
    q, k, v, out, lse,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q (B, Hq, Sq, D), k and v (B, Hq / group, Sk, ...) by strides; out (B, Sq, Hq, Dv), lse.

    With cu_seqlens, q is (Sq, Hq, D), k (Sk, Hkv, D), out (Sq, Hq, Dv), lse (Hq, Sq), Sq and Sk are
    numbers of tokens, and the grid is Hq * (Sq // BLOCK_M + batch + 2) instead of
    batch * Hq * cdiv(Sq, BLOCK_M). scale, cap, slopes and masks as in `primitives.scores`, except
    that slopes and sinks come as the caller gave them. FOLD: scale > 0, and products become scores
    by nothing but it.

    Blocks across an edge share the loop with the others, as a branch: after a loop of their own,
    ptxas takes the accumulator for one that is in flight and serialises every product (C7515).
    """
    pid = tl.program_id(0)
    if cu_seqlens_q is not None:
        programs = Sq // BLOCK_M + batch + 2
        h = pid // programs
        b, block, q_start, length, k_start, keys = find_sequence(
            cu_seqlens_q, cu_seqlens_k, batch, Sq, Sk, pid % programs, BLOCK_M
        )
        lse += h.to(tl.int64) * Sq + q_start
        out += q_start.to(tl.int64) * Hq * Dv
        q += q_start * q_stride_s.to(tl.int64)
        inside = (b >= 0) & (b < batch)
        k += k_start * k_stride_s.to(tl.int64)
        v += k_start * v_stride_s.to(tl.int64)
        Sq, Sk = length, keys
        blocks = tl.cdiv(Sq, BLOCK_M)
        if block >= blocks:
            return
    else:
        blocks = tl.cdiv(Sq, BLOCK_M)
        block = pid % blocks
        h = pid // blocks % Hq
        b = pid // blocks // Hq
        lse += (b * Hq + h).to(tl.int64) * Sq
        out += b.to(tl.int64) * Sq * Hq * Dv
        q += b * q_stride_b
        k += b * k_stride_b
        v += b * v_stride_b
        inside = True
    if window_right is not None:
        block = blocks - 1 - block  # the longest rows of a head first
    q += h * q_stride_h
    k += h // group * k_stride_h
    v += h // group * v_stride_h
    out += h * Dv
    m0 = block * BLOCK_M
    rows_m = m0 + tl.arange(0, BLOCK_M)
    i = rows_m[:, None]

    limit = Sk
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b, mask=inside, other=0), 0), Sk)
    shift = limit - Sq
    slope, first, last, rows = None, None, None, None
    low = None
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_stride_b + h, mask=inside, other=0.0) * LOG2E
    if mask is not None:
        mask += b * mask_stride_b + h * mask_stride_h
    if ranges is not None:
        first, last = load_ranges(
            ranges + b * ranges_stride_b + h * ranges_stride_h, ranges_stride_q, i, Sq
        )
        low = tl.min(tl.where(first < last, first, 2147483647))
    if seed is not None:
        rows = dropout_rows(seed, b * Hq + h, i)
    lo, full_lo, full_hi, hi = key_bounds(
        m0, Sq, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
    )

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # a key of weight 1 whose score is the sink, and which has no value
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        m = tl.where(inside, tl.zeros_like(m) + sink, m)
        den = tl.where(m == float("-inf"), den, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    qt = load_tile(q, m0, q_stride_s, 0, Sq, D, BLOCK_M, BLOCK_D, True, D == BLOCK_D)
    k += tl.cast(lo, tl.int64) * k_stride_s
    v += tl.cast(lo, tl.int64) * v_stride_s
    k_step = tl.cast(BLOCK_N * k_stride_s, tl.int64)
    v_step = tl.cast(BLOCK_N * v_stride_s, tl.int64)
    for n0 in range(lo, hi, BLOCK_N):
        n0 = tl.multiple_of(n0, BLOCK_N)
        j = n0 + tl.arange(0, BLOCK_N)[None, :]
        begin = low
        if low is not None:
            begin = low - n0
        kt = load_rows(k, k_stride_s, begin, hi - n0, D, BLOCK_N, BLOCK_D, True, D == BLOCK_D)
        s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        if not FOLD:
            s, _ = scores(
                s, i, j, Sq, shift, limit, scale, cap, slope, mask, mask_stride_q, mask_stride_k,
                None, None, None, None, mask is not None,
            )  # fmt: skip
        if (n0 < full_lo) | (n0 >= full_hi):
            keep = attended(i, j, shift, limit, window_left, window_right, first, last)
            s = tl.where(keep, s, float("-inf"))
        # with FOLD the scale is positive and comes after the maximum: one FMA per element
        fold = scale if FOLD else 1.0
        m_new = tl.maximum(m, tl.max(s, 1) * fold)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * fold - base[:, None])
        alpha = tl.exp2(m - base)
        den = den * alpha + tl.sum(p, 1)
        m = m_new
        if rows is not None:
            p = tl.where(dropout_keep(rows, j, threshold), p, 0.0)
        acc = acc * alpha[:, None]
        vt = load_rows(v, v_stride_s, begin, hi - n0, Dv, BLOCK_N, BLOCK_DV, True, Dv == BLOCK_DV)
        acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision=PRECISION)
        k += k_step
        v += v_step

    tl.store(lse + rows_m, (m + tl.log2(den)) * LN2, mask=rows_m < Sq)
    weight = tl.where(den == 0.0, 0.0, 1.0 / den)
    if seed is not None:
        weight *= keep_scale
    store_tile(out, m0, Hq * Dv, Sq, Dv, acc * weight[:, None], Dv == BLOCK_DV)


_launches: dict[tuple, tuple[Launch, int]] = {}


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Dense attention: out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    if is_decoding(Sq, Sk, spec):
        return decode(q, Memory.of(k, v, Cache()), spec)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    layout = Layout.of(q, k, v, strides)
    if needs_copies(layout, q.dtype, D, Dv):
        out, lse = forward(*aligned(q, k, v), scaled(spec, D))
        return narrowed(out, Dv), lse
    row = Hq * Dv
    device = q.get_device()
    out = empty((B, Hq, Sq, Dv), (Sq * row, Dv, row, 1), q.dtype, device)
    lse = empty((B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device)
    values, kind = arguments(spec, B, Hq, Sq, Sk, D)
    rest = (*strides, B, Hq, Hq // Hkv, Sq, Sk, *values, None, None)
    launch, block_m = _find((q, k, v, out, lse), rest, layout, kind, D, Dv, False)
    args = (address(q), address(k), address(v), address(out), address(lse), *rest)
    launch((-(-Sq // block_m) * Hq * B, 1, 1), args)
    return out, lse


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Packed attention: out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    Tq, Hq, D = q.shape
    Tk, Hkv, Dv = v.shape
    (qs, qh, _), (ks, kh, _), (vs, vh, _) = q.stride(), k.stride(), v.stride()
    strides = (0, qh, qs, 0, kh, ks, 0, vh, vs)
    layout = Layout.of(q, k, v, strides)
    if needs_copies(layout, q.dtype, D, Dv):
        out, lse = varlen_forward(*aligned(q, k, v), packing, scaled(spec, D))
        return narrowed(out, Dv), lse
    cu_q, cu_k = packing.cu_seqlens_q.contiguous(), packing.cu_seqlens_k.contiguous()
    B = cu_q.numel() - 1
    device = q.get_device()
    out = empty((Tq, Hq, Dv), (Hq * Dv, Dv, 1), q.dtype, device)
    lse = empty((Hq, Tq), (Tq, 1), torch.float32, device)
    values, kind = arguments(spec, B, Hq, Tq, Tk, D)
    rest = (*strides, B, Hq, Hq // Hkv, Tq, Tk, *values, cu_q, cu_k)
    launch, block_m = _find((q, k, v, out, lse), rest, layout, kind, D, Dv, True)
    args = (address(q), address(k), address(v), address(out), address(lse), *rest)
    launch(((Tq // block_m + B + 2) * Hq, 1, 1), args)
    return out, lse


def _find(
    tensors: tuple, rest: tuple, layout: Layout, kind: Class, D: int, Dv: int, packed: bool
) -> tuple[Launch, int]:
    """The launch for these arguments and its block of query rows, compiled if there is none yet."""
    q = tensors[0]
    dtype = q.dtype
    key = (dtype, D, Dv, packed, layout, kind, precision(dtype), q.get_device())
    found = _launches.get(key)
    if found is None:
        tile = forward_tile(architecture(q.device), dtype, max(D, Dv), kind)
        launch = bind(
            forward_kernel, (*tensors, *rest), constants(tile, D, Dv, kind, dtype), tile.options(),
            device=q.device, divisors=layout.divisors("qkv", dtype) | kind.divisors(),
            fixed=kind.fixed(), wide=layout.wide,
        )  # fmt: skip
        found = _launches[key] = launch, tile.block_m
    return found


def constants(tile: Tile, D: int, Dv: int, kind: Class, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel's constexpr parameters."""
    return {
        "D": D,
        "Dv": Dv,
        "BLOCK_D": padded(D),
        "BLOCK_DV": padded(Dv),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "FOLD": kind.fold,
        "PRECISION": precision(dtype),
    }
