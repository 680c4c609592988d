"""Packed queries as rows of equal length, for attention over a cache.

Kernels for caches take rows (B, H, S, D). A packed batch becomes such rows, tiles, without padding
each sequence to the longest one: a sequence of n queries has ``ceil(n / size)`` tiles, whose last
query is the last of its part. A tile under a causal mask sees a shorter cache, which ends at the
position of its last query. The number of tiles follows from shapes, so nothing is waited for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.geometry import heads_of_tile


class Tiles(NamedTuple):
    """Packed queries as N rows of `size` queries."""

    size: int
    sequences: Tensor  # (N,), the sequence of each tile; of unused tiles any
    ends: Tensor  # (N,), the queries of the sequence up to the end of the tile; 0: unused
    queries: Tensor  # (N, size), the index in the sequence; what is before the tile is ignored
    first: Tensor  # (B,), the first tile of each sequence


class TiledCall(NamedTuple):
    """The tiles of a call, and the arguments of attention_with_kv_cache for them."""

    tiles: Tiles
    cu_seqlens: Tensor  # (B + 1,), those of the sequences of queries, made valid
    query: Tensor  # (N, Hq, size, D)
    kv_lens: Tensor  # (N,)
    page_table: Tensor  # (N, max_pages)
    options: dict[str, Any]


def tiled_call(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor, page_table: Tensor,
    max_seqlen_q: int | None, options: dict[str, Any],
) -> TiledCall:  # fmt: skip
    """A checked call as one of tiles. A border that is less than the one before counts as equal."""
    tokens = query.shape[0]
    cu_seqlens = cu_seqlens_q.clamp(0, tokens).cummax(0).values
    longest = tokens if max_seqlen_q is None else min(max_seqlen_q, tokens)
    slopes, ranges = options.get("alibi_slopes"), options.get("key_ranges")
    causal = options.get("is_causal", False)
    positions_differ = options.get("window") is not None or slopes is not None
    size = longest if positions_differ and not causal else min(longest, tile_queries(query, key))
    tiles = _tiled(cu_seqlens, tokens, max(size, 1), longest)
    lens = kv_lens.clamp(0, page_table.shape[1] * key.shape[1])[tiles.sequences]
    if causal:
        lens = lens - cu_seqlens.diff()[tiles.sequences] + tiles.ends
    lens = lens.clamp(min=0).where(tiles.ends > 0, 0).int()
    if slopes is not None and slopes.dim() == 2:
        options = options | {"alibi_slopes": slopes[tiles.sequences]}
    if ranges is not None:
        options = options | {"key_ranges": ranges[tiles.sequences]}
    rows = query[_within(cu_seqlens[tiles.sequences, None] + tiles.queries, tokens)].transpose(1, 2)
    return TiledCall(tiles, cu_seqlens, rows, lens, page_table[tiles.sequences], options)


def tile_queries(query: Tensor, key: Tensor) -> int:
    """Queries of a tile: what a kernel for prefill takes at a time.

    Its rows are queries of all heads of a group, so that a sequence with one query, a decoding
    step, leaves as few as possible unused.
    """
    parts = 4 if query.shape[2] <= 64 else 2  # of 64 rows
    return parts * (64 // heads_of_tile(query.shape[1] // key.shape[2]))


def _tiled(cu_seqlens: Tensor, tokens: int, size: int, longest: int) -> Tiles:
    """The tiles of packed queries."""
    counts, B = cu_seqlens.diff(), len(cu_seqlens) - 1
    last = (-(-counts // size)).cumsum(0) if size < longest else torch.arange(
        1, B + 1, device=cu_seqlens.device
    )  # fmt: skip
    first = torch.nn.functional.pad(last[:-1], (1, 0))
    number = torch.arange(tokens // size + B if size < longest else B, device=cu_seqlens.device)
    sequences = torch.searchsorted(last, number, right=True).clamp(max=B - 1)
    local = number - first[sequences]
    stops = torch.minimum((local + 1) * size, counts[sequences])
    stops = stops.where(local * size < counts[sequences], 0)
    queries = stops[:, None] - size + torch.arange(size, device=cu_seqlens.device)
    return Tiles(size, sequences, stops, queries.clamp(min=0), first)


def packed(
    out: Tensor, lse: Tensor, tiles: Tiles, cu_seqlens: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """Results (N, size, H, ...) of tiles as those of tokens, (Tq, H, Dv) and (H, Tq).

    Tokens outside every sequence have 0 and -inf.
    """
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True, out_int32=True)
    outside = (sequence >= len(cu_seqlens) - 1) | (token < cu_seqlens[0])
    sequence = sequence.clamp(max=len(cu_seqlens) - 2)
    query = (token - cu_seqlens[sequence]).clamp(min=0)
    tile = _within(tiles.first[sequence] + query // tiles.size, len(tiles.ends))
    row = _within(query - tiles.ends[tile] + tiles.size, tiles.size)
    out = out[tile, row].masked_fill(outside[:, None, None], 0.0)
    return out, lse[tile, row].masked_fill(outside[:, None], float("-inf")).T.contiguous()


def _within(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, size - 1).long()
