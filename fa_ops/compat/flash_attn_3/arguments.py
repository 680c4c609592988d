"""Arguments that only FlashAttention 3 has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import need_tensor
from fa_ops.compat.flash.arguments import count, flag, has_shape


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


class Scales(NamedTuple):
    """Factors (B, Hkv) of fp8 queries, keys and values, 1 where they are None."""

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def options(self, q: Tensor, batch: int, heads: tuple[int, int]) -> dict[str, Tensor]:
        """The scales of `fa_ops.attention` for fp8 queries; none for others.

        `heads`: of queries and of keys. A scale of a key head is for all query heads of its group.

        Raises:
            TypeError: queries in 16 bits have scales, or scales are not float32.
            ValueError: another shape or device.
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
            given = name.replace("scale", "descale")
            has_shape(given, need_tensor(given, scale), (batch, Hkv))
            checks.same_device(q, given, scale, "q")
            checks.need(scale.dtype == torch.float32, "{} must be float32, got {}", given,
                        scale.dtype, error=TypeError)  # fmt: skip
            found[name] = scale.detach() if scale.requires_grad else scale
        if self.q_descale is not None and Hkv and Hq % Hkv == 0:
            found["q_scale"] = found["q_scale"].repeat_interleave(Hq // Hkv, 1)
        return found
