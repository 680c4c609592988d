"""Answer for the name "flash_attention_2", which other libraries ask for, on request.

Code under this name expects what FlashAttention does: a 2-D mask is padding, causality is aligned
at the last key, and the window is an argument if the mask does not contain it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from hf_integration import hooks
from hf_integration.attention import fa_ops_attention_forward
from hf_integration.masks import fa_ops_mask

_METHOD = "_check_and_adjust_attn_implementation"

_originals: dict[object, Callable] = {}  # what transformers had under the names


def take() -> None:
    """Register our functions under the names. Idempotent.

    Raises RuntimeError if this transformers release has no method that checks an implementation.
    """
    if _originals:
        return
    adjust = getattr(PreTrainedModel, _METHOD, None)
    if adjust is None:
        raise RuntimeError(f"this transformers release has no PreTrainedModel.{_METHOD}")
    _originals[_METHOD] = adjust
    setattr(PreTrainedModel, _METHOD, _unchecked(adjust))
    registered = AttentionInterface().valid_keys()
    for interface, function in (
        (AttentionInterface, attention_forward),
        (AttentionMaskInterface, fa_ops_mask),
    ):
        for name in hooks.FLASH_NAMES:
            if name in registered:
                _originals[interface, name] = interface().get(name)
                interface.register(name, function)
    hooks.names.update(hooks.FLASH_NAMES)


def give_back() -> None:
    """Restore what transformers had under the names. Idempotent."""
    for where, kept in _originals.items():
        if where == _METHOD:
            setattr(PreTrainedModel, _METHOD, kept)
        else:
            interface, name = where
            if kept is None:
                interface._global_mapping.pop(name, None)
            else:
                interface.register(name, kept)
    _originals.clear()
    hooks.names.difference_update(hooks.FLASH_NAMES)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """fa_ops_attention_forward with the masks of FlashAttention.

    Raises NotImplementedError for a window without causality that the mask does not contain.
    """
    is_padding = attention_mask is not None and attention_mask.dim() == 2
    is_packed = kwargs.get("cache") is not None or kwargs.get("cu_seq_lens_q") is not None
    if is_padding and attention_mask.shape[1] < key.shape[2]:  # a static cache
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
    if is_padding or (attention_mask is None and not is_packed):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = _mask(module, query, key, attention_mask, causal, sliding_window)
    return fa_ops_attention_forward(
        module, query, key, value, attention_mask, *args, is_causal=is_causal,
        sliding_window=sliding_window, **kwargs,
    )  # fmt: skip


def _mask(
    module: nn.Module, query: Tensor, key: Tensor, padding: Tensor | None, causal: bool,
    window: int | None,
) -> Tensor | None:  # fmt: skip
    """The mask of a call with padding (B, Sk) or none; None where SDPA's meaning is the same."""
    Sq, Sk = query.shape[2], key.shape[2]
    is_bounded = window is not None and window < Sk
    if padding is None and not is_bounded and not (causal and 1 < Sq < Sk):
        return None
    if is_bounded and not causal:
        raise NotImplementedError(f"sliding_window needs causality or a mask, got {window}")
    function = causal_mask_function if causal else bidirectional_mask_function
    return fa_ops_mask(
        batch_size=query.shape[0], q_length=Sq, kv_length=Sk, q_offset=Sk - Sq,
        mask_function=sliding_window_causal_mask_function(window) if is_bounded else function,
        local_size=window if is_bounded else None,
        attention_mask=None if padding is None else padding[:, -Sk:].bool(),
        device=query.device, config=module.config,
    )  # fmt: skip


def _unchecked(adjust: Callable) -> Callable:
    """The method that chooses an implementation, without the checks for flash-attn."""

    @functools.wraps(adjust)
    def wrapper(self, attn_implementation, is_init_check=False, *args, **kwargs):
        if attn_implementation in hooks.names and attn_implementation in hooks.FLASH_NAMES:
            return self.get_correct_attn_implementation(attn_implementation, is_init_check)
        return adjust(self, attn_implementation, is_init_check, *args, **kwargs)

    return wrapper
