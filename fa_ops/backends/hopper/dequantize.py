"""Conversion of e4m3 caches to 16 bits for prompts, whose products take many times as long.

The keys of each row of the batch are converted in every call, into memory of its own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    Params,
    address,
    current_stream,
    empty,
    kernel,
    on_device,
)
from fa_ops.backends.hopper.split_kv import by_head, cache_sizes, table_layout
from fa_ops.call import CacheTensors
from fa_ops.types import Cache, scales_of

E4M3 = torch.float8_e4m3fn
_LAYOUT = struct_layout("dequantize.cu", "DequantizeParams")
_ADDRESSES, _SIZES = _LAYOUT.packer("k", "table_out"), _LAYOUT.packer("k_strides")
_TOKENS, _THREADS = 16, 256  # of a CTA, as in cuda/dequantize.cu
_MAX_GRID_ROWS = 65535  # limit of the grid's second dimension; a CTA loops over further rows


def converter(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Converter:
    """A function that converts caches with this geometry to the dtype of the query."""
    return _converter(
        q.dtype, q.device.index, q.shape[0], (k.shape, v.shape), (k.stride(), v.stride()),
        table_layout(cache.page_table),
        scales_of(cache.k_scale, cache.v_scale, cache.page_table is not None),
    )  # fmt: skip


class Converter:
    """Converts caches of one geometry."""

    def __init__(
        self, dtype: torch.dtype, device: int, B: int, shapes, strides,
        table: tuple[int, int] | None, scales: int,
    ) -> None:  # fmt: skip
        paged = table is not None
        k_shape, k_strides = by_head(shapes[0], paged), by_head(strides[0], paged)
        v_strides, Dv = by_head(strides[1], paged), shapes[1][3]
        pages, page, keys = cache_sizes(k_shape, table and table[0])
        Hkv, D = k_shape[1], k_shape[3]
        self._device, self._dtype = device, dtype
        self._table = None if table is None else ((B, table[0]), (table[0], 1), torch.int32)
        self._layouts = [
            _as_tokens(B, Hkv, keys, dim)
            if table is None
            else _as_pages(B * table[0], page, Hkv, dim)
            for dim in (D, Dv)
        ]
        sizes = _SIZES.pack(
            *k_strides[:3], *v_strides[:3], B, Hkv, keys, D, Dv, page, pages,
            0 if table is None else table[1], scales,
        )  # fmt: skip
        self._params = Params(_ADDRESSES, sizes)
        self._grid = -(-keys // _TOKENS), min(B, _MAX_GRID_ROWS)
        defines = tuple(kernel_defines(dtype).items())
        self._kernel = kernel("dequantize", "dequantize", device, _THREADS, defines=defines)

    def empty(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Memory for keys, values and their page table."""
        with on_device(self._device):
            k, v = (empty(*layout, self._dtype) for layout in self._layouts)
            return k, v, None if self._table is None else empty(*self._table)

    def run(
        self, k: Tensor, v: Tensor, tensors: CacheTensors
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """16-bit keys and values, and their page table if there is one."""
        k_out, v_out, table = self.empty()
        scales = [s if s is None else s.contiguous() for s in (tensors.k_scale, tensors.v_scale)]
        with on_device(self._device):
            params = self._params.take(
                k.data_ptr(), v.data_ptr(), *map(address, scales), tensors.kv_lens.data_ptr(),
                address(tensors.page_table), k_out.data_ptr(), v_out.data_ptr(), address(table),
            )  # fmt: skip
            self._kernel.launch(self._grid, current_stream(self._device), params[1])
            self._params.give_back(params)
        return k_out, v_out, table


def _as_tokens(B: int, H: int, S: int, D: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape (B, H, S, D) and strides of a cache that is (B, S, H, D) in memory."""
    return (B, H, S, D), (S * H * D, D, H * D, 1)


def _as_pages(pages: int, size: int, H: int, D: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape (pages, size, H, D) and strides."""
    return (pages, size, H, D), (size * H * D, H * D, D, 1)


def kernel_defines(dtype: torch.dtype) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": int(dtype == torch.bfloat16), "HAS_KV_LENS": 1}


_converter = functools.lru_cache(maxsize=256)(Converter)
