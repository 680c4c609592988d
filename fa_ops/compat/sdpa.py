"""Run `F.scaled_dot_product_attention` on the kernels of fa_ops instead of torch's flash kernel:

    import fa_ops.compat.sdpa
    torch.nn.attention.activate_flash_attention_impl("fa_ops")
    ...
    torch.nn.attention.restore_flash_attention_impl()

Importing the module only registers the name. While it is active, calls that torch dispatches to its
flash kernel on CUDA (no mask, 16 bits, allowed by `sdpa_kernel`) run `fa::attention`, in eager mode
and under `torch.compile`, forward and backward. Dropout and causal calls with unequal lengths raise
NotImplementedError.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from fa_ops.ops import library  # noqa: F401  (defines the operators)

NAME = "fa_ops"
FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = f"{FORWARD}_backward"


class Handle:
    """The registration of the kernels, which torch keeps while they are active."""

    def __init__(self, key: str) -> None:
        self._library: Library | None = Library("aten", "IMPL", key)
        self._library.impl(FORWARD, forward, key, allow_override=True)
        self._library.impl(BACKWARD, backward, key, allow_override=True)

    def remove(self) -> None:
        """Restore torch's own kernels."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def activate(key: str = "CUDA") -> Handle:
    """Register the kernels; called by `torch.nn.attention.activate_flash_attention_impl`."""
    return Handle(key)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """aten::_scaled_dot_product_flash_attention: out in the memory order of query, lse, and values
    for the backward pass."""
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p must be 0 where fa_ops replaces torch's flash kernel, got {dropout_p}"
        )
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask must be False: weights are never stored")
    Sq, Sk = query.shape[2], key.shape[2]
    if is_causal and Sq != Sk:
        raise NotImplementedError(
            f"is_causal needs as many queries as keys, because SDPA aligns at the top left, got "
            f"{Sq} and {Sk}"
        )
    with torch.no_grad():
        out, lse = torch.ops.fa.attention_with_lse(
            query, key, value, is_causal=is_causal, scale=scale
        )
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        offset = torch.zeros((), dtype=torch.uint64, device=query.device)
        return _in_layout_of(query, out), lse, None, None, Sq, Sk, seed, offset, query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_backward: gradients of query, key and value."""
    with torch.no_grad():
        grads = torch.ops.fa.attention_backward(
            grad_out, None, query, key, value, out, logsumexp, is_causal=is_causal, scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads))


def _in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """x with the strides that compiled code expects."""
    expected = torch.empty_like(like, device="meta").stride()
    if x.stride() == expected:
        return x
    return torch.empty_strided(x.shape, expected, dtype=x.dtype, device=x.device).copy_(x)


register_flash_attention_impl(NAME, register_fn=activate)
