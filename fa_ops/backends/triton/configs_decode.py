"""Tiles of the decoding kernels: keys per step, warps, stages, and programs per multiprocessor."""

from __future__ import annotations

import dataclasses

import torch

from fa_ops.backends.triton.arguments import padded


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """Block sizes and compiler options of the split kernel."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int
    per_sm: int  # programs that a multiprocessor holds at once

    def options(self) -> dict[str, int]:
        """The compiler options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# Keys of a piece under `batch_invariant`: few enough that one sequence of 32k keys with 8 kv heads
# fills 132 multiprocessors twice, and a multiple of every block_n below.
FIXED_KEYS = 1024

# A call is light if a multiprocessor has at most this many keys to read: then one program, with
# fewer pieces to merge, may suffice; otherwise two, one of which loads while the other computes.
LIGHT_KEYS = 2048

MERGE_WARPS, MERGE_PARTS = 4, 16


def decode_tile(
    arch: int, dtype: torch.dtype, fp8: bool, D: int, Dv: int, rows: int, light: bool
) -> DecodeTile:
    """The tile for `rows` query rows per kv head. More than 32 go to several programs: with 64,
    Triton takes wgmma on Hopper, and there its accumulators spill from D = 256 on."""
    width = min(512, max(64, padded(D), padded(Dv)))
    roomy = arch in (80, 87, 90) or 100 <= arch < 120
    if dtype == torch.float32:
        return _FP32[width]
    table = (_ROOMY_FP8 if fp8 else _ROOMY) if roomy else _SMALL
    tile = table[width][light] if roomy else table[width]
    if rows <= 16 or not roomy:
        return tile
    if width == 512 and D <= 512 and not fp8:  # keys and values that share no memory
        return DecodeTile(32, 32, 8, 3, 1)
    return dataclasses.replace(tile, block_m=32, num_warps=8 if width > 128 else tile.num_warps)


# By the larger head dimension: (the tile, the tile of light calls). Bytes in flight decide, some
# 64 to 96 KB per multiprocessor. With heads of 128, two programs of 3 stages are faster than one of
# 4 for light calls too (`bench decode`), but for one row of 8k keys, where they are equal.
_ROOMY = {
    64: (DecodeTile(16, 128, 4, 3, 2), DecodeTile(16, 128, 4, 4, 1)),
    128: (DecodeTile(16, 64, 4, 3, 2), DecodeTile(16, 64, 4, 3, 2)),
    256: (DecodeTile(16, 32, 4, 3, 2), DecodeTile(16, 32, 4, 4, 1)),
    512: (DecodeTile(16, 64, 8, 2, 1), DecodeTile(16, 64, 8, 2, 1)),
}
_ROOMY_FP8 = {
    64: (DecodeTile(16, 128, 4, 4, 3), DecodeTile(16, 128, 4, 4, 1)),
    128: (DecodeTile(16, 64, 4, 4, 3), DecodeTile(16, 128, 4, 4, 1)),
    256: (DecodeTile(16, 64, 4, 3, 2), DecodeTile(16, 64, 4, 4, 1)),
    512: (DecodeTile(16, 64, 8, 2, 1), DecodeTile(16, 64, 8, 2, 1)),
}
_SMALL = {  # 99 KB of shared memory
    64: DecodeTile(16, 64, 4, 3, 2),
    128: DecodeTile(16, 32, 4, 3, 2),
    256: DecodeTile(16, 32, 4, 2, 1),
    512: DecodeTile(16, 16, 4, 2, 1),
}
_FP32 = {
    64: DecodeTile(16, 32, 4, 2, 2),
    128: DecodeTile(16, 32, 4, 2, 2),
    256: DecodeTile(16, 16, 4, 2, 1),
    512: DecodeTile(16, 16, 4, 2, 1),
}
