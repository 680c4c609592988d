"""Float masks, which are added to the scores: read in place where TMA can read them, else copied.

Batches, heads, queries or keys that share a part of the mask read the same memory; nothing is
repeated except one block of the queries or keys that share it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.block_lists import BlockLists
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import TensorMap
from fa_ops.geometry import rows_are_aligned
from fa_ops.types import ALIGNMENT

ROWS, _COLUMNS = 64, 128  # of the widest tile that a kernel reads at once
_FIELDS = struct_layout("masks.cuh", "Bias").packer("data")  # behind the tensor map


def bits_of(mask: Tensor | None) -> int:
    """Bits of an element of a float mask; 0 without a float mask."""
    return 0 if mask is None or mask.dtype == torch.bool else mask.element_size() * 8


class Bias(NamedTuple):
    """The layout of a float mask as kernels read it; its address is an argument of `packed`."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # 1 in batches and heads that share it; one block of queries or keys
    strides: tuple[int, ...]
    steps: tuple[int, int, int, int]  # 0 where a dimension is shared, else 1
    last_column: int  # where the last pair of a row begins
    blocks: BlockLists | None = None

    @classmethod
    def of(cls, mask: Tensor, blocks: Tensor | None = None) -> tuple[Bias, Tensor]:
        """The layout, and the tensor that has it."""
        layout = None if blocks is None else BlockLists.of(mask, blocks)
        mask = _without_repetition(mask)
        steps = tuple(int(size > 1) for size in mask.shape)
        B, H, rows, columns = mask.shape
        held = mask.expand(B, H, ROWS if rows == 1 else rows, _COLUMNS if columns == 1 else columns)
        if not rows_are_aligned(held):
            held = _copied(held)
        last = (held.shape[3] - 1) // 2 * 2
        return cls(held.dtype, tuple(held.shape), held.stride(), steps, last, layout), held

    def map(self) -> TensorMap:
        """The tensor map of the mask."""
        return TensorMap(self.dtype, self.shape, self.strides, ROWS)

    def packed(self, tensor_map: TensorMap, address: int, blocks: int = 0, *, unit: float) -> bytes:
        """struct Bias: of mask and blocks the addresses; `unit` is the accumulators', in scores."""
        size = self.dtype.itemsize
        at = (s * size * step for s, step in zip(self.strides[:3], self.steps))
        fields = _FIELDS.pack(
            address, *at, *self.steps, self.last_column, unit, blocks,
            *(self.blocks or (0, 0, 0, 0)),
        )  # fmt: skip
        return tensor_map[address] + fields


def _without_repetition(mask: Tensor) -> Tensor:
    """The mask with four dimensions; expanded dimensions have one element."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim, stride in enumerate(mask.stride()):
        mask = mask if stride else mask.narrow(dim, 0, 1)
    return mask


def _copied(t: Tensor) -> Tensor:
    """A copy with aligned rows."""
    *outer, columns = t.shape
    unit = ALIGNMENT // t.element_size()
    return t.new_empty((*outer, -(-columns // unit) * unit))[..., :columns].copy_(t)
