"""Packed sequences that do not follow one another, and chunks of them, as a packing.

A packing has two tensors of boundaries, so what lies between two segments must belong to a sequence
too. It has 0 keys, which gives 0 to its queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import checks, tracing
from fa_ops.compat.flash.arguments import check_list, has_shape
from fa_ops.types import Packing

Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # first query, queries, first key, keys of each


def packing_of(
    parts: Parts, longest_q: int | None, longest_k: int | None
) -> tuple[Packing, Tensor]:
    """The packing of segments that are in order, and the numbers of keys of its sequences."""
    first_q, queries, first_k, keys = parts
    ends_q, ends_k = (
        torch.stack((first, first + n), -1).flatten().int()
        for first, n in ((first_q, queries), (first_k, keys))
    )
    kv_lens = torch.stack((keys, torch.zeros_like(keys)), -1).flatten()[:-1].int()
    if longest_q is not None and len(kv_lens) and tracing.can_read(ends_q):
        longest_q = max(longest_q, int(ends_q.diff().max()))  # also of what lies between
    return Packing(ends_q, ends_k, longest_q, longest_k), kv_lens


def check(packing: Packing, tokens: tuple[int, int]) -> None:
    """Raise ValueError or TypeError for boundaries that errors about segments would not name.

    `tokens` are the numbers of queries and keys. Their values are checked on the CPU only.
    """
    for name, ends, most in zip(packing._fields, packing[:2], tokens):
        check_list(name, ends)
        has_shape(name, ends, (len(packing.cu_seqlens_q),))
        if tracing.can_read(ends):
            checks.cu_seqlens(name, ends, most)


def check_longest(name: str, longest: int | None, lens: Tensor) -> None:
    """Raise ValueError for an upper bound that is negative or, on the CPU, below a length."""
    if longest is not None and longest < 0:
        raise ValueError(f"{name} must not be negative, got {longest}")
    if tracing.can_read(lens):
        checks.max_seqlen(name, longest, lens, "queries" if name.endswith("q") else "keys")


def used(ends_q: Tensor, ends_k: Tensor, queries: Tensor | None, keys: Tensor | None) -> Parts:
    """The segments of sequences of which the first queries and keys are used; ``None``: all."""
    counts = (
        ends.diff() if n is None else torch.minimum(n, ends.diff()).clamp(min=0)
        for ends, n in ((ends_q, queries), (ends_k, keys))
    )
    queries, keys = counts
    return ends_q[:-1], queries, ends_k[:-1], keys


def chunks(parts: Parts, size: int, longest: int) -> Parts:
    """The segments of which each query attends only keys of its own chunk of positions.

    Chunk ``c`` has the positions from ``c * size`` on. A segment of n queries lies in at most
    ``ceil(n / size) + 1`` chunks; the number of segments follows from `longest`, the upper bound.
    """
    first_q, queries, first_k, keys = (x.long()[:, None] for x in parts)
    before = keys - queries  # the position of the first query
    number = torch.arange(-(-longest // size) + 1, device=keys.device)
    start = (before.div(size, rounding_mode="floor") + number) * size
    zero = torch.zeros_like(keys)
    query, query_end, key, key_end = (
        torch.minimum(torch.maximum(x, zero), n)
        for x, n in (
            (start - before, queries), (start + size - before, queries), (start, keys),
            (start + size, keys),
        )
    )  # fmt: skip
    found = first_q + query, query_end - query, first_k + key, key_end - key
    return tuple(x.flatten() for x in found)


def chunk_ranges(Sq: int, Sk: int, size: int, device: torch.device) -> Tensor:
    """The key ranges (1, 1, Sq, 2) of queries that attend their own chunk of positions."""
    positions = torch.arange(Sk - Sq, Sk, device=device, dtype=torch.int32)
    start = positions.div(size, rounding_mode="floor") * size
    return torch.stack((start, start + size), -1)[None, None]
