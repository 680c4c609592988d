"""The gradient of queries, and the row statistics that the other backward kernels need."""

import triton
import triton.language as tl

from fa_ops.backends.triton.backward_kernels import (
    exact_size,
    load_row_parts,
    load_rows,
    product_scale,
    row_capacity,
    row_offset,
    schedule,
    score_gradients,
)
from fa_ops.backends.triton.block_lists import block_of_step, walk_keys
from fa_ops.backends.triton.matrix_products import (
    divided,
    exact_precision,
    joined,
    parts,
    product,
    transposed,
)
from fa_ops.backends.triton.primitives import (
    LOG2E,
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
    store_tile,
)


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
    threshold, keep_scale, window_left, window_right, PACKED: tl.constexpr, D: tl.constexpr,
    Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr,
    DIVIDES: tl.constexpr, EXACT: tl.constexpr,
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
    slope, first, last = None, None, None
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
    seed, threshold, keep_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, EXTREME: tl.constexpr,
    PRECISION: tl.constexpr, DIVIDES: tl.constexpr,
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
        seed, threshold, keep_scale, window_left, window_right, PACKED, D, Dv, BLOCK_D, BLOCK_DV,
        BLOCK_M, BLOCK_N, EVEN, EXTREME, PRECISION, DIVIDES, False,
    )  # fmt: skip
    if may_redo(window_left, window_right, mask, ranges, PRECISION) and redo:
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
            window_right, PACKED, D, Dv, BLOCK_D, BLOCK_DV, BLOCK_M, 2 *
            exact_size(out.dtype.element_ty), EVEN, EXTREME, exact_precision(PRECISION), DIVIDES,
            True,
        )  # fmt: skip
