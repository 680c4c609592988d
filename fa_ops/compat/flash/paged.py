"""Packed queries over keys in pages, as flash-attn attends them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_ops.compat.flash.arguments import PACKED, PAGES, shape, unit_stride
from fa_ops.compat.flash.cache import Caches
from fa_ops.kv_cache import attention_with_kv_cache
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
    out, lse = varlen_pages.attention(*detached, ends, lens, table, longest, options)
    return undifferentiable("attention over pages (block_table)", inputs, out, lse)


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


def undifferentiable(
    what: str, inputs: Sequence[Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse, whose gradients raise NotImplementedError, if the inputs require any."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Undifferentiable.apply(what, out, lse, *inputs)
    return out, lse


class _Undifferentiable(torch.autograd.Function):
    """Results whose gradients are refused instead of missing."""

    @staticmethod
    def forward(ctx, what, out, lse, *inputs):
        ctx.what = what
        ctx.set_materialize_grads(False)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{ctx.what} has no backward pass")
