"""Quantisation of 16-bit query, key and value, in one launch: statistics, then the numbers.

Everything that the kernels write for a call lies in one allocation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import address, empty, kernel, one_parameter, set_zero
from fa_ops.call import QuantizedTensors
from fa_ops.types import SCALE_BLOCK

VALUE_BLOCK = 128  # keys whose values are transposed together
THREADS = 256
_CTAS = 4  # of those that find the largest values, on a multiprocessor
_QUERY_ROWS = 16  # of a CTA's lanes: QUERY_UNITS * QUERY_STEPS of quantize.cu
_KEY_STEPS = 4  # blocks of a CTA, in quantize.cu
_PARAMS = struct_layout("quantize.cu", "QuantizeParams")
ADDRESSES, SCALARS = _PARAMS.packer("q", "kv_lens"), _PARAMS.packer("q_strides")
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
        defines = kernel_defines(dtype, D, Dv, is_int8, rotate)
        self._kernel = kernel("quantize", "quantize", device, THREADS, 0, tuple(defines.items()))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: QuantizedTensors, stream: int,
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


def kernel_defines(
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
