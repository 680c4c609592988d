"""The functions that diffusers calls for the attention backends "fa_ops" and "fa_ops_8bit".

They have the arguments of diffusers' own backends, which selects what it passes by their names.
Query, key and value are (B, S, H, D), and positions are those of scaled_dot_product_attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import _templated_context_parallel_attention
from torch import Tensor
from transformers.utils import logging

import fa_ops
from fa_ops.tracing import is_compiling
from hf_integration.diffusers import key_masks, parallel

if TYPE_CHECKING:
    from diffusers import ParallelConfig

_logger = logging.get_logger(__name__)
Result = Tensor | tuple[Tensor, Tensor]


def fa_ops_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: ParallelConfig | None = None,
) -> Result:
    """Compute one attention call of a diffusers model.

    Args:
        query: ``(B, Sq, Hq, D)``.
        key: ``(B, Sk, Hkv, D)``.
        value: ``(B, Sk, Hkv, Dv)``.
        attn_mask: bool or float, ``(B, Sk)`` for keys, or broadcastable to ``(B, Hq, Sq, Sk)``.
        dropout_p: probability of dropping a softmax weight.
        is_causal: query ``i`` attends keys ``j <= i``, also where ``Sq`` and ``Sk`` differ.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``.
        enable_gqa: not needed; key heads may always be fewer than query heads.
        return_lse: also return the logarithm of the softmax's denominator, ``(B, Sq, Hq)``.
        _parallel_config: the sequence is distributed by diffusers' templates.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError: a mask with ``is_causal``; what ``parallel.check`` refuses.
        NotImplementedError: no backend can run the call.
    """
    if _parallel_config is not None:
        config = _parallel_config.context_parallel_config
        parallel.check(config, attn_mask, dropout_p, is_causal)
        return _templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=parallel.forward_op, backward_op=parallel.backward_op,
            _parallel_config=_parallel_config,
        )  # fmt: skip
    key, value, options = with_mask(query, key, value, attn_mask, is_causal)
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    result = fa_ops.attention(
        *heads_first, dropout_p=dropout_p, scale=scale, return_lse=return_lse, **options
    )
    return _tokens_first(result)


def fa_ops_8bit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Result:
    """Compute one attention call with 8-bit products, as :func:`fa_ops_attention`.

    Calls whose mask is more than a length or a range of keys for each row have 16-bit products,
    with a warning. Such a mask is recognised where the host can read it without waiting.

    Raises ValueError where a gradient would be recorded, and for dropout.
    """
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if dropout_p or is_trained:
        raise ValueError(
            "the attention backend 'fa_ops_8bit' is for inference: run the model under "
            "torch.no_grad(), or train with 'fa_ops'"
        )
    seen_key, seen_value, options = with_mask(query, key, value, attn_mask, is_causal)
    if "attn_mask" in options:
        if not is_compiling():
            _logger.warning_once(
                "a mask that is not known to be one run of keys: such calls of 'fa_ops_8bit' have "
                "16-bit products."
            )
        return fa_ops_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, return_lse
        )
    heads_first = (x.transpose(1, 2) for x in (query, seen_key, seen_value))
    result = fa_ops.quantized_attention(*heads_first, scale=scale, return_lse=return_lse, **options)
    return _tokens_first(result)


def with_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The keys and values that are attended, and the options that express mask and causality.

    Tensors are (B, S, H, D). fa_ops aligns causality at the last key, and SDPA at the first one.
    """
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a Tensor or None, got {type(mask).__name__}")
    if not is_causal:
        return key, value, key_masks.arguments(mask, key)
    if mask is not None:
        raise ValueError("attn_mask must be None with is_causal=True, as in SDPA")
    Sq, Sk = query.shape[1], key.shape[1]
    if Sq > Sk:
        return key, value, {"window": (None, Sq - Sk)}
    return key[:, :Sq], value[:, :Sq], {"is_causal": True}


def _tokens_first(result: Result) -> Result:
    """(B, S, H, ...) for (B, H, S, ...)."""
    if isinstance(result, Tensor):
        return result.transpose(1, 2)
    out, lse = result
    return out.transpose(1, 2), lse.transpose(1, 2)
