"""attention_varlen over keys in pages, and of e4m3 tensors."""
