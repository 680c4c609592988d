"""Arguments that only FlashAttention 3 has."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.argument_types import need_tensor
from fa_ops.compat.flash.arguments import count, flag


def chunk_of(attention_chunk: int) -> int:
    """The length of a chunk of positions; 0: none. Positions are int32, as is the length."""
    chunk = count("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk must not be negative, got {chunk}")
    return min(chunk, 2**31 - 1)


def check_unused(
    num_splits: int, pack_gqa: bool | None, sm_margin: int, scheduler_metadata: Tensor | None = None
) -> None:
    """Raise TypeError for values of wrong types of what only steers FlashAttention 3's kernels."""
    count("num_splits", num_splits)
    count("sm_margin", sm_margin)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)
    if scheduler_metadata is not None:
        need_tensor("scheduler_metadata", scheduler_metadata)


def refuse(q: Tensor, **arguments: Tensor | None) -> None:
    """Raise NotImplementedError for scales of fp8 inputs and fp8 queries."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None, got {type(value).__name__}")
    if need_tensor("q", q).dtype == torch.float8_e4m3fn:
        raise NotImplementedError(f"q must be in 16 bits or more, got {q.dtype}")
