"""Tile tables: which tile a kernel uses for which head dim on which GPU, and what was measured."""

from __future__ import annotations

import dataclasses

import torch

from fa_ops.backends.triton.arguments import Class


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes and compiler options of one kernel."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    tma: bool = (
        False  # load keys and values through tensor descriptors: from Hopper on, 16-byte rows
    )

    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}


def forward_tile(arch: int, dtype: torch.dtype, head_dim: int, kind: Class) -> Tile:
    """The forward tile for a GPU of capability `arch` and the larger of D and Dv."""
    if dtype == torch.float32:
        return Tile(64, 32, 4, 2)
    return Tile(128, 64, 8, 2)
