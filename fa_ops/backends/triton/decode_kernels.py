"""The kernels of decoding, and the share of the keys that each of their programs has."""

from __future__ import annotations

import triton
import triton.language as tl

from fa_ops.backends.triton.primitives import (
    LOG2E,
    attended,
    has_nonfinite,
    load_keys,
    natural,
    pages_of,
    replace_nonfinite,
    saturated,
    scale_index,
    tanh,
    unpacked,
    with_sink,
)

# Work ranges of decoding programs: the tiles of all sequences, divided equally (as in Stream-K).
#
# A sequence has a number of tiles of BLOCK_N keys, times its units (see `decode_kernels`). All of
# it is computed from lengths and key ranges on the device.


@triton.jit
def key_range(ranges, ranges_stride, b, batch, length):
    """Key range [begin, end) of sequences b, within their `length`."""
    at = ranges + b * ranges_stride
    begin = tl.maximum(tl.load(at, mask=b < batch, other=0), 0)
    end = tl.minimum(tl.load(at + 1, mask=b < batch, other=0), length)
    return begin, tl.maximum(end, 0)


@triton.jit
def row_tiles(
    kv_lens, ranges, ranges_stride, b, batch, capacity, new, Sq, window_left,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(length, first tile, tiles) of sequences b, a scalar or a vector; 0 beyond the batch."""
    length = capacity
    if kv_lens is not None:
        length = tl.minimum(tl.load(kv_lens + b, mask=b < batch, other=0), capacity) + new
        length = tl.minimum(tl.maximum(length, 0), capacity)
    length = tl.where(b < batch, length, 0)
    begin, end = length * 0, length
    if ranges is not None:
        begin, end = key_range(ranges, ranges_stride, b, batch, length)
    if window_left is not None:
        begin = tl.maximum(length - Sq - window_left, begin)
    first = begin // BLOCK_N
    return length, first, tl.maximum(tl.cdiv(end, BLOCK_N) - first, 0)


@triton.jit
def find_tile(
    kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, units, tile,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(sequence, tiles before it) of tile number `tile`, and the number of all tiles."""
    b, base, before = 0, 0, 0
    for chunk in range(0, batch, CHUNK):
        u = chunk + tl.arange(0, CHUNK)
        _, _, tiles = row_tiles(
            kv_lens, ranges, ranges_stride, u, batch, capacity, new, Sq, window_left, BLOCK_N
        )
        ends = before + tl.cumsum(tiles, 0) * units
        passed = (ends <= tile) & (u < batch)
        b += tl.sum(passed.to(tl.int32), 0)
        base = tl.maximum(base, tl.max(tl.where(passed, ends, 0), 0))
        before += tl.sum(tiles, 0) * units
    return b, base, before


@triton.jit
def tiles_before(
    kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, b,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tiles per unit of the sequences before b, and of all sequences."""
    before, total = 0, 0
    for chunk in range(0, batch, CHUNK):
        u = chunk + tl.arange(0, CHUNK)
        _, _, tiles = row_tiles(
            kv_lens, ranges, ranges_stride, u, batch, capacity, new, Sq, window_left, BLOCK_N
        )
        before += tl.sum(tl.where(u < b, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    return before, total


@triton.jit
def work_range(pid, total, programs):
    """Tiles [first, last) of a program, divided equally over at most as many programs as tiles.

    `program_of_tile` is its inverse.
    """
    programs = tl.minimum(programs, tl.maximum(total, 1)).to(tl.int64)
    first = (pid * total.to(tl.int64)) // programs
    last = (pid + 1) * total.to(tl.int64) // programs
    idle = pid >= programs
    return tl.where(idle, total, first).to(tl.int32), tl.where(idle, 0, last).to(tl.int32)


@triton.jit
def program_of_tile(tile, total, programs):
    """The program whose `work_range` has the tile."""
    programs = tl.minimum(programs, tl.maximum(total, 1)).to(tl.int64)
    return (((tile.to(tl.int64) + 1) * programs - 1) // tl.maximum(total, 1)).to(tl.int32)


# Flash-Decoding kernels: few query rows against a long cache, whose keys are split.
#
# A program computes the rows of all query heads that share a kv head. A `unit` is a kv head of a
# sequence, or one of several blocks of its rows, and has a number of tiles of BLOCK_N keys. Tiles
# are numbered sequence by sequence, unit by unit.
#
# STREAM: every program has an equal range of these tiles (as in Stream-K), so sequences of
# different lengths are balanced, and only numbers read on the device depend on lengths. Units that
# lie within a range are written to the result; the pieces at its two ends go to slots 2 * pid (it
# began in an earlier range) and 2 * pid + 1 (it continues in a later one), where
# `merge_splits_kernel` finds them by the same arithmetic. Otherwise each unit is split alone, into
# `splits` pieces, or with FIXED into pieces of that many tiles, so that a sequence's bits do not
# depend on its batch.


@triton.jit
def attend_piece(
    q, k, v, table, b, h, m0, first, last, begin, end, length,
    q_stride_h, q_stride_s, k_stride_b, k_stride_s, v_stride_b, v_stride_s,
    Hkv, group, Sq, pages, scale, k_scales, v_scales, cap, slopes, window_left, window_right,
    fixed_max,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, EXTRA: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, EXTREME: tl.constexpr,
    APART: tl.constexpr, EXACT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Softmax over tiles [first, last) of one unit: (maximum, denominator, weighted sum, failed).

    q points to the batch element, k and v to the head (of the batch element, or of page 0), `table`
    to the batch element's pages, slopes to the kv head's first query head, k_scales and v_scales
    to the kv head's first scale if there is one for each page or token. Keys are attended below
    `end`, and from `begin` on unless that is None.

    `fixed_max` None: online softmax with a running maximum. Otherwise it points to a fixed maximum
    for the kv head's first query head, in units of scores, and the loop neither reduces nor
    rescales (the unified max of FlashDecoding++, arXiv:2311.01282); it fails if a row's maximum is
    so far from it that weights lose precision.

    APART: rows may attend different keys; then it fails if a sum is NaN or Inf, which may come from
    a masked value. EXACT: a NaN or Inf in a value makes NaN of the rows that attend it and changes
    no other.
    """
    FP8: tl.constexpr = k.dtype.element_ty == tl.int16  # two numbers in each
    PACK: tl.constexpr = 2 if FP8 else 1
    r = m0 + tl.arange(0, BLOCK_M)
    head = r // Sq
    i = r - head * Sq
    rows = r < group * Sq
    cols = tl.arange(0, BLOCK_D // PACK)
    extra = BLOCK_D // PACK + tl.arange(0, EXTRA // PACK if EXTRA > 0 else 16)
    cols_v = tl.arange(0, BLOCK_DV // PACK)
    at = q + (h * group + head) * q_stride_h + i * q_stride_s
    qt = load_query(at, rows, cols * PACK, D)
    if EXTRA > 0:
        qx = load_query(at, rows, extra * PACK, D)
    if FP8:  # fp16 holds every e4m3 number, and q in units of its rows' largest
        q_odd = load_query(at + 1, rows, cols * 2, D - 1)
        top = largest(qt, q_odd)
        if EXTRA > 0:
            qx_odd = load_query(at + 1, rows, extra * 2, D - 1)
            top = tl.maximum(top, largest(qx, qx_odd))
            qx, qx_odd = in_units_of(qx, top), in_units_of(qx_odd, top)
        qt, q_odd = in_units_of(qt, top), in_units_of(q_odd, top)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=rows, other=0.0)[:, None] * LOG2E
    shift = length - Sq
    steps = tl.arange(0, BLOCK_N)

    if fixed_max is None:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        den = tl.zeros([BLOCK_M], tl.float32)
    else:
        m = tl.load(fixed_max + head, mask=rows, other=0.0) * LOG2E
        den = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        highest = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV // PACK], tl.float32)
    acc_odd = acc
    if EXACT:
        poisoned = tl.zeros([BLOCK_M], tl.int32)
    v_top = 0.0  # the largest scale of values so far; acc is in its units
    page = steps  # of this tile's keys; loaded one tile ahead, so that keys do not wait for it
    if PAGE > 0:
        page = pages_of(table, first * BLOCK_N, end, BLOCK_N, PAGE)
        if BLOCK_N % PAGE == 0:
            k += (steps % PAGE).to(tl.int64) * k_stride_s
            v += (steps % PAGE).to(tl.int64) * v_stride_s
    for t in tl.range(first, last, num_stages=1 if EXACT else STAGES):
        n0 = tl.multiple_of(t * BLOCK_N, BLOCK_N)
        j = n0 + steps
        there = j < end
        if begin is not None:
            there = there & (j >= begin)
        if window_left is not None:  # keys that no row attends
            there = there & (j >= shift - window_left)
        if PAGE > 0:
            there = there & (page >= 0) & (page < pages)
            known = tl.where(there, page, 0).to(tl.int64)
            k_rows, v_rows = k + known * k_stride_b, v + known * v_stride_b
            if BLOCK_N % PAGE != 0:
                slot = (j % PAGE).to(tl.int64)
                k_rows += slot * k_stride_s
                v_rows += slot * v_stride_s
            page = pages_of(table, n0 + BLOCK_N, end, BLOCK_N, PAGE)
        else:
            # incremented pointers would take 80 registers more
            k_rows = k + j.to(tl.int64) * k_stride_s
            v_rows = v + j.to(tl.int64) * v_stride_s
        kt = load_keys(k_rows, there, cols, D, PACK, BLOCK_D)
        if FP8:
            kt, k_odd = unpacked(kt)
            s = tl.dot(qt, tl.trans(kt))
            s = tl.dot(q_odd, tl.trans(k_odd), s)
        else:
            s = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        if EXTRA > 0:
            kx = load_keys(k_rows, there, extra, D, PACK, BLOCK_D + EXTRA)
            if FP8:
                kx, kx_odd = unpacked(kx)
                s = tl.dot(qx, tl.trans(kx), s)
                s = tl.dot(qx_odd, tl.trans(kx_odd), s)
            else:
                s = tl.dot(qx, tl.trans(kx), s, input_precision=PRECISION)
        s *= scale
        if EXTREME and cap is None:
            s = saturated(s)
        if FP8:
            s *= top[:, None]
        if SCALES >= 2:
            scale_at = scale_index(known if PAGE > 0 else j, j, Hkv, PAGE, SCALES)
        if k_scales is not None:
            s *= tl.load(k_scales + scale_at, mask=there, other=0.0)[None, :]
        if cap is not None:
            s = tanh(s, EXTREME) * cap
        columns = j[None, :]
        if slope is not None:
            s -= slope * tl.abs(i[:, None] + shift - columns).to(tl.float32)
        keep = attended(i[:, None], columns, shift, end, window_left, window_right, None, None)
        if PAGE > 0 or begin is not None:
            keep = keep & there[None, :]
        s = tl.where(keep, s, float("-inf"))
        if fixed_max is None:
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - base[:, None])
            alpha = tl.exp2(m - base)
            den = den * alpha + tl.sum(p, 1)
            m = m_new
        else:
            highest = tl.maximum(highest, s)
            p = tl.exp2(s - m[:, None])
            den += p
            alpha = tl.full([BLOCK_M], 1.0, tl.float32)
        if v_scales is not None:
            v_scale = tl.load(v_scales + scale_at, mask=there, other=0.0)
            v_top_new = tl.maximum(v_top, tl.max(tl.abs(v_scale), 0))
            unit = tl.where(v_top_new == 0.0, 1.0, v_top_new)
            alpha *= v_top / unit
            p *= (v_scale / unit)[None, :]
            v_top = v_top_new
        if fixed_max is None or v_scales is not None:
            acc = acc * alpha[:, None]
            if FP8:
                acc_odd = acc_odd * alpha[:, None]
        vt = kt if SHARED else load_keys(v_rows, there, cols_v, Dv, PACK, BLOCK_DV)
        if FP8:
            if SHARED:
                v_odd = k_odd
            else:
                vt, v_odd = unpacked(vt)
        if EXACT:
            vt, nonfinite = replace_nonfinite(vt)
            if FP8:
                v_odd, nonfinite_odd = replace_nonfinite(v_odd)
                nonfinite = nonfinite | nonfinite_odd
            found = (p != 0.0) & nonfinite[None, :]
            poisoned = tl.maximum(poisoned, tl.max(found.to(tl.int32), 1))
        if FP8:
            acc_odd = tl.dot(p.to(tl.float16), v_odd, acc_odd)
        acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision=PRECISION)
    if FP8:
        acc = tl.interleave(acc, acc_odd)
    if v_scales is not None:
        acc *= v_top
    failed = tl.full([], 0, tl.int1)
    if EXACT:
        acc = tl.where(poisoned[:, None] > 0, float("nan"), acc)
    elif fixed_max is not None:
        # weights of half precision: the smaller ones of fp16 lose no more than 2**-17 of the whole
        low = -8.0 if FP8 or q.dtype.element_ty == tl.float16 else -32.0
        high = 15.0 if FP8 or q.dtype.element_ty == tl.float16 else 32.0
        den, top_score = tl.sum(den, 1), tl.max(highest, 1)
        some = top_score > float("-inf")
        near = (top_score - m >= low) & (top_score - m <= high)
        failed = tl.max((rows & some & (near == 0)).to(tl.int32), 0) > 0
        m = tl.where(some, m, float("-inf"))
    if APART and not EXACT:
        failed = failed | has_nonfinite(acc)
    return m, den, acc, failed


@triton.jit
def load_query(at, rows, cols, D):
    """Load query rows; 0 beyond D."""
    return tl.load(at[:, None] + cols[None, :], mask=rows[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def largest(x, y):
    """The largest magnitude in each row of two tiles, or 1 if all of it is 0."""
    x, y = tl.max(tl.abs(x.to(tl.float32)), 1), tl.max(tl.abs(y.to(tl.float32)), 1)
    return tl.where((x == 0.0) & (y == 0.0), 1.0, tl.maximum(x, y))


@triton.jit
def in_units_of(x, top):
    """Divide each row by its `top`, in fp16."""
    return (x.to(tl.float32) / top[:, None]).to(tl.float16)


@triton.jit
def store_whole(out, lse, sinks, b, h, m0, m, den, acc, Hq, group, Sq, Dv: tl.constexpr):
    """Store the result of all keys of a unit, with sinks."""
    r = m0 + tl.arange(0, acc.shape[0])
    head = h * group + r // Sq
    i = r % Sq
    rows = r < group * Sq
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head, mask=rows, other=float("-inf")).to(tl.float32)
        m, den, alpha = with_sink(m, den, sink, False)
        acc = acc * alpha[:, None]
    weight = tl.where(den == 0.0, 0.0, 1.0 / den)
    at = lse + (b * Hq + head).to(tl.int64) * Sq + i
    tl.store(at, natural(m, den, sink), mask=rows)
    cols = tl.arange(0, acc.shape[1])
    at = out + ((b.to(tl.int64) * Sq + i) * Hq + head)[:, None] * Dv + cols[None, :]
    keep = rows[:, None] & (cols < Dv)[None, :]
    tl.store(at, (acc * weight[:, None]).to(out.dtype.element_ty), mask=keep)


@triton.jit
def store_piece(partial, partial_lse, slot, m0, m, den, acc, rows, Dv: tl.constexpr):
    """Store the weighted average of a piece's values, and its log2-sum-exp2."""
    at = tl.arange(0, acc.shape[0])
    keep = m0 + at < rows
    at = slot.to(tl.int64) * acc.shape[0] + at
    tl.store(partial_lse + at, m + tl.log2(den), mask=keep)
    weight = tl.where(den == 0.0, 0.0, 1.0 / den)
    cols = tl.arange(0, acc.shape[1])
    keep = keep[:, None] & (cols < Dv)[None, :]
    tl.store(partial + at[:, None] * Dv + cols[None, :], acc * weight[:, None], mask=keep)


@triton.jit(do_not_specialize=["Sq", "batch", "window_left", "window_right", "splits", "new"])
def split_kernel(
    q, k, v, out, lse, partial, partial_lse,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s: tl.int64,
    k_stride_b, k_stride_h: tl.int64, k_stride_s, v_stride_b, v_stride_h: tl.int64, v_stride_s,
    batch: tl.int32, Hkv: tl.int32, group: tl.int32, Sq: tl.int32, capacity: tl.int32,
    new: tl.int32, splits: tl.int32, table, table_stride: tl.int64, pages: tl.int32,
    k_scale, v_scale, scale: tl.float32, cap, slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride: tl.int32, unified_max, window_left, window_right,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, EXTRA: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    SCALES: tl.constexpr, EXTREME: tl.constexpr, APART: tl.constexpr, STREAM: tl.constexpr,
    FIXED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a program's range of tiles, as results of whole units and as pieces of others.

    q (B, Hq, Sq, D); k and v (B, Hkv, S, ...), or pages of PAGE keys, by strides.

    k_scale and v_scale are (B, Hkv); with SCALES 2 (pages, Hkv), with 3 (pages, PAGE, Hkv) or
    (B, Hkv, capacity), as the constants of `types`.
    scale holds log2(e), or with `cap`, which then does, is scale / softcap. `partial` is
    (slots, BLOCK_M, Dv) and `partial_lse` (slots, BLOCK_M), fp32, in units of log2. `unified_max`
    (Hq,) are fixed maxima. Pieces for which they are too far off are computed again, and so are
    those of rows that attend different keys (APART) where a value is NaN or Inf.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(group * Sq, BLOCK_M)
    units = Hkv * blocks
    if PDL:  # every program runs from here on, so the merging ones can wait in their places
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if STREAM:
        _, _, total = find_tile(
            kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, units, 0,
            BLOCK_N, CHUNK,
        )  # fmt: skip
        tile, stop = work_range(pid, total, splits)
        b, base, _ = find_tile(
            kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, units, tile,
            BLOCK_N, CHUNK,
        )  # fmt: skip
    else:
        tile, stop, base = 0, 1, 0
        b = pid // splits // units
    length, origin, tiles = row_tiles(
        kv_lens, ranges, ranges_stride, b, batch, capacity, new, Sq, window_left, BLOCK_N
    )
    if STREAM:
        unit = (tile - base) // tl.maximum(tiles, 1)
        first = tile - base - unit * tiles
    else:
        unit = pid // splits % units
        piece = tl.cdiv(tiles, splits)
        if FIXED > 0:
            piece = FIXED
        first = tl.minimum(pid % splits * piece, tiles)
    while tile < stop:
        if STREAM:
            last = tl.minimum(tiles, first + stop - tile)
            slot = 2 * pid + tl.where(first == 0, 1, 0)
            whole = (first == 0) & (last == tiles)
        else:
            last = tl.minimum(first + piece, tiles)
            slot = pid
            whole = splits == 1
        if whole | (first < last):
            h = unit // blocks
            m0 = unit % blocks * BLOCK_M
            factor = scale
            k_scales, v_scales = None, None
            if SCALES >= 2:
                scales_at = h.to(tl.int64)
                if SCALES == 3 and PAGE == 0:
                    scales_at = (b.to(tl.int64) * Hkv + h) * capacity
                if k_scale is not None:
                    k_scales = k_scale + scales_at
                if v_scale is not None:
                    v_scales = v_scale + scales_at
            elif k_scale is not None:
                factor *= tl.load(k_scale + b * Hkv + h)
            k_at, v_at, pages_at, slopes_at = k + h * k_stride_h, v + h * v_stride_h, table, slopes
            if PAGE > 0:
                pages_at = table + b * table_stride
            else:
                k_at += b.to(tl.int64) * k_stride_b
                v_at += b.to(tl.int64) * v_stride_b
            begin, end = None, length
            if ranges is not None:
                begin, end = key_range(ranges, ranges_stride, b, batch, length)
            if slopes is not None:
                slopes_at = slopes + b * slopes_stride_b + h * group
            fixed_max, failed = None, None
            if unified_max is not None:
                fixed_max = unified_max + h * group
            for attempt in tl.static_range(1 if unified_max is None else 0, 3 if APART else 2):
                if failed is None or failed:
                    m, den, acc, failed = attend_piece(
                        q + b * q_stride_b, k_at, v_at, pages_at, b, h, m0, origin + first,
                        origin + last, begin, end, length, q_stride_h, q_stride_s,
                        k_stride_b, k_stride_s, v_stride_b, v_stride_s,
                        Hkv, group, Sq, pages, factor, k_scales, v_scales, cap, slopes_at,
                        window_left, window_right, fixed_max if attempt == 0 else None,
                        D, Dv, BLOCK_D, EXTRA, BLOCK_DV, BLOCK_M, BLOCK_N, PAGE, SHARED, PRECISION,
                        STAGES, EXTREME, APART, attempt == 2, SCALES,
                    )  # fmt: skip
            if v_scale is not None and SCALES < 2:
                acc *= tl.load(v_scale + b * Hkv + h)
            if whole:
                store_whole(
                    out, lse, sinks, b, h, m0, m, den, acc, Hkv * group, group, Sq, Dv
                )  # fmt: skip
            else:
                store_piece(partial, partial_lse, slot, m0, m, den, acc, group * Sq, Dv)
        if STREAM:
            tile += tl.maximum(last - first, 1)  # terminates even if lengths change meanwhile
            first = first * 0
            unit += 1
            if (unit == units) & (tile < stop):
                unit = unit * 0
                b += 1
                length, origin, tiles = row_tiles(
                    kv_lens, ranges, ranges_stride, b, batch, capacity, new, Sq, window_left,
                    BLOCK_N,
                )  # fmt: skip
                while (tiles == 0) & (b < batch):
                    b += 1
                    length, origin, tiles = row_tiles(
                        kv_lens, ranges, ranges_stride, b, batch, capacity, new, Sq, window_left,
                        BLOCK_N,
                    )  # fmt: skip
        else:
            tile = 1


@triton.jit(do_not_specialize=["Sq", "batch", "window_left", "splits", "new"])
def merge_splits_kernel(
    partial, partial_lse, out, lse, batch: tl.int32, Hkv: tl.int32, group: tl.int32, Sq: tl.int32,
    capacity: tl.int32, new: tl.int32, splits: tl.int32, sinks, kv_lens, ranges,
    ranges_stride: tl.int32, window_left,
    Dv: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STREAM: tl.constexpr, FIXED: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of `split_kernel`, one program per query row of a head; also empty rows."""
    pid = tl.program_id(0)
    i = pid % Sq
    hq = pid // Sq % (Hkv * group)
    b = pid // Sq // (Hkv * group)
    blocks = tl.cdiv(group * Sq, BLOCK_M)
    r = hq % group * Sq + i
    unit = hq // group * blocks + r // BLOCK_M
    units = Hkv * blocks
    _, _, tiles = row_tiles(
        kv_lens, ranges, ranges_stride, b, batch, capacity, new, Sq, window_left, BLOCK_N
    )
    if STREAM:
        before, total = tiles_before(
            kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, b,
            BLOCK_N, CHUNK,
        )  # fmt: skip
        start = before * units + unit * tiles
        owner = program_of_tile(start, total * units, splits)
        last = program_of_tile(start + tl.maximum(tiles, 1) - 1, total * units, splits)
        count = tl.where(tiles > 0, last - owner + 1, 0)
    else:
        piece = tl.cdiv(tiles, splits)
        if FIXED > 0:
            piece = FIXED
        count = tl.cdiv(tiles, tl.maximum(piece, 1))
    if PDL:  # every program waits, so that the end of this kernel implies the end of both
        tl.extra.cuda.gdc_wait()
    if STREAM:  # noqa: SIM102  (a constexpr and a runtime condition)
        if count == 1:
            return  # written already
    m = tl.full([1], float("-inf"), tl.float32)
    den = tl.zeros([1], tl.float32)
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + hq + tl.arange(0, 1)).to(tl.float32)
        m, den, _ = with_sink(m, den, sink, False)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    cols = tl.arange(0, BLOCK_DV)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        if STREAM:
            slot = 2 * (owner + part) + tl.where(part == 0, 1, 0)
        else:
            slot = (b * units + unit) * splits + part
        at = slot.to(tl.int64) * BLOCK_M + r % BLOCK_M
        s = tl.load(partial_lse + at, mask=part < count, other=float("-inf"))
        keep = (part < count)[:, None] & (cols < Dv)[None, :]
        x = tl.load(partial + at[:, None] * Dv + cols[None, :], mask=keep, other=0.0)
        m_new = tl.maximum(m, tl.max(s, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base)
        alpha = tl.exp2(m - base)
        den = den * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(x * p[:, None], 0)
        m = m_new
    weight = tl.where(den == 0.0, 0.0, 1.0 / den)
    at = lse + (b * Hkv * group + hq).to(tl.int64) * Sq + i + tl.arange(0, 1)
    tl.store(at, natural(m, den, sink))
    at = out + ((b.to(tl.int64) * Sq + i) * Hkv * group + hq) * Dv + cols
    tl.store(at, (acc * weight).to(out.dtype.element_ty), mask=cols < Dv)
