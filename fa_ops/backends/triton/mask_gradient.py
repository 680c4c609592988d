"""The gradient of a float mask, summed over the dimensions in which the mask is broadcast."""

import triton
import triton.language as tl

from fa_ops.backends.triton.backward_kernels import (
    load_row_parts,
    row_capacity,
    score_gradients,
)
from fa_ops.backends.triton.matrix_products import exact_precision, product, transposed
from fa_ops.backends.triton.primitives import (
    LOG2E,
    has_nonfinite,
    key_bounds,
    load_ranges,
)


@triton.jit
def tile_product(
    x, x_part, m0, x_stride, Sq, y, y_part, n0, y_stride, Sk, width: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of rows m0 ... of x and rows n0 ... of y."""
    xt = load_row_parts(x, x_part, m0, x_stride, 0, Sq, width, BLOCK_M, BLOCK, True, PRECISION)
    yt = load_row_parts(y, y_part, n0, y_stride, 0, Sk, width, BLOCK_N, BLOCK, True, PRECISION)
    s = product(xt, transposed(yt), None, PRECISION)
    if PRECISION == "split":  # noqa: SIM102  (a constexpr and a runtime condition)
        if has_nonfinite(s):
            s = tile_product(
                x, x_part, m0, x_stride, Sq, y, y_part, n0, y_stride, Sk, width, BLOCK_M, BLOCK_N,
                BLOCK, exact_precision(PRECISION),
            )  # fmt: skip
    return s


@triton.jit(
    do_not_specialize=["Sq", "Sk", "batch", "steps", "threshold", "window_left", "window_right"]
)
def mask_grad_kernel(
    q, k, v, grad_out, row_lse, row_delta, dmask,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    grad_out_stride_b: tl.int64, grad_out_stride_h: tl.int64, grad_out_stride_s,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32, steps: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    blocks, blocks_stride_b: tl.int64, blocks_stride_h: tl.int64, blocks_rows: tl.int32,
    blocks_columns: tl.int32,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, EXTREME: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_B: tl.constexpr, ONE_H: tl.constexpr, ONE_Q: tl.constexpr, ONE_K: tl.constexpr,
):  # fmt: skip
    """One tile of a float mask's gradient, summed over `steps` of the tiles that share its mask.

    dmask (splits, B or 1, Hq or 1, Sq or 1, Sk or 1): ONE_x is whether a dimension is broadcast and
    so summed here. The grid is the tiles of one split, innermost first, times the splits.
    """
    m_tiles = tl.cdiv(Sq, BLOCK_M)
    n_tiles = tl.cdiv(Sk, BLOCK_N)
    pid = tl.program_id(0)
    n_own, m_own, h_own, b_own = 0, 0, 0, 0
    size_b, size_h, size_q, size_k = 1, 1, 1, 1
    loop_b, loop_h, loop_q, loop_k = 1, 1, 1, 1
    if ONE_K:
        loop_k = n_tiles
    else:
        size_k = Sk
        n_own = pid % n_tiles
        pid = pid // n_tiles
    if ONE_Q:
        loop_q = m_tiles
    else:
        size_q = Sq
        m_own = pid % m_tiles
        pid = pid // m_tiles
    if ONE_H:
        loop_h = Hq
    else:
        size_h = Hq
        h_own = pid % Hq
        pid = pid // Hq
    if ONE_B:
        loop_b = batch
    else:
        size_b = batch
        b_own = pid % batch
        pid = pid // batch
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    end = tl.minimum((pid + 1) * steps, loop_b * loop_h * loop_q * loop_k)
    for step in range(pid * steps, end):
        n0 = (n_own + step % loop_k) * BLOCK_N
        m0 = (m_own + step // loop_k % loop_q) * BLOCK_M
        h = h_own + step // (loop_k * loop_q) % loop_h
        b = b_own + step // (loop_k * loop_q * loop_h)
        i = m0 + tl.arange(0, BLOCK_M)[:, None]
        j = n0 + tl.arange(0, BLOCK_N)[None, :]
        limit = Sk
        if kv_lens is not None:
            limit = tl.minimum(tl.maximum(tl.load(kv_lens + b), 0), Sk)
        shift = limit - Sq
        slope, ranges_head, first, last = None, None, None, None
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_stride_b + h) * LOG2E
        if ranges is not None:
            ranges_head = ranges + b * ranges_stride_b + h * ranges_stride_h
            first, last = load_ranges(ranges_head, ranges_stride_q, i, Sq)
        lo, full_lo, full_hi, hi = key_bounds(
            m0, Sq, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
        )
        if (n0 >= lo) & (n0 < hi):
            hk = h // group
            at = (b * Hq + h) * row_capacity(Sq, batch, False) + i
            q_at, k_at = q + b * q_stride_b + h * q_stride_h, k + b * k_stride_b + hk * k_stride_h
            v_at = v + b * v_stride_b + hk * v_stride_h
            do_at = grad_out + b * grad_out_stride_b + h * grad_out_stride_h
            qk = tile_product(
                q_at, batch * q_stride_b, m0, q_stride_s, Sq, k_at, batch * k_stride_b, n0,
                k_stride_s, limit, D, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
            dp = tile_product(
                do_at, batch * grad_out_stride_b, m0, grad_out_stride_s, Sq, v_at,
                batch * v_stride_b, n0, v_stride_s, limit, Dv, BLOCK_M, BLOCK_N, BLOCK_DV,
                PRECISION,
            )  # fmt: skip
            w, ds, dx = score_gradients(
                qk, dp, tl.load(row_lse + at, mask=i < Sq, other=float("inf")),
                tl.load(row_delta + at, mask=i < Sq, other=0.0), i, j, Sq, shift, limit, scale, cap,
                slope, mask + b * mask_stride_b + h * mask_stride_h, mask_stride_q, mask_stride_k,
                ranges_head, ranges_stride_q, seed, b * Hq + h, threshold,
                keep_scale, window_left, window_right, True, EXTREME, True,
            )  # fmt: skip
            acc += ds
    base = ((pid * size_b + b_own).to(tl.int64) * size_h + h_own) * size_q * size_k
    m = tl.arange(0, BLOCK_M)[:, None] + m_own * BLOCK_M
    n = tl.arange(0, BLOCK_N)[None, :] + n_own * BLOCK_N
    if ONE_Q:
        acc = tl.sum(acc, 0, keep_dims=True)
        m = tl.zeros([1, 1], tl.int32)
    if ONE_K:
        acc = tl.sum(acc, 1, keep_dims=True)
        n = tl.zeros([1, 1], tl.int32)
    tl.store(
        dmask + base + m.to(tl.int64) * size_k + n,
        acc.to(dmask.dtype.element_ty),
        mask=(m < size_q) & (n < size_k),
    )
