"""flash_attn_varlen_func and its packed forms: attention of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.api import attention_varlen, dropout_seed
from fa_ops.argument_types import checked_packing
from fa_ops.compat.flash.arguments import (
    PACKED,
    Window,
    check_list,
    flag,
    infinite_where_empty,
    need_int32,
    parts,
    scalar,
    shape,
    unit_stride,
)
from fa_ops.compat.flash.paged import attend_pages
from fa_ops.compat.flash.weights import signed_weights
from fa_ops.compat.flash_attn.dense import Result, keywords_of, options_of
from fa_ops.ops import varlen


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
    out, lse = seeded(*tensors, packing, None, seed, options)
    return out, lse, weights(q, k, packing, None, seed, options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor ``(Tk, 2, Hkv, D)``."""
    k, v = parts("kv", kv, 2, "(T, 2, H, D)")
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args, **options
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
    packing = checked_packing(*packing)
    shape("(B, max_pages)", block_table=table)
    need_int32("block_table", table)
    check_list("cu_seqlens_k", packing.cu_seqlens_k)
    lens = packing.cu_seqlens_k.diff() if kv_lens is None else kv_lens
    names = "scale", "softcap", "alibi_slopes", "is_causal", "window"
    options = {name: options[name] for name in names}
    out, lse = attend_pages(
        q, k, v, lens, table, packing.cu_seqlens_q, packing.max_seqlen_q, options
    )
    return out, infinite_where_empty(lse)


def seeded(
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
