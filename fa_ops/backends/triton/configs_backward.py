"""Tile tables of the backward kernels, by GPU generation and by the wider of D and Dv.

Times are of one H200, bf16, 16384 tokens and 2048 / D heads, at 2k and 8k tokens per sequence; the
other generations were only compiled: theirs are the largest tiles that neither spill registers nor
exceed shared memory. A `query_tile` has at least as many rows as the `key_value_tile` beside it,
which reads whole blocks of the first kernel's row statistics.
"""

from __future__ import annotations

import torch

from fa_ops.backends.triton.arguments import padded
from fa_ops.backends.triton.configs import Tile

# by generation: (query_tile, key_value_tile) for heads to 64, to 128 and to 256 wide
_HALF = {
    80: (  # 163 KiB of shared memory
        (Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
        (Tile(64, 64, 8, 1), Tile(32, 64, 8, 1)),
    ),
    86: (  # 99 KiB
        (Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        (Tile(128, 32, 8, 2), Tile(64, 64, 8, 1)),
        (Tile(64, 32, 8, 1), Tile(32, 32, 8, 2)),
    ),
    90: (
        # two programs of four warps on a multiprocessor: one's exponentials hide under the other's
        # products; eight warps are 1 % faster for queries of full, 25 % slower of causal attention
        (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
        # key_value: 10 % faster than eight warps with 128 keys, in spite of spills before the loop
        (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
        (Tile(128, 64, 8, 1), Tile(64, 64, 8, 2)),
    ),
    100: (
        (Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
        (Tile(128, 64, 8, 2), Tile(32, 64, 8, 2)),
        (Tile(128, 64, 8, 1), Tile(32, 64, 8, 1)),
    ),
}
_SINGLE = (
    (Tile(32, 32, 4, 2), Tile(32, 64, 8, 2)),
    (Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
    (Tile(16, 16, 4, 2), Tile(16, 16, 8, 2)),
)


def backward_tiles(arch: int, dtype: torch.dtype, head_dim: int) -> tuple[Tile, Tile]:
    """Tiles of `query_grad_kernel` and `key_value_grad_kernel` on a GPU of capability `arch`.

    `head_dim` is the larger of D and Dv.
    """
    size = max(padded(head_dim), 64).bit_length() - 7
    if dtype == torch.float32:
        return _SINGLE[size]
    return _HALF[_generation(arch)][size]


def _generation(arch: int) -> int:
    """The key of `_HALF` for GPUs with the same instructions and as much shared memory."""
    if arch in (80, 87):
        return 80
    if 90 <= arch < 120:
        return 90 if arch < 100 else 100
    return 86


def mask_tile(dtype: torch.dtype, head_dim: int) -> Tile:
    """Tile of `mask_grad_kernel`: q, k, v and dO fill 64 KiB of shared memory, on every GPU."""
    width = padded(head_dim) * dtype.itemsize
    side = 64 if width <= 256 else 32 if width <= 512 else 16
    return Tile(side, side, 4, 1)
