"""Fused attention for PyTorch: operators, backends, and the typed functions in front of them."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from fa_ops import compat
from fa_ops.call.backend_option import set_backend, use_backend
from fa_ops.functions.attention import attention, attention_varlen, mask_blocks, merge_states
from fa_ops.functions.explain import explain
from fa_ops.functions.flex import flex_attention, mask_tiles
from fa_ops.functions.kv_cache import attention_with_kv_cache
from fa_ops.functions.quantized import quantized_attention
from fa_ops.functions.selected import (
    attention_selected,
    attention_selected_tokens,
    select_tokens,
)
from fa_ops.ops.rules import SAC_OPS

if TYPE_CHECKING:
    from fa_ops import distributed as distributed
    from fa_ops import testing as testing

__version__ = "0.1.0"
__all__ = [
    "SAC_OPS",
    "attention",
    "attention_selected",
    "attention_selected_tokens",
    "attention_varlen",
    "attention_with_kv_cache",
    "compat",
    "explain",
    "flex_attention",
    "mask_blocks",
    "mask_tiles",
    "merge_states",
    "quantized_attention",
    "select_tokens",
    "set_backend",
    "use_backend",
]

# imported where they are first used: they import more of torch
_SUBMODULES = ("distributed", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])
