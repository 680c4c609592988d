"""Checks of calls with a key-value cache.

Kernels stay within the cache by themselves: a page number out of range is never followed, and a new
key beyond the capacity is not written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import cache_memory, checks
from fa_ops.call.call import Call
from fa_ops.call.checks import FP8, need
from fa_ops.call.options import Operands

NAMES = "key_cache", "value_cache"


def cached(call: Call, real: bool = False) -> None:
    """Raise ValueError or TypeError unless a call over a cache is legal.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    (q, k, v), tensors, o = call[:3], call.operands, call.options
    checks.given(query=q, key_cache=k, value_cache=v, kv_lens=tensors.kv_lens)
    dims = checks.PAGES_LAYOUT if call.is_paged else "(B, Hkv, S, D)"
    for name, t, layout in (
        ("query", q, checks.LAYOUT), ("key_cache", k, dims), ("value_cache", v, dims)
    ):  # fmt: skip
        checks.rank(name, t, layout)
        checks.same_device(q, name, t)
    _dtypes(q, k, v)
    (B, Hq, *_), Hkv = q.shape, k.shape[2 if call.is_paged else 1]
    _cache_shapes(q, k, v, tensors.page_table)
    _new(q, v, tensors, B, Hkv)
    _scales(q, k, tensors, B, Hkv)
    rotary(q, tensors.rotary_cos, tensors.rotary_sin)
    _unified_max(q, tensors.unified_max, Hq)
    need(o.num_splits >= 0, "num_splits must not be negative, got {}: 0 chooses from shapes",
         o.num_splits)  # fmt: skip
    both = o.batch_invariant and o.num_splits > 0
    need(not both, "batch_invariant fixes the length of a split: num_splits must be 0, got {}",
         o.num_splits)  # fmt: skip
    checks.options(call, B)
    if tensors.key_ranges is not None:
        _key_ranges(q, tensors.key_ranges, B)
    if not real:
        return
    checks.contiguous_rows(query=q, key_cache=k, value_cache=v)
    if tensors.new_key is not None:
        checks.contiguous_rows(key=tensors.new_key, value=tensors.new_value)
        for name, t in (("key_cache", k), ("value_cache", v)):
            message = (
                "{} is written to, so no two of its elements may share memory, got strides {}: "
                "pass {}.contiguous()"
            )
            need(not cache_memory.has_overlaps(t), message, name, t.stride(), name)
        cache_memory.check(k, v, tensors)


def pages(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = NAMES) -> None:
    """Raise ValueError or TypeError unless query (T, Hq, D) can attend these pages.

    `names` are those of keys and values in messages.
    """
    for name, t in zip(names, (k, v)):
        checks.same_device(q, name, t)
    _dtypes(q, k, v, names)
    _page_shapes(q, k, v, names)


def pages_of_heads(q: Tensor, k: Tensor, v: Tensor, tensors: Operands) -> None:
    """Raise unless a call may have a page table for each key head."""
    for name, t, layout in (
        ("query", q, checks.LAYOUT), ("key_cache", k, checks.PAGES_LAYOUT),
        ("value_cache", v, checks.PAGES_LAYOUT),
    ):  # fmt: skip
        checks.rank(name, t, layout)
        checks.same_device(q, name, t)
    _page_shapes(q, k, v, NAMES)
    table, B, Hkv = tensors.page_table, q.shape[0], k.shape[2]
    checks.integers(q, "page_table", table)
    of = "it has a row of pages for each sequence and key head"
    checks.has_shape("page_table", table, (B, Hkv, table.shape[2]), of)
    refused = {"key": tensors.new_key, "k_scale": tensors.k_scale, "v_scale": tensors.v_scale}
    refused |= {"value": tensors.new_value, "unified_max": tensors.unified_max}
    for name, t in refused.items():
        need(t is None, "{} must be None where page_table has a row for each key head: {}", name,
             "new keys are written to the pages before, and are not 8-bit numbers")  # fmt: skip
    need(k.numel() < 2**31 and v.numel() < 2**31, "key_cache must have fewer than 2**31 elements "
         "where page_table has a row for each key head, got shape {}: pass a part of the pages",
         k.shape)  # fmt: skip
    if tensors.kv_lens is not None:
        checks.integers(q, "kv_lens", tensors.kv_lens)
        checks.has_shape("kv_lens", tensors.kv_lens, (B,), "pass a number of keys for each row")
    if tensors.alibi_slopes is not None:
        need(tensors.alibi_slopes.shape[-1] == q.shape[1], "alibi_slopes must have shape (Hq,) or "
             "(B, Hq) with Hq = {}, got {}: pass a slope for each query head", q.shape[1],
             tensors.alibi_slopes.shape)  # fmt: skip
    if tensors.key_ranges is not None:
        _key_ranges(q, tensors.key_ranges, B)
    if tensors.sinks is not None:
        checks.floats(q, "sinks", tensors.sinks)
        checks.has_shape("sinks", tensors.sinks, (q.shape[1],), "pass a sink for each query head")


def page_values(table: Tensor, lens: Tensor, count: int, size: int) -> None:
    """Raise ValueError unless the pages (B, Hkv, n) that lengths use are below `count`."""
    used = torch.arange(table.shape[2], device=table.device) * size < lens.view(-1, 1, 1)
    wrong = ((table < 0) | (table >= count)) & used
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        need(False, "page_table{} is {}, but key_cache has {} pages: they are numbered from 0", at,
             int(table[tuple(at)]), count)  # fmt: skip


def paged(call: Call) -> None:
    """Raise ValueError or TypeError unless a call of packed queries over pages is legal, in
    addition to what `functions.varlen` has checked."""
    q, tensors = call.query, call.operands
    sequences = tensors.page_table.shape[0]
    pages(q, call.key, call.value, ("key", "value"))
    checks.integers(q, "cu_seqlens_q", tensors.cu_seqlens_q)
    of = "page_table has a row for each sequence"
    checks.has_shape("cu_seqlens_q", tensors.cu_seqlens_q, (sequences + 1,), of)
    checks.options(call, sequences)


def _dtypes(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = NAMES) -> None:
    checks.query_dtype(q)
    key, value = names
    checks.same_dtype(k, value, v, key)
    need(
        k.dtype == q.dtype or (k.dtype == FP8 and q.dtype.itemsize == 2),
        "{} must be query's {} (or float8_e4m3fn for a half-precision query), got {}: cast query "
        "to {}", key, q.dtype, k.dtype, "bfloat16" if k.dtype == FP8 else k.dtype, error=TypeError,
    )  # fmt: skip


def _cache_shapes(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> None:
    B, Hq, _, D = q.shape
    if table is None:
        (Bk, Hkv, S, Dk), (Bv, Hv, Sv, _) = k.shape, v.shape
        checks.batches_and_lengths(B, (Bk, S), (Bv, Sv), NAMES)
        checks.heads(Hq, Hkv, Hv, D, Dk, *NAMES)
        return
    checks.integers(q, "page_table", table)
    need(table.dim() == 2, "page_table must have shape (B, max_pages), or (B, Hkv, max_pages), "
         "got {}: it has a row of pages for each sequence, or for each sequence and key head",
         table.shape)  # fmt: skip
    need(table.shape[0] == B, "page_table has {} rows, but query has batch size {}: it has one for "
         "each sequence", table.shape[0], B)  # fmt: skip
    _page_shapes(q, k, v, NAMES)


def _page_shapes(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str]) -> None:
    """Check the shapes of query (B, Hq, Sq, D) or (T, Hq, D), and of pages."""
    (pages, size, Hkv, Dk), (pages_v, size_v, Hv, _), (key, value) = k.shape, v.shape, names
    of = f"both are {checks.PAGES_LAYOUT}"
    need(pages_v == pages, "{} has {} pages, but {} has {}: {}", value, pages_v, key, pages, of)
    need(size_v == size, "{} has pages of {} keys, but {} of {}: {}", value, size_v, key, size, of)
    need(size >= 1, "a page of {} must hold at least one key, got shape {}: it is {}", key, k.shape,
         checks.PAGES_LAYOUT)  # fmt: skip
    checks.heads(q.shape[1], Hkv, Hv, q.shape[-1], Dk, *names, layout=checks.PAGES_LAYOUT)


def _new(q: Tensor, v: Tensor, tensors: Operands, B, Hkv) -> None:
    """The new keys and values."""
    key, value = tensors.new_key, tensors.new_value
    if key is None and value is None:
        return
    checks.given(key=key, value=value)
    Sn = key.shape[2] if key.dim() == 4 else -1
    for name, t, width in (("key", key, q.shape[3]), ("value", value, v.shape[3])):
        checks.same_device(q, name, t)
        checks.same_dtype(q, name, t)
        expected = B, Hkv, "Sn" if Sn == -1 else Sn, width
        of = "pass new tokens with the heads of the cache and the features of its keys and values"
        checks.has_shape(name, t, expected, of)


def _scales(q: Tensor, k: Tensor, tensors: Operands, B, Hkv) -> None:
    shapes = []
    for name, t in (("k_scale", tensors.k_scale), ("v_scale", tensors.v_scale)):
        if t is not None:
            need(k.dtype == FP8, "{0} is for caches in float8_e4m3fn, but key_cache is {1}: pass "
                 "{0}=None", name, k.dtype)  # fmt: skip
            checks.same_device(q, name, t)
            checks.has_dtype(name, t, torch.float32)
            expected: tuple[int, ...] = B, Hkv
            if t.dim() == 3 and tensors.page_table is None:
                expected = B, Hkv, k.shape[2]
            elif t.dim() == 3:
                expected = k.shape[0], 1 if t.shape[1] == 1 else k.shape[1], Hkv
            of = "pass a factor for each row and head, for each page, or for each token"
            checks.has_shape(name, t, expected, of)
            shapes.append(t.shape)
    need(len(shapes) < 2 or shapes[0] == shapes[1], "k_scale and v_scale must both be for rows, "
         "(B, Hkv), for pages, or for tokens, got {} and {}", *shapes)  # fmt: skip


def _unified_max(q: Tensor, unified_max: Tensor | None, Hq) -> None:
    if unified_max is not None:
        checks.same_device(q, "unified_max", unified_max)
        checks.has_dtype("unified_max", unified_max, torch.float32)
        checks.has_shape("unified_max", unified_max, (Hq,), "pass an estimate for each query head")


def _key_ranges(q: Tensor, ranges: Tensor, B) -> None:
    checks.integers(q, "key_ranges", ranges)
    message = (
        "key_ranges must have shape (B or 1, 1, 1, 2) with B = {}, got {}: over a cache all "
        "queries of a row have one range"
    )
    need(ranges.dim() == 4, message, B, ranges.shape)
    rows, *rest = ranges.shape
    need((rows - 1) * (rows - B) == 0, message, B, ranges.shape)
    for size, expected in zip(rest, (1, 1, 2), strict=True):
        need(size == expected, message, B, ranges.shape)


def rotary(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Raise ValueError or TypeError unless the tables of a rotary embedding fit the query."""
    alone = "rotary_sin" if cos is None else "rotary_cos"
    need((cos is None) == (sin is None), "rotary_cos and rotary_sin must be given together, got {} "
         "alone: pass both, or neither", alone)  # fmt: skip
    if cos is None:
        return
    of = "it has a column for each pair of features that are rotated"
    need(cos.dim() == 2, "rotary_cos must have shape (positions, R / 2), got {}: {}", cos.shape, of)
    need(cos.shape[0] >= 1, "rotary_cos must have at least one position, got {}: it has a row for "
         "each", cos.shape)  # fmt: skip
    R, D = 2 * cos.shape[1], q.shape[3]
    need(R <= D, "rotary_cos is for {} features, but query has {}: {}", R, D, of)
    checks.floats(q, "rotary_cos", cos)
    checks.floats(q, "rotary_sin", sin)
    checks.same_dtype(cos, "rotary_sin", sin, "rotary_cos")
    checks.has_shape("rotary_sin", sin, tuple(cos.shape), "it is of rotary_cos's angles")


def values(
    q: Tensor, k: Tensor, v: Tensor, tensors: Operands, name: str = "key_cache"
) -> None:  # fmt: skip
    """Raise ValueError unless lengths and pages lie inside the cache, and nothing that is read is
    overwritten by an append. Reads lengths and pages on the host.

    `name` is that of the keys.
    """
    if tensors.new_key is not None:
        caches = [(n, x, *cache_memory.span(x)) for n, x in zip(NAMES, (k, v))]
        for other, t in (("query", q), ("key", tensors.new_key), ("value", tensors.new_value)):
            start, end = cache_memory.span(t)
            for cache_name, cache, first, last in caches:
                if start < last and first < end:
                    message = "{} shares memory with {}, which is written to: pass {}.clone()"
                    need(not cache_memory.share_memory(t, cache), message, other, cache_name, other)
    lens, table = tensors.kv_lens, tensors.page_table
    new = 0 if tensors.new_key is None else tensors.new_key.shape[2]
    size = 1 if table is None else k.shape[1]
    capacity = k.shape[2] if table is None else table.shape[1] * size
    for b, length in enumerate(lens.tolist()):
        need(
            length >= 0, "kv_lens[{}] is {}, which is negative: a row without keys has 0", b, length
        )
        need(length + new <= capacity, "kv_lens[{}] is {}, which with {} new keys is past the "
             "cache's {}: it counts the keys before the call", b, length, new,
             capacity)  # fmt: skip
        if table is not None:
            used = table[b, : -(-(length + new) // max(size, 1))]
            wrong = ((used < 0) | (used >= k.shape[0])).nonzero()
            if len(wrong):
                at = int(wrong[0])
                need(False, "page_table[{}, {}] is {}, but {} has {} pages: they are numbered from "
                     "0", b, at, int(used[at]), name, k.shape[0])  # fmt: skip
        cos = tensors.rotary_cos
        last = length + new if cos is not None else 0
        need(cos is None or last <= cos.shape[0], "rotary_cos has {} positions, but sequence {} "
             "has {} keys: it has a row for each position", 0 if cos is None else cos.shape[0], b,
             last)  # fmt: skip
