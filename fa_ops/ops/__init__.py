"""The operators' contracts: schemas, kernels per dispatch key, gradients, rules."""

from fa_ops.ops import (
    autocast,
    dense,
    fully_masked_rows,
    inductor,
    kv_cache,
    masks,
    merge,
    programmed,
    quantized,
    rules,
    seeds,
    selected,
    token_selection,
    varlen,
)

__all__ = [
    "autocast",
    "dense",
    "fully_masked_rows",
    "inductor",
    "kv_cache",
    "masks",
    "merge",
    "programmed",
    "quantized",
    "rules",
    "seeds",
    "selected",
    "token_selection",
    "varlen",
]
