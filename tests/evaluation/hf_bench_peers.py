"""FlashAttention 3 from the wheel `fa3_fwd`, which has only the forward pass, for transformers."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.utils import is_flash_attn_3_available

from hf_integration.encodings import PerTensorCache

FA3_FORWARD = "fa3_fwd"
_MODULE = "fa3_fwd_interface"
PARTS = ("prefill", "memory")  # it does not support partly filled caches

_memo = PerTensorCache()


def register() -> str | None:
    """Register it if it can be imported and transformers' flash_attention_3 is not available.

    Returns the name to use instead of "flash_attention_3", or None.
    """
    if is_flash_attn_3_available() or importlib.util.find_spec(_MODULE) is None:
        return None
    AttentionInterface.register(FA3_FORWARD, forward)
    AttentionMaskInterface.register(FA3_FORWARD, flash_attention_mask)
    return FA3_FORWARD


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention, in the layout of the kernel, which needs no copy.

    Tokens that `attention_mask` (B, S) excludes are removed; the indices of the others are computed
    once in a forward pass.
    """
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("the wheel fa3_fwd has no backward pass")
    if query.shape[2] != key.shape[2] or dropout:
        raise NotImplementedError("fa3_fwd is measured in a prefill without a longer cache")
    kernels = importlib.import_module(_MODULE)
    options = {"softmax_scale": scaling, "causal": True}
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if attention_mask is None:
        return _first(kernels.flash_attn_func(q, k, v, **options)), None
    tokens, ends, longest = _memo.get(attention_mask, module, lambda: _tokens(attention_mask))
    packed = (t.flatten(0, 1)[tokens] for t in (q, k, v))
    found = _first(kernels.flash_attn_varlen_func(*packed, ends, ends, longest, longest, **options))
    out = found.new_zeros((q.shape[0] * q.shape[1], *found.shape[1:]))
    out[tokens] = found
    return out.unflatten(0, q.shape[:2]), None


def _tokens(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """The indices of the kept tokens, the cumulative lengths, and the longest length."""
    lengths = mask.sum(1, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return mask.flatten().nonzero()[:, 0], ends, int(lengths.max())


def _first(result: Tensor | tuple) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
