"""`F.scaled_dot_product_attention` by this package's kernels where torch takes its flash kernel:

    import fa_ops.compat.sdpa
    torch.nn.attention.activate_flash_attention_impl("fa_ops")
    ...
    torch.nn.attention.restore_flash_attention_impl()

The import makes the name known and changes nothing else. When it is activated, what torch decides
to give to its flash kernel on CUDA (no mask, 16 bits, and as `sdpa_kernel` allows) goes to
`fa::attention`, in eager mode and under `torch.compile`, forward and backward. What the operator
does not have there, dropout and causal calls of unequal lengths, raises NotImplementedError.
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
    """What torch keeps while the kernels are active."""

    def __init__(self, key: str) -> None:
        self._library: Library | None = Library("aten", "IMPL", key)
        self._library.impl(FORWARD, forward, key, allow_override=True)
        self._library.impl(BACKWARD, backward, key, allow_override=True)

    def remove(self) -> None:
        """Give torch its own kernels back."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def activate(key: str = "CUDA") -> Handle:
    """What `torch.nn.attention.activate_flash_attention_impl` calls."""
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
    """aten::_scaled_dot_product_flash_attention: out as query lies in memory, the lse, and what the
    backward pass is given again."""
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p must be 0 where fa_ops stands for torch's flash kernel, got {dropout_p}"
        )
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask must be False: weights are never stored")
    Sq, Sk = query.shape[2], key.shape[2]
    if is_causal and Sq != Sk:
        raise NotImplementedError(
            f"is_causal needs as many queries as keys, as SDPA aligns at the top left, got {Sq} "
            f"and {Sk}"
        )
    with torch.no_grad():
        out, lse = torch.ops.fa.attention_with_lse(
            query, key, value, is_causal=is_causal, scale=scale
        )
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        offset = torch.zeros((), dtype=torch.uint64, device=query.device)
        return _as(query, out), lse, None, None, Sq, Sk, seed, offset, query.new_empty(0)


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
    """aten::_scaled_dot_product_flash_attention_backward, of the same."""
    with torch.no_grad():
        grads = torch.ops.fa.attention_backward(
            grad_out, None, query, key, value, out, logsumexp, is_causal=is_causal, scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return tuple(_as(x, grad) for x, grad in zip((query, key, value), grads))


def _as(like: Tensor, x: Tensor) -> Tensor:
    """In the memory order that compiled code is told to expect."""
    expected = torch.empty_like(like, device="meta").stride()
    if x.stride() == expected:
        return x
    return torch.empty_strided(x.shape, expected, dtype=x.dtype, device=x.device).copy_(x)


register_flash_attention_impl(NAME, register_fn=activate)
