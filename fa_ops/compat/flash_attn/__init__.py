"""The package `flash_attn` (FlashAttention 2), on the operators of fa_ops:

    from fa_ops.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

Its modules are those that libraries import: `flash_attn_interface`, `bert_padding`,
`layers.rotary` and `ops.triton.rotary`. After `fa_ops.compat.install("flash_attn")`,
`import flash_attn` finds them.

Arguments, their order and defaults, layouts, (B, S, H, D) or packed (T, H, D), and results are
those of flash-attn 2.8. The functions run on every device and in every dtype that fa_ops supports,
on the CPU too, and are differentiable where the originals are. Numbers may also be 0-d tensors or
NumPy numbers, and bools 0 or 1.

Differences: the sides of a window may be None, which means unbounded, as -1 does; the head
dimension of values may differ from that of keys; dropout drops other weights than flash-attn with
the same seed; pages hold any number of keys, but pages and lengths beyond the cache do not raise
on a GPU, where the host does not read them. Errors of the operators use the operators' names of
arguments: query, key, value, kv_lens, page_table.
"""

from fa_ops.compat.flash_attn import flash_attn_interface
from fa_ops.compat.flash_attn.attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"  # the release whose functions these are
__all__ = [
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
