"""Device code of attention over lists of blocks: lists of tiles, the forward and backward kernels.

Rows are the pairs of a query and a head of the group that shares a key head, query by query. A
program has rows of one list, or of several short ones (NSA: a list for each query), whose union it
walks: a word of a union is `start << 32 | members`, the first key of a tile, and a bit for each of
the program's lists that has it. The gradients of keys walk the inverse: for each tile of keys, the
lists that have it. Sums have one order, so results repeat bitwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_ops.backends.triton.primitives import (
    LARGEST,
    LN2,
    LOG2E,
    find_sequence,
    has_nonfinite,
    load_keys,
    load_rows,
    natural,
    opaque,
    positions,
    replace_nonfinite,
    saturated,
    softmax_step,
    store_tile,
    with_sink,
)

EXACT_ROWS = tl.constexpr(16)  # of tiles that are recomputed


@triton.constexpr_function
def exact_keys(keys):
    """Keys of a tile that is recomputed, of which the kernel's tiles have a multiple."""
    return min(32, keys)


@triton.constexpr_function
def is_gathered(size):
    """Whether a tile has keys of several blocks, whose size is no multiple of a tile's."""
    return size % 64 != 0


# Lists of tiles


@triton.jit
def list_entries(
    lists, counts, first, group, number, e, n, rows, Sq, Sk, query_block, SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """(start, end) of entries e of lists of a group: keys that a query of the group may attend.

    What lists nothing ends where it starts. first: where block 0 of a query begins.
    """
    row = group * LISTS + number
    inside = (number < LISTS) & (row < rows)
    block = tl.load(lists + row.to(tl.int64) * n + e, mask=inside, other=-1)
    if counts is not None:
        inside = inside & (e < tl.load(counts + row, mask=inside, other=0))
    inside = inside & (block >= 0) & (block <= Sk // SIZE)
    start = tl.where(inside, block, 0) * SIZE
    if first is not None:
        start += tl.load(first + row, mask=inside, other=0)
    end = tl.minimum(start + SIZE, Sk)
    if CAUSAL:
        end = tl.minimum(end, tl.minimum((group + 1) * LISTS * query_block, Sq) + Sk - Sq)
    return start, tl.where(inside, end, start)


@triton.jit(do_not_specialize=["n", "rows", "groups", "Sq", "Sk", "query_block"])
def union_kernel(
    lists, counts, first, unions, n: tl.int32, rows: tl.int32, groups: tl.int32, Sq: tl.int32,
    Sk: tl.int32, query_block: tl.int32, capacity: tl.int64, SIZE: tl.constexpr,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, LISTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tiles of TILE keys that a group of LISTS lists has, once each: the count, then words.

    lists int32 (heads, rows, n); unions int64 (heads, groups, 1 + capacity). Each entry is compared
    with all of the group.
    """
    group = tl.program_id(0) % groups
    head = (tl.program_id(0) // groups).to(tl.int64)
    lists += head * rows * n
    if counts is not None:
        counts += head * rows
    unions += (head * groups + group) * (1 + capacity)
    count = 0
    for begin in range(0, LISTS * n, CHUNK):
        e = begin + tl.arange(0, CHUNK)
        start, end = list_entries(
            lists, counts, first, group, e // n, e % n, n, rows, Sq, Sk, query_block, SIZE, CAUSAL,
            LISTS,
        )  # fmt: skip
        is_new, members = end > start, tl.zeros([CHUNK], tl.int32)
        for number in tl.static_range(LISTS):
            for f in range(0, n):
                start_f, end_f = list_entries(
                    lists, counts, first, group, number, f, n, rows, Sq, Sk, query_block, SIZE,
                    CAUSAL, LISTS,
                )  # fmt: skip
                same = (start == start_f) & (end_f > start_f)
                members |= same.to(tl.int32) << number
                is_new = is_new & ((same & (number * n + f < e)) == 0)
        tiles = tl.where(is_new, tl.cdiv(end - start, TILE), 0)
        place = count + tl.cumsum(tiles, 0) - tiles
        for tile in range(0, tl.max(tiles, 0)):
            word = ((start + tile * TILE).to(tl.int64) << 32) | members.to(tl.int64)
            tl.store(unions + 1 + place + tile, word, mask=tile < tiles)
        count += tl.sum(tiles, 0)
    tl.store(unions, count.to(tl.int64))


@triton.jit
def rows_of_group(
    ranges, ranges_stride_b, b, hk, group, m0, Sq, Sk, query_block, GROUP: tl.constexpr,
    LISTS: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rows m0 ... of a group of lists: (token, head, list, whether there is one, low, high).

    A row attends keys [low, high).
    """
    r = m0 + positions(ROWS, EXACT)
    token = group * LISTS * query_block + r // GROUP
    inside = (r < LISTS * query_block * GROUP) & (token < Sq)
    low, high = row_bounds(ranges, ranges_stride_b, b, token, inside, Sq, Sk, CAUSAL)
    return token, hk * GROUP + r % GROUP, r // GROUP // query_block, inside, low, high


@triton.jit
def row_bounds(ranges, ranges_stride_b, b, token, inside, Sq, Sk, CAUSAL: tl.constexpr):
    """The keys [low, high) that queries may attend; those not `inside` none."""
    low, high = token * 0, token * 0 + Sk
    if ranges is not None:
        at = ranges + b * ranges_stride_b + token * 2
        low = tl.load(at, mask=inside, other=0)
        high = tl.load(at + 1, mask=inside, other=0)
    elif CAUSAL:
        high = tl.minimum(token + Sk - Sq + 1, Sk)
    return low, tl.where(inside, high, 0)


@triton.jit
def load_gathered(
    x, stride_h, stride_s, head, token, inside, WIDTH: tl.constexpr, COLS: tl.constexpr
):
    """Rows of a tensor by their heads and tokens, 0 where there is none.

    Offsets have 64 bits where strides have.
    """
    offsets = (head * stride_h + token * stride_s)[:, None] + tl.arange(0, COLS)[None, :]
    keep = inside[:, None]
    if WIDTH < COLS:
        keep = keep & (tl.arange(0, COLS) < WIDTH)[None, :]
    return tl.load(x + offsets, mask=keep, other=0.0)


@triton.jit
def kept_keys(j, exists, members, number, low, high, LISTS: tl.constexpr):
    """Whether rows attend keys: j (1, N), or what broadcasts; the others (M, 1)."""
    keep = j < high
    if low is not None:
        keep = keep & (j >= low)
    if exists is not None:
        keep = keep & exists
    if LISTS > 1:
        keep = keep & (((members >> number) & 1) > 0)
    return keep


@triton.jit
def word_at(unions, step, end, SIZE: tl.constexpr, SPLIT: tl.constexpr, GATHERED: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    """The word of a step: of a tile, or with GATHERED of each of BLOCK_N keys from `step` on."""
    if GATHERED:
        slot = step + tl.arange(0, BLOCK_N)
        return tl.load(unions + slot // SIZE, mask=slot < end, other=0)
    else:
        return tl.load(unions + step // SPLIT, mask=step < end, other=0)


@triton.jit
def keys_of_step(word, step, end, Sk, SIZE: tl.constexpr, SPLIT: tl.constexpr,
                 GATHERED: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """(first key, keys (N,), which of them exist, members) of a step with its word."""
    first, members = (word >> 32).to(tl.int32), word.to(tl.int32)
    if GATHERED:
        slot = step + positions(BLOCK_N, EXACT)
        j = first + slot % SIZE
        return 0, j, (slot < end) & (j < Sk), members
    else:
        n0 = first + step % SPLIT * BLOCK_N
        j = n0 + positions(BLOCK_N, EXACT)
        return n0, j, j < Sk, members


@triton.jit
def load_step(
    x, stride_s, n0, j, exists, Sk, WIDTH: tl.constexpr, COLS: tl.constexpr,
    BLOCK_N: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """The rows of keys or values of a step."""
    if GATHERED:
        at = x + j.to(tl.int64) * stride_s
        return load_keys(at, exists, tl.arange(0, COLS), WIDTH, 1, COLS)
    else:
        at = x + tl.cast(n0, tl.int64) * stride_s
        return load_rows(at, stride_s, None, Sk - n0, WIDTH, BLOCK_N, COLS, True, WIDTH == COLS)


# The forward kernel


@triton.jit
def attend_rows(
    q, k, v, out, lse, sinks, ranges, unions, q_stride_b, q_stride_h, q_stride_s, k_stride_b,
    k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, ranges_stride_b, b, hk, group, m0,
    Hq, Sq, Sk, query_block, scale, D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, LISTS: tl.constexpr, CAUSAL: tl.constexpr,
    FOLD: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attention of rows m0 ... m0 + BLOCK_M - 1 of a group of lists.

    EXACT: scores are natural until the maximum is subtracted, and a NaN or Inf in a value makes NaN
    of the rows that attend it and changes no other. Otherwise returns whether any row has to be
    recomputed so.
    """
    GATHERED: tl.constexpr = is_gathered(SIZE)
    SPLIT: tl.constexpr = 1 if GATHERED else TILE // BLOCK_N
    q += b * q_stride_b
    k += b * k_stride_b + hk * k_stride_h
    v += b * v_stride_b + hk * v_stride_h
    token, h, number, inside, lowest, high = rows_of_group(
        ranges, ranges_stride_b, b, hk, group, m0, Sq, Sk, query_block, GROUP, LISTS, CAUSAL,
        BLOCK_M, EXACT,
    )  # fmt: skip
    qt = load_gathered(q, q_stride_h, q_stride_s, h, token, inside, D, BLOCK_D)
    full_high = tl.min(tl.where(inside, high, 2147483647), 0)
    full_low, low = 0, None
    if ranges is not None:
        full_low = tl.max(tl.where(inside, lowest, 0), 0)
        low = lowest[:, None]
    unit = scale if FOLD else LOG2E
    if EXACT:
        poisoned = tl.zeros([BLOCK_M], tl.int32)
        if not FOLD:
            scale *= LN2
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    count = tl.load(unions).to(tl.int32)
    unions += 1
    STEP: tl.constexpr = BLOCK_N if GATHERED else 1
    end = count * (SIZE if GATHERED else SPLIT)
    word = word_at(unions, 0, end, SIZE, SPLIT, GATHERED, BLOCK_N)
    for step in tl.range(0, end, STEP, num_stages=1 if EXACT else None):
        n0, j, exists, members = keys_of_step(
            word, step, end, Sk, SIZE, SPLIT, GATHERED, BLOCK_N, EXACT
        )
        # one step ahead, so that keys do not wait for it
        word = word_at(unions, step + STEP, end, SIZE, SPLIT, GATHERED, BLOCK_N)
        kt = load_step(k, k_stride_s, n0, j, exists, Sk, D, BLOCK_D, BLOCK_N, GATHERED)
        s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        if not FOLD:
            s *= scale
            if EXTREME:
                s = saturated(s)
        if GATHERED:
            keep = kept_keys(
                j[None, :], exists[None, :], members[None, :], number[:, None], low,
                high[:, None], LISTS,
            )  # fmt: skip
            s = tl.where(keep, s, float("-inf"))
        else:
            is_mixed = (n0 + BLOCK_N > full_high) | (n0 < full_low)
            if LISTS > 1:
                is_mixed = is_mixed | (members != (1 << LISTS) - 1)
            if is_mixed:
                keep = kept_keys(
                    j[None, :], None, members, number[:, None], low, high[:, None], LISTS
                )
                s = tl.where(keep, s, float("-inf"))
        p, alpha, m, den = softmax_step(s, m, den, scale, unit, FOLD, EXACT)
        acc = acc * alpha[:, None]
        vt = load_step(v, v_stride_s, n0, j, exists, Sk, Dv, BLOCK_DV, BLOCK_N, GATHERED)
        if EXACT:
            vt, nonfinite = replace_nonfinite(vt)
            touched = (p != 0.0) & nonfinite[None, :]
            poisoned = tl.maximum(poisoned, tl.max(touched.to(tl.int32), 1))
        acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision=PRECISION)
    if EXACT:
        acc = tl.where(poisoned[:, None] > 0, float("nan"), acc)
        if FOLD:
            m *= scale * LN2
    highest, sink = m, None
    if sinks is not None:
        sink = tl.load(sinks + h, mask=inside, other=0.0).to(tl.float32)
        m, den, alpha = with_sink(m, den, sink, EXACT)
    at = (b * Hq + h).to(tl.int64) * Sq + token
    tl.store(lse + at, natural(m, den, sink, EXACT), mask=inside)
    weight = tl.where(den == 0.0, 0.0, 1.0 / den)
    if sinks is not None:
        weight *= alpha
    acc *= weight[:, None]
    row = (b.to(tl.int64) * Sq + token) * Hq + h
    cols = tl.arange(0, BLOCK_DV)
    keep_row = inside[:, None] & (cols < Dv)[None, :]
    at = out + row[:, None] * Dv + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=keep_row)
    # beyond 2**22 a product that is not rounded is too far from a maximum that is
    redo = tl.abs(highest) > (4194304.0 if FOLD else LARGEST)
    redo = redo & (highest != float("-inf")) & inside
    return (tl.max(redo.to(tl.int32), 0) > 0) | has_nonfinite(acc)


@triton.jit
def locate_rows(pid, Hkv, groups, parts):
    """A program's work: (b, kv head, group of lists, part of its rows), the last rows first."""
    part = pid % parts
    group = groups - 1 - pid // parts % groups
    head = pid // parts // groups
    return head // Hkv, head % Hkv, group, part


@triton.jit(do_not_specialize=["Sq", "Sk", "Hkv", "groups", "parts", "query_block"])
def forward_kernel(
    q, k, v, out, lse, sinks, ranges, unions,
    q_stride_b: tl.int64, q_stride_h, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    ranges_stride_b: tl.int64, unions_stride_b: tl.int64, unions_stride_h: tl.int64,
    capacity: tl.int64, Hkv: tl.int32, Sq: tl.int32, Sk: tl.int32, query_block: tl.int32,
    groups: tl.int32, parts: tl.int32, scale: tl.float32,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, LISTS: tl.constexpr, CAUSAL: tl.constexpr, FOLD: tl.constexpr,
    EXTREME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M rows of a group of lists: out (B, Sq, Hq, Dv), lse (B, Hq, Sq).

    q (B, Hkv * GROUP, Sq, D), k and v (B, Hkv, Sk, ...) by strides; ranges int32 (B or 1, Sq, 2).
    scale: log2(e) times the scale. The grid is B * Hkv * groups * parts.
    """
    b, hk, group, part = locate_rows(tl.program_id(0), Hkv, groups, parts)
    unions += b * unions_stride_b + hk * unions_stride_h + group.to(tl.int64) * (1 + capacity)
    redo = attend_rows(
        q, k, v, out, lse, sinks, ranges, unions, q_stride_b, q_stride_h, q_stride_s, k_stride_b,
        k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, ranges_stride_b, b, hk, group,
        part * BLOCK_M, Hkv * GROUP, Sq, Sk, query_block, scale, D, Dv, BLOCK_D, BLOCK_DV, BLOCK_M,
        BLOCK_N, SIZE, TILE, GROUP, LISTS, CAUSAL, FOLD, EXTREME, PRECISION, False,
    )  # fmt: skip
    if redo:
        # small tiles, and recomputed indices, take no registers from the loop above
        b, hk, group, part = opaque(b), opaque(hk), opaque(group), opaque(part)
        for more in tl.range(0, BLOCK_M, EXACT_ROWS, num_stages=1):
            attend_rows(
                q, k, v, out, lse, sinks, ranges, unions, q_stride_b, q_stride_h, q_stride_s,
                k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
                ranges_stride_b, b, hk, group, part * BLOCK_M + more, Hkv * GROUP, Sq, Sk,
                query_block, scale, D, Dv, BLOCK_D, BLOCK_DV, EXACT_ROWS, exact_keys(BLOCK_N), SIZE,
                TILE, GROUP, LISTS, CAUSAL, FOLD, EXTREME, PRECISION, True,
            )  # fmt: skip


# The backward kernels


@triton.jit
def weights_and_gradients(
    qk, dp, lse, delta, keep, scale, EXTREME: tl.constexpr, EXACT: tl.constexpr
):
    """(p, ds) of a tile: the weights, and the gradients of the scores; lse in units of log2."""
    s = qk * scale
    if EXTREME:
        s = saturated(s)
    p = tl.where(keep, tl.exp2(s - lse), 0.0)
    ds = p * (dp - delta)
    if EXACT:
        ds = tl.where(p == 0.0, 0.0, ds)
    return p, ds


@triton.jit
def query_grad_rows(
    q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, ranges, unions, q_stride_b,
    q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, out_stride_b, out_stride_h,
    out_stride_s, dq_stride_b, dq_stride_h, dq_stride_s, ranges_stride_b, b, hk, group, m0, Hq, Sq,
    Sk, query_block, scale, D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, LISTS: tl.constexpr, CAUSAL: tl.constexpr,
    EXTREME: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dq of rows m0 ... m0 + BLOCK_M - 1 of a group of lists, and their statistics.

    EXACT: a NaN or Inf in a key or value makes NaN of the gradients of rows that attend it and
    changes no other. Otherwise returns whether any row has to be recomputed so.
    """
    GATHERED: tl.constexpr = is_gathered(SIZE)
    SPLIT: tl.constexpr = 1 if GATHERED else TILE // BLOCK_N
    q += b * q_stride_b
    dq += b * dq_stride_b
    k += b * k_stride_b + hk * k_stride_h
    v += b * v_stride_b + hk * v_stride_h
    token, h, number, inside, lowest, high = rows_of_group(
        ranges, ranges_stride_b, b, hk, group, m0, Sq, Sk, query_block, GROUP, LISTS, CAUSAL,
        BLOCK_M, EXACT,
    )  # fmt: skip
    at = (b * Hq + h).to(tl.int64) * Sq + token
    m = tl.load(lse + at, mask=inside, other=float("-inf"))
    do = load_gathered(
        grad_out + b * grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, h, token, inside,
        Dv, BLOCK_DV,
    )  # fmt: skip
    o = load_gathered(
        out + b * out_stride_b, out_stride_h, out_stride_s, h, token, inside, Dv, BLOCK_DV
    )
    qt = load_gathered(q, q_stride_h, q_stride_s, h, token, inside, D, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + at, mask=inside, other=0.0)
    dead = m == float("-inf")
    m *= LOG2E
    # from 2**24 on lse has no fraction left, and weights computed from it might overflow
    m = tl.where(tl.abs(m) >= 16777216.0, float("inf"), m)
    delta = tl.where(dead, 0.0, delta)
    if not EXACT:
        at = (b * (Hq // GROUP) + hk).to(tl.int64) * Sq * GROUP + token * GROUP + h - hk * GROUP
        tl.store(row_lse + at, m, mask=inside)
        tl.store(row_delta + at, delta, mask=inside)
    low = None
    if ranges is not None:
        low = lowest[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    poisoned = tl.zeros([BLOCK_M], tl.int32)
    count = tl.load(unions).to(tl.int32)
    unions += 1
    STEP: tl.constexpr = BLOCK_N if GATHERED else 1
    end = count * (SIZE if GATHERED else SPLIT)
    word = word_at(unions, 0, end, SIZE, SPLIT, GATHERED, BLOCK_N)
    for step in tl.range(0, end, STEP, num_stages=1 if EXACT else None):
        n0, j, exists, members = keys_of_step(
            word, step, end, Sk, SIZE, SPLIT, GATHERED, BLOCK_N, EXACT
        )
        word = word_at(unions, step + STEP, end, SIZE, SPLIT, GATHERED, BLOCK_N)
        kt = load_step(k, k_stride_s, n0, j, exists, Sk, D, BLOCK_D, BLOCK_N, GATHERED)
        vt = load_step(v, v_stride_s, n0, j, exists, Sk, Dv, BLOCK_DV, BLOCK_N, GATHERED)
        if EXACT:
            kt, nonfinite = replace_nonfinite(kt)
            vt, nonfinite_v = replace_nonfinite(vt)
            nonfinite = nonfinite | nonfinite_v
        qk = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(vt), input_precision=PRECISION)
        if GATHERED:
            keep = kept_keys(
                j[None, :], exists[None, :], members[None, :], number[:, None], low,
                high[:, None], LISTS,
            )  # fmt: skip
        else:
            keep = kept_keys(j[None, :], None, members, number[:, None], low, high[:, None], LISTS)
        p, ds = weights_and_gradients(
            qk, dp, m[:, None], delta[:, None], keep, scale, EXTREME, EXACT
        )
        if EXACT:
            touched = ((p != 0.0) | (ds != 0.0)) & nonfinite[None, :]
            poisoned = tl.maximum(poisoned, tl.max(touched.to(tl.int32), 1))
        acc = tl.dot(ds.to(kt.dtype), kt, acc, input_precision=PRECISION)
    acc *= scale * LN2
    if EXACT:
        acc = tl.where(poisoned[:, None] > 0, float("nan"), acc)
    cols = tl.arange(0, BLOCK_D)
    at = dq + h * dq_stride_h + token * dq_stride_s
    keep_row = inside[:, None] & (cols < D)[None, :]
    tl.store(at[:, None] + cols[None, :], acc.to(dq.dtype.element_ty), mask=keep_row)
    return has_nonfinite(acc)


@triton.jit(do_not_specialize=["Sq", "Sk", "Hkv", "groups", "parts", "query_block"])
def query_grad_kernel(
    q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, ranges, unions,
    q_stride_b: tl.int64, q_stride_h, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    grad_out_stride_b: tl.int64, grad_out_stride_h, grad_out_stride_s,
    out_stride_b: tl.int64, out_stride_h, out_stride_s,
    dq_stride_b: tl.int64, dq_stride_h, dq_stride_s,
    ranges_stride_b: tl.int64, unions_stride_b: tl.int64, unions_stride_h: tl.int64,
    capacity: tl.int64, Hkv: tl.int32, Sq: tl.int32, Sk: tl.int32, query_block: tl.int32,
    groups: tl.int32, parts: tl.int32, scale: tl.float32,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, LISTS: tl.constexpr, CAUSAL: tl.constexpr, EXTREME: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M rows of a group of lists, and row_lse and row_delta (B, Hkv, Sq, GROUP).

    row_lse: lse in units of log2, inf for rows that attend nothing. row_delta: rowsum(dO * O) less
    the gradient of lse. Tensors and grid as in `forward_kernel`.
    """
    b, hk, group, part = locate_rows(tl.program_id(0), Hkv, groups, parts)
    unions += b * unions_stride_b + hk * unions_stride_h + group.to(tl.int64) * (1 + capacity)
    redo = query_grad_rows(
        q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, ranges, unions, q_stride_b,
        q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h,
        v_stride_s, grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, out_stride_b,
        out_stride_h, out_stride_s, dq_stride_b, dq_stride_h, dq_stride_s, ranges_stride_b, b, hk,
        group, part * BLOCK_M, Hkv * GROUP, Sq, Sk, query_block, scale, D, Dv, BLOCK_D, BLOCK_DV,
        BLOCK_M, BLOCK_N, SIZE, TILE, GROUP, LISTS, CAUSAL, EXTREME, PRECISION, False,
    )  # fmt: skip
    if redo:
        b, hk, group, part = opaque(b), opaque(hk), opaque(group), opaque(part)
        for more in tl.range(0, BLOCK_M, EXACT_ROWS, num_stages=1):
            query_grad_rows(
                q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, ranges, unions,
                q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b,
                v_stride_h, v_stride_s, grad_out_stride_b, grad_out_stride_h, grad_out_stride_s,
                out_stride_b, out_stride_h, out_stride_s, dq_stride_b, dq_stride_h, dq_stride_s,
                ranges_stride_b, b, hk, group, part * BLOCK_M + more, Hkv * GROUP, Sq, Sk,
                query_block, scale, D, Dv, BLOCK_D, BLOCK_DV, EXACT_ROWS, exact_keys(BLOCK_N), SIZE,
                TILE, GROUP, LISTS, CAUSAL, EXTREME, PRECISION, True,
            )  # fmt: skip


@triton.jit
def key_grad_rows(
    q, k, v, grad_out, row_lse, row_delta, ranges, words, dk, dv, partials, q_stride_b, q_stride_h,
    q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, dk_stride_b, dk_stride_h, dk_stride_s,
    dv_stride_b, dv_stride_h, dv_stride_s, ranges_stride_b, b, hk, n0, limit, count, slot, part0,
    Hkv, Sq, Sk, query_block, scale, D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
    SIZE: tl.constexpr, GROUP: tl.constexpr, LIST_ROWS: tl.constexpr, BY_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr, CAUSAL: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys n0 ... n0 + BLOCK_N - 1 below `limit`, over `count` words of the inverse.

    A word is a list, -1 for none; with several blocks of a tile `list << 32 | blocks`, a bit for
    each. LIST_ROWS: rows of a list, 0 if there are BLOCK_M or more; BY_HEADS: a
    step has queries of one head. slot: of `partials` (slots, PART, BLOCK_D +
    BLOCK_DV) that take the sums from row `part0` on, or below 0 the gradients themselves.
    """
    q += b * q_stride_b
    grad_out += b * grad_out_stride_b
    row_lse += (b * Hkv + hk).to(tl.int64) * Sq * GROUP
    row_delta += (b * Hkv + hk).to(tl.int64) * Sq * GROUP
    list_rows = query_block * GROUP
    j = n0 + positions(BLOCK_N, EXACT)
    there = j < limit
    k_at = k + b * k_stride_b + hk * k_stride_h + tl.cast(n0, tl.int64) * k_stride_s
    v_at = v + b * v_stride_b + hk * v_stride_h + tl.cast(n0, tl.int64) * v_stride_s
    kt = load_rows(k_at, k_stride_s, None, limit - n0, D, BLOCK_N, BLOCK_D, True, D == BLOCK_D)
    vt = load_rows(v_at, v_stride_s, None, limit - n0, Dv, BLOCK_N, BLOCK_DV, True, Dv == BLOCK_DV)
    own = (part0 + positions(BLOCK_N, EXACT)) // SIZE  # the block of a key in the tile
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    poisoned = tl.zeros([BLOCK_N], tl.int32)
    head_parts = tl.cdiv(query_block, BLOCK_M)
    parts = GROUP * head_parts if BY_HEADS else tl.cdiv(list_rows, BLOCK_M)
    STEP: tl.constexpr = BLOCK_M if LIST_ROWS > 0 else 1
    end = count * (LIST_ROWS if LIST_ROWS > 0 else parts)
    for step in tl.range(0, end, STEP, num_stages=1 if EXACT else None):
        if LIST_ROWS > 0:
            row = step + positions(BLOCK_M, EXACT)
            word = tl.load(words + row // LIST_ROWS, mask=row < end, other=0)
            r = row % LIST_ROWS
            inside = row < end
        elif BY_HEADS:
            word = tl.load(words + step // head_parts // GROUP)
        else:
            word = tl.load(words + step // parts)
            r = step % parts * BLOCK_M + positions(BLOCK_M, EXACT)
            inside = r < list_rows
        if BLOCKS == 1:
            number = word
        else:
            number, blocks = (word >> 32).to(tl.int32), word.to(tl.int32)
        if BY_HEADS:
            g = step // head_parts % GROUP
            m0 = number * query_block + step % head_parts * BLOCK_M
            token = m0 + positions(BLOCK_M, EXACT)
            last = tl.where(number < 0, m0, tl.minimum((number + 1) * query_block, Sq))
            inside = token < last
        else:
            g = r % GROUP
            token = number * query_block + r // GROUP
            inside = inside & (token < Sq)
            if BLOCKS == 1:
                inside = inside & (word >= 0)
        h = hk * GROUP + g
        low, high = row_bounds(ranges, ranges_stride_b, b, token, inside, Sq, Sk, CAUSAL)
        at = token * GROUP + g
        m = tl.load(row_lse + at, mask=inside, other=float("inf"))
        if BY_HEADS:
            at_q = q + h * q_stride_h + tl.cast(m0, tl.int64) * q_stride_s
            qt = load_rows(
                at_q, q_stride_s, None, last - m0, D, BLOCK_M, BLOCK_D, True, D == BLOCK_D
            )
        else:
            qt = load_gathered(q, q_stride_h, q_stride_s, h, token, inside, D, BLOCK_D)
        if EXACT:
            qt, nonfinite = replace_nonfinite(qt)
        qk = tl.dot(kt, tl.trans(qt), input_precision=PRECISION)
        if BY_HEADS:
            at_do = grad_out + h * grad_out_stride_h + tl.cast(m0, tl.int64) * grad_out_stride_s
            do = load_rows(
                at_do, grad_out_stride_s, None, last - m0, Dv, BLOCK_M, BLOCK_DV, True,
                Dv == BLOCK_DV,
            )  # fmt: skip
        else:
            do = load_gathered(
                grad_out, grad_out_stride_h, grad_out_stride_s, h, token, inside, Dv, BLOCK_DV
            )
        delta = tl.load(row_delta + at, mask=inside, other=0.0)
        if EXACT:
            do, nonfinite_do = replace_nonfinite(do)
            delta, nonfinite_delta = replace_nonfinite(delta[:, None])
            delta = tl.reshape(delta, [BLOCK_M])
            nonfinite = nonfinite | nonfinite_do | nonfinite_delta | (m != m)
            m = tl.where(nonfinite, -1e38, m)  # makes every weight that is not masked Inf
        dp = tl.dot(vt, tl.trans(do), input_precision=PRECISION)
        keep = j[:, None] < high[None, :]
        if ranges is not None:
            keep = keep & (j[:, None] >= low[None, :])
        if BLOCKS > 1:
            if LIST_ROWS > 0:
                blocks = blocks[None, :]
            keep = keep & (((blocks >> own[:, None]) & 1) > 0)
        p, ds = weights_and_gradients(
            qk, dp, m[None, :], delta[None, :], keep, scale, EXTREME, EXACT
        )
        if EXACT:
            touched = ((p != 0.0) | (ds != 0.0)) & nonfinite[None, :]
            poisoned = tl.maximum(poisoned, tl.max(touched.to(tl.int32), 1))
            p = tl.where(nonfinite[None, :], 0.0, p)
            ds = tl.where(nonfinite[None, :], 0.0, ds)
        dv_acc = tl.dot(p.to(do.dtype), do, dv_acc, input_precision=PRECISION)
        dk_acc = tl.dot(ds.to(qt.dtype), qt, dk_acc, input_precision=PRECISION)
    dk_acc *= scale * LN2
    if EXACT:
        dk_acc = tl.where(poisoned[:, None] > 0, float("nan"), dk_acc)
        dv_acc = tl.where(poisoned[:, None] > 0, float("nan"), dv_acc)
    dk_acc = tl.where(there[:, None], dk_acc, 0.0)
    dv_acc = tl.where(there[:, None], dv_acc, 0.0)
    if slot < 0:
        store_tile(
            dk + b * dk_stride_b + hk * dk_stride_h, n0, dk_stride_s, limit, D, dk_acc, D == BLOCK_D
        )
        store_tile(
            dv + b * dv_stride_b + hk * dv_stride_h, n0, dv_stride_s, limit, Dv, dv_acc,
            Dv == BLOCK_DV,
        )  # fmt: skip
    else:
        at = partials + tl.cast(slot, tl.int64) * PART * (BLOCK_D + BLOCK_DV)
        store_tile(at, part0, BLOCK_D, PART, BLOCK_D, dk_acc, True)
        store_tile(at + PART * BLOCK_D, part0, BLOCK_DV, PART, BLOCK_DV, dv_acc, True)
    return has_nonfinite(dk_acc) | has_nonfinite(dv_acc)


@triton.jit
def locate_unit(unit, ends, batch, Sk, UNIT: tl.constexpr):
    """(first key, end) of a unit of UNIT keys, which begin in each of the sequences of `ends`."""
    if ends is not None:
        _, block, start, length, _, _ = find_sequence(ends, ends, batch, Sk, Sk, unit, UNIT)
        # the keys before the first sequence, and behind the last one, have units too
        return start + block * UNIT, tl.minimum(start + block * UNIT + UNIT, start + length)
    else:
        return unit * UNIT, tl.minimum(unit * UNIT + UNIT, Sk)


@triton.jit(do_not_specialize=["Sq", "Sk", "Hkv", "items", "query_block", "batch", "units"])
def key_grad_kernel(
    q, k, v, grad_out, row_lse, row_delta, ranges, words, offsets, first_items, first_slots, ends,
    dk, dv, partials,
    q_stride_b: tl.int64, q_stride_h, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    grad_out_stride_b: tl.int64, grad_out_stride_h, grad_out_stride_s,
    dk_stride_b: tl.int64, dk_stride_h: tl.int64, dk_stride_s,
    dv_stride_b: tl.int64, dv_stride_h: tl.int64, dv_stride_s,
    ranges_stride_b: tl.int64, Hkv: tl.int32, Sq: tl.int32, Sk: tl.int32, query_block: tl.int32,
    batch: tl.int32, units: tl.int32, list_heads: tl.int32, heads: tl.int32, items: tl.int32,
    slots: tl.int32, longest: tl.int32, scale: tl.float32,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, LIST_ROWS: tl.constexpr, BY_HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    EXTREME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of a unit, over the lists that have them, or some of these.

    A unit is a block of keys, or several small ones. Unit u of head h of the lists has words
    offsets[h * units + u] and on, in items of `longest`; first_items and first_slots number its
    items, and of those that share a unit the slots of `partials`. The grid is parts of a unit times
    items times the repetitions of the lists' heads.
    """
    PARTS: tl.constexpr = (UNIT + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    part, item, repetition = pid % PARTS, pid // PARTS % items, pid // PARTS // items
    numbered = unit_of_item(first_items, item, list_heads * heads * units)
    begin = item - tl.load(first_items + numbered)
    own = tl.load(first_items + numbered + 1) - tl.load(first_items + numbered)
    if begin >= own:
        return
    first_word = tl.load(offsets + numbered) + begin * longest
    words += first_word
    count = tl.minimum(tl.load(offsets + numbered + 1) - first_word, longest).to(tl.int32)
    list_head = numbered // units
    b = list_head // heads + repetition // (Hkv // heads)
    hk = list_head % heads + repetition % (Hkv // heads)
    n0, limit = locate_unit(numbered % units, ends, batch, Sk, UNIT)
    n0 += part * BLOCK_N
    slot = (repetition * slots + tl.load(first_slots + numbered) + begin) * PARTS + part
    slot = tl.where(own > 1, slot, -1)
    if n0 < limit:
        redo = key_grad_rows(
            q, k, v, grad_out, row_lse, row_delta, ranges, words, dk, dv, partials, q_stride_b,
            q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h,
            v_stride_s, grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, dk_stride_b,
            dk_stride_h, dk_stride_s, dv_stride_b, dv_stride_h, dv_stride_s, ranges_stride_b, b, hk,
            n0, limit, count, slot, 0, Hkv, Sq, Sk, query_block, scale, D, Dv,
            BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_N, SIZE, GROUP, LIST_ROWS, BY_HEADS,
            UNIT // SIZE, CAUSAL, EXTREME, PRECISION, False,
        )  # fmt: skip
        if redo:
            b, hk, n0, limit, slot = opaque(b), opaque(hk), opaque(n0), opaque(limit), opaque(slot)
            count = opaque(count)
            for more in tl.range(0, tl.minimum(BLOCK_N, limit - n0), EXACT_ROWS, num_stages=1):
                key_grad_rows(
                    q, k, v, grad_out, row_lse, row_delta, ranges, words, dk, dv, partials,
                    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
                    v_stride_b, v_stride_h, v_stride_s, grad_out_stride_b, grad_out_stride_h,
                    grad_out_stride_s, dk_stride_b, dk_stride_h, dk_stride_s, dv_stride_b,
                    dv_stride_h, dv_stride_s, ranges_stride_b, b, hk, n0 + more, limit, count, slot,
                    more, Hkv, Sq, Sk, query_block, scale, D, Dv, BLOCK_D, BLOCK_DV,
                    2 * EXACT_ROWS, EXACT_ROWS, BLOCK_N, SIZE, GROUP, LIST_ROWS, BY_HEADS,
                    UNIT // SIZE, CAUSAL, EXTREME, PRECISION, True,
                )  # fmt: skip


@triton.jit
def unit_of_item(first_items, item, count):
    """The last unit whose first item is not behind `item`; units have at least one item each."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_behind = tl.load(first_items + middle) > item
        high = tl.where(is_behind, middle - 1, high)
        low = tl.where(is_behind, low, middle)
    return low


@triton.jit(do_not_specialize=["Sk", "Hkv", "batch", "units"])
def key_sum_kernel(
    partials, first_items, first_slots, ends, dk, dv,
    dk_stride_b: tl.int64, dk_stride_h: tl.int64, dk_stride_s,
    dv_stride_b: tl.int64, dv_stride_h: tl.int64, dv_stride_s,
    Hkv: tl.int32, Sk: tl.int32, batch: tl.int32, units: tl.int32, list_heads: tl.int32,
    heads: tl.int32, slots: tl.int32, D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of a unit that several items share: their sums, in their order."""
    PARTS: tl.constexpr = (UNIT + BLOCK_N - 1) // BLOCK_N
    count = list_heads * heads * units
    pid = tl.program_id(0)
    part, numbered, repetition = pid % PARTS, pid // PARTS % count, pid // PARTS // count
    own = tl.load(first_items + numbered + 1) - tl.load(first_items + numbered)
    if own < 2:
        return
    list_head = numbered // units
    b = list_head // heads + repetition // (Hkv // heads)
    hk = list_head % heads + repetition % (Hkv // heads)
    n0, limit = locate_unit(numbered % units, ends, batch, Sk, UNIT)
    n0 += part * BLOCK_N
    if n0 >= limit:
        return
    slot = repetition * slots + tl.load(first_slots + numbered)
    rows = tl.arange(0, BLOCK_N)[:, None]
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for one in range(0, own):
        at = ((slot + one) * PARTS + part).to(tl.int64) * BLOCK_N * (BLOCK_D + BLOCK_DV)
        dk_acc += tl.load(partials + at + rows * BLOCK_D + tl.arange(0, BLOCK_D)[None, :])
        at += BLOCK_N * BLOCK_D
        dv_acc += tl.load(partials + at + rows * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :])
    dk += b * dk_stride_b + hk * dk_stride_h
    dv += b * dv_stride_b + hk * dv_stride_h
    store_tile(dk, n0, dk_stride_s, limit, D, dk_acc, D == BLOCK_D)
    store_tile(dv, n0, dv_stride_s, limit, Dv, dv_acc, Dv == BLOCK_DV)
