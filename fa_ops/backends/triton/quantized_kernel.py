"""The forward kernel with 8-bit products: the loop of `forward_kernel` without its rare cases.

int8 products accumulate from 0x4B400000, the bits of the float 1.5 * 2**23: as a float, the sum is
that number plus the product, and no integer is converted. Weights are rounded to e4m3 relative to a
power of two of the block of keys, and their sum is that of the rounded ones.
"""

import triton
import triton.language as tl

from fa_ops.backends.triton.primitives import (
    LARGEST,
    LN2,
    LOG2E,
    attended,
    first_row,
    key_bounds,
    load_ranges,
    load_tile,
    store_tile,
    tanh,
)
from fa_ops.backends.triton.quantize_kernel import to_e4m3

WEIGHT_BITS = tl.constexpr(8.0)  # a weight of 1 is rounded as 2**8
SLACK_BITS = tl.constexpr(4.0)  # from a block's largest weight to what its weights are relative to
MAGIC_BITS, MAGIC = tl.constexpr(0x4B400000), tl.constexpr(12582912.0)


@triton.jit
def products(qt, kt, INT8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """q k^T in float32; exact for int8 and up to 256 features."""
    if INT8:
        start = tl.full([BLOCK_M, BLOCK_N], MAGIC_BITS, tl.int32)
        sums = tl.dot(qt, tl.trans(kt), start, out_dtype=tl.int32)
        s = sums.to(tl.float32, bitcast=True) - MAGIC
    else:
        s = tl.dot(qt, tl.trans(kt))
    return s


@triton.jit(do_not_specialize=["Sq", "Sk", "batch", "window_left", "window_right"])
def quantized_kernel(
    q, k, v, out, lse,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_d: tl.int64,
    q_scale, q_scale_b: tl.int64, q_scale_h: tl.int64, q_scale_s: tl.int64,
    k_scale, k_scale_b: tl.int64, k_scale_h: tl.int64, k_scale_s: tl.int64,
    v_scale, v_scale_b: tl.int64, v_scale_h: tl.int64, v_scale_d: tl.int64,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32,
    scale: tl.float32, cap, offset, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    window_left, window_right,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, Q_SHIFT: tl.constexpr, K_SHIFT: tl.constexpr,
):  # fmt: skip
    """Attention of one block of rows of a head.

    q (B, Hq, Sq, D) and k (B, Hkv, Sk, D) in int8 or e4m3, v (B, Hkv, Dv, Sk') in e4m3, by strides,
    with Sk rounded up to VALUE_BLOCK and finite numbers everywhere;
    out (B, Sq, Hq, Dv), lse (B, Hq, Sq). A scale has strides of 0 where it is shared; one of query
    or key is for 2**Q_SHIFT or 2**K_SHIFT tokens. scale: log2(e) times the scale, or with cap,
    which is log2(e) times the softcap, scale / softcap. offset (B, Hq, Sq): what scores lack.
    """
    INT8: tl.constexpr = q.dtype.element_ty == tl.int8
    pid = tl.program_id(0)
    blocks = tl.cdiv(Sq, BLOCK_M)
    h = pid // blocks % Hq
    b = pid // blocks // Hq
    m0 = first_row(pid % blocks, Sq, window_right, BLOCK_M)
    q += b * q_stride_b + h * q_stride_h
    k += b * k_stride_b + h // group * k_stride_h
    v += b * v_stride_b + h // group * v_stride_h
    q_scale += b * q_scale_b + h * q_scale_h
    k_scale += b * k_scale_b + h // group * k_scale_h
    limit = Sk
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b), 0), Sk)
    shift = limit - Sq
    rows_m = m0 + tl.arange(0, BLOCK_M)
    i = rows_m[:, None]
    first, last = None, None
    if ranges is not None:
        ranges += b * ranges_stride_b + h * ranges_stride_h
        first, last = load_ranges(ranges, ranges_stride_q, i, Sq)
    lo, full_lo, full_hi, hi = key_bounds(
        m0, Sq, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
    )
    row_scale = tl.load(q_scale + (rows_m >> Q_SHIFT) * q_scale_s, mask=rows_m < Sq, other=0.0)
    row_scale = row_scale[:, None] * scale
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    qt = load_tile(q, m0, q_stride_s, 0, Sq, D, BLOCK_M, BLOCK_D, True, D == BLOCK_D)
    cols = tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_DV)[:, None]
    v_tile = v + channels * v_stride_d + cols[None, :]
    for n0 in tl.range(lo, hi, BLOCK_N):
        n0 = tl.multiple_of(n0, BLOCK_N)
        j = (n0 + cols)[None, :]
        kt = load_tile(k, n0, k_stride_s, None, hi, D, BLOCK_N, BLOCK_D, True, D == BLOCK_D)
        s = products(qt, kt, INT8, BLOCK_M, BLOCK_N)
        if (1 << K_SHIFT) % BLOCK_N == 0:  # the tile has one scale
            s *= row_scale * tl.load(k_scale + (n0 >> K_SHIFT) * k_scale_s)
        else:
            of_keys = tl.load(k_scale + (j >> K_SHIFT) * k_scale_s, mask=j < hi, other=0.0)
            s *= row_scale * of_keys
        if cap is not None:
            s = tanh(s, False) * cap
        if (n0 < full_lo) | (n0 >= full_hi):
            keep = attended(i, j, shift, limit, window_left, window_right, first, last)
            s = tl.where(keep, s, float("-inf"))
        largest = tl.ceil(tl.max(s, 1))
        m_new = tl.maximum(m, largest)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        # The block's weights are rounded relative to 2**reference, so that a much larger weight in
        # another block does not make them 0.
        reference = tl.where(largest == float("-inf"), base, tl.minimum(largest + SLACK_BITS, base))
        p = to_e4m3(tl.exp2(s - (reference[:, None] - WEIGHT_BITS)))
        alpha, beta = tl.exp2(m - base), tl.exp2(reference - base)
        den = den * alpha + tl.sum(p.to(tl.float32), 1) * beta
        m = m_new
        if Dv == BLOCK_DV:
            vt = tl.load(v_tile + n0)
        else:
            vt = tl.load(v_tile + n0, mask=channels < Dv, other=0.0)
        # Sums over BLOCK_N keys are added in float32: fp8 tensor cores accumulate with fewer bits.
        # tl.dot's max_num_imprecise_acc is no way to do so: Triton 3.6 and 3.7 read the sum of a
        # pipelined wgmma before they wait for it.
        acc = acc * alpha[:, None] + tl.dot(p, tl.trans(vt)) * beta[:, None]
    store_results(
        out, lse, acc, m, den, b, h, m0, rows_m, Hq, group, Sq, v_scale, v_scale_b, v_scale_h,
        v_scale_d, offset, sinks, Dv, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def store_results(
    out, lse, acc, m, den, b, h, m0, rows_m, Hq, group, Sq, v_scale, v_scale_b, v_scale_h,
    v_scale_d, offset, sinks, Dv: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Normalise, and store out and lse; m in units of log2, den in units of 2**-WEIGHT_BITS."""
    at = (b * Hq + h).to(tl.int64) * Sq + rows_m
    lacking = None
    if offset is not None:
        lacking = tl.load(offset + at, mask=rows_m < Sq, other=0.0)
    den *= 0.00390625
    acc *= 0.00390625
    weight = 1.0
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
        given = sink + tl.zeros([m.shape[0]], tl.float32)
        if offset is not None:
            sink -= lacking
        sink = tl.minimum(sink * LOG2E, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        top = tl.maximum(m, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(m - base)
        den = den * weight + tl.exp2(sink - base)
        m = top
    total = tl.where(den == 0.0, float("-inf"), (m + tl.log2(den)) * LN2)
    if offset is not None:
        total += lacking
    if sinks is not None:
        total = tl.maximum(total, given, propagate_nan=tl.PropagateNan.ALL)
    tl.store(lse + at, total, mask=rows_m < Sq)
    channels = tl.arange(0, BLOCK_DV)
    of_values = v_scale + b * v_scale_b + h // group * v_scale_h
    factor = tl.load(of_values + channels * v_scale_d, mask=channels < Dv, other=0.0)
    acc *= tl.where(den == 0.0, 0.0, weight / den)[:, None]
    acc *= factor[None, :]
    out += b.to(tl.int64) * Sq * Hq * Dv + h * Dv
    store_tile(out, m0, Hq * Dv, Sq, Dv, acc, Dv == BLOCK_DV)
