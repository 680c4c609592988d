"""Arguments that only FlashAttention 3 has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.argument_types import need_tensor
from fa_ops.compat.flash.arguments import count, flag, has_shape
from fa_ops.types import dtype_name


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


def refuse_scales(q: Tensor, why: str, scales: Scales) -> None:
    """Raise NotImplementedError for scales of fp8 inputs and fp8 queries."""
    for name, value in zip(Scales._fields, scales):
        if value is not None:
            raise NotImplementedError(f"{name} must be None {why}, got {type(value).__name__}")
    if need_tensor("q", q).dtype == torch.float8_e4m3fn:
        raise NotImplementedError(f"q must be in 16 bits or more {why}, got {dtype_name(q.dtype)}")


class Scales(NamedTuple):
    """Factors (B, Hkv) of fp8 queries, keys and values, 1 where they are None."""

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def refuse_with(self, q: Tensor, **others: object) -> None:
        """Raise NotImplementedError for fp8 queries, or their scales, with any of these given."""
        given = [n for n, x in others.items() if x is not None and not (type(x) is int and x == 0)]
        if given:
            refuse_scales(q, f"with {given[0]}", self)

    def options(self, q: Tensor, batch: int, heads: tuple[int, int]) -> dict[str, Tensor]:
        """The scales of `fa_ops.attention` for fp8 queries; none for others.

        `heads`: of queries and of keys. A scale of a key head is for all query heads of its group.

        Raises:
            TypeError: queries in 16 bits have scales.
            ValueError: another shape.
        """
        if need_tensor("q", q).dtype != torch.float8_e4m3fn:
            for name, scale in zip(self._fields, self):
                if scale is not None:
                    raise TypeError(
                        f"{name} is for inputs in float8_e4m3fn, but q is {dtype_name(q.dtype)}"
                    )
            return {}
        found, (Hq, Hkv) = {}, heads
        for name, scale in zip(("q_scale", "k_scale", "v_scale"), self):
            if scale is None:
                found[name] = torch.ones(1, device=q.device)
                continue
            has_shape(name.replace("scale", "descale"), need_tensor(name, scale), (batch, Hkv))
            found[name] = scale
        if self.q_descale is not None and Hkv and Hq % Hkv == 0:
            found["q_scale"] = self.q_descale.repeat_interleave(Hq // Hkv, 1)
        return found
