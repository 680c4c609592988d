"""Tile tables: which tile a kernel uses for which head dim on which GPU, and what was measured."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes and compiler options of one kernel."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}
