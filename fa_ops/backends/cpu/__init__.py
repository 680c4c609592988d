"""The CPU backend: aten's flash kernel where it fits, one blockwise loop for everything else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fa_ops.backends.cpu import blockwise, flash, layout
from fa_ops.backends.cpu.runs import key_runs
from fa_ops.types import Gradients, Packing, Spec


def available_error() -> str | None:
    return None


def support_error(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    if q.device.type != "cpu":
        return f"runs on CPU tensors, got {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"runs fp16, bf16, fp32 and fp64, got {q.dtype}"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, first_batch: int = 0
) -> tuple[Tensor, Tensor]:
    """`first_batch` is the batch index of row 0 in the dropout stream."""
    runs = key_runs(spec, q.shape[2], k.shape[2])
    pieces = flash.plan(q, k, v, spec, runs)
    if pieces is not None:
        return flash.forward(q, k, v, spec, pieces)
    return blockwise.forward(q, k, v, spec, runs, first_batch)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: Spec,
    mask_grad: bool = False, first_batch: int = 0,
) -> Gradients:  # fmt: skip
    runs = key_runs(spec, q.shape[2], k.shape[2])
    pieces = None if mask_grad or grad_lse is not None else flash.plan(q, k, v, spec, runs)
    if pieces is not None:
        grads = flash.backward(grad_out, q, k, v, out, lse, spec, pieces)
    else:
        grads = blockwise.backward(
            grad_out, grad_lse, q, k, v, out, lse, spec, runs, mask_grad, first_batch
        )
    if spec.sinks is None:
        return grads
    return grads._replace(sinks=_sinks_gradient(grad_out, grad_lse, out, lse, spec.sinks))


def _sinks_gradient(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor
) -> Tensor:
    """A sink scales its row's out by 1 - share and adds log(1 / (1 - share)) to its lse; `share` is its own weight."""
    share = torch.exp(sinks.to(lse.dtype).view(-1, 1) - lse).masked_fill_(lse == float("-inf"), 0.0)
    slope = -torch.einsum("bhsd,bhsd->bhs", grad_out.to(lse.dtype), out.to(lse.dtype))
    if grad_lse is not None:
        slope += grad_lse
    return share.mul_(slope).sum((0, 2)).to(sinks.dtype)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec
) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=layout.accumulator(q.dtype))
    for b, rows, keys in _sequences(packing):
        if keys.start == keys.stop:
            if spec.sinks is not None:
                lse[:, rows] = spec.sinks.to(lse.dtype).view(-1, 1)
            continue
        one = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys]))
        o, m = forward(*one, _sequence_spec(spec, b), first_batch=b)
        out[rows] = o.squeeze(0).transpose(0, 1)
        lse[:, rows] = m.squeeze(0)
    return out, lse


def varlen_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing,
    spec: Spec,
) -> Gradients:  # fmt: skip
    total = Gradients(*(torch.zeros_like(x) for x in (q, k, v)))
    dsinks = None if spec.sinks is None else torch.zeros_like(spec.sinks, dtype=lse.dtype)
    for b, rows, keys in _sequences(packing):
        dlse = None if grad_lse is None else grad_lse[:, rows].unsqueeze(0)
        if keys.start == keys.stop:
            if dsinks is not None and dlse is not None:
                dsinks += dlse.sum((0, 2))
            continue
        do, qs, ks, vs, o = (
            x.transpose(0, 1).unsqueeze(0)
            for x in (grad_out[rows], q[rows], k[keys], v[keys], out[rows])
        )
        grads = backward(
            do,
            dlse,
            qs,
            ks,
            vs,
            o,
            lse[:, rows].unsqueeze(0),
            _sequence_spec(spec, b),
            first_batch=b,
        )
        for whole, part, tokens in zip(total[:3], grads[:3], (rows, keys, keys), strict=True):
            whole[tokens] = part.squeeze(0).transpose(0, 1)
        if dsinks is not None:
            dsinks += grads.sinks
    return total if dsinks is None else total._replace(sinks=dsinks.to(spec.sinks.dtype))


def _sequences(packing: Packing) -> Iterator[tuple[int, slice, slice]]:
    """(index, query tokens, key tokens) of each sequence that has queries."""
    ends_q, ends_k = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
    for b in range(len(ends_q) - 1):
        if ends_q[b] < ends_q[b + 1]:
            yield b, slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])


def _sequence_spec(spec: Spec, b: int) -> Spec:
    slopes = spec.alibi_slopes
    return spec._replace(
        alibi_slopes=slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes,
        kv_lens=None if spec.kv_lens is None else spec.kv_lens[b : b + 1],
    )


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(lses.dtype, torch.float32)
    top = lses.to(wide).amax(0)
    top = top.masked_fill_(top == float("-inf"), 0.0)
    shares = torch.exp(lses - top)
    total = shares.sum(0)
    acc = torch.zeros(outs.shape[1:], dtype=wide)
    for out, share in zip(outs, shares / total.masked_fill(total == 0, 1.0), strict=True):
        acc.addcmul_(out, share.unsqueeze(-1))
    return acc.to(outs.dtype), (top + total.log()).to(lses.dtype)
