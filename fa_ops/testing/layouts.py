"""Memory layouts of (B, H, S, D) inputs: contiguous, permuted, sliced, expanded, overlapping."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("bhsd", "bshd", "packed", "expanded", "heads", "rows", "frames")
GRAD_LAYOUTS = ("bhsd", "bshd", "ones", "rows", "frames")


def base_shape(layout: str, B: int, H: int, S: int, D: int) -> tuple[int, ...]:
    """The shape of the contiguous tensor of which `arranged` returns a view."""
    return {
        "bhsd": (B, H, S, D),
        "bshd": (B, S, H, D),
        "packed": (B, S, 2 * H, D),  # a slice of wider rows
        "expanded": (1, H, S, D),  # all rows of the batch share memory
        "heads": (B, 1, S, D),  # all heads share memory
        "rows": (B, H, 1, D),  # all tokens share memory
        "frames": (B, H, max(S, 1) + D - 1),  # each row begins one element after the row before it
    }[layout]


def arranged(layout: str, base: Tensor, B: int, H: int, S: int, D: int) -> Tensor:
    """A (B, H, S, D) view of `base` in the named layout."""
    if layout == "frames":
        return base.unfold(-1, D, 1)[:, :, :S]
    if layout in ("bshd", "packed"):
        base = base[:, :, :H].transpose(1, 2)
    return base.expand(B, H, S, D)


def rearranged(layout: str, x: Tensor) -> Tensor:
    """A tensor of x's shape (..., D) and of its values in another layout, which may repeat values.

    "ones" repeats a single value everywhere.
    """
    if layout == "ones":
        return x.flatten()[:1].view([1] * x.dim()).expand(x.shape)
    if layout == "rows":
        return x[..., :1, :].expand(x.shape)
    if layout == "bshd":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "frames":
        *outer, S, D = x.shape
        return torch.cat([x[..., 0], x[..., -1, 1:]], -1).unfold(-1, D, 1)
    return x
