"""The positions at which flash-attn rotates queries and new keys of a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import cache_checks, tracing
from fa_ops.backends import rotary


class Rotation(NamedTuple):
    """The tables of a rotary embedding, ``(positions, R / 2)``, and how to use them."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    queries_differ: bool  # else all queries of a row are at one position, that of its first new key

    def of_rows(self, q: Tensor, k: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """q ``(B, Sq, Hq, D)`` and k ``(B, Sn, Hkv, D)``, rotated from positions offsets (B,) on.

        Tensors that do not fit are returned unchanged, because the operator refuses them.
        """
        cache_checks.rotary(q.transpose(1, 2), self.cos, self.sin)
        (B, Sq, _, D), Sn = q.shape, k.shape[1]
        if offsets.shape != (B,) or k.shape[0] != B or k.shape[3] != D:
            return q, k
        steps = Sq if self.queries_differ else 1
        self._check(offsets, max(Sn, steps))
        rows = (offsets[:, None] + torch.arange(n, device=q.device) for n in (steps, Sn))
        return tuple(
            self._rotated(x, positions.expand(-1, x.shape[1])) for x, positions in zip((q, k), rows)
        )

    def of_tokens(self, x: Tensor, ends: Tensor, offsets: Tensor, differ: bool) -> Tensor:
        """Packed tokens x ``(T, H, D)``, rotated from the positions offsets (B,) on."""
        cache_checks.rotary(x[None].transpose(1, 2), self.cos, self.sin)
        token = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
        inside = (sequence < len(ends) - 1) & (token >= ends[0])
        sequence = sequence.clamp(max=len(ends) - 2)
        positions = offsets[sequence] + (token - ends[sequence] if differ else 0)
        self._check(positions.where(inside, 0), 1)
        return self._rotated(x[None], positions[None])[0]

    def _check(self, offsets: Tensor, steps: int) -> None:
        if tracing.can_read(offsets) and len(offsets):
            needed, found = int(offsets.max()) + steps, self.cos.shape[0]
            if needed > found:
                raise ValueError(f"rotary_cos has {found} positions, but {needed} are needed")

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        positions = positions.clamp(0, self.cos.shape[0] - 1)
        x = rotary.rotated(x.transpose(1, 2), self.cos, self.sin, self.interleaved, positions)
        return x.transpose(1, 2)
