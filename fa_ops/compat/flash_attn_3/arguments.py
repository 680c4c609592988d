"""Arguments that only FlashAttention 3 has."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.api import need_int
from fa_ops.compat.flash.arguments import scalar


def chunk_of(attention_chunk: int) -> int:
    """The length of a chunk of positions; 0: none."""
    chunk = need_int("attention_chunk", scalar(attention_chunk))
    if chunk < 0:
        raise ValueError(f"attention_chunk must not be negative, got {chunk}")
    return chunk


def refuse(q: Tensor, **arguments: Tensor | None) -> None:
    """Raise NotImplementedError for scales of fp8 inputs and fp8 queries."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None, got {type(value).__name__}")
    if q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError(f"q must be in 16 bits or more, got {q.dtype}")
