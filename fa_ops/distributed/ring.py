"""Attention over a sequence that the processes of a group share: keys and values go round.

Each process keeps its queries. In `n` steps it attends its own keys and those of every other
process, which arrive from its predecessor while it computes, and merges what it finds by their
log-sum-exps in float32. The backward pass goes round again; the gradients of keys and values travel
with them and come home in the last step. Nothing of the size of the whole sequence is ever held.
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

    Every process of the group must call it with tensors of the same shapes, its parts of the
    sequence as :func:`shard` cuts it.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``S`` tokens of this process, ``D`` and ``Dv`` head dimensions.

    Args:
        query: ``(B, Hq, S, D)``.
        key: ``(B, Hkv, S, D)``; not causally, of any one length.
        value: ``(B, Hkv, S, Dv)``.
        group: ``None``: all processes.
        is_causal: token ``i`` of the whole sequence attends tokens ``j <= i``.
        zigzag: the order of the tokens, which matters if causal; as given to :func:`shard`.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: a bitwise repeatable backward.
        backend: as in :func:`fa_ops.attention`; "reference" without gradients.

    Returns:
        ``out`` ``(B, Hq, S, Dv)`` in query's dtype; with ``return_lse`` ``(out, lse)``, ``lse``
        ``(B, Hq, S)``. Gradients flow through both.

    Raises:
        ValueError: shapes that do not fit each other, or a group without this process.
        RuntimeError: torch.distributed is not initialised.
        NotImplementedError: no backend, or not the one named, can run the call.

    Source: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; Brandon et al., Striped
    Attention, https://arxiv.org/abs/2311.09431, for why the order matters.
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
            "the reference backend has gradients of whole calls alone, got inputs that require grad"
        )
    call = RingOptions(is_causal, scale, softcap, deterministic, backend)
    # what the operator or every backend refuses must be refused before anything is sent
    with torch.no_grad():
        on_meta = (t.to("meta") for t in (query, key, value))
        torch.ops.fa.attention_with_lse(*on_meta, **call.options(is_causal))
    asked = Spec(None, 0.0, is_causal, scale, softcap=softcap, backend=backend)
    dispatch.choose(planning.normalised(Call(DENSE, query, key, value, asked)))
    out, lse = _Ring.apply(query, key, value, Ring(group, rank, size), zigzag, call)
    return (out, lse) if return_lse else out


class RingOptions(NamedTuple):
    """What all steps have in common."""

    is_causal: bool
    scale: float | None
    softcap: float
    deterministic: bool
    backend: str | None

    def options(self, is_causal: bool) -> dict:
        """Of one step."""
        return self._asdict() | {"is_causal": is_causal}


class Ring(NamedTuple):
    """The group, and this process's place in it."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def pass_on(self, *tensors: Tensor) -> tuple[list[Tensor], list[dist.Work]]:
        """Send them to the next process; what comes from the one before is there after waiting."""
        ranks = ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        if self.group is not None:
            ranks = tuple(dist.get_global_rank(self.group, r) for r in ranks)
        coming = [torch.empty_like(t) for t in tensors]
        send = [dist.P2POp(dist.isend, t, ranks[0], self.group) for t in tensors]
        receive = [dist.P2POp(dist.irecv, t, ranks[1], self.group) for t in coming]
        return coming, dist.batch_isend_irecv(send + receive)

    def rounds(self, *tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Whose tensors are here, and these; the next ones come while they are used."""
        held = [t.contiguous() for t in tensors]
        for step in range(self.size):
            coming, requests = self.pass_on(*held) if step + 1 < self.size else (held, [])
            yield (self.rank - step) % self.size, held
            _wait(requests)
            held = coming


def _wait(requests: list[dist.Work]) -> None:
    for request in requests:
        request.wait()


def _reach(
    ring: Ring, source: int, is_causal: bool, zigzag: bool, tokens: int
) -> tuple[slice, slice, bool] | None:
    """Which of this process's queries attend which of that one's keys, and whether causally."""
    every, half = slice(None), tokens // 2
    if not is_causal or source == ring.rank:
        return every, every, is_causal
    # in zigzag order, chunks r and 2n - 1 - r here: of who comes before, the first is earlier than
    # both; of who follows, both are earlier than the second here
    if zigzag:
        earlier = source < ring.rank
        return (every, slice(half), False) if earlier else (slice(half, None), every, False)
    return (every, every, False) if source < ring.rank else None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring: Ring, zigzag: bool, call: RingOptions):
        out = lse = None
        for source, (k_here, v_here) in ring.rounds(k, v):
            reach = _reach(ring, source, call.is_causal, zigzag, q.shape[2])
            if reach is None:
                continue
            rows, keys, causal = reach
            part, part_lse = torch.ops.fa.attention_with_lse(
                q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys], **call.options(causal)
            )
            if out is None:  # its own keys come first, and all of its queries attend some of them
                out, lse = part.to(_sums(q)), part_lse
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
        dq, sent, coming, requests = torch.zeros_like(q, dtype=_sums(q)), None, None, []
        for source, (k_here, v_here) in ring.rounds(k, v):
            grads = [x.new_zeros(x.shape, dtype=_sums(q)) for x in (k_here, v_here)]
            reach = _reach(ring, source, call.is_causal, ctx.zigzag, q.shape[2])
            if reach is not None:
                rows, keys, causal = reach
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
            if coming is not None:  # what those found who had these keys before
                grads = [a.add_(b) for a, b in zip(grads, coming)]
            sent = grads  # kept until they have gone
            coming, requests = ring.pass_on(*sent) if ring.size > 1 else (sent, [])
        _wait(requests)
        dk, dv = (total.to(x.dtype) for total, x in zip(coming, (k, v)))
        return dq.to(q.dtype), dk, dv, None, None, None


def _sums(x: Tensor) -> torch.dtype:
    """What partial results are added in."""
    return torch.promote_types(x.dtype, torch.float32)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Two results over different keys, in place of the first."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.add_(part * (part_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)
