"""e4m3 query, key and value with their scales, as the kernel with 8-bit products reads them.

Query and key are read where they lie; values are transposed, and scales repeated, in a launch of
their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import address, empty, kernel, one_parameter, set_zero
from fa_ops.backends.hopper.quantize import THREADS, VALUE_BLOCK, Addresses, lanes, offsets_of
from fa_ops.call import QuantizedTensors
from fa_ops.types import SCALE_BLOCK, Quantization

_PARAMS = struct_layout("prepare_e4m3.cu", "ScaledParams")
_ADDRESSES, _SCALARS = _PARAMS.packer("v", "kv_lens"), _PARAMS.packer("v_strides")


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
        defines = kernel_defines(Dv)
        self._kernel = kernel("scaled", "scaled", device, THREADS, 0, tuple(defines.items()))
        repeating = -(-(queries + keys + channels) // THREADS)
        self._grid = B * Hkv * self.blocks + repeating, 1

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: QuantizedTensors, stream: int,
        with_offset: bool,
    ) -> tuple[Addresses, Tensor]:  # fmt: skip
        """Launch the kernel; returns its addresses and the memory that it writes."""
        memory = empty(*self._memory)
        begin = memory.data_ptr()
        v8, counter, q_scale, k_scale, v_scale = [begin + x for x in self._offsets]
        set_zero(counter, 1, stream)
        params = _ADDRESSES.pack(
            v.data_ptr(), *map(address, tensors[3:]), v8, q_scale, k_scale, v_scale,
            address(tensors.kv_lens),
        ) + self._scalars  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        found = Addresses(q.data_ptr(), k.data_ptr(), v8, q_scale, k_scale, v_scale, 0, 0, counter)
        return found, memory


def _count(shape: tuple[int, ...]) -> int:
    """Scales of a head in a tensor of this shape; 0 if there is one for all heads."""
    return 0 if len(shape) < 2 else 1 if len(shape) == 2 else shape[2]


def kernel_defines(Dv: int) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": 1, "VALUE_LANES": lanes(Dv)}
