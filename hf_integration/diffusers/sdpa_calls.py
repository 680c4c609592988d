"""Answer the SDPA calls of models whose processors do not ask diffusers for a backend.

The processors of Stable Diffusion, SDXL, Stable Diffusion 3, CogVideoX and others call
`F.scaled_dot_product_attention` themselves, so that no backend of diffusers has an effect on them.
In the modules of such processors, `F` becomes a copy of torch.nn.functional in which this function
runs fa_ops while "fa_ops" is the active backend.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch.nn.functional
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn
from transformers.utils import logging

from fa_ops.call.options import MAX_HEAD_DIM, dtype_name
from fa_ops.tracing import is_compiling
from hf_integration.diffusers.attention import fa_ops_8bit_attention, fa_ops_attention
from hf_integration.hooks import EIGHT_BIT, NAME

_logger = logging.get_logger(__name__)
_MAX_SINGLE_DIM = (
    256  # in float32 wider heads are slow without tf32: a kernel has few queries a tile
)
_functions = {NAME: fa_ops_attention, EIGHT_BIT: fa_ops_8bit_attention}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA by the active backend of diffusers if that is ours, and by torch if it is not.

    torch also computes calls of tensors that do not have four dimensions, and on a GPU those with
    head dimensions that no kernel has, or none that is fast, as in the attention of an autoencoder
    in float32, which has one head.
    """
    attend = _functions.get(_AttentionBackendRegistry._active_backend.value)
    if attend is None or query.dim() != 4 or _is_too_wide(query, value):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask[None]  # (Sq, Sk), which diffusers' backends would take for (B, Sk)
    tokens_first = (x.transpose(1, 2) for x in (query, key, value))
    out = attend(*tokens_first, attn_mask, dropout_p, is_causal, scale)
    return out.transpose(1, 2)


def _is_too_wide(query: Tensor, value: Tensor) -> bool:
    widest = max(query.shape[-1], value.shape[-1])
    limit = _MAX_SINGLE_DIM if query.dtype == torch.float32 else MAX_HEAD_DIM
    if not query.is_cuda or widest <= limit:
        return False
    if not is_compiling():
        _logger.warning_once(
            f"no fast GPU kernel of fa_ops has head dimension {widest} in "
            f"{dtype_name(query.dtype)}: such calls of scaled_dot_product_attention run in torch."
        )
    return True


def install(module: ModuleType) -> None:
    """Replace `F` in a module of diffusers. Idempotent."""
    if getattr(module, "F", None) is torch.nn.functional:
        module.F = _functional


def is_installed(module: ModuleType) -> bool:
    """Whether the SDPA calls of a module are answered."""
    return getattr(module, "F", None) is _functional


def modules_of(model: nn.Module) -> set[ModuleType]:
    """The modules with the code of a model's attention processors."""
    layers = (layer for layer in model.modules() if getattr(layer, "processor", None) is not None)
    return {sys.modules[type(layer.processor).__module__] for layer in layers}


_functional = ModuleType(__name__ + ".functional", torch.nn.functional.__doc__)
_functional.__dict__.update(
    {name: value for name, value in vars(torch.nn.functional).items() if name[:2] != "__"}
)
_functional.scaled_dot_product_attention = scaled_dot_product_attention
