"""The forward and backward pass of one part of a distributed sequence, for diffusers' templates.

A template distributes the sequence (ring, Ulysses or both) and calls the two functions inside an
autograd function of its own, with tensors (B, S, H, D) and lse (B, S, H).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_integration.diffusers import key_masks

if TYPE_CHECKING:
    from diffusers import ContextParallelConfig

_attend, _differentiate = torch.ops.fa.attention_with_lse, torch.ops.fa.attention_backward


def check(
    config: ContextParallelConfig, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    """Raise ValueError for arguments that the templates would treat wrongly.

    Causality would be that within each block of keys, dropout would drop the same weights of each
    block, and a ring would apply the mask of this process to the keys of all others.
    """
    if is_causal:
        raise ValueError("is_causal must be False with context parallelism, got True")
    if dropout_p:
        raise ValueError(f"dropout_p must be 0 with context parallelism, got {dropout_p}")
    if attn_mask is None:
        return
    if config.ring_degree > 1:
        raise ValueError(
            f"attn_mask must be None with ring_degree {config.ring_degree}: use ulysses_degree"
        )
    if attn_mask.requires_grad:
        raise ValueError("attn_mask must not require grad with context parallelism")


def forward_op(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries to a block of keys: out, or (out, lse)."""
    options = {"scale": scale, **key_masks.arguments(attn_mask, key)}
    out, lse = _attend(*_transposed(query, key, value), **options)
    out, lse = _transposed(out, lse)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.fa_ops_options = options
    return (out, lse) if return_lse else out


def backward_op(
    ctx: Any,
    grad_out: Tensor,
    *args: object,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    A ring passes each block of keys with the out and lse of all blocks, from which the weights
    within the block follow. What is not passed is what `forward_op` saved.
    """
    given = query, key, value, out, lse
    query, key, value, out, lse = (
        saved if tensor is None else tensor for tensor, saved in zip(given, ctx.saved_tensors)
    )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    tensors = _transposed(grad_out.contiguous(), query, key, value, out)
    lse = lse.to(wide).transpose(1, 2).contiguous()
    grads = _differentiate(tensors[0], None, *tensors[1:], lse, **ctx.fa_ops_options)
    return _transposed(*grads[:3])


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)
