"""Packed sequences: the dense kernels over one long sequence, with a key range for each token.

A tile visits the keys between its rows' first and last, so that sequences cost what they hold; one
that crosses from a sequence to the next visits both and masks.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fa_ops.backends.hopper import dense_backward, dense_forward
from fa_ops.backends.hopper.launch import (
    address,
    current_stream,
    kernel,
    on_device,
    pointers_to,
)
from fa_ops.backends.hopper.problem import window_sides
from fa_ops.types import Gradients, Packing, Spec

_THREADS = 256


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (Tq, Hq, Dv) and lse (Hq, Tq) of packed sequences."""
    dense = _with_key_ranges(q, k, packing, spec)
    out, lse = dense_forward.forward(*map(_one_batch, (q, k, v)), dense, packing)
    if spec.sinks is not None:  # tokens outside every sequence have no sink
        lse.masked_fill_(_outside_sequences(len(q), packing.cu_seqlens_q), float("-inf"))
    return out[0].transpose(0, 1), lse[0]


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, packing: Packing, spec: Spec,
) -> Gradients:  # fmt: skip
    """All gradients of a packed call."""
    tensors = map(_one_batch, (q, k, v, out))
    if spec.sinks is not None:  # so that the weights of their sinks are 0
        lse = lse.masked_fill(_outside_sequences(len(q), packing.cu_seqlens_q), float("inf"))
    grads = dense_backward.backward(
        _one_batch(grad_out),
        None if grad_lse is None else grad_lse[None],
        *tensors,
        lse[None],
        _with_key_ranges(q, k, packing, spec),
        packing=packing,
    )
    dq, dk, dv = (x[0].transpose(0, 1) for x in grads[:3])
    return grads._replace(query=dq, key=dk, value=dv)


def _one_batch(x: Tensor) -> Tensor:
    """(T, H, D) as (1, H, T, D)."""
    return x.transpose(0, 1)[None]


def _with_key_ranges(q: Tensor, k: Tensor, packing: Packing, spec: Spec) -> Spec:
    """The spec with the sequences' bounds, causality and window as key ranges (1, 1, Tq, 2)."""
    ends_q, ends_k = packing.cu_seqlens_q.contiguous(), packing.cu_seqlens_k.contiguous()
    lens = None if spec.kv_lens is None else spec.kv_lens.contiguous()
    left, right, _ = window_sides(spec.is_causal, spec.window_left, spec.window_right)
    ranges = torch.empty((1, 1, len(q), 2), dtype=torch.int32, device=q.device)
    index = q.device.index
    with on_device(index):
        kernel("packed", "packed_ranges", index, _THREADS).launch(
            (-(-len(q) // _THREADS), 1),
            current_stream(index),
            pointers_to(
                *(ctypes.c_uint64(address(t)) for t in (ends_q, ends_k, lens, ranges)),
                *map(ctypes.c_int, (len(ends_q) - 1, len(q), len(k), left, right)),
            ),
        )
    return spec._replace(
        is_causal=False, window_left=-1, window_right=-1, kv_lens=None, key_ranges=ranges
    )


def _outside_sequences(tokens: int, ends: Tensor) -> Tensor:
    """bool (tokens,): before the first sequence or after the last."""
    at = torch.arange(tokens, device=ends.device)
    return (at < ends[0]) | (at >= ends.max())
