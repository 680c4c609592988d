"""The operators' contracts: schemas, kernels per dispatch key, gradients, rules."""

from fa_ops.ops import dense, merge, rules, varlen, vmap

__all__ = ["dense", "merge", "rules", "varlen", "vmap"]
