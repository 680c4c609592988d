"""Attention with 8-bit products: the kernels, quantisation of their inputs, and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.configs import Tile, quantized_tile
from fa_ops.backends.triton.launch import INTERPRETED, Launch, architecture, bind, padded
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
from fa_ops.call.call import Call
from fa_ops.call.options import Options

# The forward kernel with 8-bit products: the loop of `forward_kernel` without its rare cases.
#
# int8 products accumulate from 0x4B400000, the bits of the float 1.5 * 2**23: as a float, the sum
# is that number plus the product, and no integer is converted. Weights are rounded to e4m3 relative
# to a power of two of the block of keys, and their sum is that of the rounded ones.

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


# Kernels that quantise query, key and value to 8 bits, as docs/semantics.md defines it.
#
# `statistics_kernel` computes what one scale or mean of a whole row needs, in PARTS partial
# results; `quantize_kernel` then reads each tensor once and writes its 8-bit numbers and scales.

INLINE = tl.constexpr(not INTERPRETED)
PARTS = tl.constexpr(16)  # partial results of each row
SCALE_BLOCK = tl.constexpr(64)  # keys that share a scale
VALUE_BLOCK = tl.constexpr(128)  # the number of keys of quantised values is a multiple
MEAN_KEYS = tl.constexpr(1024)
PART_KEYS = tl.constexpr(64)  # MEAN_KEYS / PARTS
INT8_LARGEST = tl.constexpr(127.43)
SMALLEST = tl.constexpr(7.888609052210118e-31)  # 2**-100


@triton.jit
def to_e4m3(x):
    """x rounded to e4m3, to nearest even; larger numbers become 448."""
    if not INLINE:  # the interpreter's conversion neither saturates nor rounds to nearest even
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576
        small = (x + 24576.0) - 24576.0  # multiples of 2**-9
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def power_of_two(largest):
    """(scale, 1 / scale): the smallest power of two by which `largest` is at most 448."""
    bits = tl.maximum(largest, SMALLEST).to(tl.int32, bitcast=True)
    exponent = ((bits + 0x1FFFFF) >> 23) - 8
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def with_scale(x, largest, INT8: tl.constexpr):
    """(numbers, scale) of x, as int8 or e4m3; `largest` broadcasts to x."""
    if INT8:
        scale = tl.maximum(largest, SMALLEST) / INT8_LARGEST
        rounded = (x / scale + 12582912.0) - 12582912.0  # to nearest even
        numbers = tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)
    else:
        scale, inverse = power_of_two(largest)
        numbers = to_e4m3(x * inverse)
    return numbers, scale


@triton.jit
def butterfly(x, HALF: tl.constexpr):
    """Sums and differences of the columns whose indices differ in the bit HALF."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, [ROWS, COLS // (2 * HALF), 2, HALF])
    first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, [0, 1, 3, 2]), [ROWS, COLS])


@triton.jit
def rotated(x, factor, D: tl.constexpr):
    """Rows of x times the rotation of D features; factor: 1 / sqrt(D & -D)."""
    for bit in tl.static_range(8):
        if (1 << bit) < (D & -D):
            x = butterfly(x, 1 << bit)
    return x * factor


@triton.jit
def number_of_keys(kv_lens, b, Sk):
    """kv_lens[b] clamped to [0, Sk], or Sk."""
    n = Sk
    if kv_lens is not None:
        n = tl.minimum(tl.maximum(tl.load(kv_lens + b), 0), Sk)
    return n


@triton.jit
def load_16(base, rows, cols, stride, first, limit, width):
    """Rows `rows` and columns `cols` of a matrix; 0 outside [first, limit) and beyond `width`."""
    at = base + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    keep = (rows >= first) & (rows < limit)
    return tl.load(at, mask=keep[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=["Sk"])
def statistics_kernel(
    k, v, sums, largest,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s: tl.int64,
    Hkv: tl.int32, Sk: tl.int32, kv_lens,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SMOOTH: tl.constexpr,
):  # fmt: skip
    """Part `program_id(0)` of sums (B, Hkv, PARTS, D) of keys, and of largest |v| (.., Dv)."""
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = number_of_keys(kv_lens, b, Sk)
    cols_v = tl.arange(0, BLOCK_DV)
    v += b * v_stride_b + h * v_stride_h
    share = tl.cdiv(tl.cdiv(n, PARTS), SCALE_BLOCK) * SCALE_BLOCK
    top = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, n), SCALE_BLOCK):
        rows = start + tl.arange(0, SCALE_BLOCK)
        x = load_16(v, rows, cols_v, v_stride_s, 0, n, Dv)
        top = tl.maximum(top, tl.max(tl.abs(x.to(tl.float32)), 0))
    row = ((b * Hkv + h) * PARTS + part).to(tl.int64)
    tl.store(largest + row * Dv + cols_v, top, mask=cols_v < Dv)
    if SMOOTH:
        cols = tl.arange(0, BLOCK_D)
        k += b * k_stride_b + h * k_stride_h
        step = tl.maximum(tl.cdiv(n, MEAN_KEYS), 1)
        rows = (part * PART_KEYS + tl.arange(0, PART_KEYS)) * step
        x = load_16(k, rows, cols, k_stride_s, 0, n, D)
        tl.store(sums + row * D + cols, tl.sum(x.to(tl.float32), 0), mask=cols < D)


@triton.jit
def mean_of_keys(sums, row, n, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean of the keys of a (b, h), from its partial sums."""
    cols = tl.arange(0, BLOCK_D)
    at = sums + (row.to(tl.int64) * PARTS + tl.arange(0, PARTS))[:, None] * D + cols[None, :]
    total = tl.sum(tl.load(at, mask=(cols < D)[None, :], other=0.0), 0)
    step = tl.maximum(tl.cdiv(n, MEAN_KEYS), 1)
    return total / tl.maximum(tl.cdiv(n, step), 1).to(tl.float32)


# ptxas 12.8 merges two conversions of equal constants to e4m3 with a register that it never sets.
# Zeros of padding columns are such constants if their number is one, so `features` and `channels`
# are variables.
@triton.jit(do_not_specialize=["Sq", "Sk", "features", "channels"])
def quantize_kernel(
    q, k, v, sums, largest, q8, k8, v8, q_scale, k_scale, v_scale, offset,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s: tl.int64,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32,
    features: tl.int32, channels: tl.int32, scale: tl.float32, factor: tl.float32, kv_lens,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SMOOTH: tl.constexpr, ROTATE: tl.constexpr, INT8: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantise BLOCKS blocks of SCALE_BLOCK tokens of one head of query, key or value.

    `features` and `channels` are D and Dv.

    q8 (B, Hq, Sq, D'), k8 (B, Hkv, Sk, D'), D' = BLOCK_D; v8 (B, Hkv, Dv, Sk'), Sk' = Sk rounded up
    to VALUE_BLOCK, 0 beyond the keys; q_scale and offset (B, Hq, Sq), k_scale (B, Hkv, blocks of
    keys), v_scale (B, Hkv, Dv).
    """
    pid = tl.program_id(0)
    Hkv = Hq // group
    q_programs = tl.cdiv(Sq, BLOCKS * SCALE_BLOCK)
    k_programs = tl.cdiv(Sk, BLOCKS * SCALE_BLOCK)
    cols = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, SCALE_BLOCK)
    of_keys = pid - q_programs * Hq * batch
    of_values = of_keys - k_programs * Hkv * batch
    if of_keys < 0:
        row = pid // q_programs
        b, h = row // Hq, row % Hq
        n = number_of_keys(kv_lens, b, Sk)
        q += b * q_stride_b + h * q_stride_h
        at = row.to(tl.int64) * Sq
        if offset is not None:
            mean = mean_of_keys(sums, b * Hkv + h // group, n, D, BLOCK_D)
        for block in range(BLOCKS):
            rows = (pid % q_programs * BLOCKS + block) * SCALE_BLOCK + tokens
            x = load_16(q, rows, cols, q_stride_s, 0, Sq, features).to(tl.float32)
            if offset is not None:
                both = tl.sum(x * mean[None, :], 1) * scale
                tl.store(offset + at + rows, both, mask=rows < Sq)
            if ROTATE:
                x = rotated(x, factor, D)
            numbers, row_scale = with_scale(x, tl.max(tl.abs(x), 1)[:, None], INT8)
            to = q8 + (at + rows)[:, None] * BLOCK_D + cols[None, :]
            tl.store(to, numbers, mask=(rows < Sq)[:, None])
            to_scale = q_scale + at + rows
            tl.store(to_scale[:, None], row_scale, mask=(rows < Sq)[:, None])
    elif of_values < 0:
        row = of_keys // k_programs
        b, h = row // Hkv, row % Hkv
        n = number_of_keys(kv_lens, b, Sk)
        k += b * k_stride_b + h * k_stride_h
        at = row.to(tl.int64) * Sk
        if SMOOTH:
            mean = mean_of_keys(sums, row, n, D, BLOCK_D)[None, :]
        for block in range(BLOCKS):
            first = (of_keys % k_programs * BLOCKS + block) * SCALE_BLOCK
            rows = first + tokens
            x = load_16(k, rows, cols, k_stride_s, 0, n, features).to(tl.float32)
            if SMOOTH:
                x = tl.where((rows < n)[:, None], x - mean, 0.0)
            if ROTATE:
                x = rotated(x, factor, D)
            numbers, one_scale = with_scale(x, tl.max(tl.abs(x)), INT8)
            to = k8 + (at + rows)[:, None] * BLOCK_D + cols[None, :]
            tl.store(to, numbers, mask=(rows < Sk)[:, None])
            blocks = tl.cdiv(Sk, SCALE_BLOCK)
            block_at = first // SCALE_BLOCK
            to_scale = k_scale + row.to(tl.int64) * blocks + block_at
            tl.store(to_scale, one_scale, mask=block_at < blocks)
    else:
        row = of_values // k_programs
        b, h = row // Hkv, row % Hkv
        n = number_of_keys(kv_lens, b, Sk)
        v += b * v_stride_b + h * v_stride_h
        cols_v = tl.arange(0, BLOCK_DV)
        parts = (row.to(tl.int64) * PARTS + tl.arange(0, PARTS))[:, None] * Dv
        inside = cols_v < Dv
        top = tl.load(largest + parts + cols_v[None, :], mask=inside[None, :], other=0.0)
        channel_scale, inverse = power_of_two(tl.max(top, 0))
        tl.store(v_scale + row * Dv + cols_v, channel_scale, mask=inside)
        width = tl.cdiv(Sk, VALUE_BLOCK) * VALUE_BLOCK
        v8 += row.to(tl.int64) * Dv * width
        for block in range(BLOCKS):
            rows = (of_values % k_programs * BLOCKS + block) * SCALE_BLOCK + tokens
            x = load_16(v, rows, cols_v, v_stride_s, 0, n, channels).to(tl.float32)
            numbers = tl.trans(to_e4m3(x * inverse[None, :]))
            to = v8 + cols_v.to(tl.int64)[:, None] * width + rows[None, :]
            tl.store(to, numbers, mask=inside[:, None] & (rows < width)[None, :])


# The launches: 16-bit tensors are quantised, then attended.

E4M3 = torch.float8_e4m3fn
BLOCK_SHIFT = SCALE_BLOCK.value.bit_length() - 1
ALL_SHIFT = 30  # one scale for all tokens
BLOCKS = 4  # blocks of SCALE_BLOCK tokens that a program quantises
_MAX_WINDOW = 2**30
_launches: dict[tuple, Launch] = {}


class EightBit(NamedTuple):
    """8-bit tensors and their scales as the kernel reads them."""

    query: Tensor  # (B, Hq, Sq, D or more), int8 or e4m3
    key: Tensor  # (B, Hkv, Sk, D or more)
    value: Tensor  # (B, Hkv, Dv, Sk or more), e4m3
    q_scale: Tensor  # (B, Hq, blocks of 2**q_shift tokens)
    q_shift: int
    k_scale: Tensor
    k_shift: int
    v_scale: Tensor  # (B, Hkv, Dv)
    offset: Tensor | None = None  # (B, Hq, Sq)


def architecture_error(q: Tensor) -> str | None:
    """Why the GPU cannot compute with e4m3, or None."""
    if INTERPRETED or q.device.type != "cuda" or architecture(q.device) >= 89:
        return None
    return f"needs compute capability 8.9 for e4m3, got {architecture(q.device) / 10}"


def quantized_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, bfloat16 for e4m3, and lse (B, Hq, Sq)."""
    (q, k, v), t, softcap = call[:3], call.operands, call.options.softcap
    if q.dtype == E4M3:
        eight, dtype = _as_given(call), torch.bfloat16
    else:
        eight, dtype = quantise(call), q.dtype
    B, Hq, Sq, D = q.shape
    out = torch.empty_permuted((B, Hq, Sq, v.shape[3]), (0, 2, 1, 3), dtype=dtype, device=q.device)
    lse = torch.empty((B, Hq, Sq), dtype=torch.float32, device=q.device)
    Sk, (left, right) = k.shape[2], _window(call.options)
    cap = softcap * LOG2E.value if softcap else None
    factor = call.scale / softcap if softcap else call.scale * LOG2E.value
    ranges, strides = t.key_ranges, (0, 0, 0)
    if ranges is not None:
        ranges = ranges.contiguous().expand(B, Hq, Sq, 2)
        strides = ranges.stride()[:3]
    args = (
        eight.query, eight.key, eight.value, out, lse,
        *eight.query.stride()[:3], *eight.key.stride()[:3], *eight.value.stride()[:3],
        eight.q_scale, *eight.q_scale.stride(),
        eight.k_scale, *eight.k_scale.stride(),
        eight.v_scale, *eight.v_scale.stride(),
        B, Hq, Hq // k.shape[1], Sq, Sk, factor, cap, eight.offset, t.sinks, t.kv_lens,
        ranges, *strides, left, right,
    )  # fmt: skip
    tile = quantized_tile(architecture(q.device), max(D, v.shape[3]))
    launch = _find(quantized_kernel, args, attention_constants(eight, tile), q, tile.options())
    launch((-(-Sq // tile.block_m) * Hq * B, 1, 1), args)
    return out, lse


def quantise(call: Call) -> EightBit:
    """Quantise 16-bit or float32 tensors, in two launches."""
    (q, k, v), options, kv_lens = call[:3], call.options, call.operands.kv_lens
    (B, Hq, Sq, D), (_, Hkv, Sk, Dv), device = q.shape, v.shape, q.device
    smooth = options.smooth_key and not options.softcap
    is_int8 = options.qk_dtype in (None, torch.int8)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    parts = PARTS.value
    sums = new(B, Hkv, parts, D) if smooth else None
    largest = new(B, Hkv, parts, Dv)
    constants = quantise_constants(q.shape[3], Dv, options)
    strides = (*k.stride()[:3], *v.stride()[:3])
    args = (k, v, sums, largest, *strides, Hkv, Sk, kv_lens)
    _find(statistics_kernel, args, constants[0], q)((parts, Hkv, B), args)
    dtype, width = torch.int8 if is_int8 else E4M3, _width(D)
    blocks = -(-Sk // SCALE_BLOCK.value)
    eight = EightBit(
        new(B, Hq, Sq, width, dtype=dtype), new(B, Hkv, Sk, width, dtype=dtype),
        new(B, Hkv, Dv, Sk + -Sk % VALUE_BLOCK.value, dtype=E4M3), new(B, Hq, Sq), 0,
        new(B, Hkv, blocks), BLOCK_SHIFT, new(B, Hkv, Dv), new(B, Hq, Sq) if smooth else None,
    )  # fmt: skip
    args = (
        q, k, v, sums, largest, eight.query, eight.key, eight.value, eight.q_scale, eight.k_scale,
        eight.v_scale, eight.offset, *q.stride()[:3], *strides, B, Hq, Hq // Hkv, Sq, Sk,
        D, Dv, call.scale, (D & -D) ** -0.5, kv_lens,
    )  # fmt: skip
    tokens = BLOCKS * SCALE_BLOCK.value
    programs = B * (Hq * -(-Sq // tokens) + 2 * Hkv * -(-Sk // tokens))
    launch = _find(quantize_kernel, args, constants[1], q, quantise_options(D))
    launch((programs, 1, 1), args)
    return eight


def quantise_constants(D: int, Dv: int, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constexpr parameters of `statistics_kernel` and of `quantize_kernel`."""
    widths = {"D": D, "Dv": Dv, "BLOCK_D": _width(D), "BLOCK_DV": padded(Dv)}
    first = widths | {"SMOOTH": options.smooth_key and not options.softcap}
    rest = {"ROTATE": options.rotate, "INT8": options.qk_dtype in (None, torch.int8)}
    return first, first | rest | {"BLOCKS": BLOCKS}


def quantise_options(D: int) -> dict[str, int]:
    """The compiler options of `quantize_kernel`: the rows of a block stay in registers."""
    return {"num_warps": 8 if D > 128 else 4}


def attention_constants(eight: EightBit, tile: Tile) -> dict[str, Any]:
    """The constexpr parameters of `quantized_kernel`."""
    D, Dv = eight.query.shape[3], eight.value.shape[2]
    return {
        "D": D,
        "Dv": Dv,
        "BLOCK_D": _width(D),
        "BLOCK_DV": padded(Dv),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "Q_SHIFT": eight.q_shift,
        "K_SHIFT": eight.k_shift,
    }


def divisors(args: tuple, names: list[str]) -> dict[str, int]:
    """Parameters of the kernels that are multiples of 16: addresses and strides of rows."""
    found = {}
    for name, arg in zip(names, args):
        value = arg.data_ptr() if isinstance(arg, Tensor) and not arg.is_meta else arg
        is_row = "_stride_" in name and "range" not in name
        aligned = name in ("q", "k", "v", "q8", "k8", "v8") or is_row
        if aligned and isinstance(value, int) and value % 16 == 0:
            found[name] = 16
    return found


def _find(
    kernel: Any, args: tuple, constants: dict, q: Tensor, options: dict | None = None
) -> Launch:
    """The launch of a kernel for arguments like these, compiled on first use."""
    divisible = divisors(args, kernel.arg_names)
    kinds = tuple(a.dtype if isinstance(a, Tensor) else a is None for a in args)
    wide = any(isinstance(a, int) and a >= 1 << 23 for a in args)
    key = (
        kernel.fn.__name__, kinds, tuple(divisible), wide, *constants.values(), q.get_device(),
    )  # fmt: skip
    found = _launches.get(key)
    if found is None:
        found = _launches[key] = bind(
            kernel, args, constants, options or {"num_warps": 4}, device=q.device,
            divisors=divisible, wide=wide,
        )  # fmt: skip
    return found


def _width(D: int) -> int:
    """The width of rows of query and key: tensor cores multiply 32 8-bit numbers at once."""
    return max(32, padded(D))


def _window(options: Options) -> tuple[int | None, int | None]:
    left, right = options.window_left, options.window_right
    left = None if left < 0 else min(left, _MAX_WINDOW)
    if options.is_causal:
        return left, 0
    return left, None if right < 0 else min(right, _MAX_WINDOW)


def _as_given(call: Call) -> EightBit:
    """e4m3 tensors with their scales; value is transposed, as tensor cores read it."""
    (q, k, v), t, Sk = call[:3], call.operands, call.key.shape[2]
    transposed = v.view(torch.uint8).transpose(2, 3)
    if t.kv_lens is not None:  # a weight of 0 times what lies beyond may be NaN
        inside = torch.arange(Sk, device=v.device) < t.kv_lens.view(-1, 1, 1, 1)
        transposed = transposed.masked_fill(~inside, 0)
    transposed = F.pad(transposed, (0, -Sk % VALUE_BLOCK.value)).contiguous()
    q_scale, q_shift = _of_tokens(t.q_scale, q)
    k_scale, k_shift = _of_tokens(t.k_scale, k)
    v_scale = t.v_scale
    v_scale = v_scale.view(1, 1, 1) if v_scale.dim() < 2 else v_scale
    v_scale = v_scale if v_scale.dim() == 3 else v_scale.unsqueeze(-1)
    v_scale = v_scale.expand(v.shape[0], v.shape[1], v.shape[3])
    return EightBit(q, k, transposed.view(E4M3), q_scale, q_shift, k_scale, k_shift, v_scale)


def _of_tokens(scale: Tensor, x: Tensor) -> tuple[Tensor, int]:
    """The scale as (B, H, blocks), and log2 of the number of tokens of a block."""
    B, H, S, _ = x.shape
    if scale.dim() == 3:
        return scale, 0 if scale.shape[2] == S else BLOCK_SHIFT
    scale = scale.view(1, 1) if scale.dim() < 2 else scale
    return scale.expand(B, H).unsqueeze(-1), ALL_SHIFT
