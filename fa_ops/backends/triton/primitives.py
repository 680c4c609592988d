"""Device functions of all kernels: packed sequences, tiles, bounds, scores and dropout.

Conventions. `i` and `j` are query and key positions as tensors that broadcast against each other:
`i` (M, 1) and `j` (1, N) for a tile of scores, `i` (1, M) and `j` (N, 1) for its transpose; every
function works for both. Positions are within the sequence. `shift` is (keys of the sequence) - Sq,
so that i + shift is the diagonal; `limit` is the number of keys. An optional argument is off when
it is None: `window_left`, `window_right` (is_causal is window_right = 0), `cap`, `slope`, `mask`,
`first` and `last` (key ranges). Scores are in units of log2: s = score * log2(e), so that weights
are exp2(s - m).
"""

import triton
import triton.language as tl

from fa_ops.backends.triton.launch import INTERPRETED

INLINE = tl.constexpr(not INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


# Sequences


@triton.jit
def find_sequence(cu_seqlens, other, batch, total, other_total, pid, BLOCK: tl.constexpr):
    """The sequence and block of program `pid`, and the sequence's tokens.

    Returns (b, block, start, length, other_start, other_length): sequence b has `length` tokens
    from `start` on in the tensor that `cu_seqlens` divides, and `other_length` tokens from
    `other_start` on in the one that `other` divides. Borders are clamped to [0, total] and to the
    largest border before them, so no address is ever outside the tokens.

    The tokens before the first sequence count as sequence -1, those after the last as sequence
    `batch`, both without other tokens, so that every token belongs to a program. Sequence b starts
    at program start // BLOCK + b + 1, which leaves it at least cdiv(length, BLOCK) programs; an
    idle one has block >= cdiv(length, BLOCK). A launch needs total // BLOCK + batch + 2 programs.
    """
    CHUNK: tl.constexpr = 128
    begun, start, end, other_start, highest = 0, 0, total, 0, 0
    for chunk in range(0, batch + 2, CHUNK):
        u = chunk + tl.arange(0, CHUNK)
        border = tl.associative_scan(_border(cu_seqlens, batch, total, u), 0, _larger)
        border = tl.maximum(border, highest)
        highest = tl.max(border, 0)
        has_begun = (u < batch + 2) & (border // BLOCK + u <= pid)
        begun += tl.sum(has_begun.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(has_begun, border, 0), 0))
        end = tl.minimum(end, tl.min(tl.where(has_begun, total, border), 0))
        own = tl.where(has_begun, _border(other, batch, other_total, u), 0)
        other_start = tl.maximum(other_start, tl.max(own, 0))
    u = begun - 1
    other_end = tl.where(u > batch, 0, _border(other, batch, other_total, u + 1))
    other_length = tl.where(u > 0, tl.maximum(other_end - other_start, 0), 0)
    return u - 1, pid - (start // BLOCK + u), start, end - start, other_start, other_length


@triton.jit
def _border(cu_seqlens, batch, total, u):
    """Border u of 0, cu_seqlens[0], ..., cu_seqlens[batch], total, clamped to [0, total]."""
    inside = tl.load(cu_seqlens + u - 1, mask=(u > 0) & (u < batch + 2), other=0)
    return tl.where(u >= batch + 2, total, tl.minimum(tl.maximum(inside, 0), total))


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def opaque(x):
    """The same integers, in a form that the compiler cannot relate to x.

    Values that a rare branch computes from them are not shared with earlier code, and so occupy no
    register before the branch.
    """
    if INLINE:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return x


@triton.jit
def positions(SIZE: tl.constexpr, OPAQUE: tl.constexpr):
    """0 ... SIZE - 1, `opaque` if so wanted."""
    return opaque(tl.arange(0, SIZE)) if OPAQUE else tl.arange(0, SIZE)


@triton.jit
def first_row(block, rows, window_right, BLOCK: tl.constexpr):
    """First row of a block; with window_right the last rows, which attend the most keys, go first.

    For valid blocks only: with a select between them and others, Triton 3.7 fails to prove that
    keys are aligned, and does not prefetch them.
    """
    return (block if window_right is None else tl.cdiv(rows, BLOCK) - 1 - block) * BLOCK


# Tiles


@triton.jit
def pointers(base, start, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(ROWS, COLS) pointers to rows start, start + 1, ... of a matrix with contiguous columns."""
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]
    return base + tl.cast(start, tl.int64) * stride + offsets


@triton.jit
def load_rows(
    at, stride, first, last, width, ROWS: tl.constexpr, COLS: tl.constexpr,
    EDGE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Load a (ROWS, COLS) tile at `at` from a matrix with `width` columns; EXACT: width is COLS.

    Columns beyond `width` are 0, and with EDGE rows outside [first, last) too (None: no bound).
    Offsets of 32 bits are unsigned, so that a loop keeps one register for each instead of two.
    """
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    offsets = rows * stride + cols
    if offsets.dtype.primitive_bitwidth == 32:
        offsets = offsets.to(tl.uint32)
    tile = at + offsets
    if EDGE:
        keep = rows < last
        if first is not None:
            keep = keep & (rows >= first)
        if not EXACT:
            keep = keep & (cols < width)
        return tl.load(tile, mask=keep, other=0.0)
    if EXACT:
        return tl.load(tile)
    return tl.load(tile, mask=cols < width, other=0.0)


@triton.jit
def load_tile(
    base, start, stride, first, limit, width, ROWS: tl.constexpr, COLS: tl.constexpr,
    EDGE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Load rows start ... start + ROWS - 1 of the matrix at `base`, as `load_rows` does."""
    at = base + tl.cast(start, tl.int64) * stride
    if first is not None:
        first -= start
    return load_rows(at, stride, first, limit - start, width, ROWS, COLS, EDGE, EXACT)


@triton.jit
def store_tile(base, start, stride, limit, width, x, EXACT: tl.constexpr):
    """Store the rows of x below `limit` and its columns below `width`, in the dtype of `base`."""
    rows = start + tl.arange(0, x.shape[0])[:, None]
    cols = tl.arange(0, x.shape[1])[None, :]
    keep = rows < limit
    if not EXACT:
        keep = keep & (cols < width)
    tile = pointers(base, start, stride, x.shape[0], x.shape[1])
    tl.store(tile, x.to(base.dtype.element_ty), mask=keep)


# Caches


@triton.jit
def page_of(table, key, end, PAGE: tl.constexpr):
    """The page number of a key, or of each of several keys; -1 from `end` on."""
    return tl.load(table + key // PAGE, mask=key < end, other=-1)


@triton.jit
def pages_of(table, n0, end, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Page numbers of keys n0 ... n0 + BLOCK_N - 1, -1 from `end` on.

    If a block has whole pages, only the number of its first key is divided.
    """
    steps = tl.arange(0, BLOCK_N)
    pages = n0 // PAGE + steps // PAGE if BLOCK_N % PAGE == 0 else (n0 + steps) // PAGE
    return tl.load(table + pages, mask=n0 + steps < end, other=-1)


@triton.jit
def load_keys(at, there, cols, D: tl.constexpr, PACK: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of keys or values, 0 beyond D, whose padded size is WIDTH."""
    keep = there[:, None]
    if D < WIDTH:
        keep = keep & (cols * PACK < D)[None, :]
    return tl.load(at[:, None] + cols[None, :], mask=keep, other=0)


@triton.jit
def unpacked(x):
    """Convert the e4m3 numbers in the low and high bytes of int16 to two fp16 tiles."""
    if not INLINE:  # for the interpreter; NaN becomes 480
        low = ((x << 8) >> 1) & -16385
        high = (x >> 1) & -16512
        low, high = low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
        return low * 256.0, high * 256.0
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 x;
        .reg .b16 a, b;
        prmt.b32 x, $2, 0, 0x3120;
        mov.b32 {a, b}, x;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        }""",
        "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    return low, high


@triton.jit
def scale_index(page, key, Hkv, PAGE: tl.constexpr, SCALES: tl.constexpr):
    """The offset of the scale of a key, or of its page, from the kv head's first scale."""
    if SCALES == 2:
        at = page * Hkv
    elif PAGE > 0:
        at = (page * PAGE + key % PAGE) * Hkv
    else:
        at = key
    return at


# Bounds


@triton.jit
def load_ranges(ranges, stride_q, i, Sq):
    """First and last + 1 attended key of queries i, in i's shape; rows beyond Sq have none.

    `ranges` points at the (b, h) part of key_ranges.
    """
    at = ranges + tl.cast(i, tl.int64) * stride_q
    return tl.load(at, mask=i < Sq, other=0), tl.load(at + 1, mask=i < Sq, other=0)


@triton.jit
def key_bounds(
    m0, Sq, shift, limit, window_left, window_right, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Key blocks for query rows m0 ... m0 + BLOCK_M - 1: (lo, full_lo, full_hi, hi).

    Keys [lo, hi) contain all that the rows attend, and the rows attend all of [full_lo, full_hi).
    All but hi are multiples of BLOCK_N, and lo <= full_lo <= full_hi; full_lo may exceed hi.
    `first`, `last`: the rows' key ranges.
    """
    low, full_low, high, full_high = 0, 0, limit, limit
    m1 = tl.minimum(m0 + BLOCK_M, Sq) - 1
    if window_right is not None:
        high = tl.minimum(high, m1 + shift + window_right + 1)
        full_high = tl.minimum(full_high, m0 + shift + window_right + 1)
    if window_left is not None:
        low = tl.maximum(low, m0 + shift - window_left)
        full_low = tl.maximum(full_low, m1 + shift - window_left)
    if first is not None:
        some = first < last
        low = tl.maximum(low, tl.min(tl.where(some, first, 2147483647)))
        high = tl.minimum(high, tl.max(tl.where(some, last, 0)))
        full_low = tl.maximum(full_low, tl.max(first))
        full_high = tl.minimum(full_high, tl.min(last))
    return _blocks(low, full_low, full_high, high, BLOCK_N)


@triton.jit
def row_bounds(
    n0, Sq, shift, limit, window_left, window_right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Query blocks for keys n0 ... n0 + BLOCK_N - 1: (lo, full_lo, full_hi, hi).

    Rows [lo, hi) contain all that attend one of the keys, and all of [full_lo, full_hi) attend
    every one of them. All but hi are multiples of BLOCK_M, and lo <= full_lo <= full_hi; full_lo
    may exceed hi. Callers apply key ranges themselves, as the rows of a key are no range.
    """
    low, full_low, high, full_high = 0, 0, Sq, Sq
    n1 = tl.minimum(n0 + BLOCK_N, limit) - 1
    if window_right is not None:
        low = tl.maximum(low, n0 - shift - window_right)
        full_low = tl.maximum(full_low, n1 - shift - window_right)
    if window_left is not None:
        high = tl.minimum(high, n1 - shift + window_left + 1)
        full_high = tl.minimum(full_high, n0 - shift + window_left + 1)
    high = tl.where(n0 < limit, high, 0)
    full_high = tl.where(n0 + BLOCK_N <= limit, full_high, 0)
    return _blocks(low, full_low, full_high, high, BLOCK_M)


@triton.jit
def _blocks(low, full_low, full_high, high, BLOCK: tl.constexpr):
    high = tl.maximum(high, 0)
    low = tl.minimum(low, high) // BLOCK * BLOCK
    end = tl.cdiv(high, BLOCK) * BLOCK
    # no more than `end` before it is rounded up, which would overflow near 2**31
    full_low = tl.maximum(tl.cdiv(tl.minimum(full_low, end), BLOCK) * BLOCK, low)
    full_high = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK * BLOCK, full_low), end)
    return low, full_low, full_high, high


# Scores


@triton.jit
def tanh(x, SMALL: tl.constexpr):
    """tanh(x). SMALL: with a small relative error near 0 as well, where the plain form cancels."""
    t = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    if SMALL:
        z = x * x  # a least-squares fit of tanh(x) / x for |x| < 0.625, within 5e-9
        y = ((-5.704042525e-3 * z + 2.063786149e-2) * z - 5.373915650e-2) * z
        y = ((y + 1.333143175e-1) * z - 3.333328128e-1) * z
        t = tl.where(z < 0.390625, x + x * y, t)
    return t


@triton.jit
def scores(
    qk, i, j, Sq, shift, limit, scale, cap, slope, mask, mask_stride_q, mask_stride_k,
    window_left, window_right, first, last, EDGE: tl.constexpr, EXTREME: tl.constexpr,
    EXACT: tl.constexpr = False, UNIT: tl.constexpr = LOG2E, is_mixed=True,
    PROGRAM: tl.constexpr = None, terms=None,
):  # fmt: skip
    """Convert products q.k to (s, t): s is -inf where masked; t is the softcap's tanh.

    scale: log2(e) times the scale; with `cap`, which is log2(e) times the softcap, it is
           scale / softcap instead. The derivative of s with respect to the product is `scale`, or
           `scale * cap * (1 - t * t)`. Without `cap`, t is the product itself.
    slope: log2(e) times the ALiBi slope.
    mask:  pointer to the (b, h) part of attn_mask, bool or float.
    first, last: the rows' key ranges.
    EDGE:  whether a position of this tile may be outside limit, window or range; False for the
           full blocks of `key_bounds` and `row_bounds`. Rows beyond Sq are not masked.
    EXTREME: whether scale or softcap may be so large that scores overflow or tanh cancels.
    EXACT: -inf in a float mask masks NaN and Inf, too.
    UNIT:  1 for natural scores, with scale, cap and slope not multiplied by log2(e), so that the
           lowest finite numbers of a float mask stay finite.
    is_mixed: whether the mask must be read, as it changes some score of the tile.
    PROGRAM: what changes natural scores, `programs.ProgramFunctions.apply`, which reads `terms`.
    """
    if cap is not None:
        t = tanh(qk * scale, EXTREME)
        s = t * cap
    else:
        t = qk
        s = qk * scale
        if EXTREME:
            s = saturated(s)
    if slope is not None:
        s -= slope * tl.abs(i + shift - j).to(tl.float32)
    if PROGRAM is not None:
        s = PROGRAM(s * (1.0 / UNIT), i, j, terms) * UNIT
    if mask is not None:
        if not EXACT:
            s = with_mask(
                s, i, j, Sq, limit, mask, mask_stride_q, mask_stride_k, EDGE, False, UNIT, is_mixed
            )
        elif is_mixed:
            s = with_mask(s, i, j, Sq, limit, mask, mask_stride_q, mask_stride_k, EDGE, True, UNIT)
    if EDGE:
        keep = attended(i, j, shift, limit, window_left, window_right, first, last)
        s = tl.where(keep, s, float("-inf"))
    return s, t


@triton.jit
def with_mask(
    s, i, j, Sq, limit, mask, mask_stride_q, mask_stride_k, EDGE: tl.constexpr,
    EXACT: tl.constexpr, UNIT: tl.constexpr, is_mixed=True,
):  # fmt: skip
    """The scores with a dense mask, as `scores` applies it; with a bool one they may be products.

    is_mixed: nothing is loaded where it is False, and the scores are unchanged.
    """
    at = mask + tl.cast(i, tl.int64) * mask_stride_q + tl.cast(j, tl.int64) * mask_stride_k
    inside = (i < Sq) & (j < limit) if EDGE else i < Sq
    inside = tl.where(is_mixed, inside, False)
    if mask.dtype.element_ty == tl.int1:
        keep = tl.load(at, mask=inside, other=0) != 0
        return tl.where(keep | (is_mixed == 0), s, float("-inf"))
    else:
        # a NaN or Inf in a key makes NaN of the scores of rows beyond Sq, too
        element = tl.load(at, mask=inside, other=float("-inf") if EXACT else 0.0)
        bias = element.to(tl.float32) * UNIT
        return tl.where(bias == float("-inf"), bias, s + bias) if EXACT else s + bias


@triton.jit
def saturated(x):
    """Clamp infinities to the largest finite numbers; NaN stays."""
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def attended(i, j, shift, limit, window_left, window_right, first, last):
    """Positions within limit, window and ranges: bool, broadcastable to the tile."""
    keep = j < limit
    if window_right is not None:
        keep = keep & (j <= i + shift + window_right)
    if window_left is not None:
        keep = keep & (j >= i + shift - window_left)
    if first is not None:
        keep = keep & (j >= first) & (j < last)
    return keep


@triton.jit
def attends_some(i, shift, limit, window_left, window_right, first, last):
    """Whether there is a position within limit, window and ranges: bool, in i's shape."""
    low, high = i * 0, i * 0 + limit
    if window_right is not None:
        high = tl.minimum(high, i + shift + window_right + 1)
    if window_left is not None:
        low = tl.maximum(low, i + shift - window_left)
    if first is not None:
        low, high = tl.maximum(low, first), tl.minimum(high, last)
    return low < high


@triton.jit
def softmax_step(s, m, den, scale, unit, FOLD: tl.constexpr, EXACT: tl.constexpr):
    """(weights, factor of the sums so far, maximum, denominator) after the scores s of a tile.

    With FOLD, s are products, times which the positive scale gives scores. EXACT: scores are
    subtracted from their maximum before they are multiplied by `unit`.
    """
    if EXACT:
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s - base[:, None]) * unit)
        alpha = tl.exp2((m - base) * unit)
    else:
        # with FOLD the scale comes after the maximum: one FMA per element
        fold = scale if FOLD else 1.0
        m_new = tl.maximum(m, tl.max(s, 1) * fold)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * fold - base[:, None])
        alpha = tl.exp2(m - base)
    return p, alpha, m_new, den * alpha + tl.sum(p, 1)


@triton.jit
def with_sink(m, den, sink, NATURAL: tl.constexpr):
    """Add a sink to rows: (maximum, denominator, factor of the weighted sums of values).

    m: in units of log2, or natural. In them the sink is clamped to the largest finite number.
    """
    unit: tl.constexpr = LOG2E if NATURAL else 1.0
    if not NATURAL:
        sink *= LOG2E
    sink = tl.minimum(sink, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    top = tl.maximum(m, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    alpha = tl.exp2((m - base) * unit)
    return top, den * alpha + tl.exp2((sink - base) * unit), alpha


@triton.jit
def natural(m, den, sink, NATURAL: tl.constexpr = False):
    """Natural lse from a maximum in units of log2, or a NATURAL one; at least the sink, which
    `with_sink` clamps."""
    lse = m + tl.log2(den) * LN2 if NATURAL else (m + tl.log2(den)) * LN2
    if sink is not None:
        lse = tl.maximum(lse, sink, propagate_nan=tl.PropagateNan.ALL)
    return lse


# NaN and Inf


@triton.jit
def replace_nonfinite(x):
    """(x with 0 for each NaN and Inf, whether each row had any)."""
    good = tl.abs(x.to(tl.float32)) < float("inf")
    return tl.where(good, x, 0.0), tl.max((good == 0).to(tl.int32), 1) > 0


@triton.constexpr_function
def is_masked(window_left, window_right, mask, ranges):
    """Whether rows of a block may attend different keys of a tile."""
    return not (window_left is window_right is mask is ranges is None)


@triton.constexpr_function
def multiplies_parts(precision):
    """Whether float32 is multiplied in parts, see `matrix_products`."""
    return precision in ("split", "loaded")


@triton.constexpr_function
def may_redo(window_left, window_right, mask, ranges, precision):
    """Whether a tile with a NaN or Inf in its results may have to be recomputed."""
    return multiplies_parts(precision) or is_masked(window_left, window_right, mask, ranges)


@triton.jit
def has_nonfinite(x):
    """Whether x has a NaN or Inf, at one FMA per element."""
    return tl.sum(x * 0.0) != 0.0


# Dropout: the hash of `backends/dropout.py` in uint32


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_rows(seed, batch_head, i, Sq):
    """Hash of seed, batch_head = b * Hq + h and query, in i's shape; `seed` is a pointer.

    Where it points to 32-bit numbers, they are the hashes (B, Hq, Sq), those of other rows 0.
    """
    if seed.dtype.element_ty == tl.int32:
        inside = (i >= 0) & (i < Sq)
        words = tl.load(seed + batch_head.to(tl.int64) * Sq + i, mask=inside, other=0)
        words = words.to(tl.uint32, bitcast=True)
    else:
        seed = tl.load(seed)
        high, low = (seed >> 32).to(tl.uint32), seed.to(tl.uint32)
        stream = _mix(batch_head.to(tl.uint32) * 0x9E3779B9 + high) ^ low
        words = _mix(stream + i.to(tl.uint32) * 0x85EBCA6B)
    return words


@triton.jit
def dropout_keep(rows, j, threshold):
    """Whether each weight is kept. `threshold`: the 32 bits of dropout.threshold(p) as an int32."""
    return _mix(rows + j.to(tl.uint32) * 0xC2B2AE35) >= threshold.to(tl.uint32, bitcast=True)
