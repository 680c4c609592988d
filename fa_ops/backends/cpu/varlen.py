"""Packed sequences on CPU: one dense call per group of adjacent sequences of equal lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.cpu import dense, layout
from fa_ops.types import Gradients, Packing, Spec


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
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=layout.accumulator(q.dtype))
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
