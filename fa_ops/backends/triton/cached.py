"""Attention over a key-value cache: append, then the forward kernel for many queries, and the
decoding kernels for all other calls. e4m3 caches are converted for the forward kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends import quantization
from fa_ops.backends.triton import decode
from fa_ops.backends.triton.append import bind_cache, prepare_cache
from fa_ops.backends.triton.forward import forward, paged_forward
from fa_ops.backends.triton.launch import Launch, Layout, address, bind, empty, needs_copies, padded
from fa_ops.backends.triton.primitives import load_keys, page_of, scale_index, unpacked
from fa_ops.call.call import Call, Run, is_prefill
from fa_ops.call.options import ALIGNMENT, MAX_HEAD_DIM, scales_of


def cache_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Append the new keys and values, if any, then attend."""
    if not attends_whole_rows(call):
        return decode.cache_forward(call)
    if call.writes_cache:
        call = call._replace(query=prepare_cache(call)).without_new()
    if call.key.dtype != call.query.dtype:
        call = dequantized(call)
    return paged_forward(call) if call.is_paged else forward(call)


def attends_whole_rows(call: Call) -> bool:
    """Whether the forward kernel attends a cache, each program with all keys of its queries."""
    (q, k, v), tensors, options = call[:3], call.operands, call.options
    if options.num_splits or options.batch_invariant or tensors.unified_max is not None:
        return False
    D, Dv = q.shape[3], v.shape[3]
    if tensors.key_ranges is not None or not is_prefill(q) or max(D, Dv) > MAX_HEAD_DIM:
        return False
    is_converted = k.dtype != q.dtype
    if is_converted and quantization.conversion_error(call) is not None:
        return False
    if not call.is_paged:
        return True
    # Unaligned tensors are copied, but not all pages. Converted pages are new memory.
    k, v = (q, q) if is_converted else (k, v)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    return not needs_copies(Layout.of(q, k, v, strides), q.dtype, D, Dv)


def prepare_append(call: Call) -> Run:
    """A function that appends new keys and values.

    It returns the queries, rotated if need be, and kv_lens with the new keys.
    """
    return bind_cache(call, counts=True)


# The conversion of e4m3 caches for prompts, which takes a small part of their time.

_NUMBERS, WARPS = 4096, 4  # of a program
# divisors for `bind`: new memory is aligned, and with ALIGNED all rows of the cache are too
_DIVISORS = {"out": ALIGNMENT}
ALIGNED = _DIVISORS | {"x": ALIGNMENT}
ALIGNED |= dict.fromkeys(("stride_b", "stride_h", "stride_s"), ALIGNMENT // 2)
_launches: dict[tuple, Launch] = {}


def dequantized(call: Call) -> Call:
    """The call over the cache in q's dtype: (B, Hkv, S, D), or pages, first those of row 0, then
    those of row 1 and so on, with their table."""
    q, t, m = call.query, call.operands, decode.Memory.of(call)
    B, scales = q.shape[0], scales_of(t.k_scale, t.v_scale, call.is_paged)
    table = None
    if m.table is not None:
        row = m.table.shape[1]
        table = empty((B, row), (row, 1), torch.int32, q.get_device())
    converted = []
    parts = (m.key, m.strides[:3], t.k_scale), (m.value, m.strides[3:], t.v_scale)
    for x, strides, scale in parts:
        D = 2 * x.shape[3]
        out = empty(
            (B, m.capacity, m.Hkv, D), (m.capacity * m.Hkv * D, m.Hkv * D, D, 1), q.dtype,
            q.get_device(),
        )  # fmt: skip
        scale = None if scale is None else scale.contiguous()
        tensors = (x, out, scale, t.kv_lens.contiguous(), m.table, table)
        rest = (*strides, m.Hkv, m.capacity, 0 if table is None else m.table.stride(0), len(x))
        launch = _find(tensors, rest, D, m.page, scales if scale is not None else 0)
        args = (*(None if x is None else address(x) for x in tensors), *rest)
        launch((-(-m.capacity // _tokens(D)) * m.Hkv * B, 1, 1), args)
        converted.append(out.transpose(1, 2) if table is None else out.view(-1, m.page, m.Hkv, D))
    key, value = converted
    operands = t._replace(page_table=table, k_scale=None, v_scale=None)
    return call._replace(key=key, value=value, operands=operands)


def _find(
    tensors: tuple[Tensor | None, ...], rest: tuple, D: int, page: int, scales: int
) -> Launch:
    """The launch for these arguments, compiled on first use."""
    x, out = tensors[:2]
    bits = x.data_ptr() | 2 * (rest[0] | rest[1] | rest[2])  # strides
    is_aligned = bits % ALIGNMENT == 0
    key = (out.dtype, D, page, scales, is_aligned, x.get_device())
    found = _launches.get(key)
    if found is None:
        found = _launches[key] = bind(
            dequantize_kernel, (*tensors, *rest), constants(D, page, scales), {"num_warps": WARPS},
            device=x.device, divisors=ALIGNED if is_aligned else _DIVISORS,
        )  # fmt: skip
    return found


def constants(D: int, page: int, scales: int) -> dict[str, int]:
    """The kernel's constexpr parameters."""
    return {"D": D, "BLOCK_D": padded(D), "TOKENS": _tokens(D), "PAGE": page, "SCALES": scales}


def _tokens(D: int) -> int:
    """The number of tokens that a program converts."""
    return _NUMBERS // padded(D)


# The kernel that converts an e4m3 cache to the dtype of the query.


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
