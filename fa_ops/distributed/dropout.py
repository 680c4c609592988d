"""Dropout of a whole sequence, of which each call of the operator computes a part.

A weight is dropped by the hash of its place in the whole. The operator is given a word for each of
its rows, which has everything of the hash but the key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.call.options import Spec
from fa_ops.distributed import step_calls
from fa_ops.distributed.exchange import Waiting
from fa_ops.distributed.layout import Members, Segment
from fa_ops.distributed.masks import Mask, document_of, positions
from fa_ops.distributed.step_calls import StepCall
from fa_ops.functions import attention


class RowWords(NamedTuple):
    """What the rows of a process drop."""

    p: float
    words: Tensor  # int32 (B, Hq, S), for keys of the whole sequence

    def of_call(self, call: StepCall) -> Tensor:
        """The words with which a call drops what belongs to its rows and keys."""
        words = self.words[call.batches, :, call.rows]
        return dropout.from_key(words, call.first_key)


def agreed_seed(
    query: Tensor, p: float, groups: tuple[Members, ...], timeout: float | None
) -> Tensor:
    """The seed that the first process of all draws; the others draw one too, and drop it."""
    seed = attention.dropout_seed(query, p)
    for members in reversed(groups):
        if members.size > 1:
            first = members.global_rank(0)
            work = dist.broadcast(seed, first, group=members.group, async_op=True)
            Waiting([work], [seed], "the seed of dropout", timeout).wait()
    return seed


def row_words(
    seed: Tensor, mask: Mask, queries: tuple[Segment, ...], B: int, heads: slice, Hq: int
) -> Tensor:
    """The words of these tokens for some of the `Hq` query heads, int32 (B, heads, tokens).

    Documents are a batch, as in `attention_varlen`: rows and keys are numbered in each of them.
    """
    device, i = seed.device, positions(queries)
    index = torch.arange(heads.start, heads.stop, device=device).view(1, -1, 1)
    if mask.cu_seqlens is None:
        b = torch.arange(B, device=device).view(-1, 1, 1)
        return dropout.row_words(seed, b * Hq + index, i.to(device))
    document, start = (x.to(device) for x in document_of(mask, i))
    words = dropout.row_words(seed, document * Hq + index, i.to(device) - start)
    return dropout.from_key(words, -start)


# Dropout of packed queries over gathered keys, of whose sequences a process knows its own alone.
#
# A weight is numbered by its query and its key in the packed whole, so that it is dropped or kept
# for any number of processes alike. The operator for packed sequences numbers weights in each
# sequence; the one for dense calls takes a word for each row, and key ranges in place of
# cu_seqlens.


class PackedDropout(NamedTuple):
    """What the queries of a process attend and drop."""

    p: float
    words: Tensor  # int32 (1, Hq, T), for the keys that the process attends
    ranges: Tensor  # int32 (1, 1, T, 2), among these keys

    @classmethod
    def of(
        cls, p: float, seed: Tensor, cu_seqlens: tuple[Tensor, Tensor], options: dict, T: int,
        Hq: int, rank: int, first_key: int,
    ) -> PackedDropout:  # fmt: skip
        """For `T` queries of process `rank`, whose keys begin at `first_key` of the whole.

        `cu_seqlens` are those of the sequences among queries and among keys, int32 (B + 1,).
        """
        heads = torch.arange(Hq, device=seed.device).view(1, -1, 1)
        words = dropout.row_words(seed, heads, torch.arange(T, device=seed.device) + rank * T)
        window = options["window_left"], options["window_right"]
        ranges = key_ranges(*cu_seqlens, T, options["is_causal"], *window)
        return cls(p, dropout.from_key(words, first_key), ranges)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice, options: dict
    ) -> tuple[Tensor, Tensor]:
        """out (T, heads, Dv) and lse (heads, T) of some heads, as the packed operator returns."""
        spec = self._spec(heads, options)
        out, lse = step_calls.forward(*map(_dense, (q, k, v)), spec)
        return _packed(out), lse.squeeze(0)

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor, heads: slice, options: dict,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of q, k and v."""
        lse, grad_lse = (None if x is None else x.unsqueeze(0) for x in (lse, grad_lse))
        tensors = (_dense(x) for x in (q, k, v, out))
        spec = self._spec(heads, options)
        return [
            _packed(x) for x in step_calls.backward(_dense(grad_out), grad_lse, *tensors, lse, spec)
        ]

    def _spec(self, heads: slice, options: dict) -> Spec:
        # causal and window are in the ranges; with ALiBi, which needs causality, the last query
        # has the position of the last key, in dense calls too
        return Spec(
            dropout_p=self.p, scale=options["scale"], alibi_slopes=options["alibi_slopes"],
            key_ranges=self.ranges, dropout_seed=self.words[:, heads].contiguous(),
            deterministic=options["deterministic"],
        )  # fmt: skip


def key_ranges(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, T: int, is_causal: bool, left: int, right: int
) -> Tensor:
    """The keys of each packed query, int32 (1, 1, T, 2); (0, 0) outside of every sequence.

    Sequences are aligned at the last query and the last key, as in `attention_varlen`.
    """
    ends_q, ends_k = cu_seqlens_q.long(), cu_seqlens_k.long()
    i = torch.arange(T, device=ends_q.device)
    which = torch.searchsorted(ends_q[1:].contiguous(), i, right=True)
    which = which.clamp(max=max(0, ends_q.numel() - 2))
    lo, hi = ends_k[which], ends_k[which + 1]
    position = i + hi - ends_q[which + 1]
    if is_causal:
        hi = hi.minimum(position + 1)
    if right >= 0:
        hi = hi.minimum(position + right + 1)
    if left >= 0:
        lo = lo.maximum(position - left)
    there = (lo < hi) & (i >= ends_q[0]) & (i < ends_q[-1])
    ranges = torch.where(there.unsqueeze(1), torch.stack((lo, hi), 1), 0)
    return ranges.to(torch.int32).view(1, 1, T, 2)


def _dense(x: Tensor) -> Tensor:
    """(1, H, T, D) of (T, H, D)."""
    return x.transpose(0, 1).unsqueeze(0)


def _packed(x: Tensor) -> Tensor:
    """(T, H, D) of (1, H, T, D)."""
    return x.squeeze(0).transpose(0, 1)
