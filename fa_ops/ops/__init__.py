"""The operators' contracts: schemas, kernels per dispatch key, gradients, rules."""

from fa_ops.ops import dense, kv_cache, merge, nested, quantized, rules, varlen, vmap

__all__ = ["dense", "kv_cache", "merge", "nested", "quantized", "rules", "varlen", "vmap"]
