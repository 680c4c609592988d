"""Device functions of the backward kernels, after FlashAttention-2 (Dao, arXiv:2307.08691).

With p = exp2(s - lse), dp = dO v^T and delta = rowsum(dO * O) - dlse, the gradient of a score is
ds = p (dp - delta); dQ = ds K, dK = ds^T Q and dV = p^T dO follow. Every tile of scores is computed
twice, once in `query_grad_kernel` and once, transposed, in `key_value_grad_kernel`, so that each
gradient is accumulated in registers by the program that writes it: deterministic, without atomics,
in memory linear in the length. (Accumulating dQ with atomics in the second kernel saves two of
seven products and was slower on an H200 at every size.)
"""

import triton
import triton.language as tl

from fa_ops.backends.triton.matrix_products import operand
from fa_ops.backends.triton.primitives import (
    LN2,
    LOG2E,
    dropout_keep,
    dropout_rows,
    load_ranges,
    scores,
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
        return x, x, x


@triton.jit
def score_gradients(
    qk, dp, lse, delta, i, j, Sq, shift, limit, scale, cap, slope, mask, mask_stride_q,
    mask_stride_k, ranges, ranges_stride_q, seed, batch_head, threshold, keep_scale, window_left,
    window_right, LIMIT: tl.constexpr, EXTREME: tl.constexpr, EXACT: tl.constexpr, is_mixed=True,
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
        None, None, None, None, mask is not None, EXTREME, EXACT, LOG2E, is_mixed,
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
