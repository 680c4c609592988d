"""New keys and values of packed sequences, written after those that a cache holds."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import checks, overlap, tracing
from fa_ops.checks import FP8
from fa_ops.compat.flash.arguments import PACKED, has_shape, shape
from fa_ops.compat.flash.cache import Caches
from fa_ops.ops import library


def append(caches: Caches, k: Tensor, v: Tensor, ends: Tensor, lens: Tensor) -> None:
    """Write tokens into pages.

    Args:
        caches: in pages.
        k: ``(T, Hkv, D)``.
        v: ``(T, Hkv, Dv)``.
        ends: int32 ``(B + 1,)``, the cumulative numbers of new tokens.
        lens: int32 ``(B,)``, the number of keys of each row before.

    The arguments are those that `check_new` accepts. Tokens outside every sequence or beyond the
    cache are not written. Nothing is waited for.
    """
    if not k.shape[0]:
        return
    (pages, size), rows = caches.k.shape[:2], len(lens)
    token = torch.arange(k.shape[0], device=k.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    row = sequence.clamp(max=rows - 1)
    position = lens[row] + token - ends[row]
    column = (position // size).clamp(0, caches.table.shape[1] - 1)
    page = caches.table[row, column].long()
    valid = (sequence < rows) & (token >= ends[0]) & (position >= 0) & (position < caches.room)
    valid &= (page >= 0) & (page < pages)
    # A token that is not written repeats the write of the first one that is, or what is there.
    first = valid.int().argmax(0, keepdim=True)  # a tensor without dimensions would be read
    page = page.where(valid, page[first]).clamp(0, pages - 1)
    slot = (position % size).where(valid, (position % size)[first])
    for cache, new in ((caches.k, k), (caches.v, v)):
        if cache.dtype == FP8:  # numbers in 8 bits have few operations of torch
            new = new if new.dtype == FP8 else saturated(new)
            cache, new = cache.view(torch.uint8), new.view(torch.uint8)
        kept = torch.where(
            valid[first], new[first].to(cache.dtype), cache[page[first], slot[first]]
        )
        cache[page, slot] = torch.where(valid[:, None, None], new.to(cache.dtype), kept)


def check_new(q: Tensor, caches: Caches, k: Tensor, v: Tensor, ends: Tensor, lens: Tensor) -> None:
    """Raise ValueError or TypeError for tokens that `append` cannot write.

    On the CPU also for tokens beyond the cache.
    """
    shape(PACKED, k=k, v=v)
    for name, x, cache in (("k", k, caches.k), ("v", v, caches.v)):
        checks.same_device(q, name, x, "q")
        checks.need(x.dtype == q.dtype, "{} is {}, but q is {}", name, x.dtype, q.dtype,
                    error=TypeError)  # fmt: skip
        has_shape(name, x, (k.shape[0], *cache.shape[2:]))
    has_memory = not (tracing.is_compiling() or tracing.in_functorch()) and all(
        type(t) in tracing.PLAIN and library.is_strided(t) for t in (caches.k, caches.v)
    )
    if has_memory:
        has_pages = caches.table.shape[1] > 1  # one is a row of a contiguous cache
        checks.need(not overlap.caches_share_memory(caches.k, caches.v, has_pages),
                    "v_cache shares memory with k_cache, and both are written to")  # fmt: skip
    checks.integers(k, "cu_seqlens_k_new", ends)
    has_shape("cu_seqlens_k_new", ends, (len(caches.table) + 1,))
    checks.integers(k, "cache_seqlens", lens)
    has_shape("cache_seqlens", lens, (len(caches.table),))
    if not tracing.can_read(ends, lens, caches.table):
        return
    checks.cu_seqlens("cu_seqlens_k_new", ends, k.shape[0])
    size = caches.k.shape[1]
    for b, (held, new) in enumerate(zip(lens.tolist(), ends.diff().tolist())):
        if held < 0 or held + new > caches.room:
            raise ValueError(
                f"cache_seqlens[{b}] is {held}, which with {new} new keys is not within the "
                f"cache's {caches.room}"
            )
        used = caches.table[b, : -(-(held + new) // size)]
        if ((used < 0) | (used >= len(caches.k))).any():
            raise ValueError(
                f"page_table[{b}] has pages {used.tolist()}, but there are {len(caches.k)}"
            )


def saturated(x: Tensor) -> Tensor:
    """x rounded to e4m3; larger numbers become the largest."""
    largest = torch.finfo(FP8).max
    return x.clamp(-largest, largest).to(FP8)
