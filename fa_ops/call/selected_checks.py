"""Checks of calls in which lists name the keys of each query."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa_ops.call import checks
from fa_ops.call.call import Call
from fa_ops.call.checks import need
from fa_ops.call.options import MAX_BLOCK, Operands, Options

TOKENS_LAYOUT = "(N, Hkv, D)"
_NUMBERED = "they are numbered from 0, and -1 lists nothing"


def blocks(call: Call, real: bool = False) -> None:
    """Raise ValueError or TypeError unless a call with lists of blocks is legal.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    checks.dense(call, real)
    (q, k), t, o = call[:2], call.operands, call.options
    (B, _, Sq, _), (Hkv, Sk) = q.shape, k.shape[1:3]
    for name, size in (("block_size", o.block_size), ("query_block", o.query_block)):
        need(size >= 1, "{} must be at least 1, got {}: it counts tokens", name, size)
        need(size <= MAX_BLOCK, "{} must be at most {}, got {}: attention without lists attends "
             "all keys", name, MAX_BLOCK, size)  # fmt: skip
    checks.integers(q, "block_indices", t.block_indices)
    found, rows = t.block_indices.shape, -(-Sq // o.query_block)
    message = (
        "block_indices must have shape (B or 1, Hkv or 1, ceil(Sq / query_block), n) with "
        "(B, Hkv, ceil(Sq / query_block)) = {}, got {}{}"
    )
    remedy = {2: ": pass block_indices[None, None]", 3: ": pass block_indices[:, None]"}
    shown = (B, Hkv, rows), found, remedy.get(len(found), "")
    need(len(found) == 4, message, *shown)
    for size, whole in zip(found[:2], (B, Hkv)):
        need((size - 1) * (size - whole) == 0, message, *shown)
    need(found[2] == rows, message, *shown)
    if t.counts is not None:
        checks.integers(q, "counts", t.counts)
        checks.has_shape("counts", t.counts, tuple(found[:3]), "pass a number for each list")
    if t.key_ranges is not None:
        message = "key_ranges must have shape (B or 1, 1, Sq or 1, 2), got {}: {}"
        need(t.key_ranges.shape[1] == 1, message, t.key_ranges.shape,
             "all heads of a call with block_indices have one range")  # fmt: skip
    if t.cu_seqlens is not None:
        checks.integers(q, "cu_seqlens", t.cu_seqlens)
        checks.borders("cu_seqlens", t.cu_seqlens)
        need(B == 1, "cu_seqlens divide the only row of a batch, but query has batch size {}: pass "
             "the sequences one after another, (1, H, T, D)", B)  # fmt: skip
        need(Sq == Sk, "cu_seqlens are those of query and key, which must have one length, got {} "
             "and {}: pass one sequence as a row of its own", Sq, Sk)  # fmt: skip


def block_values(options: Options, q: Tensor, k: Tensor, v: Tensor, tensors: Operands) -> None:
    """Raise ValueError unless every entry of a list is a block of keys, or -1. Reads the lists."""
    lists, ends, size = tensors.block_indices, tensors.cu_seqlens, options.block_size
    n, Sk = lists.shape[3], k.shape[2]
    limit = torch.tensor(-(-Sk // size))
    if ends is not None:
        checks.cu_seqlens("cu_seqlens", ends, Sk)
        keys = pad(ends.diff().repeat_interleave(ends.diff()), (int(ends[0]), Sk - int(ends[-1])))
        limit = (keys + size - 1).div(size, rounding_mode="floor")
        limit = pad(limit, (0, -Sk % options.query_block)).unflatten(0, (-1, options.query_block))
        limit = limit.amax(1).view(1, 1, -1, 1)
    wrong = (lists < -1) | (lists >= limit)
    if tensors.counts is not None:
        _counts(tensors.counts, n)
        wrong &= torch.arange(n) < tensors.counts.unsqueeze(-1)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        allowed = int(limit.expand(lists.shape)[tuple(at)])
        need(False, "block_indices{} is {}, but there are {} blocks of {} keys: {}", at,
             int(lists[tuple(at)]), allowed, size, _NUMBERED)  # fmt: skip


def tokens(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, counts: Tensor | None, real: bool = False
) -> None:
    """Raise ValueError or TypeError unless queries (T, Hq, D) can attend lists of tokens (T, k).

    `real` as above. Options are checked with the call that these tensors become.
    """
    checks.given(query=q, key=k, value=v)
    layouts = ("query", q, "(T, Hq, D)"), ("key", k, TOKENS_LAYOUT), ("value", v, TOKENS_LAYOUT)
    for name, t, layout in layouts:
        remedy = {
            2: f": pass {name}[:, None] of a latent cache (N, D)",
            4: f": pass {name}.transpose(1, 2).flatten(0, 1) of (B, H, S, D), with lists that "
            "number the tokens of all sequences",
        }.get(t.dim(), "")
        need(t.dim() == 3, "{} must have shape {}, got {}{}", name, layout, t.shape, remedy)
        checks.same_dtype(q, name, t)
        checks.same_device(q, name, t)
    checks.query_dtype(q)
    (T, Hq, D), (N, Hkv, Dk), (Nv, Hv, _) = q.shape, k.shape, v.shape
    need(Nv == N, "value has {} tokens, but key has {}: each key needs its value", Nv, N)
    checks.heads(Hq, Hkv, Hv, D, Dk, layout=TOKENS_LAYOUT)
    checks.integers(q, "token_indices", lists)
    need(lists.dim() == 2, "token_indices must have shape (T, k), got {}: it has a list for each "
         "query", lists.shape)  # fmt: skip
    need(lists.shape[0] == T, "token_indices has {} lists, but query has {} tokens: it has a list "
         "for each", lists.shape[0], T)  # fmt: skip
    if counts is not None:
        checks.integers(q, "counts", counts)
        checks.has_shape("counts", counts, (T,), "pass a number for each list")
    if real:
        checks.contiguous_rows(query=q, key=k, value=v)


def token_values(k: Tensor, lists: Tensor, counts: Tensor | None) -> None:
    """Raise ValueError unless every entry of a list is a token, or -1. Reads the lists."""
    wrong = (lists < -1) | (lists >= k.shape[0])
    if counts is not None:
        _counts(counts, lists.shape[1])
        wrong &= torch.arange(lists.shape[1]) < counts.unsqueeze(-1)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        need(False, "token_indices{} is {}, but there are {} tokens: {}", at,
             int(lists[tuple(at)]), k.shape[0], _NUMBERED)  # fmt: skip


def selection(
    q: Tensor, k: Tensor, weights: Tensor, count: int, scale: float | None,
    kv_lens: Tensor | None, key_ranges: Tensor | None, attn_mask: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError unless keys of these tensors can be ranked and listed."""
    checks.given(query=q, key=k, weights=weights)
    for name, t in (("query", q), ("key", k)):
        checks.rank(name, t, checks.LAYOUT)
        checks.same_dtype(q, name, t)
        checks.same_device(q, name, t)
    checks.query_dtype(q, "query and key")
    (B, H, Sq, D), (Bk, Hk, Sk, Dk) = q.shape, k.shape
    checks.batches_and_lengths(B, (Bk, Sk), (Bk, Sk))
    need(Hk == 1, "key has {} heads, but those of an indexer share their keys: pass one head", Hk)
    checks.heads(H, Hk, Hk, D, Dk)
    checks.floats(q, "weights", weights)
    checks.has_shape("weights", weights, (B, H, Sq), "pass a weight for each head and query")
    need(count >= 1, "count must be at least 1, got {}: it is the length of a list", count)
    if scale is not None:
        need(-math.inf < scale < math.inf, "scale must be finite, got {}", scale)
    if kv_lens is not None:
        checks.integers(q, "kv_lens", kv_lens)
        checks.has_shape("kv_lens", kv_lens, (B,), "pass a number of keys for each row")
    if key_ranges is not None:
        checks.key_ranges(q, key_ranges, B, 1, Sq)
    if attn_mask is not None:
        checks.integers(q, "attn_mask", attn_mask, torch.bool)
        message = "attn_mask must have shape (B or 1, 1, Sq or 1, Sk) with (B, Sq, Sk) = {}, got {}"
        found = (B, Sq, Sk), attn_mask.shape
        need(attn_mask.dim() == 4, message, *found)
        need(attn_mask.shape[1] == 1, message, *found)
        need(attn_mask.shape[3] == Sk, message, *found)
        for size, whole in zip(attn_mask.shape[::2], (B, Sq)):
            need((size - 1) * (size - whole) == 0, message, *found)


def _counts(counts: Tensor, n: int) -> None:
    """Raise ValueError unless each is a length of a list of at most n entries."""
    wrong = (counts < 0) | (counts > n)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        need(False, "counts{} is {}, but a list has {} entries: it says how many of them count", at,
             int(counts[tuple(at)]), n)  # fmt: skip
