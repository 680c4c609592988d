"""Attention of packed queries over gathered keys, some key heads at a time.

While some heads are attended, those of the next piece are gathered. Each process knows only the
mask of its own queries. In the backward pass keys and values are gathered again, and the owner of
keys sums their gradients in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.argument_types import Window, sides
from fa_ops.distributed import agreement
from fa_ops.distributed.dropout import agreed_seed
from fa_ops.distributed.exchange import Exchange, Waiting, all_gather
from fa_ops.distributed.gathered_dropout import PackedDropout
from fa_ops.distributed.graph_breaks import outside_graphs
from fa_ops.distributed.layout import Members, groups_of
from fa_ops.distributed.sums import sum_dtype
from fa_ops.ops.undifferentiable import differentiable_once
from fa_ops.types import dtype_name

Packing = tuple[Tensor, Tensor, int, int]


@outside_graphs
def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, keys: slice, heads: int,
    group: dist.ProcessGroup | None, *, is_causal: bool, window: Window | None,
    scale: float | None, alibi_slopes: Tensor | None, deterministic: bool, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``(T, Hq, Dv)`` and lse ``(Hq, T)`` of this process's queries. Differentiable.

    Args:
        q: ``(T, Hq, D)``.
        k: ``(T, Hkv, D)``, gathered in the order of the processes.
        v: ``(T, Hkv, Dv)``.
        packing: cu_seqlens and maximal lengths of the queries, and of the keys in `keys`.
        keys: of the gathered keys, those that the queries attend.
        heads: key heads of a piece.
        group: ``None``: all processes.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: see
            :func:`fa_ops.compat.ring_flash_attn.llama3_flash_attn_varlen_func`.
    """
    (members,) = groups_of(group)
    left, right = sides(window)
    options = {
        "is_causal": is_causal, "scale": scale, "window_left": left, "window_right": right,
        "deterministic": deterministic,
    }  # fmt: skip
    job = Gathering(members, packing, keys, heads, alibi_slopes, options)
    with agreement.shared_errors(members, q.device, True) as words:
        shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v)))
        given = {n: x for n, x in options.items() if n != "deterministic"}
        slopes = alibi_slopes is not None
        words.append(
            f"{shapes} of {dtype_name(q.dtype)}, {heads} heads at a time, {given}, "
            f"alibi_slopes {slopes}, dropout_p {dropout_p}"
        )
        _check(q, k, v, job, dropout_p)
    if dropout_p > 0:
        seed = agreed_seed(q, dropout_p, (members,), None)
        place = q.shape[0], q.shape[1], members.rank, keys.start
        job = job._replace(dropout=PackedDropout.of(dropout_p, seed, packing[:2], options, *place))
    return _GatheredAttention.apply(q, k, v, job)


class Gathering(NamedTuple):
    """What a call computes, besides tensors that may require grad."""

    members: Members
    packing: Packing
    keys: slice
    heads: int
    slopes: Tensor | None
    options: dict
    dropout: PackedDropout | None = None

    def pieces(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, dict]]:
        """The query heads and key heads of each piece, and the operator's options."""
        group = q.shape[1] // k.shape[1]
        for first in range(0, k.shape[1], self.heads):
            of_keys = slice(first, first + self.heads)
            of_queries = slice(of_keys.start * group, of_keys.stop * group)
            slopes = None if self.slopes is None else self.slopes[..., of_queries]
            yield of_queries, of_keys, self.options | {"alibi_slopes": slopes}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice, options: dict
    ) -> tuple[Tensor, Tensor]:
        """out and lse of a piece, which has these query heads."""
        if self.dropout is not None:
            return self.dropout.forward(q, k, v, heads, options)
        return torch.ops.fa.attention_varlen(q, k, v, *self.packing, **options)

    def gradients(self, saved: tuple, heads: slice, options: dict) -> Sequence[Tensor]:
        """The gradients of q, k and v of a piece; `saved` as of the operator's backward pass."""
        if self.dropout is not None:
            return self.dropout.backward(*saved, heads, options)
        return torch.ops.fa.attention_varlen_backward(*saved, *self.packing, **options)[:3]

    def gathered(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of all processes for each piece, while the next ones are gathered."""
        firsts = range(0, k.shape[1], self.heads)
        arriving = self._gather(k, v, firsts[0]) if firsts else None
        for following in [*firsts[1:], None]:
            if arriving is None:
                return
            whole, waiting = arriving
            arriving = None if following is None else self._gather(k, v, following)
            waiting.wait()
            yield whole

    def _gather(self, k: Tensor, v: Tensor, first: int) -> tuple[tuple[Tensor, Tensor], Waiting]:
        mine = [x[:, first : first + self.heads].contiguous() for x in (k, v)]
        whole = tuple(x.new_empty(self.members.size * x.shape[0], *x.shape[1:]) for x in mine)
        what = f"the step of key heads {first} to {first + self.heads} (keys)"
        return whole, all_gather(whole, mine, Exchange(self.members), what)

    def returned(self, grads: Tensor, heads: slice) -> Tensor:
        """The sum over processes of the gradients of this process's keys, in float32."""
        received, group = torch.empty_like(grads), self.members.group
        work = dist.all_to_all_single(received, grads, group=group, async_op=not grads.is_cuda)
        what = f"the step of key heads {heads.start} to {heads.stop} (gradients)"
        Waiting([work], [grads], what, None).wait()
        return received.unflatten(0, (self.members.size, -1)).sum(0, dtype=sum_dtype(grads))


class _GatheredAttention(torch.autograd.Function):
    """apply(q, k, v, job) -> (out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, job: Gathering):
        """Attend piece after piece."""
        outs, lses = [q.new_empty(q.shape[0], 0, v.shape[2])], []
        lses.append(q.new_empty(0, q.shape[0], dtype=sum_dtype(q)))
        for whole, (of_queries, _, options) in zip(job.gathered(k, v), job.pieces(q, k)):
            keys, values = (x[job.keys] for x in whole)
            out, lse = job.attend(q[:, of_queries], keys, values, of_queries, options)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 1), torch.cat(lses)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("attention over gathered heads")
    def backward(ctx, tensors, grad_out, grad_lse):
        """Gradients of q, k and v."""
        q, k, v, out, lse = tensors
        job = ctx.job
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for whole, (of_queries, of_keys, options) in zip(job.gathered(k, v), job.pieces(q, k)):
            saved = (
                grad_out[:, of_queries], None if grad_lse is None else grad_lse[of_queries],
                q[:, of_queries], *(x[job.keys] for x in whole), out[:, of_queries],
                lse[of_queries],
            )  # fmt: skip
            grads = job.gradients(saved, of_queries, options)
            dq[:, of_queries] = grads[0]
            for total, like, part in zip((dk, dv), whole, grads[1:], strict=True):
                sent = torch.zeros_like(like)
                sent[job.keys] = part
                total[:, of_keys] = job.returned(sent, of_keys)
        return dq, dk, dv, None


def _check(q: Tensor, k: Tensor, v: Tensor, job: Gathering, dropout_p: float) -> None:
    """Raise the errors of this process's call."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    keys, tokens = job.keys, k.shape[0] * job.members.size
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must be as long as q, got {k.shape[0]} and {q.shape[0]} tokens")
    if job.heads < 1 or k.shape[1] % job.heads:
        raise ValueError(f"heads_k_stride must divide k's {k.shape[1]} heads, got {job.heads}")
    if keys.step not in (None, 1) or not 0 <= keys.start <= keys.stop <= tokens:
        raise ValueError(
            f"local_k_slice must lie within the {tokens} tokens of all processes, got {keys}"
        )
    placed = {"window_size": job.options["window_left"] >= 0 or job.options["window_right"] >= 0}
    placed["alibi_slopes"] = job.slopes is not None
    for name, given in placed.items():
        if given and not job.options["is_causal"]:
            raise NotImplementedError(
                f"{name} needs causal=True: without it the position of the queries in the last "
                "sequence is not known"
            )
    attended = keys.stop - keys.start
    on_meta = (x.new_empty(attended, *x.shape[1:], device="meta") for x in (k, v))
    ends = (x.to("meta") for x in job.packing[:2])
    slopes = None if job.slopes is None else job.slopes.detach().to("meta")
    torch.ops.fa.attention_varlen(
        q.detach().to("meta"), *on_meta, *ends, *job.packing[2:],
        **job.options | {"alibi_slopes": slopes},
    )  # fmt: skip
