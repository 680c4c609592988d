"""flash_attn.ops: what libraries import of it."""
