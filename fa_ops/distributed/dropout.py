"""Dropout of a whole sequence, of which each call of the operator computes a part.

A weight is dropped by the hash of its place in the whole. The operator is given a word for each of
its rows, which has everything of the hash but the key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops import api
from fa_ops.backends import dropout
from fa_ops.distributed.exchange import Waiting
from fa_ops.distributed.forms import StepCall
from fa_ops.distributed.layout import Members, Segment
from fa_ops.distributed.masks import Mask, document_of, positions


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
    seed = api.dropout_seed(query, p)
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
