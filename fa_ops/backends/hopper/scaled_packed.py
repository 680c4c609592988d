"""e4m3 tensors of packed sequences, as the kernel with 8-bit products reads them.

Query and key are read where they lie, also in pages; values are transposed, and scales repeated, in
a launch of their own, which also writes where each sequence's keys lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import address, empty, kernel, one_parameter, set_zero
from fa_ops.backends.hopper.quantize import THREADS, VALUE_BLOCK, Addresses, lanes, offsets_of
from fa_ops.call import PackedQuantizedTensors

_LAYOUT = struct_layout("prepare_e4m3.cu", "ScaledPackedParams")
_SIZES = _LAYOUT.packer("v_strides")
_PARAMS = _LAYOUT.packer(packed=("pages:pages", "v_strides:key_blocks"))
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

    def table(self, tensors: PackedQuantizedTensors) -> bytes:
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
        self._sizes = _SIZES.pack(
            *v_strides, *(int(len(shape) == 2) for shape in scale_shapes),
            *(B, Hq, Hkv, sequences.queries, sequences.keys, Dv, blocks),
        )  # fmt: skip
        defines = kernel_defines(Dv, sequences.pages is not None)
        self._kernel = kernel(
            "scaled_packed", "scaled_packed", device, THREADS, 0, tuple(defines.items())
        )
        self._grid = Hkv * blocks + -(-(queries + keys + channels + B) // THREADS), 1

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: PackedQuantizedTensors, stream: int,
        with_offset: bool,
    ) -> tuple[PackedAddresses, Tensor]:  # fmt: skip
        """Launch the kernel; returns its addresses and the memory that it writes."""
        t, memory = tensors, empty(*self._memory)
        begin = memory.data_ptr()
        counter, v8, q_scale, k_scale, v_scale, lens, starts = [begin + x for x in self._offsets]
        set_zero(counter, 1, stream)
        params = _PARAMS.pack(
            v.data_ptr(), *map(address, t[-3:]), address(t.cu_seqlens_k), address(t.kv_lens),
            v8, q_scale, k_scale, v_scale, lens, starts, self._sequences.table(t), self._sizes,
        )  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        found = Addresses(q.data_ptr(), k.data_ptr(), v8, q_scale, k_scale, v_scale, 0, 0, counter)
        return PackedAddresses(found, lens, starts), memory


def kernel_defines(Dv: int, is_paged: bool) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": 1, "VALUE_LANES": lanes(Dv), "IS_PAGED": int(is_paged)}
