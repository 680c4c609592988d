"""Packed sequences and key-value caches on the CPU, by calls of dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import rotary
from fa_ops.backends.cpu import dense, scores
from fa_ops.call.options import Cache, Gradients, Packing, Spec

# Packed sequences on CPU: one dense call per group of adjacent sequences of equal lengths.


class Batch(NamedTuple):
    """Adjacent sequences of equal lengths, the first of them sequence `b`."""

    b: int
    size: int
    queries: slice
    keys: slice

    def dense(self, x: Tensor, tokens: slice) -> Tensor:
        """View these tokens of (T, H, D) as (size, H, S, D)."""
        return x[tokens].unflatten(0, (self.size, -1)).transpose(1, 2)

    def dense_lse(self, lse: Tensor) -> Tensor:
        """View (Hq, T) as (size, Hq, S)."""
        return lse[:, self.queries].unflatten(1, (self.size, -1)).transpose(0, 1)

    def spec(self, spec: Spec) -> Spec:
        """The part of a spec that applies to these sequences."""
        some, slopes = slice(self.b, self.b + self.size), spec.alibi_slopes
        return spec._replace(
            alibi_slopes=slopes[some] if slopes is not None and slopes.dim() == 2 else slopes,
            kv_lens=None if spec.kv_lens is None else spec.kv_lens[some],
        )


def _batches(packing: Packing, Tq: int, Tk: int) -> Iterator[Batch]:
    """All sequences with queries. Borders are clamped, so wrong ones cannot read out of bounds."""
    ends_q = packing.cu_seqlens_q.clamp(0, Tq).tolist()
    ends_k = packing.cu_seqlens_k.clamp(0, Tk).tolist()
    lengths = [
        (max(0, ends_q[b + 1] - ends_q[b]), max(0, ends_k[b + 1] - ends_k[b]))
        for b in range(len(ends_q) - 1)
    ]
    b = 0
    while b < len(lengths):
        (Sq, Sk), last = lengths[b], b + 1
        if Sq and Sk:
            while last < len(lengths) and lengths[last] == lengths[b]:
                last += 1
        size = last - b
        q, k = ends_q[b], ends_k[b]
        if Sq:
            yield Batch(b, size, slice(q, q + size * Sq), slice(k, k + size * Sk))
        b = last


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec
) -> tuple[Tensor, Tensor]:
    """out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=scores.accumulator(q.dtype))
    for batch in _batches(packing, q.shape[0], k.shape[0]):
        if batch.keys.start == batch.keys.stop:
            if spec.sinks is not None:
                lse[:, batch.queries] = spec.sinks.to(lse.dtype).view(-1, 1)
            continue
        tensors = (batch.dense(q, batch.queries), *(batch.dense(x, batch.keys) for x in (k, v)))
        o, m = dense.forward(*tensors, batch.spec(spec), batch.b)
        batch.dense(out, batch.queries).copy_(o)
        batch.dense_lse(lse).copy_(m)
    return out, lse


def varlen_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, packing: Packing, spec: Spec,
) -> Gradients:  # fmt: skip
    """Gradients of packed q, k and v, and of sinks."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    sinks, dsinks = spec.sinks, None
    if sinks is not None:
        dsinks = torch.zeros(q.shape[1], dtype=lse.dtype)
        spec = spec._replace(sinks=sinks.to(lse.dtype))
    for batch in _batches(packing, q.shape[0], k.shape[0]):
        dlse = None if grad_lse is None else batch.dense_lse(grad_lse)
        if batch.keys.start == batch.keys.stop:
            if dsinks is not None and dlse is not None:
                dsinks += dlse.sum((0, 2))
            continue
        do, qs, o = (batch.dense(x, batch.queries) for x in (grad_out, q, out))
        ks, vs = batch.dense(k, batch.keys), batch.dense(v, batch.keys)
        grads = dense.backward(
            do, dlse, qs, ks, vs, o, batch.dense_lse(lse), batch.spec(spec), first_batch=batch.b
        )
        batch.dense(dq, batch.queries).copy_(grads.query)
        batch.dense(dk, batch.keys).copy_(grads.key)
        batch.dense(dv, batch.keys).copy_(grads.value)
        if dsinks is not None:
            dsinks += grads.sinks
    return Gradients(dq, dk, dv, sinks=None if dsinks is None else dsinks.to(sinks.dtype))


# Attention over a key-value cache on CPU: append, gather, then dense attention.
#
# A contiguous cache in the query's dtype is attended in place, up to the longest sequence. Paged
# and fp8 caches are copied to a dense tensor, which takes memory for the keys in use.

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
        lse = torch.empty(q.shape[:3], dtype=scores.accumulator(q.dtype))
        return scores.empty_out(q, v), lse
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
