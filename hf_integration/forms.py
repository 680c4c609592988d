"""The masks that travel through a transformers model: 4-D tensors, small wherever possible.

transformers hands whatever the mask function returns from layer to layer and asks only that it be a
4-D tensor. Five forms:

    int32, empty, shape (1, 1, 0, 0)    every query attends every key
    int32, empty, shape (1, 1, 0, n)    causal over the first n keys, aligned at the bottom right;
                                        later keys are unused cache
    int32 (B or 1, 1, Sq or 1, 2)       key ranges: query i attends keys lo <= j < hi
    bool, broadcastable (B, H, Sq, Sk)  True keeps
    float, broadcastable                added to the scores

The first two carry everything in their shape: no kernel runs to make them, no device value is read
to use them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """A mask as the arguments of an attention call; keys from `visible` on are cut off first."""

    visible: int | None = None
    is_causal: bool = False
    key_ranges: Tensor | None = None
    attn_mask: Tensor | None = None

    def keep(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """Bool, broadcastable to (B, H, Sq, Sk): everything the form says but a float mask."""
        j = torch.arange(Sk, device=device)
        keep = torch.ones((1, 1, Sq, Sk), dtype=torch.bool, device=device)
        if self.is_causal:
            keep = keep & (j <= torch.arange(Sq, device=device)[:, None] + Sk - Sq)
        if self.key_ranges is not None:
            keep = keep & (j >= self.key_ranges[..., :1]) & (j < self.key_ranges[..., 1:])
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            keep = keep & self.attn_mask
        return keep


def full(device: torch.device | str) -> Tensor:
    return torch.empty((1, 1, 0, 0), dtype=torch.int32, device=device)


def causal(visible: int, device: torch.device | str) -> Tensor:
    return torch.empty((1, 1, 0, visible), dtype=torch.int32, device=device)


def ranges(lo: Tensor, hi: Tensor) -> Tensor:
    """From bounds of shape (B or 1, Sq or 1)."""
    return torch.stack(torch.broadcast_tensors(lo, hi), -1)[:, None].to(torch.int32)


def read(mask: Tensor) -> Form:
    """What a mask tensor says. Raises ValueError for a tensor that is none of the five forms."""
    if mask.dtype == torch.int32 and mask.dim() == 4:
        if mask.shape[2] == 0:
            n = mask.shape[3]
            return Form() if n == 0 else Form(visible=n, is_causal=True)
        if mask.shape[3] == 2:
            return Form(key_ranges=mask)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(
            "attention_mask must be bool, floating point or a mask made by fa_ops, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return Form(attn_mask=mask)


def name(mask: Tensor) -> str:
    if mask.shape[2] > 0:
        return "ranges"
    return "full" if mask.shape[3] == 0 else "causal"
