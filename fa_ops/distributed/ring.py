"""Ring attention: attention over a sequence that is distributed over the processes of a group.

Each process keeps its queries. In `n` steps it attends its own keys and those of every other
process, which it receives from its predecessor while it computes, and merges the partial results by
their log-sum-exps in float32. In the backward pass keys and values circulate again, and their
gradients with them, until in the last step they return to their process. No process ever stores a
tensor of the size of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops import dispatch, planning
from fa_ops.call import DENSE, Call
from fa_ops.distributed.layout import members
from fa_ops.ops import library  # noqa: F401  (defines the operators)
from fa_ops.types import Spec


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    zigzag: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries over the keys of all processes. Differentiable.

    Every process of the group must call it, with tensors of the same shapes: its parts of the
    sequence, as :func:`shard` returns them.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``S`` tokens of this process, ``D`` and ``Dv`` head dimensions.

    Args:
        query: ``(B, Hq, S, D)``.
        key: ``(B, Hkv, S, D)``; without causality any length that all processes share.
        value: ``(B, Hkv, S, Dv)``.
        group: ``None``: all processes.
        is_causal: token ``i`` of the whole sequence attends tokens ``j <= i``.
        zigzag: the order of the tokens, as passed to :func:`shard`; matters only if causal.
        scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: whether the backward pass is bitwise repeatable.
        backend: as in :func:`fa_ops.attention`; "reference" only without gradients.

    Returns:
        ``out`` ``(B, Hq, S, Dv)`` in query's dtype; with ``return_lse`` ``(out, lse)``, ``lse``
        ``(B, Hq, S)``. Gradients flow through both.

    Raises:
        ValueError: shapes that do not fit each other, or a group without this process.
        RuntimeError: torch.distributed is not initialised.
        NotImplementedError: no backend, or not the requested one, supports the call.

    Source: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; Brandon et al., Striped
    Attention, https://arxiv.org/abs/2311.09431, for balancing causal attention by order.
    """
    rank, size = members(group)
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, S, D), got {tuple(t.shape)}")
    Sq, Sk = query.shape[2], key.shape[2]
    if is_causal and Sq != Sk:
        raise ValueError(f"key must be as long as query if is_causal, got {Sk} and {Sq} tokens")
    if is_causal and zigzag and size > 1 and Sq % 2:
        raise ValueError(f"query must have an even number of tokens in zigzag order, got {Sq}")
    records = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if records and (backend or dispatch.default) == "reference":
        raise NotImplementedError(
            "the reference backend has no gradients of ring attention, got inputs that require grad"
        )
    call = RingOptions(is_causal, scale, softcap, deterministic, backend)
    # Errors of the operator and of backends must be raised before anything is sent.
    with torch.no_grad():
        on_meta = (t.to("meta") for t in (query, key, value))
        torch.ops.fa.attention_with_lse(*on_meta, **call.options(is_causal))
    spec = Spec(None, 0.0, is_causal, scale, softcap=softcap, backend=backend)
    dispatch.choose(planning.normalised(Call(DENSE, query, key, value, spec)))
    out, lse = _Ring.apply(query, key, value, Ring(group, rank, size), zigzag, call)
    return (out, lse) if return_lse else out


class RingOptions(NamedTuple):
    """The options of a call, which all steps share."""

    is_causal: bool
    scale: float | None
    softcap: float
    deterministic: bool
    backend: str | None

    def options(self, is_causal: bool) -> dict:
        """The options of one step."""
        return self._asdict() | {"is_causal": is_causal}


class Ring(NamedTuple):
    """The group, the rank of this process in it, and its size."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def pass_on(self, *tensors: Tensor) -> tuple[list[Tensor], list[dist.Work]]:
        """Send tensors to the next process and receive the previous one's into new tensors.

        Returns the new tensors and the requests to wait for.
        """
        ranks = ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        if self.group is not None:
            ranks = tuple(dist.get_global_rank(self.group, r) for r in ranks)
        received = [torch.empty_like(t) for t in tensors]
        send = [dist.P2POp(dist.isend, t, ranks[0], self.group) for t in tensors]
        receive = [dist.P2POp(dist.irecv, t, ranks[1], self.group) for t in received]
        return received, dist.batch_isend_irecv(send + receive)

    def rounds(self, *tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the tensors of each process with its rank, while receiving those of the next."""
        current = [t.contiguous() for t in tensors]
        for step in range(self.size):
            received, requests = self.pass_on(*current) if step + 1 < self.size else (current, [])
            yield (self.rank - step) % self.size, current
            _wait(requests)
            current = received


def _wait(requests: list[dist.Work]) -> None:
    for request in requests:
        request.wait()


def _visible(
    ring: Ring, source: int, is_causal: bool, zigzag: bool, tokens: int
) -> tuple[slice, slice, bool] | None:
    """Which queries of this process attend which keys of a source, and whether causally.

    None if no query attends any of its keys.
    """
    every, half = slice(None), tokens // 2
    if not is_causal or source == ring.rank:
        return every, every, is_causal
    # In zigzag order process r holds chunks r and 2 n - 1 - r. For a source of lower rank, its
    # first chunk precedes both chunks here, and its second follows both. For a source of higher
    # rank, both of its chunks lie between the two chunks here.
    if zigzag:
        is_lower = source < ring.rank
        return (every, slice(half), False) if is_lower else (slice(half, None), every, False)
    return (every, every, False) if source < ring.rank else None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring: Ring, zigzag: bool, call: RingOptions):
        out = lse = None
        for source, (k_here, v_here) in ring.rounds(k, v):
            visible = _visible(ring, source, call.is_causal, zigzag, q.shape[2])
            if visible is None:
                continue
            rows, keys, causal = visible
            part, part_lse = torch.ops.fa.attention_with_lse(
                q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys], **call.options(causal)
            )
            if out is None:  # the first step covers all queries, because keys are the process's own
                out, lse = part.to(_sum_dtype(q)), part_lse
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.zigzag, ctx.call = ring, zigzag, call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        ring, call = ctx.ring, ctx.call
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq, requests = torch.zeros_like(q, dtype=_sum_dtype(q)), []
        sent = received = None
        for source, (k_here, v_here) in ring.rounds(k, v):
            grads = [x.new_zeros(x.shape, dtype=_sum_dtype(q)) for x in (k_here, v_here)]
            visible = _visible(ring, source, call.is_causal, ctx.zigzag, q.shape[2])
            if visible is not None:
                rows, keys, causal = visible
                of_rows = (x[:, :, rows] for x in (q, out, lse, grad_out))
                q_here, out_here, lse_here, grad_here = of_rows
                parts = torch.ops.fa.attention_backward(
                    grad_here, None if grad_lse is None else grad_lse[:, :, rows], q_here,
                    k_here[:, :, keys], v_here[:, :, keys], out_here, lse_here,
                    **call.options(causal),
                )  # fmt: skip
                dq[:, :, rows] += parts[0]
                for total, part in zip(grads, parts[1:3]):
                    total[:, :, keys] += part
            _wait(requests)
            if received is not None:  # the gradients of the processes that had these keys before
                grads = [a.add_(b) for a, b in zip(grads, received)]
            sent = grads  # a reference until sending has finished
            received, requests = ring.pass_on(*sent) if ring.size > 1 else (sent, [])
        _wait(requests)
        dk, dv = (total.to(x.dtype) for total, x in zip(received, (k, v)))
        return dq.to(q.dtype), dk, dv, None, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which partial results are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result over other keys into out and lse, in place."""
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp_().unsqueeze(-1))
    out.add_(part * (part_lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)
