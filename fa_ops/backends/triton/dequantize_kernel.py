"""The kernel that converts an e4m3 cache to the dtype of the query."""

import triton
import triton.language as tl

from fa_ops.backends.triton.primitives import load_keys, page_of, scale_index, unpacked


@triton.jit
def dequantize_kernel(
    x, out, scale, kv_lens, table, table_out,
    stride_b: tl.int64, stride_h: tl.int64, stride_s: tl.int64,
    Hkv: tl.int32, Sk: tl.int32, table_stride: tl.int64, pages: tl.int32,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Converts TOKENS tokens of one head of a sequence, and multiplies them by their scales.

    x (B, Hkv, Sk, D), or pages of PAGE tokens, holds two numbers in each int16; its strides count
    int16. out (B, Sk, Hkv, D) has the pages of a sequence one after another, and table_out
    (B, Sk / PAGE) is -1 for those that do not exist. Tokens beyond kv_lens are not written. `scale`
    is that of `scale_index`, with SCALES 1 (B, Hkv), or None.
    """
    blocks = tl.cdiv(Sk, TOKENS)
    pid = tl.program_id(0)
    j = pid % blocks * TOKENS + tl.arange(0, TOKENS)
    h, b = pid // blocks % Hkv, (pid // blocks // Hkv).to(tl.int64)
    length = tl.minimum(tl.load(kv_lens + b), Sk)
    there = j < length
    source, slot = b, j
    if PAGE > 0:
        source = page_of(table + b * table_stride, j, length, PAGE).to(tl.int64)
        exists = (source >= 0) & (source < pages)
        if h == 0:
            own = b * (Sk // PAGE) + j // PAGE
            tl.store(table_out + own, tl.where(exists, own, -1), mask=there & (j % PAGE == 0))
        there = there & exists
        slot = j % PAGE
    at = x + source * stride_b + h * stride_h + slot.to(tl.int64) * stride_s
    pairs = load_keys(at, there, tl.arange(0, BLOCK_D // 2), D, 2, BLOCK_D)
    even, odd = unpacked(pairs)
    y = tl.interleave(even, odd).to(tl.float32)
    if SCALES == 1:
        y *= tl.load(scale + b * Hkv + h)
    elif scale is not None:
        first = h if PAGE > 0 or SCALES == 2 else (b * Hkv + h) * Sk
        scales = tl.load(scale + first + scale_index(source, j, Hkv, PAGE, SCALES), mask=there)
        y *= scales[:, None]
    columns = tl.arange(0, BLOCK_D)
    to = out + ((b * Sk + j) * Hkv + h)[:, None] * D + columns[None, :]
    keep = there[:, None]
    if D < BLOCK_D:
        keep = keep & (columns < D)[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=keep)
