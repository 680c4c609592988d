"""Packed sequences as a batch of rows of equal length, where no kernel takes them packed.

The last query of a sequence is the last one of its row, so that causal masks and windows, which
count from the end, are those of the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Tensors (B, H, S, D) of packed sequences, and how many keys each of them has."""

    query: Tensor
    key: Tensor
    value: Tensor
    kv_lens: Tensor


def rows_of(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor,
    kv_lens: Tensor | None, longest_q: int, longest_k: int,
) -> Rows:  # fmt: skip
    """Rows of sequences whose keys follow one another."""
    steps = torch.arange(longest_k, device=query.device)
    lens = ends_k.diff()
    if kv_lens is not None:
        lens = torch.minimum(lens, kv_lens.clamp(min=0))
    keys = ends_k[:-1, None] + steps
    k, v = (_taken(x, keys) for x in (key, value))
    return Rows(_queries(query, ends_q, longest_q), k, v, lens.int())


def rows_of_pages(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, page_table: Tensor,
    kv_lens: Tensor, longest_q: int, longest_k: int,
) -> Rows:  # fmt: skip
    """Rows of sequences whose keys are in pages (pages, page_size, Hkv, D)."""
    page = key.shape[1]
    table = page_table[:, : -(-longest_k // page)]
    lens = kv_lens.clamp(0, page_table.shape[1] * page)
    k, v = (_taken(x, table, 1) for x in (key, value))
    return Rows(_queries(query, ends_q, longest_q), k, v, lens.int())


def packed(out: Tensor, lse: Tensor, ends_q: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Results (B, H, S, Dv) and (B, H, S) of rows as (Tq, H, Dv) and (H, Tq).

    Tokens outside every sequence have 0 and -inf.
    """
    token = torch.arange(tokens, device=ends_q.device)
    sequence = torch.searchsorted(ends_q[1:].contiguous(), token, right=True)
    outside = (sequence >= len(ends_q) - 1) | (token < ends_q[0])
    sequence = sequence.clamp(max=len(ends_q) - 2)
    row = (token - ends_q[sequence + 1] + out.shape[2]).clamp(0, out.shape[2] - 1)
    out = out.transpose(1, 2)[sequence, row].masked_fill(outside[:, None, None], 0.0)
    lse = lse.transpose(1, 2)[sequence, row].masked_fill(outside[:, None], float("-inf"))
    return out, lse.T.contiguous()


def borders(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """cu_seqlens clamped to the tokens; an entry below its predecessor is set equal to it."""
    return cu_seqlens.clamp(0, tokens).cummax(0).values


def _queries(query: Tensor, ends: Tensor, longest: int) -> Tensor:
    steps = torch.arange(longest, device=query.device) - longest
    return _taken(query, ends[1:, None] + steps)


def _taken(x: Tensor, index: Tensor, flattened: int = 0) -> Tensor:
    """(B, H, S, D) of the rows (H, D), or of the pages (page, H, D), that an index (B, S) names."""
    index = index.clamp(0, x.shape[0] - 1)
    # 8-bit numbers as bytes, which every device can index
    bits = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    taken = bits[index]
    taken = taken.flatten(1, 2) if flattened else taken
    return taken.view(x.dtype).transpose(1, 2)
