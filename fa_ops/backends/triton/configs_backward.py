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
# float32 in three parts of 16 bits, by width
_SPLIT = {
    80: {
        32: (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        64: (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        128: (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    },
    90: {
        32: (Tile(64, 64, 4, 2, 168), Tile(64, 64, 4, 2, 168)),
        64: (Tile(64, 64, 4, 1), Tile(32, 64, 4, 2)),
        128: (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    },
}

# Heads to 512 wide: (query_tile, that of dk, that of dv). dq and dk read from four tiles in shared
# memory, of which Hopper's holds one stage; dv reads from three, and has two.
_WIDE_HALF = {
    80: (Tile(64, 16, 8, 1), Tile(16, 64, 8, 1), Tile(16, 64, 8, 2)),
    86: (Tile(32, 16, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 2)),
    90: (Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(32, 64, 8, 2)),
    100: (Tile(64, 16, 8, 2), Tile(32, 64, 8, 1), Tile(32, 64, 8, 1)),
}
_WIDE_SINGLE = Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)  # 128 KiB


def divides(mode: str, head_dim: int) -> bool:
    """Whether the backward kernels need `matrix_products.divided`: 64 rows for eight warps."""
    return head_dim > (64 if mode == "split" else 256)


def backward_tiles(
    arch: int, dtype: torch.dtype, head_dim: int, mode: str = "ieee"
) -> tuple[Tile, ...]:
    """Tiles of `query_grad_kernel` and of each launch of `key_value_grad_kernel` on a GPU of
    capability `arch`: one for both gradients, or one for dk and one for dv.

    `head_dim` is the larger of D and Dv, `mode` that of `matrix_products.product`.
    """
    if mode == "split":
        return _SPLIT[90 if arch == 90 else 80][max(32, padded(head_dim))]
    size = max(padded(head_dim), 64).bit_length() - 7
    if dtype == torch.float32:
        return _WIDE_SINGLE if size == 3 else _SINGLE[size]
    generation = _generation(arch)
    return _WIDE_HALF[generation] if size == 3 else _HALF[generation][size]


def holds_wide_single(arch: int) -> bool:
    """Whether a GPU's shared memory holds the tiles of float32 and heads over 256 wide."""
    return _generation(arch) != 86


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
