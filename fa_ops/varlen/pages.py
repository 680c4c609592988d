"""attention_varlen over keys in pages.

One kernel computes it where a backend has one (`paged_kernel`). Elsewhere it is attention over a
cache, whose rows are tiles of queries (`query_tiles`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fa_ops import cache_checks, checks, dispatch, tracing
from fa_ops.argument_types import is_proxy, need_bool, need_int, need_tensor, probability
from fa_ops.call import CacheTensors
from fa_ops.kv_cache import attention_with_kv_cache
from fa_ops.varlen import paged_kernel, query_tiles

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

    `deterministic` is checked, and changes nothing.
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
            f"kv_lens or cu_seqlens_k must be given with page_table, one of them, got {given}"
        )
    if options["backend"] is not None:
        dispatch.check_name(options["backend"])
    need_bool("is_causal", options["is_causal"])
    need_bool("deterministic", deterministic)
    if probability(dropout_p):
        raise ValueError(f"dropout_p must be 0 with page_table, got {dropout_p}")
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
        checks.cu_seqlens("cu_seqlens_k", cu_seqlens_k, MAX_KEYS)
    return cu_seqlens_k.diff()


def attention(
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
        found = paged_kernel.attention(
            query, key, value, cu_seqlens_q, kv_lens, page_table, options
        )  # fmt: skip
        if found is not None:
            return found
    paged_kernel.check_options(query, key, value, cu_seqlens_q, kv_lens, page_table, options)
    if is_empty:
        return query.new_zeros(*query.shape[:2], value.shape[3]), _no_keys(query)
    call = query_tiles.tiled_call(
        query, key, cu_seqlens_q, kv_lens, page_table, longest[0], options
    )
    out, lse = attention_with_kv_cache(
        call.query, key, value, call.kv_lens, call.page_table, return_lse=True, **call.options
    )
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return query_tiles.packed(out, lse, call.tiles, call.cu_seqlens, tokens)


def check(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor,
    page_table: Tensor, longest: tuple[int | None, int | None] = (None, None),
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for what attention over the tiles would not find or not name.

    On the CPU also for cu_seqlens, lengths and pages that do not lie among the tokens and pages,
    and for sequences that are longer than `longest`.
    """
    need, layout = checks.need, "(pages, page_size, Hkv, D)"
    need(query.dim() == 3, "query must have shape (T, H, D), got {}", query.shape)
    for name, cache in (("key", key), ("value", value)):
        need(cache.dim() == 4, "{} must have shape {} with page_table, got {}", name, layout,
             cache.shape)  # fmt: skip
    is_traced = tracing.is_compiling()  # whose messages must be constant: the operator's are
    if not is_traced:
        cache_checks.pages(query, key, value, ("key", "value"))
    need(page_table.dim() == 2, "page_table must have shape (B, max_pages), got {}",
         page_table.shape)  # fmt: skip
    B = page_table.shape[0]
    integers = ("cu_seqlens_q", cu_seqlens_q), ("kv_lens", kv_lens), ("page_table", page_table)
    for name, t in integers:
        checks.integers(query, name, t)
    for (name, t), size in zip(integers, (B + 1, B)):
        if t.shape != (size,):  # `checks.need` cannot be traced with symbolic numbers
            raise ValueError(f"{name} must have shape ({size},), got {tuple(t.shape)}")
    for name, most in zip(("max_seqlen_q", "max_seqlen_k"), longest):
        if most is not None and most < 0:
            raise ValueError(f"{name} must not be negative, got {most}")
    if tracing.can_read(cu_seqlens_q, kv_lens, page_table):
        checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, query.shape[0])
        checks.max_seqlen("max_seqlen_q", longest[0], cu_seqlens_q.diff(), "queries")
        checks.max_seqlen("max_seqlen_k", longest[1], kv_lens, "keys")
        cache_checks.values(query, key, value, CacheTensors(kv_lens, page_table), "key")


def _no_keys(query: Tensor) -> Tensor:
    dtype = checks.lse_dtype(query.dtype)
    return query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=dtype)
