"""Attention over several devices, on torch.distributed."""

from fa_ops.distributed.balance import SchemeChoice, balanced_layout
from fa_ops.distributed.context_parallel import (
    context_parallel_attention,
    explain_context_parallel,
    measure_link_rate,
)
from fa_ops.distributed.layout import SequenceLayout, shard, unshard
from fa_ops.distributed.sharded_cache import attention_with_sharded_kv_cache

__all__ = [
    "SequenceLayout",
    "SchemeChoice",
    "attention_with_sharded_kv_cache",
    "balanced_layout",
    "context_parallel_attention",
    "explain_context_parallel",
    "measure_link_rate",
    "shard",
    "unshard",
]
