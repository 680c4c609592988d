"""Launches the conversion of e4m3 caches for prompts, which takes a small part of their time."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.triton.arguments import padded
from fa_ops.backends.triton.decode import Memory
from fa_ops.backends.triton.dequantize_kernel import dequantize_kernel
from fa_ops.backends.triton.launch import Launch, address, bind, empty
from fa_ops.types import ALIGNMENT, Cache, scales_of

_NUMBERS, WARPS = 4096, 4  # of a program
# divisors for `bind`: new memory is aligned, and with ALIGNED all rows of the cache are too
_DIVISORS = {"out": ALIGNMENT}
ALIGNED = _DIVISORS | {"x": ALIGNMENT}
ALIGNED |= dict.fromkeys(("stride_b", "stride_h", "stride_s"), ALIGNMENT // 2)
_launches: dict[tuple, Launch] = {}


def dequantized(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, kv_lens: Tensor
) -> tuple[Tensor, Tensor, Cache]:
    """The cache in q's dtype: (B, Hkv, S, D), or pages, first those of row 0, then those of row 1
    and so on, with their table."""
    m, B = Memory.of(k, v, cache), q.shape[0]
    scales = scales_of(cache.k_scale, cache.v_scale, m.page > 0)
    table = None
    if m.table is not None:
        row = m.table.shape[1]
        table = empty((B, row), (row, 1), torch.int32, q.get_device())
    converted = []
    parts = (m.key, m.strides[:3], cache.k_scale), (m.value, m.strides[3:], cache.v_scale)
    for x, strides, scale in parts:
        D = 2 * x.shape[3]
        out = empty(
            (B, m.capacity, m.Hkv, D), (m.capacity * m.Hkv * D, m.Hkv * D, D, 1), q.dtype,
            q.get_device(),
        )  # fmt: skip
        scale = None if scale is None else scale.contiguous()
        tensors = (x, out, scale, kv_lens.contiguous(), m.table, table)
        rest = (*strides, m.Hkv, m.capacity, 0 if table is None else m.table.stride(0), len(x))
        launch = _find(tensors, rest, D, m.page, scales if scale is not None else 0)
        args = (*(None if t is None else address(t) for t in tensors), *rest)
        launch((-(-m.capacity // _tokens(D)) * m.Hkv * B, 1, 1), args)
        converted.append(out.transpose(1, 2) if table is None else out.view(-1, m.page, m.Hkv, D))
    return *converted, cache._replace(page_table=table, k_scale=None, v_scale=None)


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
