"""Masks some of whose tiles are empty or full, as `mask_blocks` finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.types import MASK_BLOCK, mask_tiles


def fill_some(mask: Tensor, g: torch.Generator) -> None:
    """Mask a third of the tiles of a mask out, in place, and make a third change no score."""
    lowest, highest = (False, True) if mask.dtype == torch.bool else (-torch.inf, 0.0)
    kinds = torch.randint(3, mask_tiles(mask), generator=g).to(mask.device)
    rows, columns = mask.shape[-2:]
    for dim, size in ((2, rows), (3, columns)):
        kinds = kinds.repeat_interleave(MASK_BLOCK, dim).narrow(dim, 0, size)
    mask.masked_fill_(kinds == 0, lowest).masked_fill_(kinds == 1, highest)
