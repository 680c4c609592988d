"""The effect of a mask on a tile of scores, from the tile states of `fa::mask_blocks`."""

from __future__ import annotations

import enum

from torch import Tensor

from fa_ops.backends.mask_blocks import EMPTY, FULL, listed_states
from fa_ops.types import MASK_BLOCK, Spec

# A blockwise loop takes up to 1.5 times as long as aten's kernel, which visits every tile.
_SHARE_THAT_PAYS = 0.6


class TileState(enum.Enum):
    """The effect of a mask on a tile."""

    EMPTY = "masks every score out"
    FULL = "changes no score"
    MIXED = "must be read"


class MaskStates:
    """The states of the tiles of some heads, (..., m, n), as Python lists."""

    def __init__(self, states: Tensor) -> None:
        heads = states.flatten(0, -3)
        self.kept = (heads != EMPTY).any(0).tolist()
        self.full = (heads == FULL).all(0).tolist()

    def of(self, rows: slice, cols: slice) -> TileState:
        """The effect of the mask on these rows and columns of the scores in all heads."""
        down, across = _tiles(rows, len(self.kept)), _tiles(cols, len(self.kept[0]))
        if not any(self.kept[i][j] for i in down for j in across):
            return TileState.EMPTY
        full = all(self.full[i][j] for i in down for j in across)
        return TileState.FULL if full else TileState.MIXED


def _tiles(part: slice, count: int) -> range:
    """The tiles that a slice touches; a dimension with one tile may be shared by all of it."""
    if count == 1:
        return range(1)
    return range(part.start // MASK_BLOCK, -(-part.stop // MASK_BLOCK))


def skipping_pays(spec: Spec) -> bool:
    """Whether `mask_blocks` leave so few tiles that a loop over them is faster than all of them."""
    if spec.mask_blocks is None:
        return False
    states = listed_states(spec.mask_blocks, spec.attn_mask)
    return int((states != EMPTY).sum()) <= _SHARE_THAT_PAYS * states.numel()
