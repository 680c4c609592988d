"""Packed queries over keys in pages, as flash-attn attends them."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.compat.flash.arguments import PACKED, PAGES, shape, unit_stride
from fa_ops.compat.flash.cache import Caches
from fa_ops.kv_cache import attention_with_kv_cache
from fa_ops.ops.undifferentiable import undifferentiable
from fa_ops.varlen import pages as varlen_pages


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor, ends: Tensor,
    longest: int | None, options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed queries over a paged cache.

    Args:
        q: ``(Tq, Hq, D)``.
        k: ``(pages, page_size, Hkv, D)``.
        v: ``(pages, page_size, Hkv, Dv)``.
        lens: int32 ``(B,)``, the number of keys of each sequence.
        table: int32 ``(B, max_pages)``.
        ends: int32 ``(B + 1,)``, the cumulative numbers of queries.
        longest: upper bound on the number of queries of a sequence; ``None``: ``Tq``.
        options: those of :func:`fa_ops.attention_with_kv_cache`.

    Returns:
        out ``(Tq, Hq, Dv)`` and lse ``(Hq, Tq)``, 0 and -inf for tokens outside every sequence.
        Backward raises NotImplementedError.
    """
    shape(PACKED, q=q)
    shape(PAGES, k=k, v=v)
    shape("(B, max_pages)", block_table=table)
    inputs = [unit_stride(x) for x in (q, k, v)]
    detached = (x.detach() for x in inputs)
    out, lse = varlen_pages.attention(*detached, ends, lens, table, (longest, None), options)
    message = "attention over pages (block_table) has no backward pass"
    return undifferentiable(message, inputs, out, lse)


def attend_chunks(
    q: Tensor, caches: Caches, lens: Tensor, ends: Tensor, leftpad: Tensor | None, chunk: int,
    options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same where a query attends only keys in its chunk of positions behind the padding.

    Each query is a row of its own, whose mask is a range of keys.
    """
    varlen_pages.check(q, caches.k, caches.v, ends, lens, caches.table)
    token = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    inside = (sequence < len(lens)) & (token >= ends[0])
    sequence = sequence.clamp(max=max(len(lens) - 1, 0))
    keys = lens[sequence]
    position = keys - (ends[sequence + 1] - token)
    pad = torch.zeros_like(keys) if leftpad is None else leftpad[sequence]
    first = (position - pad).div(chunk, rounding_mode="floor") * chunk + pad
    left, right = options["window"] or (-1, -1)
    right = 0 if options["is_causal"] else right
    lower, upper = torch.maximum(first, pad), first + chunk
    if left >= 0:
        lower = torch.maximum(lower, position - left)
    if right >= 0:
        upper = torch.minimum(upper, position + right + 1)
    ranges = torch.stack((lower, upper), -1).where(inside[:, None], 0)[:, None, None]
    names = "scale", "softcap", "num_splits"
    out, lse = attention_with_kv_cache(
        q[:, :, None], caches.k, caches.v, keys, caches.table[sequence],
        key_ranges=ranges.int().contiguous(), return_lse=True,
        **{name: options[name] for name in names},
    )  # fmt: skip
    return out[:, :, 0], lse[:, :, 0].T.contiguous()
