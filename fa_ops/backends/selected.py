"""Attention over lists of blocks in plain torch code, by gathering the keys of each list.

Lists are taken in parts, so that memory is linear in what is selected: no tensor has an element for
each pair of a query and a key. The functions run on every device and never wait for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.call import Call
from fa_ops.call.options import Gradients

PART = {"cpu": 2**21, "cuda": 2**26}  # numbers of the keys and values that a part gathers


class Lists(NamedTuple):
    """The lists of a call, and the keys that each query may attend besides them."""

    blocks: Tensor  # int64 (B or 1, Hkv or 1, rows, n), ascending, `absent` at the end
    query_block: int  # queries that share a row of `blocks`
    first: Tensor  # int64 (Sq,): where block 0 of a query begins
    low: Tensor  # int64 (B or 1, Sq): the query attends keys from `low` on,
    high: Tensor  # ... below `high`
    absent: int  # in place of what lists nothing


class Bounds(NamedTuple):
    """The keys [low, high) that queries may attend, if a list has them."""

    first: Tensor  # int64 (Sq,): where block 0 of a query begins
    sequence: Tensor  # int64 (Sq,): the number of its sequence in cu_seqlens, -1 for none
    low: Tensor  # int64 (B or 1, Sq)
    high: Tensor  # int64 (B or 1, Sq)


def bounds_of(call: Call) -> Bounds:
    """The bounds of a call's queries, by causality, cu_seqlens and key_ranges."""
    t, Sq, Sk = call.operands, call.query.shape[2], call.key.shape[2]
    i = torch.arange(Sq, device=call.query.device)
    first, sequence, end = torch.zeros_like(i), torch.zeros_like(i), torch.full_like(i, Sk)
    if t.cu_seqlens is not None:
        ends = t.cu_seqlens.long().clamp(0, Sk).cummax(0).values
        after = torch.searchsorted(ends, i, right=True)
        is_inside = (after > 0) & (after < len(ends))
        sequence = torch.where(is_inside, after - 1, -1)
        first = ends[(after - 1).clamp(min=0)]
        end = torch.where(is_inside, ends[after.clamp(max=len(ends) - 1)], 0)
    low, high = first.view(1, Sq), end.view(1, Sq)
    if call.options.is_causal:
        high = high.minimum(i + (Sk - Sq + 1))
    if t.key_ranges is not None:
        low = low.maximum(t.key_ranges[:, 0, :, 0])
        high = high.minimum(t.key_ranges[:, 0, :, 1])
    return Bounds(first, sequence, low, high)


def lists_by_sequence(call: Call) -> tuple[Tensor, Tensor | None, int]:
    """block_indices, counts and query_block, of which no list has queries of several sequences."""
    t, query_block, Sq = call.operands, call.options.query_block, call.query.shape[2]
    if t.cu_seqlens is None or query_block == 1:
        return t.block_indices, t.counts, query_block
    lists = [
        None if x is None else x.repeat_interleave(query_block, 2)[:, :, :Sq]
        for x in (t.block_indices, t.counts)
    ]
    return *lists, 1


def lists_of(call: Call) -> Lists:
    """The lists of a call: entries out of range, beyond the count, or repeated list nothing."""
    first, _, low, high = bounds_of(call)
    blocks, counts, query_block = lists_by_sequence(call)
    blocks = blocks.long()
    absent = -(-call.key.shape[2] // call.options.block_size)
    blocks = blocks.masked_fill((blocks < 0) | (blocks > absent), absent)
    if counts is not None:
        place = torch.arange(blocks.shape[3], device=blocks.device)
        blocks = blocks.masked_fill(place >= counts.unsqueeze(-1), absent)
    blocks = blocks.sort(-1).values
    is_repeated = blocks[..., 1:] == blocks[..., :-1]
    if blocks.shape[3] > 1:
        blocks[..., 1:].masked_fill_(is_repeated, absent)
        blocks = blocks.sort(-1).values
    return Lists(blocks, query_block, first, low, high, absent)


class _GatheredLists(NamedTuple):
    """Some rows of the lists: R lists of L keys, each for `query_block` queries of G heads."""

    heads: Tensor  # int64 (R,): the batch element and kv head of a list, b * Hkv + h
    queries: Tensor  # int64 (R, query_block): tokens, those behind the last one repeated
    keys: Tensor  # int64 (R, L): tokens within the keys
    blocks: Tensor  # int64 (R, n)
    keep: Tensor  # bool (R, query_block, L)

    def rows(self, x: Tensor) -> Tensor:
        """(R, query_block, G, X) of x (B * Hkv, S, G, X)."""
        return x[self.heads[:, None], self.queries]

    def gathered(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(R, L, X) of x (B * Hkv, S, X), 0 where no query of the list attends the key."""
        x = x[self.heads[:, None], self.keys].to(dtype)
        return x.masked_fill_(~self.keep.any(1).unsqueeze(-1), 0.0)


class _SelectedProblem:
    """A call whose lists are taken in parts."""

    def __init__(self, call: Call) -> None:
        q, k, v = call[:3]
        self.call, self.lists = call, lists_of(call)
        (self.B, self.Hq, self.Sq, _), self.Hkv, self.Sk = q.shape, k.shape[1], k.shape[2]
        self.group = self.Hq // self.Hkv
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.size = call.options.block_size
        self.key, self.value = (x.flatten(0, 1) for x in (k, v))
        self.shares_keys = self.lists.query_block == 1  # all rows of a list attend the same keys

    def parts(self) -> Iterator[_GatheredLists]:
        """All lists."""
        lists, rows, n = self.lists, *self.lists.blocks.shape[2:]
        length = n * self.size
        numbers = length * (self.key.shape[2] + self.value.shape[2] + lists.query_block)
        limit = PART.get(self.key.device.type, PART["cuda"])
        step = max(1, limit // max(1, numbers))
        blocks = lists.blocks.expand(self.B, self.Hkv, rows, n)
        offsets = torch.arange(self.size, device=blocks.device)
        low, high = (x.expand(self.B, self.Sq) for x in (lists.low, lists.high))
        inside = torch.arange(lists.query_block, device=blocks.device)
        for start in range(0, self.B * self.Hkv * rows, step):
            stop = min(start + step, self.B * self.Hkv * rows)
            at = torch.arange(start, stop, device=blocks.device)
            heads, row = at // rows, at % rows
            b = heads // self.Hkv
            listed = blocks[b, heads % self.Hkv, row]
            queries = row[:, None] * lists.query_block + inside
            is_query, queries = queries < self.Sq, queries.clamp(max=self.Sq - 1)
            first = lists.first[queries[:, 0]]
            keys = listed.unsqueeze(-1) * self.size + offsets + first[:, None, None]
            keys, is_listed = (
                keys.flatten(1),
                (listed < lists.absent).repeat_interleave(self.size, 1),
            )
            lo, hi = (x[b[:, None], queries].unsqueeze(-1) for x in (low, high))
            keep = (keys.unsqueeze(1) >= lo) & (keys.unsqueeze(1) < hi)
            keep &= is_query.unsqueeze(-1) & is_listed.unsqueeze(1)
            yield _GatheredLists(heads, queries, keys.clamp(0, self.Sk - 1), listed, keep)

    def by_heads(self, x: Tensor) -> Tensor:
        """(B, Hq, S, X) or (B, Hq, S) as (B * Hkv, S, G, X or 1)."""
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        return x.unflatten(1, (self.Hkv, self.group)).flatten(0, 1).transpose(1, 2)

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        """Memory (B, S, Hkv, G, X) of results with a token for each place of a list."""
        tokens = self.lists.blocks.shape[2] * self.lists.query_block
        shape = self.B, tokens, self.Hkv, self.group, width
        return torch.empty(shape, dtype=dtype, device=self.key.device)

    def store(self, results: Tensor, part: _GatheredLists, x: Tensor) -> None:
        """Write x (R, query_block, G, X) of a part to its places in `empty` memory."""
        first = part.queries[:, :1] // self.lists.query_block * self.lists.query_block
        tokens = first + torch.arange(self.lists.query_block, device=x.device)
        b, h = part.heads // self.Hkv, part.heads % self.Hkv
        results[b[:, None], tokens, h[:, None]] = x.to(results.dtype)

    def finished(self, results: Tensor) -> Tensor:
        """(B, Hq, Sq, X) of written memory, laid out (B, Sq, Hq, X)."""
        results = results[:, : self.Sq].flatten(2, 3)
        return results.contiguous().transpose(1, 2)

    def product(self, a: Tensor, b: Tensor, terms: Tensor) -> Tensor:
        """a (R, m, G, L) @ b (R, L, X), in which only `terms` (R, m, L) count.

        `b` is 0 in keys without any term.
        """
        rows = a.flatten(1, 2)
        if self.shares_keys:
            return (rows @ b).unflatten(1, a.shape[1:3])
        return _product(rows, b, terms.repeat_interleave(a.shape[2], 1)).unflatten(1, a.shape[1:3])

    def transposed(self, a: Tensor, b: Tensor, terms: Tensor) -> Tensor:
        """(R, L, X): the transpose of a (R, m, G, L) @ b (R, m, G, X); only `terms` count."""
        columns, b = a.flatten(1, 2).transpose(1, 2), b.flatten(1, 2)
        if self.shares_keys:
            return (columns @ b).masked_fill_(~terms.any(1).unsqueeze(-1), 0.0)
        return _product(columns, b, terms.repeat_interleave(a.shape[2], 1).transpose(1, 2))

    def scores(self, part: _GatheredLists, q: Tensor, k: Tensor) -> Tensor:
        """(R, query_block, G, L), -inf where a query does not attend a key."""
        products = (q.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, q.shape[1:3])
        return products.mul_(self.call.scale).masked_fill_(~part.keep.unsqueeze(2), -torch.inf)


def _product(a: Tensor, b: Tensor, terms: Tensor) -> Tensor:
    """a @ b in which only `terms` (R, M, N) count: NaN and Inf elsewhere add 0."""
    wrong_a, wrong_b = ~torch.isfinite(a), ~torch.isfinite(b)
    if a.device.type == "cpu" and not bool(wrong_a.any() | wrong_b.any()):
        return a @ b
    out = a.masked_fill(wrong_a, 0.0) @ b.masked_fill(wrong_b, 0.0)
    touched = (wrong_a & terms).any(-1, keepdim=True)
    touched = touched | ((terms.to(b.dtype) @ wrong_b.to(b.dtype)) > 0)
    return out.masked_fill_(touched, torch.nan)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv), laid out (B, Sq, Hq, Dv) in memory, and lse (B, Hq, Sq)."""
    problem = _SelectedProblem(call)
    q, sinks, dtype = problem.by_heads(call.query), call.operands.sinks, problem.dtype
    outs = problem.empty(call.value.shape[3], call.query.dtype)
    lses = problem.empty(1, dtype)
    most = torch.finfo(dtype).max
    for part in problem.parts():
        k, v = part.gathered(problem.key, dtype), part.gathered(problem.value, dtype)
        s = problem.scores(part, part.rows(q).to(dtype), k)
        m = s.amax(-1, keepdim=True)
        column = None
        if sinks is not None:
            column = sinks.to(dtype).clamp(max=most).view(problem.Hkv, problem.group)
            column = column[part.heads % problem.Hkv].view(len(s), 1, -1, 1)
            m = torch.maximum(m, column)
        m = m.masked_fill(m == -torch.inf, 0.0)
        p = s.sub_(m).exp_()
        total = p.sum(-1, keepdim=True)
        if column is not None:
            total = total + torch.exp(column - m)
        dead = total == 0
        total = total.masked_fill(dead, 1.0)
        lse = (m + total.log()).masked_fill(dead, -torch.inf)
        out = problem.product(p, v, part.keep).div_(total)
        problem.store(outs, part, out)
        problem.store(lses, part, lse)
    out, lse = problem.finished(outs), problem.finished(lses).squeeze(-1).contiguous()
    if sinks is not None:
        lse = torch.where((sinks == torch.inf).view(-1, 1), sinks.to(dtype).view(-1, 1), lse)
    return out, lse


def backward(call: Call) -> Gradients:
    """Gradients of query, key, value and sinks; the sums over queries have one order."""
    problem, saved, sinks = _SelectedProblem(call), call.saved, call.operands.sinks
    (query, key, value), dtype = call[:3], problem.dtype
    grad_out, out, lse = saved.grad_out.to(dtype), saved.out.to(dtype), saved.lse
    delta = (grad_out * out).sum(-1)  # what the gradient of lse is subtracted from
    if saved.grad_lse is not None:
        delta = delta - saved.grad_lse
    q, do, rows = (problem.by_heads(x) for x in (query, grad_out, torch.stack((lse, delta), -1)))
    dq = problem.empty(query.shape[3], query.dtype)
    sums = [_KeyGradient(problem, x) for x in (key, value)]
    for part in problem.parts():
        k, v = part.gathered(problem.key, dtype), part.gathered(problem.value, dtype)
        of_q, of_out = part.rows(q).to(dtype), part.rows(do)
        row_lse, row_delta = part.rows(rows).split(1, -1)
        is_absent = ~part.keep.unsqueeze(2)
        p = problem.scores(part, of_q, k).sub_(row_lse).exp_().masked_fill_(is_absent, 0.0)
        dp = (of_out.flatten(1, 2) @ v.transpose(1, 2)).unflatten(1, of_out.shape[1:3])
        ds = dp.sub_(row_delta).mul_(p).mul_(call.scale).masked_fill_(is_absent, 0.0)
        problem.store(dq, part, problem.product(ds, k, part.keep))
        for total, weights, factor in zip(sums, (ds, p), (of_q, of_out)):
            total.add(part, problem.transposed(weights, factor, part.keep))
    dk, dv = (total.gradient(x) for total, x in zip(sums, (key, value)))
    dsinks = None if sinks is None else _sinks_gradient(sinks, lse, delta)
    return Gradients(torch.empty_like(query).copy_(problem.finished(dq)), dk, dv, sinks=dsinks)


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks, in which a sink of +inf has all weight."""
    most = torch.finfo(lse.dtype).max
    share = torch.exp(sinks.to(lse.dtype).clamp(max=most).view(-1, 1) - lse.clamp(max=most))
    share = share.masked_fill(lse == -torch.inf, 0.0)
    return (share * -delta).masked_fill_(share == 0, 0.0).sum((0, 2)).to(sinks.dtype)


class _KeyGradient:
    """The gradient of keys, or of values: sums over the lists that have them."""

    def __init__(self, problem: _SelectedProblem, x: Tensor) -> None:
        self.problem, heads = problem, problem.B * problem.Hkv
        self.by_blocks = problem.call.operands.cu_seqlens is None  # blocks begin at multiples
        self.width = problem.size if self.by_blocks else 1
        self.count = problem.lists.absent if self.by_blocks else problem.Sk
        # and one more, for what lists nothing
        shape = heads * self.count + 1, self.width * x.shape[3]
        self.total = torch.zeros(shape, dtype=problem.dtype, device=x.device)

    def add(self, part: _GatheredLists, x: Tensor) -> None:
        """Add x (R, L, X) of a part."""
        if self.by_blocks:
            at, is_listed = part.blocks, part.blocks < self.problem.lists.absent
        else:
            at, is_listed = part.keys, part.keep.any(1)
        index = at + part.heads[:, None] * self.count
        index = index.masked_fill(~is_listed, len(self.total) - 1).flatten()
        x = x.reshape(len(index), -1)
        if x.device.type == "cpu":  # sorted by index; on a GPU it is the other that is
            self.total.scatter_add_(0, index[:, None].expand_as(x), x)
        else:
            self.total.index_put_((index,), x, accumulate=True)

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of x (B, Hkv, Sk, X), in its layout."""
        total = self.total[:-1].view(*x.shape[:2], -1, x.shape[3])
        return torch.empty_like(x).copy_(total[:, :, : x.shape[2]])
