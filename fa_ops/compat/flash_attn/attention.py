"""flash-attn's functions: dense, packed, and over a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_ops.call.python_types import checked_packing, need_tensor
from fa_ops.compat.flash import (
    DENSE,
    PACKED,
    Window,
    attend_pages,
    attend_rows,
    caches_of,
    check_list,
    check_new,
    count,
    flag,
    heads_first,
    infinite_where_empty,
    lengths,
    need_int32,
    new_keys,
    number,
    parts,
    rotation_of,
    scalar,
    score_options,
    shape,
    signed_weights,
    unit_stride,
    without_gradient,
)
from fa_ops.functions.attention import attention, attention_varlen, dropout_seed
from fa_ops.ops import dense, varlen

# flash_attn_func and its packed forms: attention of batches of equal lengths.

# Tensor, or tuple[Tensor, Tensor, Tensor] on request: users of the original have no types
Result = Any


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q ``(B, Sq, Hq, D)`` over k ``(B, Sk, Hkv, D)`` and v ``(B, Sk, Hkv, Dv)``.

    Args:
        dropout_p: probability in [0, 1) of dropping a softmax weight.
        softmax_scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        causal: causal mask, aligned at the bottom right as in flash-attn since 2.1.
        window_size: number of visible keys on either side of a query's own position; negative:
            unbounded.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``.
        deterministic: whether the backward pass is bitwise repeatable.
        return_attn_probs: also return the lse, float32 ``(B, Hq, Sq)``, +inf in rows that attend
            no key, and the weights.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse, weights)``. With dropout, the weights are
        ``exp(score - m)`` ``(B, Hq, Sq, Sk)``, both lengths rounded up to multiples of 128, where
        ``m`` is the largest score of a row; dropped ones are negative. They take that much memory,
        and are for tests. Without dropout they have no elements.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention`.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    shape(DENSE, q=q, k=k, v=v)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                         deterministic)  # fmt: skip
    if not flag("return_attn_probs", return_attn_probs):
        return attention(*map(heads_first, (q, k, v)), **options).transpose(1, 2)
    if not options["dropout_p"]:
        out, lse = attention(*map(heads_first, (q, k, v)), **options, return_lse=True)
        return out.transpose(1, 2), infinite_where_empty(lse), q.new_empty(0)
    seed = dropout_seed(q, options["dropout_p"])
    out, lse = seeded(q, k, v, seed, options)
    return out, lse, signed_weights(q, k, seed, (q.shape[1], k.shape[1]), options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor ``(B, Sk, 2, Hkv, D)``."""
    k, v = parts("kv", kv, 2, "(B, S, 2, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`flash_attn_func` of queries, keys and values in one tensor ``(B, S, 3, H, D)``."""
    q, k, v = parts("qkv", qkv, 3, "(B, S, 3, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def options_of(
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
) -> dict:
    """The options of fa_ops.attention for the arguments of flash-attn."""
    options = score_options(softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        need_tensor("alibi_slopes", alibi_slopes)
    options |= {"dropout_p": number("dropout_p", dropout_p), "alibi_slopes": alibi_slopes}
    return options | {"deterministic": flag("deterministic", deterministic)}


def keywords_of(options: dict, seed: Tensor | None) -> dict:
    """The keyword arguments of an operator for options of fa_ops.attention."""
    names = "scale", "softcap", "alibi_slopes", "deterministic"
    left, right = options["window"] or (-1, -1)
    return {
        **{name: options[name] for name in names},
        "window_left": left, "window_right": right, "dropout_seed": seed,
    }  # fmt: skip


def seeded(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, options: dict
) -> tuple[Tensor, Tensor]:
    """out ``(B, Sq, Hq, Dv)`` and the lse of FlashAttention 2, with this seed of dropout."""
    p, causal = options["dropout_p"], options["is_causal"]
    tensors = map(heads_first, (q, k, v))
    out, lse = dense.WITH_LSE(*tensors, None, p, causal, **keywords_of(options, seed))
    return out.transpose(1, 2), infinite_where_empty(lse)


# flash_attn_varlen_func and its packed forms: attention of packed sequences.


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention within packed sequences.

    Args:
        q: ``(Tq, Hq, D)``.
        k: ``(Tk, Hkv, D)``; with ``block_table`` ``(pages, page_size, Hkv, D)``.
        v: the same with ``Dv``.
        cu_seqlens_q: int32 ``(B + 1,)``, the cumulative lengths of the sequences of queries.
        cu_seqlens_k: the same for keys, which with ``block_table`` lie in its pages.
        max_seqlen_q: upper bound on the number of queries of a sequence.
        max_seqlen_k: the same for keys.
        dropout_p: as in :func:`flash_attn_func`, as all arguments that are not here.
        return_attn_probs: also return the lse, float32 ``(Hq, Tq)``, +inf in rows that attend no
            key, and the weights of :func:`flash_attn_func`, which hold a row of the batch for each
            sequence, ``max_seqlen_q`` queries and ``max_seqlen_k`` keys.
        block_table: int32 ``(B, max_pages)``, the pages of each sequence. Not differentiable.

    Returns:
        out ``(Tq, Hq, Dv)``, or ``(out, lse, weights)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_varlen`, with
            ``block_table`` as :func:`fa_ops.attention_with_kv_cache`.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691; Kwon et al., PagedAttention,
    https://arxiv.org/abs/2309.06180 (``block_table``).
    """
    shape(PACKED, q=q)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                         deterministic)  # fmt: skip
    packing = cu_seqlens_q, cu_seqlens_k, scalar(max_seqlen_q), scalar(max_seqlen_k)
    with_lse = flag("return_attn_probs", return_attn_probs)
    if block_table is not None:
        out, lse = from_pages(q, k, v, packing, options, block_table, None)
        return (out, lse, q.new_empty(0)) if with_lse else out
    shape(PACKED, k=k, v=v)
    tensors = tuple(map(unit_stride, (q, k, v)))
    if not with_lse:
        return attention_varlen(*tensors, *packing, **options)
    seed = None if not options["dropout_p"] else dropout_seed(q, options["dropout_p"])
    out, lse = seeded_packed(*tensors, packing, None, seed, options)
    return out, lse, weights(q, k, packing, None, seed, options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor ``(Tk, 2, Hkv, D)``."""
    k, v = parts("kv", kv, 2, "(T, 2, H, D)")
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Result:
    """:func:`flash_attn_varlen_func` of queries, keys and values in one tensor ``(T, 3, H, D)``."""
    q, k, v = parts("qkv", qkv, 3, "(T, 3, H, D)")
    packing = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *packing, *args, **options)


def from_pages(
    q: Tensor, k: Tensor, v: Tensor, packing: tuple, options: dict, table: Tensor,
    kv_lens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``(Tq, Hq, Dv)`` and the lse of FlashAttention 2 over keys in pages."""
    if options["dropout_p"]:
        raise NotImplementedError(
            f"dropout_p must be 0 with block_table, got {options['dropout_p']}"
        )
    ends_q, ends_k, longest_q, _ = checked_packing(*packing)
    shape("(B, max_pages)", block_table=table)
    need_int32("block_table", table)
    check_list("cu_seqlens_k", ends_k)
    lens = ends_k.diff() if kv_lens is None else kv_lens
    names = "scale", "softcap", "alibi_slopes", "is_causal", "window"
    options = {name: options[name] for name in names}
    out, lse = attend_pages(q, k, v, lens, table, ends_q, longest_q, options)
    return out, infinite_where_empty(lse)


def seeded_packed(
    q: Tensor, k: Tensor, v: Tensor, packing: tuple, kv_lens: Tensor | None, seed: Tensor | None,
    options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``(Tq, Hq, Dv)`` and the lse of FlashAttention 2, with this seed of dropout."""
    p, causal = options["dropout_p"], options["is_causal"]
    keywords = keywords_of(options, seed)
    out, lse = varlen.VARLEN(q, k, v, *checked_packing(*packing), p, causal, kv_lens=kv_lens,
                             **keywords)  # fmt: skip
    return out, infinite_where_empty(lse)


def weights(
    q: Tensor, k: Tensor, packing: tuple, kv_lens: Tensor | None, seed: Tensor | None, options: dict
) -> Tensor:
    """The signed weights of packed sequences; no elements without dropout."""
    if seed is None:
        return q.new_empty(0)
    ends_q, ends_k, longest_q, longest_k = checked_packing(*packing)
    lens = ends_q.diff(), ends_k.diff() if kv_lens is None else kv_lens
    q, k = _rows(q, ends_q, longest_q), _rows(k, ends_k, longest_k)
    return signed_weights(q, k, seed, tuple(n.view(-1, 1, 1, 1) for n in lens), options)


def _rows(x: Tensor, ends: Tensor, longest: int | None) -> Tensor:
    """Packed sequences as rows (B, longest, H, D), whose last tokens may be any."""
    longest = x.shape[0] if longest is None else longest
    tokens = ends[:-1, None] + torch.arange(longest, device=x.device)
    return x[tokens.clamp(0, max(x.shape[0] - 1, 0))] if x.shape[0] else x.new_zeros(
        len(ends) - 1, longest, *x.shape[1:]
    )  # fmt: skip


# flash_attn_with_kvcache: attention over a cache, to which new keys and values are appended.


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache, to which new keys and values are appended first. Not differentiable.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k_cache: ``(rows, S, Hkv, D)``, with B rows or more; with ``block_table``
            ``(pages, page_size, Hkv, D)``.
        v_cache: the same with ``Dv``.
        k: ``(B, Sn, Hkv, D)``, appended in place.
        v: ``(B, Sn, Hkv, Dv)``.
        rotary_cos: ``(positions, R / 2)``; rotates the queries and ``k``, which must be given. New
            key ``j`` is at position ``cache_seqlens + j``. Query ``i`` is at ``cache_seqlens + i``
            if the call is causal or has a window, else at ``cache_seqlens``. Padding counts.
        rotary_sin: ``(positions, R / 2)``.
        cache_seqlens: int32 ``(B,)`` or one number, the number of keys in each row before the call;
            ``None``: the capacity of the cache.
        cache_batch_idx: int32 ``(B,)``, the row of the cache that belongs to each row of q;
            ``None``: the first B, in order. Not with ``block_table``.
        cache_leftpad: int32 ``(B,)``, the index of the first key of each row.
        block_table: int32 ``(B, max_pages)``.
        num_splits: number of splits of the keys of each row; 0: chosen from shapes.
        return_softmax_lse: also return the lse, float32 ``(B, Hq, Sq)``, +inf in rows that attend
            no key.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_with_kv_cache`.

    Source: Dao et al., Flash-Decoding, https://pytorch.org/blog/flash-decoding.
    """
    shape(DENSE, q=q)
    check_new(k, v, rotary_cos, rotary_sin, cache_seqlens)
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx must be None with block_table, whose rows are those of q")
    caches = caches_of(q.shape[0], k_cache, v_cache, "block_table", block_table, cache_batch_idx)
    q, new = unit_stride(without_gradient(q)), new_keys(k, v, DENSE)
    lens = lengths("cache_seqlens", cache_seqlens, q.shape[0], caches.room, q.device)
    options = score_options(softmax_scale, causal, window_size, softcap)
    options |= {"alibi_slopes": alibi_slopes, "num_splits": count("num_splits", num_splits)}
    unbounded = caches.room, caches.room
    rotation = rotation_of(rotary_cos, rotary_sin, rotary_interleaved, options, unbounded)
    with_lse = flag("return_softmax_lse", return_softmax_lse)
    out, lse = attend_rows(
        q, caches, new, lens, cache_leftpad, rotation, None, options, with_lse
    )  # fmt: skip
    return (out, infinite_where_empty(lse)) if with_lse else out
