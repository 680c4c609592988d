"""flash_attn_combine: results over parts of the keys become the result over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import checks
from fa_ops.api import merge_states
from fa_ops.argument_types import need_tensor
from fa_ops.compat.flash.arguments import buffers

_FEATURES = 256  # of one call: what all backends take


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint sets of keys, as :func:`fa_ops.merge_states`.

    Args:
        out_partial: ``(N, B, S, H, Dv)`` or ``(N, T, H, Dv)``, float32.
        lse_partial: ``(N, B, S, H)`` or ``(N, T, H)``, float32.
        out: where the result is written.
        out_dtype: the dtype of the result; ``None``: that of ``out_partial``.

    Returns:
        out ``(B, S, H, Dv)`` or ``(T, H, Dv)``, and the lse, of its shape without ``Dv``.

    Raises:
        ValueError, TypeError: as :func:`fa_ops.merge_states`.
    """
    need_tensor("lse_partial", lse_partial)
    if not isinstance(out_dtype, torch.dtype | None):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {out_dtype!r}")
    need_tensor("out_partial", out_partial)
    checks.states(out_partial, lse_partial, ("out_partial", "lse_partial"))
    buffers(out=(out, out_partial.shape[1:]))
    parts = out_partial.split(_FEATURES, -1)
    merged = [merge_states(part, lse_partial) for part in parts]
    found = torch.cat([part for part, _ in merged], -1) if len(merged) > 1 else merged[0][0]
    found = found if out_dtype is None else found.to(out_dtype)
    return (found if out is None else out.copy_(found)), merged[0][1]
