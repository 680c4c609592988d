"""`fa::mask_blocks` in plain torch code: lists of the tiles that are not empty.

For each batch and head of the mask, int32: one list for each row of tiles, of n tiles, then one for
each column of tiles, of m. A list is its length, then for each of its tiles, in order, twice the
tile's index plus whether it is mixed, then zeros to n or m.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa_ops.call.options import MASK_BLOCK, mask_tiles

EMPTY, FULL, MIXED = 0, 1, 2


def mask_blocks(mask: Tensor) -> Tensor:
    """The lists (B, H, L) of a mask (B, H, rows, columns)."""
    return lists_of_states(tile_states(mask))


def lists_of_states(states: Tensor) -> Tensor:
    """The lists (B, H, L) of the states of tiles (B, H, m, n)."""
    lists = (_lists(states), _lists(states.transpose(2, 3)))
    return torch.cat([x.flatten(2) for x in lists], 2)


def tile_states(mask: Tensor) -> Tensor:
    """uint8 (B, H, m, n): EMPTY, FULL or MIXED for each tile of a mask (B, H, rows, columns)."""
    strips = [_strip_states(strip) for strip in mask.detach().split(MASK_BLOCK, 2)]
    return torch.stack(strips, 2)


def _strip_states(strip: Tensor) -> Tensor:
    """uint8 (B, H, n), for one row of tiles."""
    if strip.dtype == torch.bool:
        bytes_of = strip.view(torch.uint8)  # whose extrema are 40 times as fast as `any`
        some, every = bytes_of.amax(2) != 0, bytes_of.amin(2) != 0
    else:
        top, bottom = strip.amax(2), strip.amin(2)  # NaN where there is one
        some, every = top != -torch.inf, (top == 0) & (bottom == 0)
    rest = -some.shape[-1] % MASK_BLOCK
    some = pad(some, (0, rest)).unflatten(-1, (-1, MASK_BLOCK)).any(-1)
    every = pad(every, (0, rest), value=True).unflatten(-1, (-1, MASK_BLOCK)).all(-1)
    states = torch.full(some.shape, MIXED, dtype=torch.uint8, device=some.device)
    return states.masked_fill_(every, FULL).masked_fill_(~some, EMPTY)


def _lists(states: Tensor) -> Tensor:
    """int32 (B, H, m, 1 + n) of states (B, H, m, n): the lists of their rows."""
    kept = states != EMPTY
    count = kept.sum(-1, keepdim=True)
    order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)
    entries = 2 * order + (states.gather(-1, order) == MIXED)
    place = torch.arange(states.shape[-1], device=states.device)
    entries = entries.masked_fill(place >= count, 0)
    return torch.cat((count, entries), -1).int()


def listed_states(blocks: Tensor, mask: Tensor) -> Tensor:
    """`tile_states` (B or 1, H or 1, m, n) from `mask_blocks`, which may hold any numbers."""
    _, _, m, n = mask_tiles(mask)
    count, entries = blocks[..., : m * (n + 1)].unflatten(-1, (m, n + 1)).split((1, n), -1)
    is_listed = torch.arange(n, device=blocks.device) < count
    tiles = (entries >> 1).clamp(0, n - 1).masked_fill(~is_listed, n).long()
    states = torch.zeros(*entries.shape[:3], n + 1, dtype=torch.uint8, device=blocks.device)
    states.scatter_(-1, tiles, (FULL + (entries & 1)).to(torch.uint8))
    return states[..., :n]
