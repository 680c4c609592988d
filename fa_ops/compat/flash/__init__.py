"""What the functions of FlashAttention 2 and FlashAttention 3 have in common."""
