"""The keys that each query row attends, as one half-open key range per row.

Causal masks, windows, `kv_lens` and `key_ranges` each leave a row one range, and so does any
combination of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.types import Spec


class KeyRanges(NamedTuple):
    """Row i attends the keys lo <= j < hi; a dead row has lo = Sk and hi = 0.

    Both int32, (B or 1, Hq or 1, Sq or 1, 1).
    """

    lo: Tensor
    hi: Tensor

    def span(self) -> tuple[int, int]:
        """The smallest range that contains every row's; empty (first >= last) if all rows are."""
        return int(self.lo.min()), int(self.hi.max())

    def core(self) -> tuple[int, int]:
        """The range of keys that every row attends; empty (first >= last) if there is none."""
        return int(self.lo.max()), int(self.hi.min())


def key_lengths(spec: Spec, Sk: int) -> Tensor:
    """Number of keys per batch element, int32 (B or 1, 1, 1, 1)."""
    if spec.kv_lens is None:
        return torch.full((1, 1, 1, 1), Sk, dtype=torch.int32)
    return spec.kv_lens.clamp(0, Sk).view(-1, 1, 1, 1)


def attended_ranges(spec: Spec, Sq: int, Sk: int) -> KeyRanges | None:
    """The key range of every row, in O(Sq) memory, or None if every row attends every key."""
    right = 0 if spec.is_causal else spec.window_right
    bounded = right >= 0 or spec.window_left >= 0
    if not bounded and spec.kv_lens is None and spec.key_ranges is None:
        return None
    hi = key_lengths(spec, Sk)
    lo = torch.zeros_like(hi)
    if bounded:
        diagonal = torch.arange(Sq, dtype=torch.int32).view(Sq, 1) + (hi - Sq)
        if right >= 0:
            hi = torch.minimum(hi, diagonal + (min(right, Sq) + 1))
        if spec.window_left >= 0:
            lo = diagonal - min(spec.window_left, Sk)
    if spec.key_ranges is not None:
        first, last = spec.key_ranges.split(1, -1)
        lo, hi = torch.maximum(lo, first), torch.minimum(hi, last)
    lo, hi = torch.broadcast_tensors(lo.clamp(min=0), hi.clamp(max=Sk))
    dead = hi <= lo
    return KeyRanges(lo.masked_fill(dead, Sk), hi.masked_fill(dead, 0))
