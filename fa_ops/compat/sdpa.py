"""Run `F.scaled_dot_product_attention` on the kernels of fa_ops instead of torch's flash kernel:

    import fa_ops.compat.sdpa
    torch.nn.attention.activate_flash_attention_impl("fa_ops")
    ...
    torch.nn.attention.restore_flash_attention_impl()

Importing the module only registers the name. While it is active, calls that torch dispatches to its
flash kernel on CUDA (no mask, 16 bits, allowed by `sdpa_kernel`) run `fa::attention`, in eager mode
and under `torch.compile`, forward and backward. So do jagged NestedTensors and
`torch.nn.attention.varlen.varlen_attn`, with `fa::attention_varlen`. Dropout, the debug mask, and
what no backend of fa_ops supports go to the kernel that was there before, with a warning, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import DispatchKeySet, Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from fa_ops.call.options import dtype_name
from fa_ops.compat.flash import (
    attend_pages,
    buffers,
    finite_or_empty,
    infinite_where_empty,
    unit_stride,
)
from fa_ops.ops import dense, varlen

# aten's five flash-attention operators on those of fa_ops.
#
# The causal mask of all of them is aligned at the bottom right, as in FlashAttention since 2.1:
# `F.scaled_dot_product_attention`, which aligns at the top left, keeps causal calls with unequal
# lengths from them, and `torch.nn.attention.bias.causal_lower_right` passes them here.

Backward = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def sdpa_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention of (B, H, S, D): out in the memory order of query,
    lse, and values for the backward pass."""
    _refuse(dropout_p, return_debug_mask)
    inputs = map(unit_stride, (query, key, value))
    out, lse = dense.WITH_LSE(*inputs, is_causal=is_causal, scale=scale)
    lse = _lse_of_torch(lse, query, key, is_causal)
    Sq, Sk = query.shape[2], key.shape[2]
    return _in_layout_of(query, out), lse, None, None, Sq, Sk, *_nothing(query)


@torch.no_grad()
def sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> Backward:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward: gradients of query, key and value."""
    _refuse(dropout_p)
    saved = map(unit_stride, (grad_out, query, key, value, out))
    grads = _dense_gradients(*saved, logsumexp, is_causal=is_causal, scale=scale)
    return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads))


@torch.no_grad()
def forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple:  # fmt: skip
    """aten::_flash_attention_forward of rows (B, S, H, D), packed tokens (T, H, D), or packed
    tokens over pages."""
    _refuse(dropout_p, return_debug_mask)
    if block_table is None:
        _need_both(cum_seq_q, cum_seq_k)
    else:
        _need_both(
            cum_seq_q, cum_seq_k if seqused_k is None else seqused_k, "cum_seq_k (or seqused_k)"
        )
        if cum_seq_q is None:
            raise ValueError("cum_seq_q must be given with block_table, got None")
    window = _window(window_size_left, window_size_right)
    options = {"scale": scale, "alibi_slopes": alibi_slopes}
    if block_table is not None:
        lens = cum_seq_k.diff() if seqused_k is None else seqused_k
        window = None if window == (-1, -1) else window
        options |= {"is_causal": is_causal, "window": window, "num_splits": num_splits or 0}
        out, lse = attend_pages(
            *(x.detach() for x in (query, key, value)), lens, block_table, cum_seq_q, max_q, options
        )
        return _in_layout_of(query, out), infinite_where_empty(lse), *_nothing(query)
    options |= {"kv_lens": seqused_k, "window_left": window[0], "window_right": window[1]}
    inputs = map(unit_stride, (query, key, value))
    if cum_seq_q is None:
        inputs = (x.transpose(1, 2) for x in inputs)
        out, lse = dense.WITH_LSE(*inputs, is_causal=is_causal, **options)
        out = out.transpose(1, 2)
    else:
        packing = cum_seq_q, cum_seq_k, max_q, max_k
        out, lse = varlen.VARLEN(*inputs, *packing, 0.0, is_causal, **options)
    return _in_layout_of(query, out), infinite_where_empty(lse), *_nothing(query)


@torch.no_grad()
def forward_into(out: Tensor, *args, **options) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: forward, written into out."""
    query, _, value = args[:3]
    buffers(out=(out, (*query.shape[:-1], value.shape[-1])))
    if out.dtype != query.dtype:
        raise TypeError(
            f"out must be {dtype_name(query.dtype)} as query, got {dtype_name(out.dtype)}: pass "
            "out.to(query.dtype)"
        )
    found, lse, *_ = forward(*args, **options)
    out.copy_(found)
    return lse


@torch.no_grad()
def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> Backward:  # fmt: skip
    """aten::_flash_attention_backward of rows or packed tokens."""
    _refuse(dropout_p)
    _need_both(cum_seq_q, cum_seq_k)
    left, right = _window(window_size_left, window_size_right)
    options = {"scale": scale, "window_left": left, "window_right": right}
    saved = map(unit_stride, (grad_out, query, key, value, out))
    if cum_seq_q is None:
        saved = (x.transpose(1, 2) for x in saved)
        grads = _dense_gradients(*saved, logsumexp, is_causal=is_causal, **options)
        grads = (grad.transpose(1, 2) for grad in grads)
    else:
        packing = cum_seq_q, cum_seq_k, max_q, max_k
        grad_out, *saved = saved
        grads = varlen.BACKWARD(
            grad_out, None, *saved, finite_or_empty(logsumexp), *packing, 0.0, is_causal, **options,
            deterministic=_deterministic(),
        )  # fmt: skip
    return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads))


KERNELS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_into,
    "_flash_attention_backward": backward,
}


def _refuse(dropout_p: float, return_debug_mask: bool = False) -> None:
    """Raise NotImplementedError for calls whose random numbers or weights torch's kernel makes."""
    if dropout_p:
        raise NotImplementedError(
            f"dropout draws the weights that torch's kernel drops, got dropout_p {dropout_p}"
        )
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask must be False: weights are never stored")


def _need_both(cum_seq_q: Tensor | None, other: Tensor | None, name: str = "cum_seq_k") -> None:
    if (cum_seq_q is None) != (other is None):
        missing = "cum_seq_q" if cum_seq_q is None else name
        raise ValueError(f"cum_seq_q and {name} must be given together, got no {missing}")


def _dense_gradients(grad_out, query, key, value, out, lse, **options) -> tuple[Tensor, ...]:
    """Gradients of (B, H, S, D)."""
    lse = lse if query.shape[2] <= key.shape[2] else finite_or_empty(lse)
    return dense.BACKWARD(
        grad_out, None, query, key, value, out, lse, deterministic=_deterministic(), **options
    )[:3]


def _deterministic() -> bool:
    """Whether gradients must be deterministic; warns as torch's kernel if they only should be."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(
            "Flash Attention defaults to a non-deterministic algorithm. "
            "torch.use_deterministic_algorithms(True, warn_only=False) makes it deterministic.",
            stacklevel=2,
        )
        return False
    return True


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    """The sides of a window, of which every negative one is unbounded, as in torch's kernel."""
    return tuple(-1 if side is None else max(side, -1) for side in (left, right))


def _lse_of_torch(lse: Tensor, query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """The lse with +inf in rows without keys, if there can be any."""
    no_keys = key.shape[2] == 0 or (is_causal and query.shape[2] > key.shape[2])
    return infinite_where_empty(lse) if no_keys else lse


def _nothing(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of torch's random numbers, which are not used, and a debug mask."""
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return seed, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """x with the strides that compiled code expects."""
    expected = torch.empty_like(like, device="meta").stride()
    if x.stride() == expected:
        return x
    return torch.empty_strided(x.shape, expected, dtype=x.dtype, device=x.device).copy_(x)


# Kernels of aten operators that hand what they cannot do to the kernel that was there before.

_REFUSALS = (NotImplementedError, ValueError, TypeError)
_said: set[tuple[str, str]] = set()


class Replacement:
    """A kernel in place of another one.

    Args:
        operator: an operator's name without its namespace, aten.
        key: the dispatch key, "CUDA" or "CPU".
        kernel: raises NotImplementedError, ValueError or TypeError for what it cannot do, before
            it computes or writes anything.
    """

    def __init__(self, operator: str, key: str, kernel: Callable) -> None:
        self._operator, self._kernel = operator, kernel
        self._before = None
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key):
            self._before = torch.library.get_kernel(f"aten::{operator}", key)

    def __call__(self, keyset: DispatchKeySet, *args, **options):
        """Run the kernel, or else the one before it; raises only where there was none."""
        try:
            return self._kernel(*args, **options)
        except _REFUSALS as error:
            if self._before is None:
                raise
            self._say(error)
        return self._before.call_boxed(keyset, *args, **options)

    def _say(self, error: Exception) -> None:
        """Warn once of each kind of call that another kernel runs."""
        kind = str(error).partition(",")[0]
        if (self._operator, kind) not in _said:
            _said.add((self._operator, kind))
            warnings.warn(f"torch's own kernel runs {self._operator}: {error}", stacklevel=2)


# Their registration.

NAME = "fa_ops"


class Handle:
    """The registration of the kernels, which torch keeps while they are active."""

    def __init__(self, key: str) -> None:
        replacements = {
            name: Replacement(name, key, kernel)
            for name, kernel in KERNELS.items()
            if hasattr(torch.ops.aten, name)  # the one in place is of a later torch than 2.11
        }
        self._library: Library | None = Library("aten", "IMPL", key)
        for name, replacement in replacements.items():
            self._library.impl(name, replacement, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Restore the kernels that were there before."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def activate(key: str = "CUDA") -> Handle:
    """Register the kernels; called by `torch.nn.attention.activate_flash_attention_impl`."""
    return Handle(key)


register_flash_attention_impl(NAME, register_fn=activate)
