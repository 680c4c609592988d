"""What the kernels with 8-bit products read, and the conversion of e4m3 caches to 16 bits.

16-bit query, key and value are quantised in one launch: statistics, then the numbers; everything
that the kernels write for a call lies in one allocation. Of e4m3 tensors query and key are read
where they lie, also in pages; values are transposed, and scales repeated, in a launch of their own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.decode import by_head, cache_sizes, table_layout
from fa_ops.backends.hopper.runtime.launch import (
    Params,
    address,
    current_stream,
    empty,
    kernel,
    on_device,
    one_parameter,
    set_zero,
)
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.options import SCALE_BLOCK, Cache, Operands, Quantization, scales_of

VALUE_BLOCK = 128  # keys whose values are transposed together
THREADS = 256
_CTAS = 4  # of those that find the largest values, on a multiprocessor
_QUERY_ROWS = 16  # of a CTA's lanes: QUERY_UNITS * QUERY_STEPS of quantize.cu
_KEY_STEPS = 4  # blocks of a CTA, in quantize.cu
_QUANTIZE_PARAMS = struct_layout("quantize.cu", "QuantizeParams")
ADDRESSES, SCALARS = _QUANTIZE_PARAMS.packer("q", "kv_lens"), _QUANTIZE_PARAMS.packer("q_strides")
_ALIGNMENT = 256


class Addresses(NamedTuple):
    """Where the quantised tensors of a call lie, by address."""

    query: int  # (B, Hq, Sq, D), int8 or e4m3, or with 16 bits
    key: int  # (B, Hkv, Sk, D)
    value: int  # (B, Hkv, Dv, blocks of VALUE_BLOCK keys), e4m3, in the order of quantize.cu
    q_scale: int  # (B, Hq, Sq)
    k_scale: int  # (B, Hkv, 2 blocks), of SCALE_BLOCK keys each
    v_scale: int  # (B, Hkv, Dv)
    offset: int  # (B, Hq, Sq), what the scores lack, or 0
    mean: int  # (B, Hkv, D), of the keys, or 0
    counter: int  # a word that is 0


class Quantizer:
    """Quantises the tensors of calls with one geometry.

    `blocks` of keys, and the `strides` of quantised query and key, describe what it writes.
    """

    def __init__(
        self, dtype: torch.dtype, device: int, shapes, strides, scale: float, is_int8: bool,
        subtracts_mean: bool, rotate: bool, with_queries: bool = True,
    ):  # fmt: skip
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = shapes
        self.blocks = -(-Sk // VALUE_BLOCK)
        self.strides = (Hq * Sq * D, Sq * D, D, 1), (Hkv * Sk * D, Sk * D, D, 1)
        self._subtracts_mean, self._with_queries = subtracts_mean, with_queries
        largest, mean = B * Hkv * Dv, B * Hkv * D if subtracts_mean else 0
        tokens = B * Hq * Sq
        quantised = tokens * with_queries
        self._counters = 4 * largest, 4 * (largest + B * Hkv)
        self._zeroed = largest + 2 * B * Hkv + 1
        sizes = (
            4 * self._zeroed, 4 * mean, quantised * D, B * Hkv * Sk * D,
            B * Hkv * Dv * self.blocks * VALUE_BLOCK, 4 * quantised, 8 * B * Hkv * self.blocks,
            4 * largest, 4 * tokens if subtracts_mean else 0,
        )  # fmt: skip
        self._offsets, total = offsets_of(sizes)
        self._memory = (total // 4,), (1,), torch.int32
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        parts = max(1, min(-(-_CTAS * sms // (B * Hkv)), -(-Sk // SCALE_BLOCK)))
        of_keys = parts + subtracts_mean + -(-self.blocks // value_blocks(Dv))
        of_keys += -(-2 * self.blocks // _KEY_STEPS)
        query_parts = with_queries * -(-Sq * lanes(D) // (THREADS * _QUERY_ROWS))
        self._grid = B * (Hkv * of_keys + Hq * query_parts), 1
        self._scalars = SCALARS.pack(
            *(*strides[0][:3], *strides[1][:3], *strides[2][:3]),
            *(B, Hq, Hq // Hkv, Sq, Sk, D, Dv, parts, scale, (D & -D) ** -0.5),
        )
        defines = quantize_defines(dtype, D, Dv, is_int8, rotate)
        self._kernel = kernel("quantize", "quantize", device, THREADS, 0, tuple(defines.items()))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, stream: int,
        with_offset: bool,
    ) -> tuple[Addresses, Tensor]:  # fmt: skip
        """The addresses of the results, and the memory that holds them.

        `with_offset`: compute what the scores lack, which changes LSE and the weight of sinks only.
        """
        memory = empty(*self._memory)
        begin = memory.data_ptr()
        set_zero(begin, self._zeroed, stream)
        largest, mean, q8, k8, v8, q_scale, k_scale, v_scale, offset = [
            begin + x for x in self._offsets
        ]
        if not self._subtracts_mean:
            mean = 0
        if not (self._subtracts_mean and with_offset):
            offset = 0
        if not self._with_queries:
            q8 = 0
        found = Addresses(
            q8 or q.data_ptr(),
            k8,
            v8,
            q_scale,
            k_scale,
            v_scale,
            offset,
            mean,
            largest + 4 * (self._zeroed - 1),
        )
        params = ADDRESSES.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q8, k8, v8, q_scale, k_scale, v_scale,
            offset if q8 else 0, mean, largest, *(largest + at for at in self._counters),
            address(tensors.kv_lens),
        ) + self._scalars  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        return found, memory


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these numbers of bytes begin in one allocation, and its size."""
    *offsets, total = itertools.accumulate(
        (-(-x // _ALIGNMENT) * _ALIGNMENT for x in sizes), initial=0
    )
    return offsets, total


def quantize_defines(
    dtype: torch.dtype, D: int, Dv: int, is_int8: bool = True, rotate: bool = False
) -> dict[str, int]:
    """The macros of the kernels; a row has a power of two of lanes, each of eight features."""
    return {
        "IS_BF16": int(dtype == torch.bfloat16), "IS_INT8": int(is_int8),
        "HEAD_LANES": lanes(D), "VALUE_LANES": lanes(Dv),
        "ROTATED_BITS": rotated_bits(D) if rotate else 0,
    }  # fmt: skip


def rotated_bits(D: int) -> int:
    """The binary logarithm of the features that are rotated together."""
    return max((D & -D).bit_length() - 1, 0)


def value_blocks(Dv: int) -> int:
    """Blocks of values of a CTA, as quantize.cu has them."""
    return 2 if lanes(Dv) < 32 else 1


def lanes(features: int) -> int:
    """Lanes that hold a row, eight features each."""
    return 8 if features <= 64 else 16 if features <= 128 else 32


# e4m3 query, key and value with their scales, as the kernel with 8-bit products reads them.
#
# Query and key are read where they lie; values are transposed, and scales repeated, in a launch of
# their own.

_E4M3_PARAMS = struct_layout("prepare_e4m3.cu", "ScaledParams")
_E4M3_ADDRESSES, _SCALARS = _E4M3_PARAMS.packer("v", "kv_lens"), _E4M3_PARAMS.packer("v_strides")


def scale_error(k: Tensor, how: Quantization) -> str | None:
    """Why the kernel cannot take these scales, or None."""
    scale = how.k_scale
    if scale.dim() == 3 and scale.shape[2] != -(-k.shape[2] // SCALE_BLOCK):
        return f"has no scale for each key, but for each {SCALE_BLOCK}"
    return None


class Scaled:
    """Brings the tensors of calls with one geometry into the kernel's order.

    `blocks` of keys, and the `strides` of query and key, are those of `Quantizer`.
    """

    def __init__(self, device: int, shapes, strides, scale_shapes):
        (B, Hq, Sq, _), (_, Hkv, Sk, _), (_, _, _, Dv) = shapes
        self.blocks, self.strides = -(-Sk // VALUE_BLOCK), strides[:2]
        queries, keys, channels = B * Hq * Sq, B * Hkv * 2 * self.blocks, B * Hkv * Dv
        values = channels * self.blocks * VALUE_BLOCK
        self._offsets, size = offsets_of((values, 4, 4 * queries, 4 * keys, 4 * channels))
        self._memory = (size // 4,), (1,), torch.int32
        tokens = SCALE_BLOCK if _count(scale_shapes[0]) != Sq else 1
        self._scalars = _SCALARS.pack(
            *strides[2][:3],
            *(_count(scale_shapes[0]), tokens, _count(scale_shapes[1]), 1),
            *(_count(scale_shapes[2]), 1, B, Hq, Hkv, Sq, Sk, Dv),
        )
        defines = e4m3_defines(Dv)
        self._kernel = kernel("scaled", "scaled", device, THREADS, 0, tuple(defines.items()))
        repeating = -(-(queries + keys + channels) // THREADS)
        self._grid = B * Hkv * self.blocks + repeating, 1

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, stream: int,
        with_offset: bool,
    ) -> tuple[Addresses, Tensor]:  # fmt: skip
        """Launch the kernel; returns its addresses and the memory that it writes."""
        t, memory = tensors, empty(*self._memory)
        begin = memory.data_ptr()
        v8, counter, q_scale, k_scale, v_scale = [begin + x for x in self._offsets]
        set_zero(counter, 1, stream)
        params = _E4M3_ADDRESSES.pack(
            v.data_ptr(), *map(address, (t.q_scale, t.k_scale, t.v_scale)),
            v8, q_scale, k_scale, v_scale, address(t.kv_lens),
        ) + self._scalars  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        found = Addresses(q.data_ptr(), k.data_ptr(), v8, q_scale, k_scale, v_scale, 0, 0, counter)
        return found, memory


def _count(shape: tuple[int, ...]) -> int:
    """Scales of a head in a tensor of this shape; 0 if there is one for all heads."""
    return 0 if len(shape) < 2 else 1 if len(shape) == 2 else shape[2]


def e4m3_defines(Dv: int) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": 1, "VALUE_LANES": lanes(Dv)}


# e4m3 tensors of packed sequences, as the kernel with 8-bit products reads them.
#
# Query and key are read where they lie, also in pages; values are transposed, and scales repeated,
# in a launch of their own, which also writes where each sequence's keys lie.

_SEQUENCES_LAYOUT = struct_layout("prepare_e4m3.cu", "ScaledPackedParams")
_SEQUENCES_SIZES = _SEQUENCES_LAYOUT.packer("v_strides")
_PACKED_PARAMS = _SEQUENCES_LAYOUT.packer(packed=("pages:pages", "v_strides:key_blocks"))
_PAGES = struct_layout("sequences.cuh", "PageTable").packer()


class Sequences(NamedTuple):
    """The sequences and tokens of a packed call, and the location of its keys."""

    count: int
    queries: int  # of all sequences
    keys: int  # of all sequences; in pages, of one sequence whose pages are all in use
    pages: tuple[int, int, int] | None = None  # a table's stride, keys of a page, number of pages

    @property
    def key_blocks(self) -> int:
        """Blocks of VALUE_BLOCK keys, as cuda/prepare_e4m3.cu counts them."""
        if self.pages is not None:
            return self.count * -(-self.keys // VALUE_BLOCK)
        return self.keys // VALUE_BLOCK + self.count

    def table(self, tensors: Operands) -> bytes:
        """The page table, without pages only the borders of the queries, as kernels have them."""
        borders = tensors.cu_seqlens_q.data_ptr()
        return _PAGES.pack(address(tensors.page_table), *(self.pages or (0, 0, 0)), 0, 0, borders)


class PackedAddresses(NamedTuple):
    """The addresses that the attention kernel reads."""

    numbers: Addresses
    kv_lens: int  # (B,)
    key_starts: int  # (B, 2): the first key and the first block of each sequence


class ScaledPacked:
    """Brings the tensors of packed calls with one geometry into the kernel's order."""

    def __init__(
        self, device: int, sequences: Sequences, heads: tuple[int, int], Dv: int,
        v_strides: tuple[int, int, int], scale_shapes: tuple,
    ):  # fmt: skip
        """Strides of values from page to page, head to head and token to token."""
        (Hq, Hkv), B, blocks = heads, sequences.count, sequences.key_blocks
        queries, keys, channels = Hq * sequences.queries, Hkv * 2 * blocks, B * Hkv * Dv
        values = Hkv * Dv * blocks * VALUE_BLOCK
        sizes = 4, values, 4 * queries, 4 * keys, 4 * channels, 4 * B, 8 * B
        self._offsets, size = offsets_of(sizes)
        self._memory = (size // 4,), (1,), torch.int32
        self._sequences = sequences
        self._sizes = _SEQUENCES_SIZES.pack(
            *v_strides, *(int(len(shape) == 2) for shape in scale_shapes),
            *(B, Hq, Hkv, sequences.queries, sequences.keys, Dv, blocks),
        )  # fmt: skip
        defines = packed_e4m3_defines(Dv, sequences.pages is not None)
        self._kernel = kernel(
            "scaled_packed", "scaled_packed", device, THREADS, 0, tuple(defines.items())
        )
        self._grid = Hkv * blocks + -(-(queries + keys + channels + B) // THREADS), 1

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, stream: int,
        with_offset: bool,
    ) -> tuple[PackedAddresses, Tensor]:  # fmt: skip
        """Launch the kernel; returns its addresses and the memory that it writes."""
        t, memory = tensors, empty(*self._memory)
        begin = memory.data_ptr()
        counter, v8, q_scale, k_scale, v_scale, lens, starts = [begin + x for x in self._offsets]
        set_zero(counter, 1, stream)
        params = _PACKED_PARAMS.pack(
            v.data_ptr(), *map(address, (t.q_scale, t.k_scale, t.v_scale)),
            address(t.cu_seqlens_k), address(t.kv_lens), v8, q_scale, k_scale, v_scale, lens,
            starts, self._sequences.table(t), self._sizes,
        )  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        found = Addresses(q.data_ptr(), k.data_ptr(), v8, q_scale, k_scale, v_scale, 0, 0, counter)
        return PackedAddresses(found, lens, starts), memory


def packed_e4m3_defines(Dv: int, is_paged: bool) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": 1, "VALUE_LANES": lanes(Dv), "IS_PAGED": int(is_paged)}


# Conversion of e4m3 caches to 16 bits for prompts, whose products take many times as long.
#
# The keys of each row of the batch are converted in every call, into memory of its own.

E4M3 = torch.float8_e4m3fn
_DEQUANTIZE_LAYOUT = struct_layout("dequantize.cu", "DequantizeParams")
_CACHE_ADDRESSES, _CACHE_SIZES = (
    _DEQUANTIZE_LAYOUT.packer("k", "table_out"),
    _DEQUANTIZE_LAYOUT.packer("k_strides"),
)
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
        sizes = _CACHE_SIZES.pack(
            *k_strides[:3], *v_strides[:3], B, Hkv, keys, D, Dv, page, pages,
            0 if table is None else table[1], scales,
        )  # fmt: skip
        self._params = Params(_CACHE_ADDRESSES, sizes)
        self._grid = -(-keys // _TOKENS), min(B, _MAX_GRID_ROWS)
        defines = tuple(dequantize_defines(dtype).items())
        self._kernel = kernel("dequantize", "dequantize", device, _THREADS, defines=defines)

    def empty(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Memory for keys, values and their page table."""
        with on_device(self._device):
            k, v = (empty(*layout, self._dtype) for layout in self._layouts)
            return k, v, None if self._table is None else empty(*self._table)

    def run(self, k: Tensor, v: Tensor, tensors: Operands) -> tuple[Tensor, Tensor, Tensor | None]:
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


def dequantize_defines(dtype: torch.dtype) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": int(dtype == torch.bfloat16), "HAS_KV_LENS": 1}


_converter = functools.lru_cache(maxsize=256)(Converter)
