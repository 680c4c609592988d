"""e4m3 query, key and value with their scales, as the kernel with 8-bit products reads them.

Query and key are read where they lie; values are transposed in a launch of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_ops.backends.hopper.launch import Entry, address, empty, kernels, one_parameter, set_zero
from fa_ops.backends.hopper.quantize import (
    ADDRESSES,
    SCALARS,
    THREADS,
    VALUE_BLOCK,
    Addresses,
    lanes,
)
from fa_ops.call import QuantizedTensors
from fa_ops.types import SCALE_BLOCK, Quantization


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

    def __init__(self, device: int, shapes, strides):
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = self._shapes = shapes
        self.blocks, self.strides = -(-Sk // VALUE_BLOCK), strides[:2]
        self._values = B * Hkv * Dv * self.blocks * VALUE_BLOCK // 4
        self._memory = (self._values + 1,), (1,), torch.int32
        self._scalars = SCALARS.pack(
            *(*strides[0][:3], *strides[1][:3], *strides[2][:3]),
            *(B, Hq, Hq // Hkv, Sq, Sk, D, Dv, 1, 1.0, 1.0),
        )
        defines = kernel_defines(Dv)
        entries = [Entry("turn_values", THREADS)]
        self._kernel = kernels("quantize", device, entries, tuple(defines.items()))[0]
        self._grid = self.blocks, B * Hkv

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: QuantizedTensors, stream: int
    ) -> tuple[Addresses, tuple[Tensor, ...]]:
        """Where the kernel finds everything, and what holds it."""
        (B, Hq, Sq, _), (_, Hkv, _, _), (_, _, _, Dv) = self._shapes
        memory = empty(*self._memory)
        counter = memory[self._values :]
        set_zero(counter, stream)
        q_scale = _of_tokens(tensors.q_scale, Sq).expand(B, Hq, Sq).contiguous()
        k_scale = _of_blocks(tensors.k_scale, 2 * self.blocks).expand(B, Hkv, -1).contiguous()
        v_scale = _of_channels(tensors.v_scale).expand(B, Hkv, Dv).contiguous()
        v8 = memory.data_ptr()
        params = ADDRESSES.pack(
            0, 0, v.data_ptr(), 0, 0, v8, 0, 0, 0, 0, 0, 0, address(tensors.kv_lens)
        ) + self._scalars  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        found = Addresses(
            q.data_ptr(), k.data_ptr(), v8, q_scale.data_ptr(), k_scale.data_ptr(),
            v_scale.data_ptr(), 0, counter.data_ptr(),
        )  # fmt: skip
        return found, (memory, q_scale, k_scale, v_scale)


def kernel_defines(Dv: int) -> dict[str, int]:
    """The macros of the kernel that transposes values."""
    return {
        "IS_BF16": 1, "IS_INT8": 0, "ROTATED_BITS": 0, "HEAD_LANES": 8, "VALUE_LANES": lanes(Dv),
    }  # fmt: skip


def _of_tokens(scale: Tensor, tokens: int) -> Tensor:
    """A scale of query as (B, H, tokens), or with ones instead."""
    if scale.dim() == 3 and scale.shape[2] != tokens:
        return scale.repeat_interleave(SCALE_BLOCK, 2)[:, :, :tokens]
    return scale if scale.dim() == 3 else _of_channels(scale)


def _of_blocks(scale: Tensor, blocks: int) -> Tensor:
    """A scale of key as (B, H, blocks), or with ones instead."""
    if scale.dim() == 3:
        return F.pad(scale, (0, blocks - scale.shape[2]))
    return _of_channels(scale).expand(-1, -1, blocks)


def _of_channels(scale: Tensor) -> Tensor:
    """A scale as (B, H, n), or with ones instead."""
    if scale.dim() == 3:
        return scale
    return scale.view(1, 1, 1) if scale.dim() < 2 else scale.unsqueeze(-1)
