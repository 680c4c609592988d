"""Fused attention for PyTorch: operators, backends, and the typed functions in front of them."""

from fa_ops import compat
from fa_ops.call.backend_option import set_backend, use_backend
from fa_ops.functions.attention import attention, attention_varlen, mask_blocks, merge_states
from fa_ops.functions.explain import explain
from fa_ops.functions.kv_cache import attention_with_kv_cache
from fa_ops.functions.quantized import quantized_attention
from fa_ops.ops.rules import SAC_OPS

__version__ = "0.1.0"
__all__ = [
    "SAC_OPS",
    "attention",
    "attention_varlen",
    "attention_with_kv_cache",
    "compat",
    "explain",
    "mask_blocks",
    "merge_states",
    "quantized_attention",
    "set_backend",
    "use_backend",
]
