"""flash_attn.ops.triton: the module of rotary embedding, in operations of torch."""
