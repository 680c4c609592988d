"""All-to-all of heads: each process attends the whole sequence with some of the heads.

Where processes outnumber key heads, a key head is sent to every process whose query heads it
serves, and its gradients are summed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.backends.dropout import seed_of_heads
from fa_ops.distributed.arguments import ParallelOptions
from fa_ops.distributed.layout import Members, Segment, joined, separated
from fa_ops.distributed.ring_steps import sum_dtype
from fa_ops.distributed.schedule import Mask
from fa_ops.distributed.transport import Exchange, Transfer, agreed_seed
from fa_ops.functions import attention
from fa_ops.ops.autograd import differentiable_once


class HeadSplit(NamedTuple):
    """Which heads each process of a group attends, and which tokens it holds before and after."""

    members: Members
    query_tokens: tuple[tuple[Segment, ...], ...]  # of each process of the group
    key_tokens: tuple[tuple[Segment, ...], ...]
    Hq: int
    Hkv: int
    timeout: float | None = None  # seconds to wait for the others

    @property
    def queries(self) -> int:
        """The query heads of each process."""
        return self.Hq // self.members.size

    def query_heads(self, rank: int) -> slice:
        """The query heads of a process."""
        return slice(rank * self.queries, (rank + 1) * self.queries)

    def key_heads(self, rank: int) -> slice:
        """The key heads that serve the query heads of a process."""
        group, heads = self.Hq // self.Hkv, self.query_heads(rank)
        return slice(heads.start // group, -(-heads.stop // group))

    def tokens(self, is_key: bool) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each process."""
        return self.key_tokens if is_key else self.query_tokens

    def served(self, x: Tensor) -> Tensor:
        """The key heads of this process, each for equally many of its query heads.

        A key head is repeated if it serves more of them than others do.
        """
        group, heads = self.Hq // self.Hkv, self.query_heads(self.members.rank)
        first, unit = self.key_heads(self.members.rank).start, math.gcd(group, self.queries)
        index = [h // group - first for h in range(heads.start, heads.stop, unit)]
        if index == list(range(x.shape[1])):
            return x
        wide = x.to(sum_dtype(x))  # in which the gradients of repeated heads are then summed
        return wide[:, torch.tensor(index, device=x.device)].to(x.dtype)


def split_error(Hq: int, size: int) -> str | None:
    """Why heads cannot be distributed, or None."""
    if Hq % size:
        return f"needs a number of query heads that {size} processes divide, got {Hq}"
    return None


class ToHeads(torch.autograd.Function):
    """apply(q, k, v, split) -> the whole sequence's q, k, v with the heads of this process."""

    @staticmethod
    def forward(ctx, q, k, v, split: HeadSplit):
        """Send each process its heads of this process's tokens."""
        ctx.split = split
        return _to_heads(split, (q, k, v), "step 1 of 2 (heads of queries, keys and values)")

    @staticmethod
    @differentiable_once("context parallel attention")
    def backward(ctx, _, *grads):
        """The reverse; gradients of a key head are summed over the processes that had it."""
        what = "step 2 of 2 of the backward pass (tokens' gradients)"
        return *_to_tokens(ctx.split, grads, (False, True, True), what), None


class ToTokens(torch.autograd.Function):
    """apply(split, *results) -> all heads of this process's tokens, of results by query head."""

    @staticmethod
    def forward(ctx, split: HeadSplit, *results):
        """Return to each process its tokens."""
        ctx.split = split
        return _to_tokens(split, results, (False,) * len(results), "step 2 of 2 (tokens' results)")

    @staticmethod
    @differentiable_once("context parallel attention")
    def backward(ctx, _, *grads):
        """Send each process its heads of the gradients; zeros too, as others wait for them."""
        what = "step 1 of 2 of the backward pass (heads of gradients)"
        return None, *_to_heads(ctx.split, grads, what, (False,) * len(grads))


def _to_heads(
    split: HeadSplit, tensors, what: str, are_keys=(False, True, True)
) -> tuple[Tensor, ...]:
    """(B, H, local tokens, ...) of all heads to (B, local heads, tokens, ...)."""
    sent = [
        [[x[:, _heads(split, rank, is_key)]] for x, is_key in zip(tensors, are_keys)]
        for rank in range(split.members.size)
    ]
    mine = [_heads(split, split.members.rank, is_key) for is_key in are_keys]
    shapes = [
        (x.shape[0], heads.stop - heads.start, *x.shape[2:]) for x, heads in zip(tensors, mine)
    ]
    received = _all_to_all(split, sent, [shapes] * split.members.size, what)
    return tuple(
        joined([parts[n] for parts in received], split.tokens(is_key), 2)
        for n, is_key in enumerate(are_keys)
    )


def _to_tokens(split: HeadSplit, tensors, are_keys, what: str) -> tuple[Tensor, ...]:
    """(B, local heads, tokens, ...) to (B, H, local tokens, ...)."""
    size, shapes = split.members.size, []
    apart = [separated(x, split.tokens(is_key), 2) for x, is_key in zip(tensors, are_keys)]
    sent = [[parts[rank] for parts in apart] for rank in range(size)]
    mine = [sum(piece.shape[2] for piece in pieces) for pieces in sent[split.members.rank]]
    for rank in range(size):
        heads = [_heads(split, rank, is_key) for is_key in are_keys]
        shapes.append([
            (x.shape[0], h.stop - h.start, tokens, *x.shape[3:])
            for x, h, tokens in zip(tensors, heads, mine)
        ])  # fmt: skip
    received = _all_to_all(split, sent, shapes, what)
    parts = [[of_rank[n] for of_rank in received] for n in range(len(tensors))]
    return tuple(
        _summed_keys(split, x) if is_key else torch.cat(x, 1) for x, is_key in zip(parts, are_keys)
    )


def _summed_keys(split: HeadSplit, parts: list[Tensor]) -> Tensor:
    """Gradients of all key heads, given those that each process had; of shared heads the sum."""
    if sum(part.shape[1] for part in parts) == split.Hkv:
        return torch.cat(parts, 1)
    x = parts[0]
    total = x.new_zeros(x.shape[0], split.Hkv, *x.shape[2:], dtype=sum_dtype(x))
    for rank, part in enumerate(parts):
        total[:, split.key_heads(rank)].add_(part)
    return total.to(x.dtype)


def _heads(split: HeadSplit, rank: int, is_key: bool) -> slice:
    return split.key_heads(rank) if is_key else split.query_heads(rank)


def _all_to_all(split: HeadSplit, sent: list, shapes: list, what: str) -> list[list[Tensor]]:
    """Exchange tensors with each process, in one message for each dtype.

    `sent[rank]` has the tensors for a process, each in pieces along the dimension of tokens, and
    `shapes[rank]` the shapes of those that it sends.
    """
    received: list[list] = [[None] * len(tensors) for tensors in sent]
    for dtype in dict.fromkeys(pieces[0].dtype for pieces in sent[0]):
        chosen = [n for n, pieces in enumerate(sent[0]) if pieces[0].dtype == dtype]
        whole, messages = _packed([[tensors[n] for n in chosen] for tensors in sent])
        sizes = [[_elements(of_rank[n]) for n in chosen] for of_rank in shapes]
        arrived = whole.new_empty(sum(map(sum, sizes)))
        arriving = arrived.split([sum(s) for s in sizes])
        _exchange(split, (whole, messages), (arrived, arriving), what)
        for rank, message in enumerate(arriving):
            for n, part in zip(chosen, message.split(sizes[rank]), strict=True):
                received[rank][n] = part.view(shapes[rank][n])
    return received


def _packed(sent: list[list[list[Tensor]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The messages for each process, in one piece of memory, to which everything is copied once."""
    sizes = [[sum(x.numel() for x in pieces) for pieces in tensors] for tensors in sent]
    whole = sent[0][0][0].new_empty(sum(map(sum, sizes)))
    messages = whole.split([sum(s) for s in sizes])
    for message, tensors, lengths in zip(messages, sent, sizes, strict=True):
        for there, pieces in zip(message.split(lengths), tensors, strict=True):
            shape = list(pieces[0].shape)
            shape[2] = sum(x.shape[2] for x in pieces)
            torch.cat(pieces, 2, out=there.view(shape))
    return whole, messages


def _exchange(split: HeadSplit, sent: tuple, received: tuple, what: str) -> None:
    """Send each process its message, and wait for those of all; both with the whole of them."""
    members, (whole, messages), (arrived, arriving) = split.members, sent, received
    if arrived.is_cuda:
        sizes = [[len(x) for x in pieces] for pieces in (arriving, messages)]
        work = dist.all_to_all_single(arrived, whole, *sizes, group=members.group, async_op=True)
        Transfer([work], [whole], what, split.timeout).wait()
        return
    # gloo's all-to-all does not end before the group's timeout where a process is missing
    arriving[members.rank].copy_(messages[members.rank])
    others = [rank for rank in range(members.size) if rank != members.rank]
    sends, receives = (
        [(rank, x[rank]) for rank in others if len(x[rank])] for x in (messages, arriving)
    )
    Exchange(members, split.timeout).start(sends, receives, what).wait()


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# The operator on the whole sequence with some of the heads, after an all-to-all of heads.
#
# Masks are those of the whole sequence, and so every option works as on one device.


def attend(
    q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, mask: Mask, options: ParallelOptions
) -> tuple[Tensor, Tensor]:
    """out and lse of these heads."""
    heads = split.query_heads(split.members.rank)
    given = _options(options, heads, q.device)
    if options.cu_seqlens is not None:
        return _documents(q, k, v, mask, options, given)
    ranges = options.key_ranges
    if ranges is not None:
        given["key_ranges"] = (ranges[:, heads] if ranges.shape[1] > 1 else ranges).to(q.device)
    if not options.dropout_p:
        return attention.attention(q, k, v, **given)
    return _with_dropout(q, k, v, split, options, given)


def of_heads(
    sinks: Tensor | None, slopes: Tensor | None, heads: slice
) -> tuple[Tensor | None, Tensor | None]:
    """Sinks and ALiBi slopes of some query heads."""
    sinks = None if sinks is None else sinks[heads]
    return sinks, None if slopes is None else slopes[..., heads]


def _options(options: ParallelOptions, heads: slice, device: torch.device) -> dict:
    sinks, slopes = of_heads(options.sinks, options.alibi_slopes, heads)
    lens = options.kv_lens
    return {
        "is_causal": options.is_causal,
        "scale": options.scale,
        "window": options.window,
        "softcap": options.softcap,
        "alibi_slopes": slopes,
        "sinks": sinks,
        "kv_lens": None if lens is None else lens.to(device),
        "return_lse": True,
        "deterministic": options.deterministic,
        "backend": options.backend,
    }


def _documents(q, k, v, mask: Mask, options: ParallelOptions, given: dict) -> tuple[Tensor, Tensor]:
    """Packed sequences, as `attention_varlen` attends them on one device."""
    ends = options.cu_seqlens.to(q.device)
    lengths = mask.cu_seqlens.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = attention.attention_varlen(*packed, ends, ends, longest, longest, **given)
    return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, options: ParallelOptions, given: dict
) -> tuple[Tensor, Tensor]:
    """One call for each row of the batch, whose heads then follow one another in the hash."""
    seed = agreed_seed(q, options.dropout_p, (split.members,), split.timeout)
    first, results = split.query_heads(split.members.rank).start, []
    left, right = options.sides
    for b in range(q.shape[0]):
        row = slice(b, b + 1)
        of_row = {n: _row(x, row) for n, x in given.items() if n not in ("window", "return_lse")}
        results.append(torch.ops.fa.attention_with_lse(
            q[row], k[row], v[row], None, options.dropout_p, window_left=left, window_right=right,
            dropout_seed=seed_of_heads(seed, b * split.Hq + first), **of_row,
        ))  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _row(x: object, row: slice) -> object:
    """What belongs to a row of the batch: kv_lens, and masks that differ between rows."""
    per_row = isinstance(x, Tensor) and (x.dtype == torch.int32 or x.dim() == 2) and len(x) > 1
    return x[row] if per_row else x
