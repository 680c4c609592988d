"""Bool masks as bits, packed once for each call, as many heads and blocks read them again.

A row has 2 bytes for 16 columns, in order, and is zero past its columns, with room for the last
block that a kernel reads. Its last 8 bytes are its key range: int32s, the first column that it
keeps and the one after the last, so that kernels skip the blocks before and after it. Batches,
heads or rows that share the mask share its bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import Params, PreparedLaunch, kernel

_WIDEST_BLOCK = 128  # columns that a kernel reads at once; blocks start at multiples of their width
_QUERIES = 64  # queries of a block in the backward pass; one block serves all if they share a mask
_THREADS = 512  # those of cuda/mask.cu, as are the columns of a warp's step and rows of a CTA
_STEP_COLUMNS = 1024
_CTA_ROWS = 32
_MAX_GRID_HEADS = 65535  # limit of the grid's second dimension; a CTA loops over further heads

_LAYOUT = struct_layout("mask.cu", "MaskParams")
_ADDRESSES, _SIZES = _LAYOUT.packer("mask", "bits"), _LAYOUT.packer("b")


class MaskLayout(NamedTuple):
    """Shape and strides of a mask (B, H, Sq, Sk); dimensions that are shared have 1 and 0."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, mask: Tensor) -> MaskLayout:
        """The layout of a mask of up to four dimensions."""
        pairs = [
            (size, stride) if size > 1 and stride else (1, 0)
            for size, stride in zip(mask.shape, mask.stride())
        ]
        return cls(*zip(*[(1, 0)] * (4 - len(pairs)), *pairs))

    @property
    def queries_share(self) -> bool:
        """Whether all queries have the same keys."""
        return self.shape[2] == 1


class MaskPacker(PreparedLaunch):
    """Packs masks of one layout to bits, uint8 in one dimension, by one launch of cuda/mask.cu.

    `bits_layout` is what kernels need to read them: byte strides of batches, heads and rows, 0
    where they are shared, and the offset of the key range in a row.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], device: int) -> None:
        B, H, rows, columns = shape
        pitch = _row_bytes(columns)
        warps = 1
        if 0 < strides[2] < strides[3]:
            name, cta_rows = "pack_columns", _CTA_ROWS
        else:
            steps = -(-(pitch - 8) * 8 // _STEP_COLUMNS)
            warps = min(1 << (steps - 1).bit_length(), _THREADS // 32)
            name, cta_rows = "pack_rows", _THREADS // 32 // warps
        sizes = _SIZES.pack(*strides, H, B * H, rows, columns, pitch, warps)
        super().__init__(
            kernel("mask", name, device, _THREADS),
            (-(-rows // cta_rows), min(B * H, _MAX_GRID_HEADS)),
            Params(_ADDRESSES, sizes),
            ((B * H * rows * pitch,), (1,), torch.uint8),
        )
        self.bits_layout = (
            H * rows * pitch * (B > 1), rows * pitch * (H > 1), pitch * (rows > 1), pitch - 8,
        )  # fmt: skip

    @classmethod
    def by_query(cls, layout: MaskLayout, Sk: int, device: int) -> MaskPacker:
        """Bits (B|1, H|1, Sq|1, Sk): the keys of each query."""
        return cls((*layout.shape[:3], Sk), layout.strides, device)

    @classmethod
    def by_key(cls, layout: MaskLayout, device: int) -> MaskPacker:
        """Bits (B|1, H|1, Sk|1, Sq): the queries of each key.

        Where queries share the mask, its one block of 64 queries is every block.
        """
        (B, H, Sq, Sk), (b, h, query, key) = layout
        return cls((B, H, Sk, _QUERIES if layout.queries_share else Sq), (b, h, key, query), device)


def _row_bytes(columns: int) -> int:
    return (columns + _WIDEST_BLOCK - 1 + 127) // 128 * 16 + 16
