"""Attention over several devices, on torch.distributed."""

from fa_ops.distributed.layout import shard, unshard
from fa_ops.distributed.ring import ring_attention

__all__ = ["ring_attention", "shard", "unshard"]
