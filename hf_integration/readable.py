"""Whether the host can read the values of a tensor, and at what cost."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.tracing import can_read


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values: not while tracing, under vmap or during graph capture."""
    return can_read(tensor, waiting=True)


def reads_are_free(device: torch.device | str) -> bool:
    """Whether the host can read tensors on a device without synchronising with it."""
    return torch.device(device).type == "cpu"
