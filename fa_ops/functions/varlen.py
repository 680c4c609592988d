"""attention_varlen over keys in pages or of e4m3 tensors, by one kernel or by tiles of queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.call import backend_option, cache_checks, checks
from fa_ops.call.call import PAGED, Call, heads_of_tile
from fa_ops.call.options import Operands
from fa_ops.call.python_types import (
    checked_call,
    is_proxy,
    need_bool,
    need_int,
    need_tensor,
    probability,
    sides,
)
from fa_ops.functions import varlen_quantized
from fa_ops.functions.kv_cache import attention_with_kv_cache
from fa_ops.ops import eager, library
from fa_ops.ops.library import Route
from fa_ops.plans import dispatch, planning

# Routes calls of attention_varlen with pages or with scales of e4m3 tensors.


def attend(
    query: Tensor, key: Tensor, value: Tensor, operands: Operands,
    longest: tuple[int | None, int | None], dropout_p: float,
    deterministic: bool, return_lse: bool, **options,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """out (Tq, Hq, Dv), or out and lse (Hq, Tq); `longest` are upper bounds on sequences."""
    t = operands
    if t.q_scale is t.k_scale is t.v_scale is None:
        out, lse = attend_pages(*arguments(
            query, key, value, t.cu_seqlens_q, t.cu_seqlens_k, t.kv_lens, t.page_table, *longest,
            dropout_p, deterministic, alibi_slopes=t.alibi_slopes, sinks=t.sinks, **options,
        ))  # fmt: skip
    else:
        out, lse = varlen_quantized.scaled_attention(
            query, key, value, operands._replace(alibi_slopes=None), longest, **options,
            dropout_p=(dropout_p, 0), alibi_slopes=(t.alibi_slopes, None),
            deterministic=(deterministic, False),
        )  # fmt: skip
    return (out, lse) if return_lse else out


# attention_varlen over keys in pages.
#
# One kernel computes it where a backend has one (`paged_kernel`). Elsewhere it is attention over a
# cache, whose rows are tiles of queries (`query_tiles`).

MAX_KEYS = 2**31 - 1  # of all sequences: cu_seqlens are int32
_NO_GRADIENT = (
    "attention_varlen with page_table has no gradient; call it under torch.no_grad(), or without "
    "page_table, which has one"
)


class PagedCall(NamedTuple):
    """The arguments of `attention`, types checked."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    longest: tuple[int | None, int | None]  # max_seqlen_q and max_seqlen_k
    options: dict[str, Any]


def arguments(
    query, key, value, cu_seqlens_q, cu_seqlens_k, kv_lens, page_table, max_seqlen_q, max_seqlen_k,
    dropout_p, deterministic, **options,
) -> PagedCall:  # fmt: skip
    """The call that these arguments of attention_varlen make, types checked.

    `deterministic` is checked_call, and changes nothing.
    """
    for name, t in (
        ("query", query), ("key", key), ("value", value), ("cu_seqlens_q", cu_seqlens_q),
        ("page_table", page_table),
    ):  # fmt: skip
        if is_proxy(need_tensor(name, t)):
            raise NotImplementedError(
                f"{name} must be a Tensor with page_table, got {type(t).__name__}: shapes decide "
                "how such a call is computed; trace it by torch.export or torch.compile"
            )
    for name, t in (("cu_seqlens_k", cu_seqlens_k), ("alibi_slopes", options["alibi_slopes"])):
        if t is not None:
            need_tensor(name, t)
    floats = {"query": query, "key": key, "value": value}
    floats |= {name: options[name] for name in ("alibi_slopes", "sinks")}
    checks.no_gradients(floats, _NO_GRADIENT)
    if (kv_lens is None) == (cu_seqlens_k is None):
        given = "neither" if kv_lens is None else "both"
        raise ValueError(
            f"kv_lens or cu_seqlens_k must be given with page_table, one of them, got {given}: "
            "pass kv_lens and cu_seqlens_k=None"
        )
    if options["backend"] is not None:
        backend_option.check_name(options["backend"])
    need_bool("is_causal", options["is_causal"])
    need_bool("deterministic", deterministic)
    if probability(dropout_p):
        raise ValueError(
            f"dropout_p must be 0 with page_table, got {dropout_p}: copy the pages to packed keys"
        )
    if kv_lens is None:
        kv_lens = _lengths(query, cu_seqlens_k, page_table)
    if max_seqlen_q is not None:
        max_seqlen_q = need_int("max_seqlen_q", max_seqlen_q, "an int or None")
    if max_seqlen_k is not None:
        max_seqlen_k = need_int("max_seqlen_k", max_seqlen_k, "an int or None")
    return PagedCall(
        query, key, value, cu_seqlens_q, need_tensor("kv_lens", kv_lens), page_table,
        (max_seqlen_q, max_seqlen_k), options,
    )  # fmt: skip


def _lengths(query: Tensor, cu_seqlens_k: Tensor, page_table: Tensor) -> Tensor:
    """The numbers of keys of sequences with these cu_seqlens, checked."""
    checks.integers(query, "cu_seqlens_k", need_tensor("cu_seqlens_k", cu_seqlens_k))
    size = page_table.shape[0] + 1 if page_table.dim() else 1
    if cu_seqlens_k.shape != (size,):
        found = tuple(cu_seqlens_k.shape)
        raise ValueError(f"cu_seqlens_k must have shape ({size},), got {found}")
    if tracing.can_read(cu_seqlens_k):
        checks.cu_seqlens("cu_seqlens_k", cu_seqlens_k, MAX_KEYS, all_tokens=False)
    return cu_seqlens_k.diff()


def attend_pages(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, longest: tuple[int | None, int | None], options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed queries over a paged cache, with options of attention_with_kv_cache.

    `longest` are upper bounds on the queries and keys of a sequence; those on keys are only
    checked. `alibi_slopes` (B, Hq) and `key_ranges` (B, 1, 1, 2) are of sequences. Returns out
    (Tq, Hq, Dv) and lse (Hq, Tq).
    """
    check(query, key, value, cu_seqlens_q, kv_lens, page_table, longest)
    tokens = query.shape[0]
    is_empty = not tokens or not page_table.shape[0]
    if not is_empty:
        found = attend_by_kernel(
            query, key, value, cu_seqlens_q, kv_lens, page_table, options
        )  # fmt: skip
        if found is not None:
            return found
    check_options(query, key, value, cu_seqlens_q, kv_lens, page_table, options)
    if is_empty:
        return query.new_zeros(*query.shape[:2], value.shape[3]), _no_keys(query)
    call = tiled_call(query, key, cu_seqlens_q, kv_lens, page_table, longest[0], options)
    out, lse = attention_with_kv_cache(
        call.query, key, value, call.kv_lens, call.page_table, return_lse=True, **call.options
    )
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return packed(out, lse, call.tiles, call.cu_seqlens, tokens)


def check(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, longest: tuple[int | None, int | None] = (None, None),
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for what attention over the tiles would not find or not name.

    On the CPU also for cu_seqlens, lengths and pages that do not lie among the tokens and pages,
    and for sequences that are longer than `longest`.
    """
    need = checks.need
    checks.rank("query", query, checks.PACKED_LAYOUT)
    for name, cache in (("key", key), ("value", value)):
        need(cache.dim() == 4, "{} must have shape {} with page_table, got {}: without it pass "
             "page_table=None", name, checks.PAGES_LAYOUT, cache.shape)  # fmt: skip
    is_traced = tracing.is_compiling()  # whose messages must be constant: the operator's are
    if not is_traced:
        cache_checks.pages(query, key, value, ("key", "value"))
    need(page_table.dim() == 2, "page_table must have shape (B, max_pages), got {}: it has a row "
         "of pages for each sequence", page_table.shape)  # fmt: skip
    B = page_table.shape[0]
    integers = ("cu_seqlens_q", cu_seqlens_q), ("kv_lens", kv_lens), ("page_table", page_table)
    for name, t in integers:
        checks.integers(query, name, t)
    for (name, t), size in zip(integers, (B + 1, B)):
        if t.shape != (size,):  # `checks.need` cannot be traced with symbolic numbers
            raise ValueError(f"{name} must have shape ({size},), got {tuple(t.shape)}")
    for name, most in zip(("max_seqlen_q", "max_seqlen_k"), longest):
        if most is not None and most < 0:
            raise ValueError(
                f"{name} must not be negative, got {most}: pass None where it is not known"
            )
    if tracing.can_read(cu_seqlens_q, kv_lens, page_table):
        checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, query.shape[0])
        checks.max_seqlen("max_seqlen_q", longest[0], cu_seqlens_q.diff(), "queries")
        checks.max_seqlen("max_seqlen_k", longest[1], kv_lens, "keys")
        operands = Operands(kv_lens=kv_lens, page_table=page_table)
        cache_checks.values(query, key, value, operands, "key")


def _no_keys(query: Tensor) -> Tensor:
    dtype = checks.lse_dtype(query.dtype)
    return query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=dtype)


# Attention of packed queries over pages by one kernel, where a backend has it.

BACKEND = "hopper"  # which has the kernel


def attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, options: dict[str, Any],
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out (Tq, Hq, Dv) and lse (Hq, Tq) of a checked call, or None where no kernel does it."""
    tensors = tensors_of(cu_seqlens_q, kv_lens, page_table, options)
    if not _may_run(query, key, value, tensors, options):
        return None
    scalars = _scalars(options, BACKEND)
    return eager.run_on(BACKEND, PAGED, query, key, value, tensors, scalars)


def call_of(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, options: dict[str, Any],
) -> Call | None:  # fmt: skip
    """The call that a kernel would run, as the backend sees it, or None."""
    tensors = tensors_of(cu_seqlens_q, kv_lens, page_table, options)
    if not _may_run(query, key, value, tensors, options):
        return None
    call = checked_call(PAGED, query, key, value, tensors, _scalars(options, BACKEND))
    planning.check(call)
    call = planning.normalised(call)
    return call if dispatch.refusal(BACKEND, call) is None else None


def check_options(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, options: dict[str, Any],
) -> None:  # fmt: skip
    """Raise ValueError or TypeError unless the options of a call are legal.

    In a graph only for slopes: the operator that the graph calls checks all others.
    """
    tensors = tensors_of(cu_seqlens_q, kv_lens, page_table, options)
    if not tracing.is_compiling():
        scalars = _scalars(options, options.get("backend"))
        call = checked_call(PAGED, query, key, value, tensors, scalars)
        checks.options(call, page_table.shape[0])
        return
    slopes = tensors.alibi_slopes
    if slopes is not None and slopes.dim() != 1:
        expected = page_table.shape[0], query.shape[1]
        if slopes.shape != expected:
            raise ValueError(f"alibi_slopes must have shape {expected}, got {tuple(slopes.shape)}")


def tensors_of(
    cu_seqlens_q: Tensor, kv_lens: Tensor, page_table: Tensor, options: dict[str, Any]
) -> Operands:
    """The tensors of a call besides query, key and value."""
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    return Operands(
        alibi_slopes=slopes, sinks=sinks, kv_lens=kv_lens, cu_seqlens_q=cu_seqlens_q,
        page_table=page_table,
    )  # fmt: skip


def _scalars(options: dict[str, Any], backend: str | None) -> tuple:
    """The scalars of a call, in the order of its signature."""
    left, right = sides(options.get("window"))
    return (
        options.get("is_causal", False), 0.0, options.get("scale"), left, right,
        options.get("softcap", 0.0), False, backend,
    )  # fmt: skip


def _may_run(
    query: Tensor, key: Tensor, value: Tensor, tensors: Operands, options: dict[str, Any]
) -> bool:
    """Whether the caller leaves the choice of a backend open, or asks for that one, and nothing
    stands between the call and a kernel."""
    name = options.get("backend") or backend_option.chosen() or "auto"
    return (
        query.is_cuda
        and name in ("auto", BACKEND)
        and options.get("key_ranges") is None
        and not options.get("num_splits")  # which the kernel would choose by itself
        and not planning.DEBUG  # where lengths and pages are checked_call, in calls over a cache
        and min(key.numel(), value.numel(), tensors.page_table.numel()) > 0
        and _is_direct(query, key, value, tensors)
    )


def _is_direct(query: Tensor, key: Tensor, value: Tensor, tensors: Operands) -> bool:
    """Whether the dispatcher would do nothing.

    Autocast casts queries to the cache's dtype.
    """
    route = library.route_of(query, key, value, *tensors)
    if route is Route.AUTOCAST and query.dtype == key.dtype:
        with library.without_autocast():
            route = library.route_of(query, key, value, *tensors)
    return route is Route.DIRECT


# Packed queries as rows of equal length, for attention over a cache.
#
# Kernels for caches take rows (B, H, S, D). A packed batch becomes such rows, tiles, without
# padding each sequence to the longest one: a sequence of n queries has ``ceil(n / size)`` tiles,
# whose last query is the last of its part. A tile under a causal mask sees a shorter cache, which
# ends at the position of its last query. The number of tiles follows from shapes, so nothing is
# waited for.


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
