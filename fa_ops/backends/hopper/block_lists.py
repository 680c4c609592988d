"""`mask_blocks` as kernels read them: struct MaskBlocks of cuda/masks.cuh."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fa_ops.types import Spec, mask_tiles


class BlockLists(NamedTuple):
    """The layout of a mask's lists, without their address."""

    b: int  # byte strides of batches and heads, 0 where they share the lists
    h: int
    tile_rows: int  # of the mask, along queries
    tile_columns: int

    @classmethod
    def of(cls, mask: Tensor, blocks: Tensor) -> BlockLists:
        """The layout of `mask_blocks` of a mask."""
        (B, H, _), (b, h, _) = blocks.shape, blocks.stride()
        return cls(4 * b * (B > 1), 4 * h * (H > 1), *mask_tiles(mask)[2:])


def skipped_lists(spec: Spec) -> BlockLists | None:
    """The lists by which the kernels of a call skip tiles, or None without `mask_blocks`."""
    if spec.mask_blocks is None:
        return None
    return BlockLists.of(spec.attn_mask, spec.mask_blocks)
