"""Device functions of the backward kernels, after FlashAttention-2 (Dao, arXiv:2307.08691).

With p = exp2(s - lse), dp = dO v^T and delta = rowsum(dO * O) - dlse, the gradient of a score is
ds = p (dp - delta); dQ = ds K, dK = ds^T Q and dV = p^T dO follow. Every tile of scores is computed
twice, once in `query_grad_kernel` and once, transposed, in `key_value_grad_kernel`, so that each
gradient is accumulated in registers by the program that writes it: deterministic, without atomics,
in memory linear in the length. (Accumulating dQ with atomics in the second kernel saves two of
seven products and was slower on an H200 at every size.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_ops.backends.triton.masks import block_of_step, walk_keys, walk_queries
from fa_ops.backends.triton.matrix_products import (
    divided,
    exact_precision,
    joined,
    operand,
    parts,
    product,
    transposed,
)
from fa_ops.backends.triton.primitives import (
    LN2,
    LOG2E,
    dropout_keep,
    dropout_rows,
    find_sequence,
    first_row,
    has_nonfinite,
    is_masked,
    key_bounds,
    load_ranges,
    may_redo,
    opaque,
    positions,
    replace_nonfinite,
    row_bounds,
    scores,
    store_tile,
)

ROW_UNIT = tl.constexpr(128)  # at least every BLOCK_M


@triton.constexpr_function
def exact_size(dtype):
    """Rows (or keys) of an EXACT tile whose gradients are accumulated; it has twice as many keys
    (or rows). Products of float32 are unrolled, so larger tiles would need too many registers.
    """
    return 8 if dtype.is_fp32() else 16


@triton.jit
def load_rows(
    base, start, stride, low, high, width: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Load rows start ... start + ROWS - 1 of a matrix with `width` columns, 0 beyond them; with
    CHECK, 0 outside rows [low, high) too.

    Offsets are products with the row, so that a loop over rows has no loop-invariant ones: those of
    `primitives.pointers` would take 30 registers more. They have 64 bits if the stride has.
    """
    rows = (start + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, COLS)[None, :]
    at = base + rows * stride + cols
    if CHECK:
        if width == COLS:
            return tl.load(at, mask=(rows >= low) & (rows < high), other=0.0)
        return tl.load(at, mask=(rows >= low) & (rows < high) & (cols < width), other=0.0)
    if width == COLS:
        return tl.load(at)
    return tl.load(at, mask=cols < width, other=0.0)


@triton.jit
def load_row_parts(
    base, part, start, stride, low, high, width: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An operand of `product` from rows that `load_rows` loads, as in `load_parts`."""
    if PRECISION == "split" or PRECISION == "joined":
        x = load_rows(base, start, stride, low, high, COLS, ROWS, COLS, CHECK)
        y = load_rows(base + part, start, stride, low, high, COLS, ROWS, COLS, CHECK)
        z = load_rows(base + 2 * part, start, stride, low, high, COLS, ROWS, COLS, CHECK)
        return operand(x, y, z, PRECISION)
    else:
        x = load_rows(base, start, stride, low, high, width, ROWS, COLS, CHECK)
        return parts(x, x, PRECISION)


@triton.jit
def score_gradients(
    qk, dp, lse, delta, i, j, Sq, shift, limit, scale, cap, slope, mask, mask_stride_q,
    mask_stride_k, ranges, ranges_stride_q, seed, batch_head, threshold, keep_scale, window_left,
    window_right, LIMIT: tl.constexpr, EXTREME: tl.constexpr, EXACT: tl.constexpr, is_mixed=True,
    PROGRAM: tl.constexpr = None, SLOPE: tl.constexpr = None, terms=None,
):  # fmt: skip
    """(w, ds, dx) of one tile, or of its transpose: the weights of the values without `keep_scale`,
    the gradient of the scores, and the gradient of the products without `product_scale`.

    lse: in log2 units, and inf for rows without attended keys, so that their weights are 0. LIMIT:
    whether keys beyond `limit` must be masked. EXACT: results are 0 where masked, even beside NaN
    or Inf. All blocks are masked like those at the mask's edge: the products hide a few selects,
    and a separate loop would cost more, because ptxas serialises wgmma where an accumulator is
    passed from loop to loop.
    """
    s, t = scores(
        qk, i, j, Sq, shift, limit, scale, cap, slope, mask, mask_stride_q, mask_stride_k,
        None, None, None, None, mask is not None, EXTREME, EXACT, LOG2E, is_mixed, PROGRAM, terms,
    )  # fmt: skip
    p = tl.exp2(s - lse)
    if LIMIT:
        p = tl.where(j < limit, p, 0.0)
    if window_right is not None:
        p = tl.where(j <= i + (shift + window_right), p, 0.0)
    if window_left is not None:
        p = tl.where(j >= i + (shift - window_left), p, 0.0)
    if ranges is not None:
        first, last = load_ranges(ranges, ranges_stride_q, i, Sq)
        inside = (j >= first) & (j < last)
        p = tl.where(inside, p, 0.0)
    w = p
    if seed is not None:
        keep = dropout_keep(dropout_rows(seed, batch_head, i, Sq), j, threshold)
        w = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    dx = ds
    if cap is not None:
        dx = ds * (1.0 - t * t)
    if PROGRAM is not None:
        # by a score without weight the program may have any derivative
        dx = tl.where(p == 0.0, 0.0, ds * SLOPE(qk * (scale * LN2), i, j, terms))
    if EXACT:
        ds, dx = tl.where(p == 0.0, 0.0, ds), tl.where(p == 0.0, 0.0, dx)
    return w, ds, dx


@triton.jit
def product_scale(scale, cap):
    """The constant factor of the derivative of a natural score with respect to its product q.k."""
    if cap is not None:
        return scale * cap * LN2
    else:
        return scale * LN2


@triton.jit
def row_capacity(tokens, batch, PACKED: tl.constexpr):
    """Elements per head of row_lse and row_delta, in which every sequence starts at a multiple of
    ROW_UNIT, so that whole blocks are loaded aligned and without a mask.
    """
    blocks = tokens // ROW_UNIT + batch + 2 if PACKED else tl.cdiv(tokens, ROW_UNIT)
    return blocks.to(tl.int64) * ROW_UNIT


@triton.jit
def row_offset(start, b):
    """First row of the packed sequence b, whose first token is `start`, in a head's row_lse."""
    return (start // ROW_UNIT + b + 1) * ROW_UNIT


@triton.jit
def schedule(pid, blocks, heads, wave):
    """(block, head) of a program: waves of `wave` heads, block by block within a wave.

    Long blocks come first, so that a wave ends with short ones; its heads share the L2 cache.
    """
    first = pid // (blocks * wave) * wave
    inside = pid - first * blocks
    width = tl.minimum(wave, heads - first)
    return inside // width, first + inside % width


# The gradient of queries, and the row statistics that the other backward kernels need.


@triton.jit
def locate_queries(pid, batch, Hq, Sq, Sk, cu_seqlens_q, cu_seqlens_k, wave, BLOCK: tl.constexpr):
    """The work of a program of `query_grad_kernel`, as `forward_kernel.locate` returns it."""
    if cu_seqlens_q is not None:
        tile, h = schedule(pid, Sq // BLOCK + batch + 2, Hq, wave)
        b, block, q_start, rows, k_start, keys = find_sequence(
            cu_seqlens_q, cu_seqlens_k, batch, Sq, Sk, tile, BLOCK
        )
    else:
        block, head = schedule(pid, tl.cdiv(Sq, BLOCK), batch * Hq, wave)
        b, h = head // Hq, head % Hq
        q_start, rows, k_start, keys = 0, Sq, 0, Sk
    return b, h, block, q_start, rows, k_start, keys


@triton.jit
def query_grad_block(
    q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, q_stride_b, q_stride_h,
    q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, out_stride_b, out_stride_h,
    out_stride_s, dq_stride_b, dq_stride_h, dq_stride_s, batch, Hq, group, b, h, m0, q_start, Sq,
    k_start, Sk, tokens, scale, cap, mask, mask_stride_b, mask_stride_h, mask_stride_q,
    mask_stride_k, blocks, blocks_stride_b, blocks_stride_h, blocks_rows, blocks_columns, slopes,
    slopes_stride_b, kv_lens, ranges, ranges_stride_b, ranges_stride_h, ranges_stride_q, seed,
    threshold, keep_scale, window_left, window_right, term_values, term_indices,
    PACKED: tl.constexpr, D: tl.constexpr,
    Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr,
    PROGRAM: tl.constexpr, SLOPE: tl.constexpr, DIVIDES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dq of rows m0 ... m0 + BLOCK_M - 1 of a head; `tokens` is the row length of lse.

    EXACT: a NaN or Inf in a key or value makes NaN of the gradients of rows that attend it and
    changes no other. Otherwise returns whether any row has to be recomputed so.
    """
    row_stride = row_capacity(tokens, batch, PACKED)
    # between the parts of float32, see `product`
    q_part = Hq * q_stride_h if PACKED else batch * q_stride_b
    do_part = Hq * grad_out_stride_h if PACKED else batch * grad_out_stride_b
    k_part = Hq // group * k_stride_h if PACKED else batch * k_stride_b
    v_part = Hq // group * v_stride_h if PACKED else batch * v_stride_b
    if PACKED:
        inside = (b >= 0) & (b < batch)
        at = h.to(tl.int64) * tokens + q_start
        row_at = h * row_stride + row_offset(q_start, b)
        q += q_start * q_stride_s.to(tl.int64)
        grad_out += q_start * grad_out_stride_s.to(tl.int64)
        out += q_start * out_stride_s.to(tl.int64)
        dq += q_start * dq_stride_s.to(tl.int64)
        k += k_start * k_stride_s.to(tl.int64)
        v += k_start * v_stride_s.to(tl.int64)
    else:
        inside = True
        at = (b * Hq + h).to(tl.int64) * Sq
        row_at = (b * Hq + h) * row_stride
        q += b * q_stride_b
        k += b * k_stride_b
        v += b * v_stride_b
        grad_out += b * grad_out_stride_b
        out += b * out_stride_b
        dq += b * dq_stride_b
    q += h * q_stride_h
    k += h // group * k_stride_h
    v += h // group * v_stride_h
    grad_out += h * grad_out_stride_h
    out += h * out_stride_h
    dq += h * dq_stride_h
    limit = Sk
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b, mask=inside, other=0), 0), Sk)
    shift = limit - Sq
    slope, first, last, terms = None, None, None, None
    if PROGRAM is not None:
        terms = (term_values, term_indices, b, h, batch, Hq, Sq, Sk)
    low = 0
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_stride_b + h, mask=inside, other=0.0) * LOG2E
    if mask is not None:
        mask += b * mask_stride_b + h * mask_stride_h
    if ranges is not None:
        ranges += b * ranges_stride_b + h * ranges_stride_h
        block_rows = m0 + positions(BLOCK_M, EXACT)
        first, last = load_ranges(ranges, ranges_stride_q, block_rows[:, None], Sq)
        low = tl.min(tl.where(first < last, first, 2147483647))
    lo, full_lo, full_hi, hi = key_bounds(
        m0, Sq, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
    )

    ROWS: tl.constexpr = BLOCK_N // 2 if EXACT else BLOCK_M
    KEY_STEP: tl.constexpr = BLOCK_N if blocks is None else 1
    begin, end, step = lo, hi, KEY_STEP
    if blocks is not None:
        tiles, listed, last_tile, begin, end = walk_keys(
            blocks + b * blocks_stride_b + h * blocks_stride_h, blocks_rows, blocks_columns, m0, Sk,
            lo, hi, is_masked(window_left, window_right, kv_lens, ranges), BLOCK_N,
        )  # fmt: skip
    if EXACT:
        # a single loop over rows and keys: ptxas spills registers of the loop with fewer nested
        # levels, which would be the main loop
        key_begin, key_blocks = begin, tl.cdiv(end - begin, KEY_STEP)
        begin, end, step = 0, tl.cdiv(tl.minimum(Sq - m0, BLOCK_M), ROWS) * key_blocks, 1
        poisoned = tl.zeros([ROWS], tl.int32)
        tl.debug_barrier()  # between the stores of row_lse and row_delta and their loads
    else:
        rows_m = m0 + tl.arange(0, BLOCK_M)
        # loads come before the first reduction, because none would move across its barrier
        m = tl.load(lse + at + rows_m, mask=rows_m < Sq, other=float("-inf"))
        do = load_row_parts(
            grad_out, do_part, m0, grad_out_stride_s, 0, Sq, Dv, BLOCK_M, BLOCK_DV, True, PRECISION
        )
        o = load_rows(out, m0, out_stride_s, 0, Sq, Dv, BLOCK_M, BLOCK_DV, True)
        qt = load_row_parts(q, q_part, m0, q_stride_s, 0, Sq, D, BLOCK_M, BLOCK_D, True, PRECISION)
        delta = tl.sum(o.to(tl.float32) * joined(do, PRECISION).to(tl.float32), 1)
        if grad_lse is not None:
            delta -= tl.load(grad_lse + at + rows_m, mask=rows_m < Sq, other=0.0)
        dead = m == float("-inf")
        m *= LOG2E
        # from 2**24 on lse has no fraction left, and weights computed from it might overflow
        m = tl.where(tl.abs(m) >= 16777216.0, float("inf"), m)
        delta = tl.where(dead, 0.0, delta)
        tl.store(row_lse + row_at + rows_m, m)
        tl.store(row_delta + row_at + rows_m, delta)

    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    CHECK: tl.constexpr = not EVEN or ranges is not None
    for n0 in tl.range(begin, end, step, num_stages=1 if EXACT else None):
        if EXACT:
            m_begin = m0 + n0 // key_blocks * ROWS
            key_block = n0 % key_blocks
            n0 = key_begin + key_block * KEY_STEP
            rows_m = m_begin + positions(ROWS, True)
            m = tl.load(row_lse + row_at + rows_m)
            delta = tl.load(row_delta + row_at + rows_m)
            do = load_row_parts(
                grad_out, do_part, m_begin, grad_out_stride_s, 0, Sq, Dv, ROWS, BLOCK_DV, True,
                PRECISION,
            )  # fmt: skip
            qt = load_row_parts(
                q, q_part, m_begin, q_stride_s, 0, Sq, D, ROWS, BLOCK_D, True, PRECISION
            )
            acc = tl.where(key_block == 0, 0.0, acc)
            poisoned = tl.where(key_block == 0, 0, poisoned)
        never, is_mixed = n0 < begin, True
        if blocks is not None:
            n0, is_mixed = block_of_step(tiles, listed, last_tile, n0, BLOCK_N)
        n0 = tl.multiple_of(n0, BLOCK_N)
        j = n0 + positions(BLOCK_N, EXACT)[None, :]
        kt = load_row_parts(
            k, k_part, n0, k_stride_s, low, hi, D, BLOCK_N, BLOCK_D, CHECK, PRECISION
        )
        if EXACT:
            finite, nonfinite = replace_nonfinite(kt[0])
            kt = (finite, finite, finite)
        qk = product(qt, transposed(kt), None, PRECISION, DIVIDES and never)
        vt = load_row_parts(
            v, v_part, n0, v_stride_s, low, hi, Dv, BLOCK_N, BLOCK_DV, CHECK, PRECISION
        )
        if EXACT:
            finite, nonfinite_v = replace_nonfinite(vt[0])
            vt = (finite, finite, finite)
            nonfinite = nonfinite | nonfinite_v
        dp = product(do, transposed(vt), None, PRECISION, DIVIDES and never)
        if DIVIDES and not EXACT:
            qk, dp = divided(qk, never), divided(dp, never)
        w, ds, dx = score_gradients(
            qk, dp, m[:, None], delta[:, None], rows_m[:, None], j, Sq, shift, limit, scale, cap,
            slope, mask, mask_stride_q, mask_stride_k, ranges, ranges_stride_q, seed, b * Hq + h,
            threshold, keep_scale, window_left, window_right, not EVEN, EXTREME, EXACT, is_mixed,
            PROGRAM, SLOPE, terms,
        )  # fmt: skip
        if EXACT:
            found = ((w != 0.0) | (ds != 0.0)) & nonfinite[None, :]
            poisoned = tl.maximum(poisoned, tl.max(found.to(tl.int32), 1))
        acc = product(parts(dx, kt[0], PRECISION), kt, acc, PRECISION, DIVIDES and never)
        if EXACT:
            grad = acc * product_scale(scale, cap)
            grad = tl.where(poisoned[:, None] > 0, float("nan"), grad)
            end_row = tl.where(key_block == key_blocks - 1, Sq, 0)  # stored after the last keys
            store_tile(dq, m_begin, dq_stride_s, end_row, D, grad, D == BLOCK_D)
    if EXACT:
        return False
    else:
        acc *= product_scale(scale, cap)
        store_tile(dq, m0, dq_stride_s, Sq, D, acc, D == BLOCK_D)
        return has_nonfinite(acc)


@triton.jit(
    do_not_specialize=["Sq", "Sk", "batch", "wave", "threshold", "window_left", "window_right"]
)
def query_grad_kernel(
    q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    grad_out_stride_b: tl.int64, grad_out_stride_h: tl.int64, grad_out_stride_s,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_s,
    dq_stride_b: tl.int64, dq_stride_h: tl.int64, dq_stride_s,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32, wave: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    blocks, blocks_stride_b: tl.int64, blocks_stride_h: tl.int64, blocks_rows: tl.int32,
    blocks_columns: tl.int32,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right,
    term_values, term_indices, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, EXTREME: tl.constexpr,
    PRECISION: tl.constexpr, PROGRAM: tl.constexpr, SLOPE: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """dq of one block of query rows, and the row statistics that the other kernels need.

    row_lse: lse in log2 units, inf for rows that attend nothing. row_delta: rowsum(dO * O) - dlse.
    Both are indexed by `row_offset`. Tensors, packing and grid as in `forward_kernel`, out by
    strides. DIVIDES: see `divided`.
    """
    pid = tl.program_id(0)
    PACKED: tl.constexpr = cu_seqlens_q is not None
    b, h, block, q_start, rows, k_start, keys = locate_queries(
        pid, batch, Hq, Sq, Sk, cu_seqlens_q, cu_seqlens_k, wave, BLOCK_M
    )
    if PACKED:  # noqa: SIM102  (a constexpr and a runtime condition)
        if block >= tl.cdiv(rows, BLOCK_M):
            return
    m0 = first_row(block, rows, window_right, BLOCK_M)
    redo = query_grad_block(
        q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, q_stride_b, q_stride_h,
        q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
        grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, out_stride_b, out_stride_h,
        out_stride_s, dq_stride_b, dq_stride_h, dq_stride_s, batch, Hq, group, b, h, m0, q_start,
        rows, k_start, keys, Sq, scale, cap, mask, mask_stride_b, mask_stride_h, mask_stride_q,
        mask_stride_k, blocks, blocks_stride_b, blocks_stride_h, blocks_rows, blocks_columns,
        slopes, slopes_stride_b, kv_lens, ranges, ranges_stride_b, ranges_stride_h, ranges_stride_q,
        seed, threshold, keep_scale, window_left, window_right, term_values, term_indices, PACKED,
        D, Dv, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EVEN, EXTREME, PRECISION, PROGRAM, SLOPE,
        DIVIDES, False,
    )  # fmt: skip
    MAY_REDO: tl.constexpr = may_redo(window_left, window_right, mask, ranges, PRECISION)
    if (PROGRAM is not None or MAY_REDO) and redo:
        # opaque indices take no registers from the loop above
        b, h, m0 = opaque(b), opaque(h), opaque(m0)
        q_start, rows = opaque(q_start), opaque(rows)
        k_start, keys = opaque(k_start), opaque(keys)
        query_grad_block(
            q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, q_stride_b, q_stride_h,
            q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
            grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, out_stride_b, out_stride_h,
            out_stride_s, dq_stride_b, dq_stride_h, dq_stride_s, batch, Hq, group, b, h, m0,
            q_start, rows, k_start, keys, Sq, scale, cap, mask, mask_stride_b, mask_stride_h,
            mask_stride_q, mask_stride_k, blocks, blocks_stride_b, blocks_stride_h, blocks_rows,
            blocks_columns, slopes, slopes_stride_b, kv_lens, ranges, ranges_stride_b,
            ranges_stride_h, ranges_stride_q, seed, threshold, keep_scale, window_left,
            window_right, term_values, term_indices, PACKED, D, Dv, BLOCK_D, BLOCK_DV, BLOCK_M, 2 *
            exact_size(out.dtype.element_ty), EVEN, EXTREME, exact_precision(PRECISION), PROGRAM,
            SLOPE, DIVIDES, True,
        )  # fmt: skip


# The gradients of keys and values.


@triton.jit
def range_bounds(ranges, stride_q, lo, hi, n0, n1, BLOCK_M: tl.constexpr):
    """(lo, hi) narrowed to rows whose key ranges overlap [n0, n1); lo is a multiple of BLOCK_M."""
    CHUNK: tl.constexpr = 1024
    low, high = hi, lo
    end = tl.where(stride_q == 0, tl.minimum(hi, lo + 1), hi)  # stride 0: all rows have one range
    for start in range(lo, end, CHUNK):
        i = start + tl.arange(0, CHUNK)
        first, last = load_ranges(ranges, stride_q, i, end)
        touch = tl.maximum(first, n0) < tl.minimum(last, n1)
        low = tl.minimum(low, tl.min(tl.where(touch, i, hi)))
        high = tl.maximum(high, tl.max(tl.where(touch, i + 1, lo)))
    if stride_q == 0:
        high = tl.where(high > lo, hi, lo)
    return low // BLOCK_M * BLOCK_M, high


@triton.jit
def locate_keys(pid, batch, Hkv, Sq, Sk, cu_seqlens_q, cu_seqlens_k, wave, BLOCK: tl.constexpr):
    """The work of a program of `key_value_grad_kernel`: (b, kv head, first key, first query token
    and number of tokens, the same of keys).
    """
    if cu_seqlens_q is not None:
        tile, hk = schedule(pid, Sk // BLOCK + batch + 2, Hkv, wave)
        b, block, k_start, keys, q_start, rows = find_sequence(
            cu_seqlens_k, cu_seqlens_q, batch, Sk, Sq, tile, BLOCK
        )
    else:
        block, head = schedule(pid, tl.cdiv(Sk, BLOCK), batch * Hkv, wave)
        b, hk = head // Hkv, head % Hkv
        q_start, rows, k_start, keys = 0, Sq, 0, Sk
    return b, hk, block * BLOCK, q_start, rows, k_start, keys


@triton.jit
def key_value_grad_block(
    q, k, v, grad_out, row_lse, row_delta, dk, dv, q_stride_b, q_stride_h, q_stride_s, k_stride_b,
    k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, grad_out_stride_b,
    grad_out_stride_h, grad_out_stride_s, dk_stride_b, dk_stride_h, dk_stride_s, dv_stride_b,
    dv_stride_h, dv_stride_s, batch, Hq, group, b, hk, n0, q_start, Sq, k_start, Sk, tokens, scale,
    cap, mask, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, blocks, blocks_stride_b,
    blocks_stride_h, blocks_rows, blocks_columns, slopes, slopes_stride_b, kv_lens, ranges,
    ranges_stride_b, ranges_stride_h, ranges_stride_q, seed, threshold, keep_scale, window_left,
    window_right, term_values, term_indices, PACKED: tl.constexpr, D: tl.constexpr,
    Dv: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
    EXTREME: tl.constexpr, PRECISION: tl.constexpr, PROGRAM: tl.constexpr, SLOPE: tl.constexpr,
    WITH_DK: tl.constexpr, WITH_DV: tl.constexpr, DIVIDES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys n0 ... n0 + BLOCK_N - 1 of a kv head; `tokens` as in `query_grad_block`.

    EXACT: a NaN or Inf in a row of q or grad_out, or in its lse, makes NaN of the gradients of keys
    that the row attends and changes no other. Otherwise returns whether any key has to be
    recomputed so.
    """
    row_stride = row_capacity(tokens, batch, PACKED)
    if PACKED:
        inside = (b >= 0) & (b < batch)
        row_at = row_offset(q_start, b)
        q += q_start * q_stride_s.to(tl.int64)
        grad_out += q_start * grad_out_stride_s.to(tl.int64)
        k += k_start * k_stride_s.to(tl.int64)
        v += k_start * v_stride_s.to(tl.int64)
        dk += k_start * dk_stride_s.to(tl.int64)
        dv += k_start * dv_stride_s.to(tl.int64)
    else:
        inside = True
        row_at = b * Hq * row_stride
        q += b * q_stride_b
        k += b * k_stride_b
        v += b * v_stride_b
        grad_out += b * grad_out_stride_b
        dk += b * dk_stride_b
        dv += b * dv_stride_b
    k += hk * k_stride_h
    v += hk * v_stride_h
    dk += hk * dk_stride_h
    dv += hk * dv_stride_h
    # between the parts of float32, see `product`
    q_part = Hq * q_stride_h if PACKED else batch * q_stride_b
    do_part = Hq * grad_out_stride_h if PACKED else batch * grad_out_stride_b
    k_part = Hq // group * k_stride_h if PACKED else batch * k_stride_b
    v_part = Hq // group * v_stride_h if PACKED else batch * v_stride_b
    limit = Sk
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b, mask=inside, other=0), 0), Sk)
    shift = limit - Sq
    lo, full_lo, full_hi, hi = row_bounds(
        n0, Sq, shift, limit, window_left, window_right, BLOCK_M, BLOCK_N
    )

    KEYS: tl.constexpr = BLOCK_M // 2 if EXACT else BLOCK_N
    heads, heads_end = hk * group, hk * group + group
    if EXACT:  # a single loop over blocks of keys and heads: see `query_grad_block`
        heads, heads_end = 0, tl.cdiv(tl.minimum(Sk - n0, BLOCK_N), KEYS) * group
        poisoned = tl.zeros([KEYS], tl.int32)
    else:
        n_begin = n0
        j = n0 + tl.arange(0, BLOCK_N)[:, None]
        kt = load_row_parts(
            k, k_part, n0, k_stride_s, 0, limit, D, BLOCK_N, BLOCK_D, True, PRECISION
        )
        if WITH_DK:
            vt = load_row_parts(
                v, v_part, n0, v_stride_s, 0, limit, Dv, BLOCK_N, BLOCK_DV, True, PRECISION
            )
    STEP: tl.constexpr = BLOCK_M if blocks is None else 1
    dk_acc, dv_acc = None, None
    if WITH_DK:
        dk_acc = tl.zeros([KEYS, BLOCK_D], tl.float32)
    if WITH_DV:
        dv_acc = tl.zeros([KEYS, BLOCK_DV], tl.float32)
    for h in range(heads, heads_end):
        if EXACT:
            n_begin = n0 + h // group * KEYS
            h = hk * group + h % group
            j = n_begin + positions(KEYS, True)[:, None]
            kt = load_row_parts(
                k, k_part, n_begin, k_stride_s, 0, limit, D, KEYS, BLOCK_D, True, PRECISION
            )
            is_first = h == hk * group
            if WITH_DK:
                vt = load_row_parts(
                    v, v_part, n_begin, v_stride_s, 0, limit, Dv, KEYS, BLOCK_DV, True, PRECISION
                )
                dk_acc = tl.where(is_first, 0.0, dk_acc)
            if WITH_DV:
                dv_acc = tl.where(is_first, 0.0, dv_acc)
            poisoned = tl.where(is_first, 0, poisoned)
        q_head = q + h * q_stride_h
        grad_out_head = grad_out + h * grad_out_stride_h
        row_lse_head = row_lse + row_at + h * row_stride
        row_delta_head = row_delta + row_at + h * row_stride
        slope, mask_head, ranges_head, terms = None, None, None, None
        begin, end = lo, hi
        if PROGRAM is not None:
            terms = (term_values, term_indices, b, h, batch, Hq, Sq, Sk)
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_stride_b + h, mask=inside, other=0.0) * LOG2E
        if mask is not None:
            mask_head = mask + b * mask_stride_b + h * mask_stride_h
        if ranges is not None:
            ranges_head = ranges + b * ranges_stride_b + h * ranges_stride_h
            begin, end = range_bounds(
                ranges_head, ranges_stride_q, lo, hi, n0, tl.minimum(n0 + BLOCK_N, limit), BLOCK_M
            )
        if blocks is not None:
            tiles, listed, last_tile, begin, end = walk_queries(
                blocks + b * blocks_stride_b + h * blocks_stride_h, blocks_rows, blocks_columns,
                n0, Sq, begin, end, is_masked(window_left, window_right, kv_lens, ranges), BLOCK_M,
            )  # fmt: skip
        for m0 in tl.range(begin, end, STEP, num_stages=1 if EXACT else None):
            never, is_mixed = m0 < begin, True
            if blocks is not None:
                m0, is_mixed = block_of_step(tiles, listed, last_tile, m0, BLOCK_M)
            m0 = tl.multiple_of(m0, BLOCK_M)
            rows_m = m0 + positions(BLOCK_M, EXACT)
            i = rows_m[None, :]
            qt = load_row_parts(
                q_head, q_part, m0, q_stride_s, 0, Sq, D, BLOCK_M, BLOCK_D, not EVEN, PRECISION
            )
            m = tl.load(row_lse_head + rows_m)
            if blocks is not None:  # a tile may end behind the rows that were written
                m = tl.where(rows_m < Sq, m, float("inf"))
            if EXACT:
                finite, nonfinite = replace_nonfinite(qt[0])
                qt = (finite, finite, finite)
            qk = product(kt, transposed(qt), None, PRECISION, DIVIDES and never)
            do = load_row_parts(
                grad_out_head, do_part, m0, grad_out_stride_s, 0, Sq, Dv, BLOCK_M, BLOCK_DV,
                not EVEN, PRECISION,
            )  # fmt: skip
            delta = tl.load(row_delta_head + rows_m)
            if blocks is not None:
                delta = tl.where(rows_m < Sq, delta, 0.0)
            if EXACT:
                finite, nonfinite_do = replace_nonfinite(do[0])
                do = (finite, finite, finite)
                delta, nonfinite_delta = replace_nonfinite(delta[:, None])
                delta = tl.reshape(delta, [BLOCK_M])
                nonfinite = nonfinite | nonfinite_do | nonfinite_delta | (m != m)
                m = tl.where(nonfinite, -1e38, m)  # makes every weight that is not masked Inf
            dp = qk  # without dk, nothing reads what follows from it
            if WITH_DK:
                dp = product(vt, transposed(do), None, PRECISION, DIVIDES and never)
            if DIVIDES and not EXACT:
                qk = divided(qk, never)
                if WITH_DK:
                    dp = divided(dp, never)
            w, ds, dx = score_gradients(
                qk, dp, m[None, :], delta[None, :], i, j, Sq, shift, limit, scale, cap, slope,
                mask_head, mask_stride_q, mask_stride_k, ranges_head, ranges_stride_q, seed,
                b * Hq + h, threshold, keep_scale, window_left, window_right, False, EXTREME,
                EXACT, is_mixed, PROGRAM, SLOPE, terms,
            )  # fmt: skip
            if EXACT:
                found = w != 0.0
                if WITH_DK:
                    found = found | (ds != 0.0)
                found = found & nonfinite[None, :]
                poisoned = tl.maximum(poisoned, tl.max(found.to(tl.int32), 1))
                w = tl.where(nonfinite[None, :], 0.0, w)
                dx = tl.where(nonfinite[None, :], 0.0, dx)
            if WITH_DV:
                dv_acc = product(
                    parts(w, do[0], PRECISION), do, dv_acc, PRECISION, DIVIDES and never
                )
            if WITH_DK:
                dk_acc = product(
                    parts(dx, qt[0], PRECISION), qt, dk_acc, PRECISION, DIVIDES and never
                )
        if EXACT:  # noqa: SIM102  (a constexpr and a runtime condition)
            if h == hk * group + group - 1:
                is_poisoned = poisoned[:, None] > 0
                dk_block, dv_block = dk_acc, dv_acc
                if WITH_DK:
                    dk_block = tl.where(is_poisoned, float("nan"), dk_acc)
                if WITH_DV:
                    dv_block = tl.where(is_poisoned, float("nan"), dv_acc)
                store_gradients(
                    dk, dv, dk_block, dv_block, n_begin, j, limit, Sk, dk_stride_s, dv_stride_s,
                    scale, cap, seed, keep_scale, D, Dv, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
    if EXACT:
        return False
    else:
        return store_gradients(
            dk, dv, dk_acc, dv_acc, n0, j, limit, Sk, dk_stride_s, dv_stride_s, scale, cap, seed,
            keep_scale, D, Dv, BLOCK_D, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def store_gradients(
    dk, dv, dk_acc, dv_acc, n0, j, limit, Sk, dk_stride_s, dv_stride_s, scale, cap, seed,
    keep_scale, D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of keys j from their sums, None for a gradient that this kernel does not
    compute; returns whether any number is NaN or Inf.
    """
    inside_limit = j < limit
    failed = tl.full([], 0, tl.int1)
    if dk_acc is not None:
        dk_acc *= product_scale(scale, cap)
        dk_acc = tl.where(inside_limit, dk_acc, 0.0)
    if dv_acc is not None:
        if seed is not None:
            dv_acc *= keep_scale
        dv_acc = tl.where(inside_limit, dv_acc, 0.0)
    if dk_acc is not None:
        store_tile(dk, n0, dk_stride_s, Sk, D, dk_acc, D == BLOCK_D)
    if dv_acc is not None:
        store_tile(dv, n0, dv_stride_s, Sk, Dv, dv_acc, Dv == BLOCK_DV)
    if dk_acc is not None:
        failed = failed | has_nonfinite(dk_acc)
    if dv_acc is not None:
        failed = failed | has_nonfinite(dv_acc)
    return failed


@triton.jit(
    do_not_specialize=["Sq", "Sk", "batch", "wave", "threshold", "window_left", "window_right"]
)
def key_value_grad_kernel(
    q, k, v, grad_out, row_lse, row_delta, dk, dv,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    grad_out_stride_b: tl.int64, grad_out_stride_h: tl.int64, grad_out_stride_s,
    dk_stride_b: tl.int64, dk_stride_h: tl.int64, dk_stride_s,
    dv_stride_b: tl.int64, dv_stride_h: tl.int64, dv_stride_s,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32, wave: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    blocks, blocks_stride_b: tl.int64, blocks_stride_h: tl.int64, blocks_rows: tl.int32,
    blocks_columns: tl.int32,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right,
    term_values, term_indices, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, EXTREME: tl.constexpr,
    PRECISION: tl.constexpr, PROGRAM: tl.constexpr, SLOPE: tl.constexpr, WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, summed over the rows of all query heads that share them.

    WITH_DK, WITH_DV: which of them; registers hold the sums of one alone where heads are wide.
    DIVIDES: see `divided`.

    Tiles are transposed, keys by queries, so that weights and score gradients are register operands
    of the following products. row_lse, row_delta: from `query_grad_kernel`. The grid is
    (heads of k) * batch * cdiv(Sk, BLOCK_N), packed (heads of k) * (Sk // BLOCK_N + batch + 2).
    """
    pid = tl.program_id(0)
    PACKED: tl.constexpr = cu_seqlens_q is not None
    b, hk, n0, q_start, rows, k_start, keys = locate_keys(
        pid, batch, Hq // group, Sq, Sk, cu_seqlens_q, cu_seqlens_k, wave, BLOCK_N
    )
    if PACKED:  # noqa: SIM102  (a constexpr and a runtime condition)
        if n0 >= keys:
            return
    redo = key_value_grad_block(
        q, k, v, grad_out, row_lse, row_delta, dk, dv, q_stride_b, q_stride_h, q_stride_s,
        k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, grad_out_stride_b,
        grad_out_stride_h, grad_out_stride_s, dk_stride_b, dk_stride_h, dk_stride_s, dv_stride_b,
        dv_stride_h, dv_stride_s, batch, Hq, group, b, hk, n0, q_start, rows, k_start, keys, Sq,
        scale, cap, mask, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, blocks,
        blocks_stride_b, blocks_stride_h, blocks_rows, blocks_columns, slopes, slopes_stride_b,
        kv_lens, ranges, ranges_stride_b, ranges_stride_h, ranges_stride_q, seed, threshold,
        keep_scale, window_left, window_right, term_values, term_indices, PACKED, D, Dv, BLOCK_D,
        BLOCK_DV, BLOCK_M, BLOCK_N, EVEN, EXTREME, PRECISION, PROGRAM, SLOPE, WITH_DK, WITH_DV,
        DIVIDES, False,
    )  # fmt: skip
    MAY_REDO: tl.constexpr = may_redo(window_left, window_right, mask, ranges, PRECISION)
    if (PROGRAM is not None or MAY_REDO) and redo:
        b, hk, n0, q_start, rows, k_start, keys = locate_keys(
            opaque(pid), batch, Hq // group, Sq, Sk, cu_seqlens_q, cu_seqlens_k, wave, BLOCK_N
        )
        key_value_grad_block(
            q, k, v, grad_out, row_lse, row_delta, dk, dv, q_stride_b, q_stride_h, q_stride_s,
            k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
            grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, dk_stride_b, dk_stride_h,
            dk_stride_s, dv_stride_b, dv_stride_h, dv_stride_s, batch, Hq, group, b, hk, n0,
            q_start, rows, k_start, keys, Sq, scale, cap, mask, mask_stride_b, mask_stride_h,
            mask_stride_q, mask_stride_k, blocks, blocks_stride_b, blocks_stride_h, blocks_rows,
            blocks_columns, slopes, slopes_stride_b, kv_lens, ranges, ranges_stride_b,
            ranges_stride_h, ranges_stride_q, seed, threshold, keep_scale, window_left,
            window_right, term_values, term_indices, PACKED, D, Dv, BLOCK_D, BLOCK_DV,
            2 * exact_size(dk.dtype.element_ty), BLOCK_N, EVEN, EXTREME, exact_precision(PRECISION),
            PROGRAM, SLOPE, WITH_DK, WITH_DV, DIVIDES, True,
        )  # fmt: skip
