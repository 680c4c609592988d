"""FlashAttention 3's functions without a cache: dense, packed, and the merging of splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.python_types import checked_packing, need_tensor
from fa_ops.compat import flash
from fa_ops.compat.flash import (
    DENSE,
    PACKED,
    Window,
    buffers,
    chunk_ranges,
    count,
    flag,
    heads_first,
    of_sequences,
    scalar,
    score_options,
    shape,
    unit_stride,
    without_gradient,
)
from fa_ops.compat.flash_attn_interface import products
from fa_ops.compat.flash_attn_interface.products import Scales, attend_parts, check_unused, chunk_of
from fa_ops.functions.attention import attention, attention_varlen, merge_states

# flash_attn_func and flash_attn_qkvpacked_func of FlashAttention 3.

# Tensor, or tuple[Tensor, Tensor] on request: users of the original have no types
Result = Any


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q ``(B, Sq, Hq, D)`` over k ``(B, Sk, Hkv, D)`` and v ``(B, Sk, Hkv, Dv)``.

    Args:
        softmax_scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        causal: causal mask, aligned at the bottom right.
        qv: the shape of out, queries of the values: scores are ``scale * (q . k + qv . v)`` and
            the default scale ``1 / sqrt(D + Dv)``; has no backward pass.
        q_descale: float32 ``(B, Hkv)``, the factors of fp8 queries by sequence and key head, or
            ``None``: 1. fp8 inputs have a result in bfloat16; their backward pass raises. With
            ``qv`` the products are in bfloat16, of the same numbers.
        k_descale: the same of fp8 keys.
        v_descale: the same of fp8 products.
        window_size: number of visible keys on either side of a query's own position; negative:
            unbounded.
        attention_chunk: a query at position p attends only keys of its chunk, those from
            ``p // attention_chunk * attention_chunk`` on; 0: all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        num_splits: no result depends on it, as on ``pack_gqa`` and ``sm_margin``; all are ignored.
        deterministic: whether the backward pass is bitwise repeatable.
        return_attn_probs: also return the lse, float32 ``(B, Hq, Sq)``, -inf in rows that attend
            no key.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention`.

    Source: Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.
    """
    shape(DENSE, q=q, k=k, v=v)
    scales = Scales(q_descale, k_descale, v_descale)
    eight_bit = scales.options(q, q.shape[0], (q.shape[2], k.shape[2]))
    check_unused(num_splits, pack_gqa, sm_margin)
    options = score_options(softmax_scale, causal, window_size, softcap)
    chunk = chunk_of(attention_chunk)
    deterministic = flag("deterministic", deterministic)
    with_lse = flag("return_attn_probs", return_attn_probs)
    inputs = q, k, v, qv, *scales
    if eight_bit:
        q, k, v = map(without_gradient, (q, k, v))
    if qv is not None and eight_bit:
        rows = torch.arange(q.shape[0], device=q.device)[:, None]
        wide = products.WidenedQueries(q, without_gradient(qv), {"k": k, "v": v}, eight_bit, rows)
        products.say(3, qv=qv)
        out, lse = products.batch(wide.q, k, v, wide.qv, chunk, options)
        result = wide.result(out), lse
    elif qv is not None:
        result = products.batch(q, k, v, qv, chunk, options)
    else:
        if chunk:
            options["key_ranges"] = chunk_ranges(q.shape[1], k.shape[1], chunk, q.device)
        options |= eight_bit or {"deterministic": deterministic}
        options["return_lse"] = with_lse
        q, k, v = map(heads_first, (q, k, v))
        result = attend_parts(lambda part: attention(q, k, part, **options), v)
        result = (result[0].transpose(1, 2), result[1]) if with_lse else (result.transpose(1, 2),)
    if eight_bit:
        result = products.without_backward(inputs, result)
    return result if with_lse else result[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of one tensor.

    Args:
        qkv: ``(B, S, 3, H, D)``, or ``(B, S, Hq + 2 Hkv, D)`` with ``num_heads_q``.
        num_heads_q: ``Hq``.

    Raises:
        ValueError: another shape.
    """
    if num_heads_q is not None:
        num_heads_q = count("num_heads_q", num_heads_q, "an int or None")
    if need_tensor("qkv", qkv).dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads, heads], 2)
    else:
        raise ValueError(
            "qkv must have shape (B, S, 3, H, D), or (B, S, Hq + 2 Hkv, D) with num_heads_q, got "
            f"{tuple(qkv.shape)} and {num_heads_q}: pass torch.stack([q, k, v], 2)"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


# flash_attn_varlen_func of FlashAttention 3.


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention within packed sequences.

    Args:
        q: ``(Tq, Hq, D)``.
        k: ``(Tk, Hkv, D)``.
        v: ``(Tk, Hkv, Dv)``.
        cu_seqlens_q: int32 ``(B + 1,)``, the cumulative lengths of the sequences of queries.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: upper bound on the number of queries of a sequence.
        max_seqlen_k: the same for keys.
        seqused_q: int32 ``(B,)``: only the first queries of a sequence are used, and the others
            give 0; ``None``: all.
        seqused_k: the same for keys.
        softmax_scale: as in :func:`flash_attn_func`, as all arguments that are not here.
        return_attn_probs: also return the lse, float32 ``(Hq, Tq)``, -inf in rows that attend no
            key.

    Returns:
        out ``(Tq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_varlen`.

    Source: Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.
    """
    shape(PACKED, q=q, k=k, v=v)
    scales = Scales(q_descale, k_descale, v_descale)
    check_unused(num_splits, pack_gqa, sm_margin)
    given = cu_seqlens_q, cu_seqlens_k, scalar(max_seqlen_q), scalar(max_seqlen_k)
    tokens = q.shape[0], k.shape[0]
    chunk = chunk_of(attention_chunk)
    packing, kv_lens = packed(given, seqused_q, seqused_k, chunk, tokens)
    options = score_options(softmax_scale, causal, window_size, softcap)
    deterministic = flag("deterministic", deterministic)
    with_lse = flag("return_attn_probs", return_attn_probs)
    eight_bit = scales.options(q, cu_seqlens_q.numel() - 1, (q.shape[1], k.shape[1]))
    if eight_bit:
        wide = (
            products.rows_of_tokens(cu_seqlens_q, q.shape[0]) if qv is not None or chunk else None
        )
        if seqused_q is not None and wide is None:
            eight_bit = products.of_used_parts(eight_bit)
        given = packing, kv_lens, options, with_lse
        result = _attend_numbers(q, k, v, qv, eight_bit, wide, *given)
        result = products.without_backward((q, k, v, qv, *scales), result)
    else:
        if qv is None:
            options["deterministic"] = deterministic
        result = _attend(q, k, v, qv, packing, kv_lens, options, with_lse)
    return result if with_lse else result[0]


def _attend(q, k, v, qv, packing, kv_lens, options, with_lse) -> tuple[Tensor, ...]:
    """out, with or without lse."""
    if qv is not None:
        return products.packed(q, k, v, qv, packing, kv_lens, options)
    options = options | {"kv_lens": kv_lens, "return_lse": with_lse}
    q, k, v = map(unit_stride, (q, k, v))
    result = attend_parts(lambda part: attention_varlen(q, k, part, *packing, **options), v)
    return result if with_lse else (result,)


def _attend_numbers(q, k, v, qv, scales, rows, *given) -> tuple[Tensor, ...]:
    """The same of e4m3 tensors; with the rows of tokens in `scales` by products in 16 bits."""
    q, k, v = map(without_gradient, (q, k, v))
    if rows is None:
        packing, kv_lens, options, with_lse = given
        return _attend(q, k, v, None, packing, kv_lens, options | scales, with_lse)
    qv = None if qv is None else without_gradient(qv)
    wide = products.WidenedQueries(q, qv, {"k": k, "v": v}, scales, rows)
    products.say(4, qv=qv, attention_chunk=True if qv is None else None)
    if qv is None:  # pages may stay in 8 bits
        k, v = k.to(products.WIDE), v.to(products.WIDE)
    out, *lse = _attend(wide.q, k, v, wide.qv, *given)
    return wide.result(out), *lse


def packed(
    given: tuple, seqused_q: Tensor | None, seqused_k: Tensor | None, chunk: int,
    tokens: tuple[int, int],
) -> tuple[flash.Borders, Tensor | None]:  # fmt: skip
    """The packing of the used parts and chunks of sequences, and their numbers of keys.

    `tokens` are the numbers of queries and keys.
    """
    packing = checked_packing(*given)
    ends_q, ends_k, longest_q, longest_k = packing
    sequences = ends_q.numel() - 1
    of_sequences("seqused_q", seqused_q, sequences)
    of_sequences("seqused_k", seqused_k, sequences)
    if seqused_q is None and not chunk:
        return packing, seqused_k
    flash.check_packing(packing, tokens)
    parts = flash.used_parts(ends_q, ends_k, seqused_q, seqused_k)
    flash.check_longest("max_seqlen_q", longest_q, parts[1])
    flash.check_longest("max_seqlen_k", longest_k, parts[3])
    if not sequences:
        return packing, seqused_k
    if chunk:
        parts = flash.chunk_parts(parts, chunk, tokens[0] if longest_q is None else longest_q)
    return flash.packing_of(parts, longest_q, longest_k)


# flash_attn_combine: results over parts of the keys become the result over all of them.

_FEATURES = 256  # of one call: what all backends take


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint sets of keys, as :func:`fa_ops.merge_states`.

    Args:
        out_partial: ``(N, B, S, H, Dv)`` or ``(N, T, H, Dv)``, float32.
        lse_partial: ``(N, B, S, H)`` or ``(N, T, H)``, float32.
        out: where the result is written.
        out_dtype: the dtype of the result; ``None``: that of ``out_partial``.

    Returns:
        out ``(B, S, H, Dv)`` or ``(T, H, Dv)``, and the lse, of its shape without ``Dv``.

    Raises:
        ValueError, TypeError: as :func:`fa_ops.merge_states`.
    """
    need_tensor("lse_partial", lse_partial)
    if not isinstance(out_dtype, torch.dtype | None):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {out_dtype!r}")
    need_tensor("out_partial", out_partial)
    checks.states(out_partial, lse_partial, ("out_partial", "lse_partial"))
    buffers(out=(out, out_partial.shape[1:]))
    parts = out_partial.split(_FEATURES, -1)
    merged = [merge_states(part, lse_partial) for part in parts]
    found = torch.cat([part for part, _ in merged], -1) if len(merged) > 1 else merged[0][0]
    found = found if out_dtype is None else found.to(out_dtype)
    return (found if out is None else out.copy_(found)), merged[0][1]
