"""The module `flash_attn_interface` (FlashAttention 3), on the operators of fa_ops:

    from fa_ops.compat.flash_attn_interface import flash_attn_func

After `fa_ops.compat.install("flash_attn_interface")`, `import flash_attn_interface` finds it, and
so does `from flash_attn_3.flash_attn_interface import ...`.

Arguments, their order and defaults, layouts and results are those of FlashAttention 3. The
functions run on every device and in every dtype that fa_ops supports, fp8 among them.
`attention_chunk` has a backward pass here, `qv` has none. What only steers FlashAttention 3's
kernels (`pack_gqa`, `sm_margin`, `scheduler_metadata`) is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.compat.flash_attn_3.attention import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from fa_ops.compat.flash_attn_3.kvcache import flash_attn_with_kvcache
from fa_ops.compat.flash_attn_3.private import _flash_attn_backward, _flash_attn_forward

__version__ = "3.0.0"
__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *args,
    **options,
) -> Tensor:
    """What flash_attn_with_kvcache takes as ``scheduler_metadata``; its kernels here need none.

    Args:
        batch_size: the number of rows of queries.
        max_seqlen_q: their longest length.
        max_seqlen_k: the longest length of a row of the cache.
        num_heads_q: ``Hq``.
        num_heads_kv: ``Hkv``.
        headdim: ``D``.
        cache_seqlens: int32 ``(B,)``; its device is that of the result.
        args: ignored, as ``options`` and all arguments but ``cache_seqlens``.
        options: see ``args``.

    Returns:
        An int32 tensor without elements.
    """
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
