"""flash_attn_func and flash_attn_qkvpacked_func of FlashAttention 3."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.api import attention
from fa_ops.argument_types import need_tensor
from fa_ops.compat.flash.arguments import (
    DENSE,
    Window,
    count,
    flag,
    heads_first,
    score_options,
    shape,
)
from fa_ops.compat.flash.cache import without_gradient
from fa_ops.compat.flash.segments import chunk_ranges
from fa_ops.compat.flash_attn_3 import numbers
from fa_ops.compat.flash_attn_3 import qv as values
from fa_ops.compat.flash_attn_3.arguments import Scales, check_unused, chunk_of
from fa_ops.compat.flash_attn_3.wide_values import attend_parts

Result = Tensor | tuple[Tensor, Tensor]


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
        v_descale: the same of fp8 values.
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
        wide = numbers.Widened(q, without_gradient(qv), {"k": k, "v": v}, eight_bit, rows)
        numbers.say(3, qv=qv)
        out, lse = values.batch(wide.q, k, v, wide.qv, chunk, options)
        result = wide.result(out), lse
    elif qv is not None:
        result = values.batch(q, k, v, qv, chunk, options)
    else:
        if chunk:
            options["key_ranges"] = chunk_ranges(q.shape[1], k.shape[1], chunk, q.device)
        options |= eight_bit or {"deterministic": deterministic}
        options["return_lse"] = with_lse
        q, k, v = map(heads_first, (q, k, v))
        result = attend_parts(lambda part: attention(q, k, part, **options), v)
        result = (result[0].transpose(1, 2), result[1]) if with_lse else (result.transpose(1, 2),)
    if eight_bit:
        result = numbers.without_backward(inputs, result)
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
            f"{tuple(qkv.shape)} and {num_heads_q}"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip
