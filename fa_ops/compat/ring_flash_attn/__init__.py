"""The functions of ring-flash-attention, on fa_ops.distributed:

    from fa_ops.compat.ring_flash_attn import zigzag_ring_flash_attn_func

After `fa_ops.compat.install("ring_flash_attn")`, `import ring_flash_attn` finds them. Arguments,
their order and defaults, layouts and which tokens each process holds are those of
ring-flash-attention 0.1.7. They run over NCCL and gloo, and are differentiable.

Differences: windows are those of the whole sequence, where the original applies them to each
block of keys; ALiBi is supported; gradients are summed over processes in float32; dropout has one
seed, drawn by the group's first process, and its backward pass drops what the forward pass
dropped; a window without causality in the llama3 functions raises NotImplementedError; arguments
are compared between processes before anything is sent. The striped functions do not exist here. In
place of the adapter for transformers there is `hf_integration.context_parallel`.
"""

from fa_ops.compat.ring_flash_attn.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from fa_ops.compat.ring_flash_attn.ring import (
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)

__version__ = "0.1.7"  # the release whose functions these are
__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
