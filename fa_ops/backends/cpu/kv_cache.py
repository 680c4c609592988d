"""Attention over a key-value cache on CPU: append, gather, then dense attention.

A contiguous cache in the query's dtype is attended in place, up to the longest sequence. Paged and
fp8 caches are copied to a dense tensor, which takes memory for the keys in use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends import rotary
from fa_ops.backends.cpu import dense, layout
from fa_ops.types import Cache, Spec

_FP8 = torch.float8_e4m3fn


def cache_forward(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Append the new keys and values, if any, then attend."""
    lens = spec.kv_lens.long()
    if cache.key is not None:
        _append(k, v, cache, lens)
        lens = lens + cache.key.shape[2]
    if not q.numel():  # which aten's kernel divides by
        lse = torch.empty(q.shape[:3], dtype=layout.accumulator(q.dtype))
        return layout.empty_out(q, v), lse
    if cache.rotary_cos is not None:
        steps = torch.arange(q.shape[2]) - q.shape[2]
        q = _rotated(q, cache, (lens[:, None] + steps).clamp_(min=0))
    longest = max(int(lens.max()), 1)
    keys = _keys(k, cache, cache.k_scale, q.dtype, len(q), longest)
    values = _keys(v, cache, cache.v_scale, q.dtype, len(q), longest)
    return dense.forward(q, keys, values, spec._replace(kv_lens=lens.int()))


def _keys(
    x: Tensor, cache: Cache, scale: Tensor | None, dtype: torch.dtype, rows: int, longest: int
) -> Tensor:
    """The first `longest` keys of every one of `rows` sequences, (B, Hkv, longest, D)."""
    pages, at = None, torch.arange(longest).expand(rows, longest)
    if cache.page_table is None:
        x = x[:, :, :longest]
    else:
        used = -(-longest // x.shape[1])
        # page table entries beyond a sequence's end may be invalid; kv_lens masks their keys
        pages = cache.page_table[:, :used].long().clamp(0, x.shape[0] - 1)
        size = x.shape[1]
        x = x.view(torch.uint8)[pages].view(_FP8) if x.dtype == _FP8 else x[pages]
        x = x.flatten(1, 2)[:, :longest].transpose(1, 2)
        pages = pages.repeat_interleave(size, 1)[:, :longest]
    if x.dtype == _FP8:
        x = x.float()
        x = x if scale is None else x.mul_(_factors(scale, pages, at))
    return x.to(dtype)


def _factors(scale: Tensor, pages: Tensor | None, at: Tensor) -> Tensor:
    """Dequantisation factors (B, Hkv, n or 1, 1) of n keys `at` (B, n), in pages (B, n)."""
    if scale.dim() == 2:
        return scale[:, :, None, None]
    if pages is None:
        return scale.gather(2, at[:, None].expand(-1, scale.shape[1], -1)).unsqueeze(-1)
    return scale[pages, at % scale.shape[1]].transpose(1, 2).unsqueeze(-1)


def _append(k: Tensor, v: Tensor, cache: Cache, lens: Tensor) -> None:
    """Write the new keys (rotated) and values after the existing `lens` keys."""
    B, _, Sn, _ = cache.key.shape
    at = lens[:, None] + torch.arange(Sn)  # (B, Sn)
    row = torch.arange(B)[:, None].expand(B, Sn)
    key = cache.key if cache.rotary_cos is None else _rotated(cache.key, cache, at)
    pages = None if cache.page_table is None else cache.page_table[row, at // k.shape[1]].long()
    for memory, new, scale in ((k, key, cache.k_scale), (v, cache.value, cache.v_scale)):
        if memory.dtype == _FP8:
            new = new.float() if scale is None else new.float() / _factors(scale, pages, at)
            new = new.clamp(-448.0, 448.0).to(_FP8).view(torch.uint8)
            memory = memory.view(torch.uint8)
        new = new.transpose(1, 2)  # (B, Sn, Hkv, D)
        if pages is None:
            memory.transpose(1, 2)[row, at] = new
        else:
            memory[pages, at % memory.shape[1]] = new


def _rotated(x: Tensor, cache: Cache, positions: Tensor) -> Tensor:
    cos, sin = cache.rotary_cos, cache.rotary_sin
    return rotary.rotated(x, cos, sin, cache.rotary_interleaved, positions)
