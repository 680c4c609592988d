"""Attention of fp8 queries over an fp8 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.api import attention_varlen
from fa_ops.compat.flash.cache import Caches


def attend_numbers(
    q: Tensor, caches: Caches, lens: Tensor, ends: Tensor | None, longest: int | None, options: dict
) -> tuple[Tensor, Tensor]:
    """out and lse in the layout of q: rows ``(B, Sq, Hq, D)`` or packed ``(Tq, Hq, D)``.

    Args:
        ends: int32 ``(B + 1,)``, the cumulative numbers of packed queries; ``None``: rows.
        longest: upper bound on the number of queries of a packed sequence.
        options: those of :func:`fa_ops.attention_varlen`, and ``num_splits``, which is ignored.
    """
    rows, caches = q.shape[:2], caches.in_pages()
    options = {name: value for name, value in options.items() if name != "num_splits"}
    packed, longest = (q, longest) if ends is not None else (q.flatten(0, 1), rows[1])
    if ends is None:
        ends = torch.arange(rows[0] + 1, dtype=torch.int32, device=q.device) * rows[1]
    out, lse = attention_varlen(
        packed, caches.k, caches.v, ends, None, longest, kv_lens=lens, page_table=caches.table,
        return_lse=True, **options,
    )  # fmt: skip
    if packed is q:
        return out, lse
    return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)
