"""Packed queries over keys in pages, as rows of equal numbers of queries.

Kernels for caches take rows ``(B, H, S, D)``. A packed batch becomes such rows, tiles, without
padding each sequence to the longest one: a sequence of n queries has ``ceil(n / size)`` tiles,
whose last query is the last of its part. A tile under a causal mask sees a shorter cache, which
ends at the position of its last query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import checks
from fa_ops.compat.flash.arguments import PACKED, PAGES, shape, unit_stride
from fa_ops.compat.flash.cache import Caches
from fa_ops.kv_cache import attention_with_kv_cache

_SIZE = 128  # queries of a tile: what a kernel for prefill takes at a time


class Tiles(NamedTuple):
    """Packed queries as N rows of `size` queries."""

    size: int
    sequences: Tensor  # (N,), the sequence of each tile; of unused tiles any
    ends: Tensor  # (N,), the queries of the sequence up to the end of the tile; 0: unused
    queries: Tensor  # (N, size), the index in the sequence; what is before the tile is ignored
    first: Tensor  # (B,), the first tile of each sequence


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
    _check(q, lens, table, ends)
    inputs = [unit_stride(x) for x in (q, k, v)]
    out, lse = _attend(*(x.detach() for x in inputs), lens, table, ends, longest, options)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Undifferentiable.apply(*inputs, out, lse)
    return out, lse


def _check(q: Tensor, lens: Tensor, table: Tensor, ends: Tensor) -> None:
    checks.integers(q, "cu_seqlens_q", ends)
    checks.has_shape("cu_seqlens_q", ends, (table.shape[0] + 1,))
    checks.integers(q, "the lengths of block_table's sequences", lens)
    checks.has_shape("the lengths of block_table's sequences", lens, (table.shape[0],))
    if not (q.is_cuda or torch.compiler.is_compiling()):
        checks.borders("cu_seqlens_q", ends, q.shape[0])


def _attend(q, k, v, lens, table, ends, longest, options) -> tuple[Tensor, Tensor]:
    tokens, longest = q.shape[0], q.shape[0] if longest is None else min(longest, q.shape[0])
    if not tokens or not table.shape[0]:
        return q.new_zeros(*q.shape[:2], v.shape[3]), _no_keys(q)
    causal, slopes = options["is_causal"], options.get("alibi_slopes")
    positions_differ = options["window"] is not None or slopes is not None
    size = min(longest, _SIZE) if causal or not positions_differ else longest
    tiles = tiled(ends, tokens, max(size, 1), longest)
    rows = q[_within(ends[tiles.sequences, None] + tiles.queries, tokens)]
    keys = lens[tiles.sequences]
    if causal:
        keys = keys - ends.diff()[tiles.sequences] + tiles.ends
    keys = keys.clamp(min=0).where(tiles.ends > 0, 0).int()
    if slopes is not None and slopes.dim() == 2:
        options = options | {"alibi_slopes": slopes[tiles.sequences]}
    if options.get("key_ranges") is not None:
        options = options | {"key_ranges": options["key_ranges"][tiles.sequences]}
    out, lse = attention_with_kv_cache(
        rows.transpose(1, 2), k, v, keys, table[tiles.sequences], return_lse=True, **options
    )
    return packed(out.transpose(1, 2), lse.transpose(1, 2), tiles, ends, tokens)


def attend_chunks(
    q: Tensor, caches: Caches, lens: Tensor, ends: Tensor, leftpad: Tensor | None, chunk: int,
    options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same where a query attends only keys in its chunk of positions behind the padding.

    Each query is a row of its own, whose mask is a range of keys.
    """
    shape(PACKED, q=q)
    _check(q, lens, caches.table, ends)
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


def tiled(ends: Tensor, tokens: int, size: int, longest: int) -> Tiles:
    """The tiles of packed queries. Their number follows from shapes, so nothing is waited for."""
    counts, B = ends.diff().clamp(min=0), len(ends) - 1
    last = (-(-counts // size)).cumsum(0) if size < longest else torch.arange(
        1, B + 1, device=ends.device
    )  # fmt: skip
    first = torch.nn.functional.pad(last[:-1], (1, 0))
    number = torch.arange(tokens // size + B if size < longest else B, device=ends.device)
    sequences = torch.searchsorted(last, number, right=True).clamp(max=B - 1)
    local = number - first[sequences]
    stops = torch.minimum((local + 1) * size, counts[sequences])
    stops = stops.where(local * size < counts[sequences], 0)
    queries = stops[:, None] - size + torch.arange(size, device=ends.device)
    return Tiles(size, sequences, stops, queries.clamp(min=0), first)


def packed(
    out: Tensor, lse: Tensor, tiles: Tiles, ends: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """Results (N, size, H, ...) of tiles as those of tokens, (Tq, H, Dv) and (H, Tq)."""
    token = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True, out_int32=True)
    outside = (sequence >= len(ends) - 1) | (token < ends[0])
    sequence = sequence.clamp(max=len(ends) - 2)
    query = (token - ends[sequence]).clamp(min=0)
    tile = _within(tiles.first[sequence] + query // tiles.size, len(tiles.ends))
    row = _within(query - tiles.ends[tile] + tiles.size, tiles.size)
    out = out[tile, row].masked_fill(outside[:, None, None], 0.0)
    return out, lse[tile, row].masked_fill(outside[:, None], float("-inf")).T.contiguous()


def _within(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, size - 1).long()


def _no_keys(q: Tensor) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype)


class _Undifferentiable(torch.autograd.Function):
    """Results whose gradients are refused instead of missing."""

    @staticmethod
    def forward(ctx, q, k, v, out, lse):
        ctx.set_materialize_grads(False)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("attention over pages (block_table) has no backward pass")
