"""attention_varlen over keys in pages, by attention over a cache with rows of equal length where no
kernel looks sequences up by itself (`paged_calls`).

Kernels for caches take rows (B, H, S, D). A packed batch becomes such rows, tiles, without padding
each sequence to the longest one: a sequence of n queries has ``ceil(n / size)`` tiles, whose last
query is the last of its part. A tile under a causal mask sees a shorter cache, which ends at the
position of its last query. The number of tiles follows from shapes, so nothing is waited for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops import cache_checks, checks, dispatch, paged_calls
from fa_ops.argument_types import need_bool, need_int, need_number, need_tensor
from fa_ops.call import CacheTensors
from fa_ops.kv_cache import attention_with_kv_cache
from fa_ops.ops import library
from fa_ops.types import heads_of_tile

MAX_KEYS = 2**31 - 1  # that borders of 32 bits can count


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
    borders: Tensor  # (B + 1,), those of the sequences of queries, made valid
    query: Tensor  # (N, Hq, size, D)
    kv_lens: Tensor  # (N,)
    page_table: Tensor  # (N, max_pages)
    options: dict[str, Any]


class PagedCall(NamedTuple):
    """The arguments of `attention`, types checked."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    max_seqlen_q: int | None
    options: dict[str, Any]


def arguments(
    query, key, value, cu_seqlens_q, cu_seqlens_k, kv_lens, page_table, max_seqlen_q, max_seqlen_k,
    dropout_p, deterministic, **options,
) -> PagedCall:  # fmt: skip
    """The call that these arguments of attention_varlen make, types checked.

    `max_seqlen_k` and `deterministic` are checked, and change nothing.
    """
    for name, t in (
        ("query", query), ("key", key), ("value", value), ("cu_seqlens_q", cu_seqlens_q),
        ("page_table", page_table),
    ):  # fmt: skip
        need_tensor(name, t)
    for name, t in (("cu_seqlens_k", cu_seqlens_k), ("alibi_slopes", options["alibi_slopes"])):
        if t is not None:
            need_tensor(name, t)
    if (kv_lens is None) == (cu_seqlens_k is None):
        given = "neither" if kv_lens is None else "both"
        raise ValueError(
            f"kv_lens or cu_seqlens_k must be given with page_table, one of them, got {given}"
        )
    if options["backend"] is not None:
        dispatch.check_name(options["backend"])
    need_bool("is_causal", options["is_causal"])
    need_bool("deterministic", deterministic)
    if need_number("dropout_p", dropout_p):
        raise ValueError(f"dropout_p must be 0 with page_table, got {dropout_p}")
    if kv_lens is None:
        kv_lens = _lengths(query, cu_seqlens_k, page_table)
    if max_seqlen_q is not None:
        max_seqlen_q = need_int("max_seqlen_q", max_seqlen_q, "an int or None")
    if max_seqlen_k is not None:
        longest = need_int("max_seqlen_k", max_seqlen_k, "an int or None")
        checks.need(longest >= 0, "max_seqlen_k must not be negative, got {}", longest)
    return PagedCall(
        query, key, value, cu_seqlens_q, need_tensor("kv_lens", kv_lens), page_table, max_seqlen_q,
        options,
    )  # fmt: skip


def _lengths(query: Tensor, cu_seqlens_k: Tensor, page_table: Tensor) -> Tensor:
    """The numbers of keys between these borders, checked."""
    checks.integers(query, "cu_seqlens_k", need_tensor("cu_seqlens_k", cu_seqlens_k))
    size = page_table.shape[0] + 1 if page_table.dim() else 1
    if cu_seqlens_k.shape != (size,):
        found = tuple(cu_seqlens_k.shape)
        raise ValueError(f"cu_seqlens_k must have shape ({size},), got {found}")
    if library.can_read(cu_seqlens_k):
        checks.borders("cu_seqlens_k", cu_seqlens_k, MAX_KEYS)
    return cu_seqlens_k.diff()


def attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, max_seqlen_q: int | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed queries over a paged cache, with options of attention_with_kv_cache.

    `alibi_slopes` (B, Hq) and `key_ranges` (B, 1, 1, 2) are of sequences. Returns out (Tq, Hq, Dv)
    and lse (Hq, Tq).
    """
    check(query, key, value, cu_seqlens_q, kv_lens, page_table, max_seqlen_q)
    tokens = query.shape[0]
    is_empty = not tokens or not page_table.shape[0]
    if not is_empty:
        found = paged_calls.attention(
            query, key, value, cu_seqlens_q, kv_lens, page_table, options
        )  # fmt: skip
        if found is not None:
            return found
    paged_calls.check_options(query, key, value, cu_seqlens_q, kv_lens, page_table, options)
    if is_empty:
        return query.new_zeros(*query.shape[:2], value.shape[3]), _no_keys(query)
    call = tiled_call(query, key, cu_seqlens_q, kv_lens, page_table, max_seqlen_q, options)
    out, lse = attention_with_kv_cache(
        call.query, key, value, call.kv_lens, call.page_table, return_lse=True, **call.options
    )
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return _packed(out, lse, call.tiles, call.borders, tokens)


def check(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, max_seqlen_q: int | None = None,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for what attention over the tiles would not find or not name.

    On the CPU also for borders, lengths and pages that do not lie among the tokens and pages.
    """
    need, layout = checks.need, "(pages, page_size, Hkv, D)"
    need(query.dim() == 3, "query must have shape (T, H, D), got {}", query.shape)
    for name, cache in (("key", key), ("value", value)):
        need(cache.dim() == 4, "{} must have shape {} with page_table, got {}", name, layout,
             cache.shape)  # fmt: skip
    is_traced = torch.compiler.is_compiling()  # whose messages must be constant: the operator's are
    if not is_traced:
        cache_checks.pages(query, key, value, ("key", "value"))
    need(page_table.dim() == 2, "page_table must have shape (B, max_pages), got {}",
         page_table.shape)  # fmt: skip
    B = page_table.shape[0]
    integers = ("cu_seqlens_q", cu_seqlens_q), ("kv_lens", kv_lens), ("page_table", page_table)
    for name, t in integers:
        checks.integers(query, name, t)
    for (name, t), size in zip(integers, (B + 1, B)):
        if t.shape != (size,):  # `checks.has_shape` cannot be traced with symbolic sizes
            raise ValueError(f"{name} must have shape ({size},), got {tuple(t.shape)}")
    if max_seqlen_q is not None:
        need(max_seqlen_q >= 0, "max_seqlen_q must not be negative, got {}", max_seqlen_q)
    if library.can_read(cu_seqlens_q, kv_lens, page_table):
        checks.borders("cu_seqlens_q", cu_seqlens_q, query.shape[0])
        longest = int(cu_seqlens_q.diff().max()) if B else 0
        need(max_seqlen_q is None or max_seqlen_q >= longest, "max_seqlen_q is {}, but a sequence "
             "has {} queries", max_seqlen_q, longest)  # fmt: skip
        cache_checks.values(query, key, value, CacheTensors(kv_lens, page_table), "key")


def tiled_call(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor, page_table: Tensor,
    max_seqlen_q: int | None, options: dict[str, Any],
) -> TiledCall:  # fmt: skip
    """A checked call as one of tiles. A border that is less than the one before counts as equal."""
    tokens = query.shape[0]
    borders = cu_seqlens_q.clamp(0, tokens).cummax(0).values
    longest = tokens if max_seqlen_q is None else min(max_seqlen_q, tokens)
    slopes, ranges = options.get("alibi_slopes"), options.get("key_ranges")
    causal = options.get("is_causal", False)
    positions_differ = options.get("window") is not None or slopes is not None
    size = longest if positions_differ and not causal else min(longest, tile_queries(query, key))
    tiles = _tiled(borders, tokens, max(size, 1), longest)
    lens = kv_lens.clamp(0, page_table.shape[1] * key.shape[1])[tiles.sequences]
    if causal:
        lens = lens - borders.diff()[tiles.sequences] + tiles.ends
    lens = lens.clamp(min=0).where(tiles.ends > 0, 0).int()
    if slopes is not None and slopes.dim() == 2:
        options = options | {"alibi_slopes": slopes[tiles.sequences]}
    if ranges is not None:
        options = options | {"key_ranges": ranges[tiles.sequences]}
    rows = query[_within(borders[tiles.sequences, None] + tiles.queries, tokens)].transpose(1, 2)
    return TiledCall(tiles, borders, rows, lens, page_table[tiles.sequences], options)


def tile_queries(query: Tensor, key: Tensor) -> int:
    """Queries of a tile: what a kernel for prefill takes at a time.

    Its rows are queries of all heads of a group, so that a sequence with one query, a decoding
    step, leaves as few as possible unused.
    """
    parts = 4 if query.shape[2] <= 64 else 2  # of 64 rows
    return parts * (64 // heads_of_tile(query.shape[1] // key.shape[2]))


def _tiled(borders: Tensor, tokens: int, size: int, longest: int) -> Tiles:
    """The tiles of packed queries."""
    counts, B = borders.diff(), len(borders) - 1
    last = (-(-counts // size)).cumsum(0) if size < longest else torch.arange(
        1, B + 1, device=borders.device
    )  # fmt: skip
    first = torch.nn.functional.pad(last[:-1], (1, 0))
    number = torch.arange(tokens // size + B if size < longest else B, device=borders.device)
    sequences = torch.searchsorted(last, number, right=True).clamp(max=B - 1)
    local = number - first[sequences]
    stops = torch.minimum((local + 1) * size, counts[sequences])
    stops = stops.where(local * size < counts[sequences], 0)
    queries = stops[:, None] - size + torch.arange(size, device=borders.device)
    return Tiles(size, sequences, stops, queries.clamp(min=0), first)


def _packed(
    out: Tensor, lse: Tensor, tiles: Tiles, borders: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """Results (N, size, H, ...) of tiles as those of tokens, (Tq, H, Dv) and (H, Tq).

    Tokens outside every sequence have 0 and -inf.
    """
    token = torch.arange(tokens, device=borders.device)
    sequence = torch.searchsorted(borders[1:].contiguous(), token, right=True, out_int32=True)
    outside = (sequence >= len(borders) - 1) | (token < borders[0])
    sequence = sequence.clamp(max=len(borders) - 2)
    query = (token - borders[sequence]).clamp(min=0)
    tile = _within(tiles.first[sequence] + query // tiles.size, len(tiles.ends))
    row = _within(query - tiles.ends[tile] + tiles.size, tiles.size)
    out = out[tile, row].masked_fill(outside[:, None, None], 0.0)
    return out, lse[tile, row].masked_fill(outside[:, None], float("-inf")).T.contiguous()


def _within(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, size - 1).long()


def _no_keys(query: Tensor) -> Tensor:
    dtype = checks.lse_dtype(query.dtype)
    return query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=dtype)
