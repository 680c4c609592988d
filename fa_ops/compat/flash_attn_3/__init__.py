"""The functions of FlashAttention 3, which `fa_ops.compat.flash_attn_interface` collects."""
