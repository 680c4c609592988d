"""Fused attention for PyTorch: operators, backends, and the typed functions in front of them."""

from fa_ops.api import attention, attention_varlen, merge_states
from fa_ops.dispatch import use_backend

__version__ = "0.1.0"
__all__ = ["attention", "attention_varlen", "merge_states", "use_backend"]
