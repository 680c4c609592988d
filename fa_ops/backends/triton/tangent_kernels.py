"""Device functions of tangents: of out and lse, and of the gradients.

With natural scores z and a dot for a tangent: mu = sum p z. is the tangent of lse,
sum p (z. - mu) v + sum p v. that of out, and dz (z. - mu) + p (a. - delta.) that of the score
gradients dz = p (a - delta), where a = dO . v. Both products of a tangent of scores, q. k and
q k., are added to one accumulator. Tangents are taken relative to `mean_tangent`, as keys of real
models have a mean, whose part would cancel only after it was rounded.

The tangents of gradients are computed twice from the scores, once by query and once by key, as the
gradients are (`backward_kernels`): no atomics but for a mask's, memory linear in the length. A
tangent that is None takes its products with it. A NaN of a masked key may reach every row of its
block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_ops.backends.triton.backward_kernels import (
    load_rows,
    locate_keys,
    locate_queries,
    product_scale,
    range_bounds,
    row_capacity,
    row_offset,
)
from fa_ops.backends.triton.primitives import (
    LARGEST,
    LOG2E,
    dropout_keep,
    dropout_rows,
    first_row,
    key_bounds,
    load_ranges,
    row_bounds,
    scores,
    store_tile,
    tanh,
)


@triton.jit
def of_head(x, b, h, stride_b, stride_h, start, stride_s):
    """A pointer to the rows of a batch element, or of a packed sequence, and a head."""
    return x + b * stride_b + h * stride_h + start * stride_s.to(tl.int64)


@triton.jit
def mean_tangent(
    q, q_t, k, k_t, start, end, stride, scale, cap, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For each row the tangent of its score with the mean of the keys from `start` on."""
    count = tl.maximum(tl.minimum(end - start, BLOCK_N), 1).to(tl.float32)
    keys = load_rows(k, start, stride, 0, end, D, BLOCK_N, BLOCK_D, True).to(tl.float32)
    mean = tl.sum(keys, 0) / count
    total = tl.zeros([q.shape[0]], tl.float32)
    if q_t is not None:
        total += tl.sum(q_t.to(tl.float32) * mean[None, :], 1)
    if k_t is not None:
        keys_t = load_rows(k_t, start, stride, 0, end, D, BLOCK_N, BLOCK_D, True)
        mean_t = tl.sum(keys_t.to(tl.float32), 0) / count
        total += tl.sum(q.to(tl.float32) * mean_t[None, :], 1)
    total *= product_scale(scale, cap)
    if cap is not None:
        t = tanh(tl.sum(q.to(tl.float32) * mean[None, :], 1) * scale, False)
        total *= 1.0 - t * t
    return total


@triton.jit
def weights_and_tangents(
    qk, raw, lse, i, j, Sq, shift, limit, scale, cap, slope, mask, mask_stride_q, mask_stride_k,
    mask_t, mask_t_stride_q, mask_t_stride_k, ranges, ranges_stride_q, window_left, window_right,
    EXTREME: tl.constexpr,
):  # fmt: skip
    """(p, z_t, t): weights, natural tangents of scores, and the softcap's tanh, of a tile or of its
    transpose; `raw` are the tangents of products.
    """
    s, t = scores(
        qk, i, j, Sq, shift, limit, scale, cap, slope, mask, mask_stride_q, mask_stride_k,
        None, None, None, None, mask is not None, EXTREME, False, LOG2E,
    )  # fmt: skip
    p = tl.exp2(s - lse)
    keep = (j < limit) & (i < Sq)
    if window_right is not None:
        keep = keep & (j <= i + (shift + window_right))
    if window_left is not None:
        keep = keep & (j >= i + (shift - window_left))
    if ranges is not None:
        first, last = load_ranges(ranges, ranges_stride_q, i, Sq)
        keep = keep & (j >= first) & (j < last)
    p = tl.where(keep, p, 0.0)
    z_t = raw * product_scale(scale, cap)
    if cap is not None:
        z_t *= 1.0 - t * t
    if mask_t is not None:
        at = mask_t + tl.cast(i, tl.int64) * mask_t_stride_q
        at += tl.cast(j, tl.int64) * mask_t_stride_k
        inside = (i < Sq) & (j < limit)
        z_t += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        z_t = tl.where(p > 0.0, z_t, 0.0)
    return p, z_t, t


@triton.jit
def tangents_of_products(a, b, a_t, b_t, shape: tl.constexpr, PRECISION: tl.constexpr):
    """a. b^T + a b.^T, in one accumulator; None is 0."""
    if a_t is not None:
        x = tl.dot(a_t, tl.trans(b), input_precision=PRECISION)
        if b_t is not None:
            x = tl.dot(a, tl.trans(b_t), x, input_precision=PRECISION)
        return x
    elif b_t is not None:
        return tl.dot(a, tl.trans(b_t), input_precision=PRECISION)
    else:
        return tl.zeros(shape, tl.float32)


@triton.jit(do_not_specialize=["Sq", "Sk", "batch", "threshold", "window_left", "window_right"])
def tangent_kernel(
    q, k, v, q_t, k_t, v_t, out, grad_out, lse, sinks_t, of_out, of_lse, grad_dot,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_s,
    of_out_stride_b: tl.int64, of_out_stride_h: tl.int64, of_out_stride_s,
    mask_t, mask_t_stride_b: tl.int64, mask_t_stride_h: tl.int64, mask_t_stride_q: tl.int64,
    mask_t_stride_k: tl.int64,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tangents of out and lse of one block of rows; with grad_out the sum over features of its
    product with the tangent of out before this is rounded.

    Tensors and their tangents have equal strides, as out and grad_out have. Grid as in
    `query_grad_kernel`.
    """
    PACKED: tl.constexpr = cu_seqlens_q is not None
    b, h, block, q_start, rows, k_start, keys = locate_queries(
        tl.program_id(0), batch, Hq, Sq, Sk, cu_seqlens_q, cu_seqlens_k, 1, BLOCK_M
    )
    if PACKED:  # noqa: SIM102  (a constexpr and a runtime condition)
        if block >= tl.cdiv(rows, BLOCK_M):
            return
    m0 = first_row(block, rows, window_right, BLOCK_M)
    inside = (b >= 0) & (b < batch)
    b_at = 0 if PACKED else b
    at = h.to(tl.int64) * Sq + q_start if PACKED else (b * Hq + h).to(tl.int64) * Sq
    hk = h // group
    q = of_head(q, b_at, h, q_stride_b, q_stride_h, q_start, q_stride_s)
    if q_t is not None:
        q_t = of_head(q_t, b_at, h, q_stride_b, q_stride_h, q_start, q_stride_s)
    k = of_head(k, b_at, hk, k_stride_b, k_stride_h, k_start, k_stride_s)
    if k_t is not None:
        k_t = of_head(k_t, b_at, hk, k_stride_b, k_stride_h, k_start, k_stride_s)
    v = of_head(v, b_at, hk, v_stride_b, v_stride_h, k_start, v_stride_s)
    if v_t is not None:
        v_t = of_head(v_t, b_at, hk, v_stride_b, v_stride_h, k_start, v_stride_s)
    out = of_head(out, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s)
    if grad_out is not None:
        grad_out = of_head(grad_out, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s)
    of_out = of_head(of_out, b_at, h, of_out_stride_b, of_out_stride_h, q_start, of_out_stride_s)
    limit = keys
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b, mask=inside, other=0), 0), keys)
    shift = limit - rows
    slope, first, last = None, None, None
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_stride_b + h, mask=inside, other=0.0) * LOG2E
    if mask is not None:
        mask += b * mask_stride_b + h * mask_stride_h
    if mask_t is not None:
        mask_t += b * mask_t_stride_b + h * mask_t_stride_h
    rows_m = m0 + tl.arange(0, BLOCK_M)
    if ranges is not None:
        ranges += b * ranges_stride_b + h * ranges_stride_h
        first, last = load_ranges(ranges, ranges_stride_q, rows_m[:, None], rows)
    lo, _, _, hi = key_bounds(
        m0, rows, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
    )
    raw_lse = tl.load(lse + at + rows_m, mask=rows_m < rows, other=float("-inf")) * LOG2E
    dead = raw_lse == float("-inf")
    m = tl.where(tl.abs(raw_lse) >= 16777216.0, float("inf"), raw_lse)
    qt = load_rows(q, m0, q_stride_s, 0, rows, D, BLOCK_M, BLOCK_D, True)
    qt_t = None
    if q_t is not None:
        qt_t = load_rows(q_t, m0, q_stride_s, 0, rows, D, BLOCK_M, BLOCK_D, True)
    mean = mean_tangent(qt, qt_t, k, k_t, lo, limit, k_stride_s, scale, cap, D, BLOCK_N, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    n = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(lo, hi, BLOCK_N):
        n0 = tl.multiple_of(n0, BLOCK_N)
        j = n0 + tl.arange(0, BLOCK_N)[None, :]
        kt = load_rows(k, n0, k_stride_s, 0, limit, D, BLOCK_N, BLOCK_D, True)
        kt_t = None
        if k_t is not None:
            kt_t = load_rows(k_t, n0, k_stride_s, 0, limit, D, BLOCK_N, BLOCK_D, True)
        qk = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        raw = tangents_of_products(qt, kt, qt_t, kt_t, [BLOCK_M, BLOCK_N], PRECISION)
        p, z_t, t = weights_and_tangents(
            qk, raw, m[:, None], rows_m[:, None], j, rows, shift, limit, scale, cap, slope, mask,
            mask_stride_q, mask_stride_k, mask_t, mask_t_stride_q, mask_t_stride_k, ranges,
            ranges_stride_q, window_left, window_right, EXTREME,
        )  # fmt: skip
        w = p * (z_t - mean[:, None])
        n += tl.sum(w, 1)
        if seed is not None:
            kept = dropout_keep(dropout_rows(seed, b * Hq + h, rows_m[:, None], rows), j, threshold)
            w, p = tl.where(kept, w, 0.0), tl.where(kept, p, 0.0)
        vt = load_rows(v, n0, v_stride_s, 0, limit, Dv, BLOCK_N, BLOCK_DV, True)
        acc = tl.dot(w.to(vt.dtype), vt, acc, input_precision=PRECISION)
        if v_t is not None:
            vt_t = load_rows(v_t, n0, v_stride_s, 0, limit, Dv, BLOCK_N, BLOCK_DV, True)
            acc = tl.dot(p.to(vt.dtype), vt_t, acc, input_precision=PRECISION)
    if seed is not None:
        acc *= keep_scale
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        share = tl.exp2(tl.minimum(sink, LARGEST) - tl.minimum(raw_lse, LARGEST))
        share = tl.where(dead, 0.0, share)
        difference = -mean
        if sinks_t is not None:
            difference += tl.load(sinks_t + h).to(tl.float32)
        n += share * difference
    o = load_rows(out, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True).to(tl.float32)
    acc -= n[:, None] * o
    store_tile(of_out, m0, of_out_stride_s, rows, Dv, acc, Dv == BLOCK_DV)
    tl.store(of_lse + at + rows_m, tl.where(dead, 0.0, n + mean), mask=rows_m < rows)
    if grad_out is not None:
        do = load_rows(grad_out, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True)
        tl.store(grad_dot + at + rows_m, tl.sum(acc * do.to(tl.float32), 1), mask=rows_m < rows)


@triton.jit
def second_gradients(
    p, z_t, t, raw, a, a_t, mu, delta, of_delta, keep, keep_scale, scale, cap, seed
):
    """(w, w_t, ds_t, dx, dx_t): weights of values and their tangents without `keep_scale`, tangents
    of score gradients, and gradients of products and their tangents without `product_scale`.
    """
    if seed is not None:
        a, a_t = tl.where(keep, a * keep_scale, 0.0), tl.where(keep, a_t * keep_scale, 0.0)
    moved_p = p * (z_t - mu)
    slope = a - delta
    ds = p * slope
    ds_t = moved_p * slope + p * (a_t - of_delta)
    w, w_t = p, moved_p
    if seed is not None:
        w, w_t = tl.where(keep, p, 0.0), tl.where(keep, moved_p, 0.0)
    dx, dx_t = ds, ds_t
    if cap is not None:
        c = 1.0 - t * t
        # -2 t / softcap times the tangent of the scaled product, of which `scale` is a part
        dx, dx_t = ds * c, ds_t * c - 2.0 * t * c * (scale * raw) * ds
    return w, w_t, ds_t, dx, dx_t


@triton.jit(do_not_specialize=["Sq", "Sk", "batch", "threshold", "window_left", "window_right"])
def second_query_kernel(
    q, k, v, q_t, k_t, v_t, grad_out, grad_out_t, out, out_t, lse, lse_t, grad_lse, grad_lse_t,
    grad_dot, dq, dmask, row_lse, row_mu, row_delta, row_of_delta,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_s,
    dq_stride_b: tl.int64, dq_stride_h: tl.int64, dq_stride_s,
    dmask_stride_b: tl.int64, dmask_stride_h: tl.int64, dmask_stride_q: tl.int64,
    dmask_stride_k: tl.int64,
    mask_t, mask_t_stride_b: tl.int64, mask_t_stride_h: tl.int64, mask_t_stride_q: tl.int64,
    mask_t_stride_k: tl.int64,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tangent of dq of one block of rows, that of the gradient of a mask, and the statistics of
    rows that `second_key_kernel` needs.
    """
    PACKED: tl.constexpr = cu_seqlens_q is not None
    b, h, block, q_start, rows, k_start, keys = locate_queries(
        tl.program_id(0), batch, Hq, Sq, Sk, cu_seqlens_q, cu_seqlens_k, 1, BLOCK_M
    )
    if PACKED:  # noqa: SIM102  (a constexpr and a runtime condition)
        if block >= tl.cdiv(rows, BLOCK_M):
            return
    m0 = first_row(block, rows, window_right, BLOCK_M)
    inside = (b >= 0) & (b < batch)
    b_at = 0 if PACKED else b
    at = h.to(tl.int64) * Sq + q_start if PACKED else (b * Hq + h).to(tl.int64) * Sq
    row_stride = row_capacity(Sq, batch, PACKED)
    row_at = h * row_stride + row_offset(q_start, b) if PACKED else (b * Hq + h) * row_stride
    hk = h // group
    q = of_head(q, b_at, h, q_stride_b, q_stride_h, q_start, q_stride_s)
    if q_t is not None:
        q_t = of_head(q_t, b_at, h, q_stride_b, q_stride_h, q_start, q_stride_s)
    k = of_head(k, b_at, hk, k_stride_b, k_stride_h, k_start, k_stride_s)
    if k_t is not None:
        k_t = of_head(k_t, b_at, hk, k_stride_b, k_stride_h, k_start, k_stride_s)
    v = of_head(v, b_at, hk, v_stride_b, v_stride_h, k_start, v_stride_s)
    if v_t is not None:
        v_t = of_head(v_t, b_at, hk, v_stride_b, v_stride_h, k_start, v_stride_s)
    out = of_head(out, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s)
    if out_t is not None:
        out_t = of_head(out_t, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s)
    if grad_out is not None:
        grad_out = of_head(grad_out, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s)
    if grad_out_t is not None:
        grad_out_t = of_head(grad_out_t, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s)
    dq = of_head(dq, b_at, h, dq_stride_b, dq_stride_h, q_start, dq_stride_s)
    limit = keys
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b, mask=inside, other=0), 0), keys)
    shift = limit - rows
    slope, first, last = None, None, None
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_stride_b + h, mask=inside, other=0.0) * LOG2E
    if mask is not None:
        mask += b * mask_stride_b + h * mask_stride_h
    if mask_t is not None:
        mask_t += b * mask_t_stride_b + h * mask_t_stride_h
    if dmask is not None:
        dmask += b * dmask_stride_b + h * dmask_stride_h
    rows_m = m0 + tl.arange(0, BLOCK_M)
    if ranges is not None:
        ranges += b * ranges_stride_b + h * ranges_stride_h
        first, last = load_ranges(ranges, ranges_stride_q, rows_m[:, None], rows)
    lo, _, _, hi = key_bounds(
        m0, rows, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
    )
    there = rows_m < rows
    m = tl.load(lse + at + rows_m, mask=there, other=float("-inf")) * LOG2E
    dead = m == float("-inf")
    mu = tl.load(lse_t + at + rows_m, mask=there, other=0.0)
    do = load_rows(grad_out, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True)
    do_t = None
    if grad_out_t is not None:
        do_t = load_rows(grad_out_t, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True)
    o = load_rows(out, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True).to(tl.float32)
    delta = tl.sum(o * do.to(tl.float32), 1)
    if grad_dot is not None:
        of_delta = tl.load(grad_dot + at + rows_m, mask=there, other=0.0)
    else:
        o_t = load_rows(out_t, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True)
        of_delta = tl.sum(o_t.to(tl.float32) * do.to(tl.float32), 1)
    if grad_out_t is not None:
        of_delta += tl.sum(o * do_t.to(tl.float32), 1)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + at + rows_m, mask=there, other=0.0)
    if grad_lse_t is not None:
        of_delta -= tl.load(grad_lse_t + at + rows_m, mask=there, other=0.0)
    delta, of_delta = tl.where(dead, 0.0, delta), tl.where(dead, 0.0, of_delta)
    m = tl.where(tl.abs(m) >= 16777216.0, float("inf"), m)
    tl.store(row_lse + row_at + rows_m, m)
    tl.store(row_mu + row_at + rows_m, mu)
    tl.store(row_delta + row_at + rows_m, delta)
    tl.store(row_of_delta + row_at + rows_m, of_delta)
    qt = load_rows(q, m0, q_stride_s, 0, rows, D, BLOCK_M, BLOCK_D, True)
    qt_t = None
    if q_t is not None:
        qt_t = load_rows(q_t, m0, q_stride_s, 0, rows, D, BLOCK_M, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n0 in tl.range(lo, hi, BLOCK_N):
        n0 = tl.multiple_of(n0, BLOCK_N)
        j = n0 + tl.arange(0, BLOCK_N)[None, :]
        kt = load_rows(k, n0, k_stride_s, 0, limit, D, BLOCK_N, BLOCK_D, True)
        kt_t = None
        if k_t is not None:
            kt_t = load_rows(k_t, n0, k_stride_s, 0, limit, D, BLOCK_N, BLOCK_D, True)
        qk = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        raw = tangents_of_products(qt, kt, qt_t, kt_t, [BLOCK_M, BLOCK_N], PRECISION)
        p, z_t, t = weights_and_tangents(
            qk, raw, m[:, None], rows_m[:, None], j, rows, shift, limit, scale, cap, slope, mask,
            mask_stride_q, mask_stride_k, mask_t, mask_t_stride_q, mask_t_stride_k, ranges,
            ranges_stride_q, window_left, window_right, EXTREME,
        )  # fmt: skip
        kept = None
        if seed is not None:
            kept = dropout_keep(dropout_rows(seed, b * Hq + h, rows_m[:, None], rows), j, threshold)
        vt = load_rows(v, n0, v_stride_s, 0, limit, Dv, BLOCK_N, BLOCK_DV, True)
        vt_t = None
        if v_t is not None:
            vt_t = load_rows(v_t, n0, v_stride_s, 0, limit, Dv, BLOCK_N, BLOCK_DV, True)
        a = tl.dot(do, tl.trans(vt), input_precision=PRECISION)
        a_t = tangents_of_products(do, vt, do_t, vt_t, [BLOCK_M, BLOCK_N], PRECISION)
        w, w_t, ds_t, dx, dx_t = second_gradients(
            p, z_t, t, raw, a, a_t, mu[:, None], delta[:, None], of_delta[:, None], kept,
            keep_scale, scale, cap, seed,
        )  # fmt: skip
        if dmask is not None:
            place = dmask + rows_m[:, None].to(tl.int64) * dmask_stride_q
            place += j.to(tl.int64) * dmask_stride_k
            tl.atomic_add(place, ds_t, mask=there[:, None] & (j < limit), sem="relaxed")
        acc = tl.dot(dx_t.to(kt.dtype), kt, acc, input_precision=PRECISION)
        if k_t is not None:
            acc = tl.dot(dx.to(kt.dtype), kt_t, acc, input_precision=PRECISION)
    store_tile(dq, m0, dq_stride_s, rows, D, acc * product_scale(scale, cap), D == BLOCK_D)


@triton.jit(do_not_specialize=["Sq", "Sk", "batch", "threshold", "window_left", "window_right"])
def second_key_kernel(
    q, k, v, q_t, k_t, v_t, grad_out, grad_out_t, row_lse, row_mu, row_delta, row_of_delta, dk, dv,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_s,
    dk_stride_b: tl.int64, dk_stride_h: tl.int64, dk_stride_s,
    dv_stride_b: tl.int64, dv_stride_h: tl.int64, dv_stride_s,
    mask_t, mask_t_stride_b: tl.int64, mask_t_stride_h: tl.int64, mask_t_stride_q: tl.int64,
    mask_t_stride_k: tl.int64,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tangents of dk and dv of one block of keys, summed over the query heads that share them.

    Tiles are transposed, keys by queries. Grid as in `key_value_grad_kernel`.
    """
    PACKED: tl.constexpr = cu_seqlens_q is not None
    b, hk, n0, q_start, rows, k_start, keys = locate_keys(
        tl.program_id(0), batch, Hq // group, Sq, Sk, cu_seqlens_q, cu_seqlens_k, 1, BLOCK_N
    )
    if PACKED:  # noqa: SIM102  (a constexpr and a runtime condition)
        if n0 >= keys:
            return
    inside = (b >= 0) & (b < batch)
    b_at = 0 if PACKED else b
    row_stride = row_capacity(Sq, batch, PACKED)
    row_at = row_offset(q_start, b) if PACKED else b * Hq * row_stride
    k = of_head(k, b_at, hk, k_stride_b, k_stride_h, k_start, k_stride_s)
    if k_t is not None:
        k_t = of_head(k_t, b_at, hk, k_stride_b, k_stride_h, k_start, k_stride_s)
    v = of_head(v, b_at, hk, v_stride_b, v_stride_h, k_start, v_stride_s)
    if v_t is not None:
        v_t = of_head(v_t, b_at, hk, v_stride_b, v_stride_h, k_start, v_stride_s)
    dk = of_head(dk, b_at, hk, dk_stride_b, dk_stride_h, k_start, dk_stride_s)
    dv = of_head(dv, b_at, hk, dv_stride_b, dv_stride_h, k_start, dv_stride_s)
    limit = keys
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b, mask=inside, other=0), 0), keys)
    shift = limit - rows
    lo, _, _, hi = row_bounds(n0, rows, shift, limit, window_left, window_right, BLOCK_M, BLOCK_N)
    j = n0 + tl.arange(0, BLOCK_N)[:, None]
    kt = load_rows(k, n0, k_stride_s, 0, limit, D, BLOCK_N, BLOCK_D, True)
    kt_t = None
    if k_t is not None:
        kt_t = load_rows(k_t, n0, k_stride_s, 0, limit, D, BLOCK_N, BLOCK_D, True)
    vt = load_rows(v, n0, v_stride_s, 0, limit, Dv, BLOCK_N, BLOCK_DV, True)
    vt_t = None
    if v_t is not None:
        vt_t = load_rows(v_t, n0, v_stride_s, 0, limit, Dv, BLOCK_N, BLOCK_DV, True)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for h in range(hk * group, hk * group + group):
        q_head = of_head(q, b_at, h, q_stride_b, q_stride_h, q_start, q_stride_s)
        q_t_head, do_t_head = None, None
        if q_t is not None:
            q_t_head = of_head(q_t, b_at, h, q_stride_b, q_stride_h, q_start, q_stride_s)
        do_head = of_head(grad_out, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s)
        if grad_out_t is not None:
            do_t_head = of_head(
                grad_out_t, b_at, h, out_stride_b, out_stride_h, q_start, out_stride_s
            )
        stats = row_at + h * row_stride
        slope, mask_head, mask_t_head, ranges_head = None, None, None, None
        begin, end = lo, hi
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_stride_b + h, mask=inside, other=0.0) * LOG2E
        if mask is not None:
            mask_head = mask + b * mask_stride_b + h * mask_stride_h
        if mask_t is not None:
            mask_t_head = mask_t + b * mask_t_stride_b + h * mask_t_stride_h
        if ranges is not None:
            ranges_head = ranges + b * ranges_stride_b + h * ranges_stride_h
            begin, end = range_bounds(
                ranges_head, ranges_stride_q, lo, hi, n0, tl.minimum(n0 + BLOCK_N, limit), BLOCK_M
            )
        for m0 in tl.range(begin, end, BLOCK_M):
            m0 = tl.multiple_of(m0, BLOCK_M)
            rows_m = m0 + tl.arange(0, BLOCK_M)
            i = rows_m[None, :]
            there = rows_m < rows
            m = tl.load(row_lse + stats + rows_m, mask=there, other=float("inf"))
            mu = tl.load(row_mu + stats + rows_m, mask=there, other=0.0)
            delta = tl.load(row_delta + stats + rows_m, mask=there, other=0.0)
            of_delta = tl.load(row_of_delta + stats + rows_m, mask=there, other=0.0)
            qt = load_rows(q_head, m0, q_stride_s, 0, rows, D, BLOCK_M, BLOCK_D, True)
            qt_t = None
            if q_t_head is not None:
                qt_t = load_rows(q_t_head, m0, q_stride_s, 0, rows, D, BLOCK_M, BLOCK_D, True)
            qk = tl.dot(kt, tl.trans(qt), input_precision=PRECISION)
            raw = tangents_of_products(kt, qt, kt_t, qt_t, [BLOCK_N, BLOCK_M], PRECISION)
            p, z_t, t = weights_and_tangents(
                qk, raw, m[None, :], i, j, rows, shift, limit, scale, cap, slope, mask_head,
                mask_stride_q, mask_stride_k, mask_t_head, mask_t_stride_q, mask_t_stride_k,
                ranges_head, ranges_stride_q, window_left, window_right, EXTREME,
            )  # fmt: skip
            kept = None
            if seed is not None:
                kept = dropout_keep(dropout_rows(seed, b * Hq + h, i, rows), j, threshold)
            do = load_rows(do_head, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True)
            do_t = None
            if do_t_head is not None:
                do_t = load_rows(do_t_head, m0, out_stride_s, 0, rows, Dv, BLOCK_M, BLOCK_DV, True)
            a = tl.dot(vt, tl.trans(do), input_precision=PRECISION)
            a_t = tangents_of_products(vt, do, vt_t, do_t, [BLOCK_N, BLOCK_M], PRECISION)
            w, w_t, ds_t, dx, dx_t = second_gradients(
                p, z_t, t, raw, a, a_t, mu[None, :], delta[None, :], of_delta[None, :], kept,
                keep_scale, scale, cap, seed,
            )  # fmt: skip
            dv_acc = tl.dot(w_t.to(do.dtype), do, dv_acc, input_precision=PRECISION)
            if grad_out_t is not None:
                dv_acc = tl.dot(w.to(do.dtype), do_t, dv_acc, input_precision=PRECISION)
            dk_acc = tl.dot(dx_t.to(qt.dtype), qt, dk_acc, input_precision=PRECISION)
            if q_t is not None:
                dk_acc = tl.dot(dx.to(qt.dtype), qt_t, dk_acc, input_precision=PRECISION)
    if seed is not None:
        dv_acc *= keep_scale
    dk_acc *= product_scale(scale, cap)
    store_tile(dk, n0, dk_stride_s, keys, D, tl.where(j < limit, dk_acc, 0.0), D == BLOCK_D)
    store_tile(dv, n0, dv_stride_s, keys, Dv, tl.where(j < limit, dv_acc, 0.0), Dv == BLOCK_DV)
