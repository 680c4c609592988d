"""The operators' contracts: schemas, kernels per dispatch key, gradients, rules."""

from fa_ops.ops import (
    averaging_rows,
    dense,
    kv_cache,
    masks,
    merge,
    nested,
    quantized,
    rules,
    varlen,
    vmap,
)

__all__ = [
    "averaging_rows",
    "dense",
    "kv_cache",
    "masks",
    "merge",
    "nested",
    "quantized",
    "rules",
    "varlen",
    "vmap",
]
