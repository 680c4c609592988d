"""The operators' contracts: schemas, kernels per dispatch key, gradients, rules. Importing this package defines them."""

from fa_ops.ops import dense, merge, varlen

__all__ = ["dense", "merge", "varlen"]
