"""Packed sequences and key-value caches on the CPU, by calls of dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import rotary
from fa_ops.backends.cpu import dense, scores, tangents
from fa_ops.call.call import Call, Saved, Tangents
from fa_ops.call.options import Gradients, Operands

# Packed sequences on CPU: one dense call per group of adjacent sequences of equal lengths.


class Batch(NamedTuple):
    """Adjacent sequences of equal lengths, the first of them sequence `b`."""

    b: int
    size: int
    queries: slice
    keys: slice

    def dense(self, x: Tensor, tokens: slice) -> Tensor:
        """View these tokens of (T, H, D) as (size, H, S, D)."""
        (_, H, D), (token, head, feature) = x.shape, x.stride()
        S = (tokens.stop - tokens.start) // self.size
        strides = S * token, head, token, feature
        return x.as_strided(
            (self.size, H, S, D), strides, x.storage_offset() + tokens.start * token
        )

    def dense_lse(self, lse: Tensor) -> Tensor:
        """View (Hq, T) as (size, Hq, S)."""
        return lse[:, self.queries].unflatten(1, (self.size, -1)).transpose(0, 1)

    def call(self, call: Call) -> Call:
        """The dense call of these sequences, or its backward pass."""
        q, k, v = call[:3]
        tensors = self.dense(q, self.queries), self.dense(k, self.keys), self.dense(v, self.keys)
        saved, tangents = self._rows(call.saved), self._rows(call.tangents)
        return call.rows(slice(self.b, self.b + self.size), *tensors, saved, tangents)

    def _rows(self, tensors: Saved | Tangents | None) -> Saved | Tangents | None:
        """The tensors of these sequences."""
        if tensors is None:
            return None
        dense = {}
        for name, x in tensors._asdict().items():
            if isinstance(x, Tensor) and name in ("lse", "grad_lse", "grad_dot"):
                dense[name] = self.dense_lse(x)
            elif isinstance(x, Tensor) and name != "sinks":
                dense[name] = self.dense(x, self.keys if name in _OF_KEYS else self.queries)
        return tensors._replace(**dense)


_OF_KEYS = ("key", "value")


def batches(ends_q: list[int], ends_k: list[int]) -> Iterator[Batch]:
    """All sequences with queries, given the borders of all, which are within the tokens."""
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


def _batches(call: Call) -> Iterator[Batch]:
    """The same of a call. Borders are clamped, so wrong ones cannot read out of bounds."""
    ends = call.operands.cu_seqlens_q, call.operands.cu_seqlens_k
    return batches(*(x.clamp(0, len(t)).tolist() for x, t in zip(ends, call[:2])))


def varlen_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    q, sinks = call.query, call.operands.sinks
    out = q.new_zeros(q.shape[0], q.shape[1], call.value.shape[2])
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=scores.accumulator(q.dtype))
    for batch in _batches(call):
        if batch.keys.start == batch.keys.stop:
            if sinks is not None:
                lse[:, batch.queries] = sinks.to(lse.dtype).view(-1, 1)
            continue
        o, m = dense.forward(batch.call(call), batch.b)
        batch.dense(out, batch.queries).copy_(o)
        batch.dense_lse(lse).copy_(m)
    return out, lse


def varlen_backward(call: Call) -> Gradients:
    """Gradients of packed q, k and v, and of sinks."""
    return _summed(call, dense.backward, call.saved.grad_lse)


def _summed(call: Call, backward: Callable, grad_lse: Tensor | None) -> Gradients:
    """The gradients of all sequences, or their tangents, which are linear in `grad_lse`."""
    dq, dk, dv = (torch.zeros_like(x) for x in call[:3])
    sinks, dsinks = call.operands.sinks, None
    if sinks is not None:
        dsinks = torch.zeros(call.query.shape[1], dtype=call.saved.lse.dtype)
        call = call.changed(sinks=sinks.to(dsinks.dtype))
    for batch in _batches(call):
        if batch.keys.start == batch.keys.stop:
            if dsinks is not None and grad_lse is not None:
                dsinks += batch.dense_lse(grad_lse).sum((0, 2))
            continue
        grads = backward(batch.call(call), batch.b)
        batch.dense(dq, batch.queries).copy_(grads.query)
        batch.dense(dk, batch.keys).copy_(grads.key)
        batch.dense(dv, batch.keys).copy_(grads.value)
        if dsinks is not None:
            dsinks += grads.sinks
    return Gradients(dq, dk, dv, sinks=None if dsinks is None else dsinks.to(sinks.dtype))


def tangents_of(call: Call) -> tuple | Gradients:
    """Tangents of out and lse, or of gradients, of a dense or a packed call."""
    if not call.is_packed:
        return tangents.backward_jvp(call) if call.is_backward else tangents.jvp(call)
    return _varlen_backward_jvp(call) if call.is_backward else _varlen_jvp(call)


def _varlen_jvp(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    saved, of_sinks = call.saved, call.tangents.sinks
    of_out, of_lse = torch.zeros_like(saved.out), torch.zeros_like(saved.lse)
    dot = None if saved.grad_out is None else torch.zeros_like(saved.lse)
    for batch in _batches(call):
        if batch.keys.start == batch.keys.stop:
            if of_sinks is not None:
                of_lse[:, batch.queries] = of_sinks.to(of_lse.dtype).view(-1, 1)
            continue
        o, m, products = tangents.jvp(batch.call(call), batch.b)
        batch.dense(of_out, batch.queries).copy_(o)
        batch.dense_lse(of_lse).copy_(m)
        if dot is not None:
            batch.dense_lse(dot).copy_(products)
    return of_out, of_lse, dot


def _varlen_backward_jvp(call: Call) -> Gradients:
    return _summed(call, tangents.backward_jvp, call.tangents.grad_lse)


# Attention over a key-value cache on CPU: append, gather, then dense attention.
#
# A contiguous cache in the query's dtype is attended in place, up to the longest sequence. Paged
# and fp8 caches are copied to a dense tensor, which takes memory for the keys in use.

_FP8 = torch.float8_e4m3fn


def append(call: Call) -> tuple[Tensor, Tensor]:
    """Write the new keys and values, if any; return the query, rotated if it is to be, and kv_lens
    with the new keys.
    """
    (q, k, v), tensors, interleaved = call[:3], call.operands, call.options.rotary_interleaved
    lens, new = tensors.kv_lens, tensors.new_key
    if new is not None:
        _append(k, v, tensors, interleaved)
        lens = lens + new.shape[2]
    if tensors.rotary_cos is not None and q.numel():
        steps = torch.arange(q.shape[2]) - q.shape[2]
        q = _rotated(q, tensors, interleaved, (lens.long()[:, None] + steps).clamp_(min=0))
    return q, lens


def cache_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Attend a cache, to which nothing is written."""
    (q, k, v), tensors = call[:3], call.operands
    lens, table = tensors.kv_lens, tensors.page_table
    if not q.numel():  # which aten's kernel divides by
        lse = torch.empty(q.shape[:3], dtype=scores.accumulator(q.dtype))
        return scores.empty_out(q, v), lse
    longest = max(int(lens.max()), 1)
    keys = _keys(k, table, tensors.k_scale, q.dtype, len(q), longest)
    values = _keys(v, table, tensors.v_scale, q.dtype, len(q), longest)
    return dense.forward(call.rows(slice(None), q, keys, values))


def _keys(
    x: Tensor, table: Tensor | None, scale: Tensor | None, dtype: torch.dtype, rows: int,
    longest: int,
) -> Tensor:  # fmt: skip
    """The first `longest` keys of every one of `rows` sequences, (B, Hkv, longest, D)."""
    pages, at = None, torch.arange(longest).expand(rows, longest)
    if table is None:
        x = x[:, :, :longest]
    else:
        used = -(-longest // x.shape[1])
        # page table entries beyond a sequence's end may be invalid; kv_lens masks their keys
        pages = table[:, :used].long().clamp(0, x.shape[0] - 1)
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


def _append(k: Tensor, v: Tensor, tensors: Operands, interleaved: bool) -> None:
    """Write the new keys (rotated) and values after the existing `kv_lens` keys."""
    key, value, table = tensors.new_key, tensors.new_value, tensors.page_table
    B, _, Sn, _ = key.shape
    if table is None and tensors.rotary_cos is None and k.dtype == key.dtype:
        lens = tensors.kv_lens.tolist()
        if lens.count(lens[0]) == B:
            k.narrow(2, lens[0], Sn).copy_(key)
            v.narrow(2, lens[0], Sn).copy_(value)
            return
    lens = tensors.kv_lens.long()
    at = lens[:, None] + torch.arange(Sn)  # (B, Sn)
    row = torch.arange(B)[:, None].expand(B, Sn)
    key = key if tensors.rotary_cos is None else _rotated(key, tensors, interleaved, at)
    pages = None if table is None else table[row, at // k.shape[1]].long()
    for memory, new, scale in ((k, key, tensors.k_scale), (v, value, tensors.v_scale)):
        if memory.dtype == _FP8:
            new = new.float() if scale is None else new.float() / _factors(scale, pages, at)
            new = new.clamp(-448.0, 448.0).to(_FP8).view(torch.uint8)
            memory = memory.view(torch.uint8)
        new = new.transpose(1, 2)  # (B, Sn, Hkv, D)
        if pages is None:
            memory.transpose(1, 2)[row, at] = new
        else:
            memory[pages, at % memory.shape[1]] = new


def _rotated(x: Tensor, tensors: Operands, interleaved: bool, positions: Tensor) -> Tensor:
    return rotary.rotated(x, tensors.rotary_cos, tensors.rotary_sin, interleaved, positions)
