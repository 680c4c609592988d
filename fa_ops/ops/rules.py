"""What the operators tell the rest of torch: autocast, FLOPs, checkpointing, tensor subclasses."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.ops import dense, library, merge, varlen
from fa_ops.ops.imports import after_import
from fa_ops.types import Packing

SAC_OPS = (dense.ATTENTION, dense.WITH_LSE, varlen.VARLEN, merge.MERGE)
"""The operators whose results selective activation checkpointing should save.

Example:
    >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    >>> save = partial(create_selective_checkpoint_contexts, [*fa_ops.SAC_OPS])
    >>> checkpoint(block, x, use_reentrant=False, context_fn=save)
"""


def _autocast(operator: torch._ops.OpOverload, device: str) -> None:
    """Query, key and value take autocast's dtype, and so do a mask or sinks in half precision."""

    def kernel(query, key, value, *args, **options):
        dtype = torch.get_autocast_dtype(device)

        def cast(t: object, kept: tuple = (torch.float64,)) -> object:
            eligible = isinstance(t, Tensor) and t.dtype.is_floating_point
            return t.to(dtype) if eligible and t.dtype not in kept else t

        wide = (torch.float32, torch.float64)  # what is added to float32 scores may stay float32
        args = [cast(t, wide) for t in args]
        options = {name: cast(t, wide) for name, t in options.items()}
        with library.without_autocast(device):
            return operator(cast(query), cast(key), cast(value), *args, **options)

    library.lib.impl(operator._opname, kernel, f"Autocast{device.upper()}")


for _operator in (dense.ATTENTION, dense.WITH_LSE, varlen.VARLEN):
    for _device in ("cpu", "cuda"):
        _autocast(_operator, _device)


# FLOPs follow torch's convention for attention: multiply-adds of the dense products, masks not
# counted.


def _flops(heads: int, pairs: int, D: int, Dv: int, backward: bool) -> int:
    """Of `pairs` query-key pairs per head: two products forward, five backward (scores again)."""
    return 2 * heads * pairs * (3 * D + 2 * Dv if backward else D + Dv)


def _dense_flops(query, key, value, *args, **options) -> int:
    B, Hq, Sq, D = query
    return _flops(B * Hq, Sq * key[2], D, value[3], backward=False)


def _dense_backward_flops(grad_out, grad_lse, query, key, value, *args, **options) -> int:
    B, Hq, Sq, D = query
    return _flops(B * Hq, Sq * key[2], D, value[3], backward=True)


def _pairs(q: Tensor, k: Tensor, packing: Packing) -> int:
    """Query-key pairs over all sequences; a bound where the lengths are not numbers."""
    ends_q, ends_k, max_q, max_k = packing
    if ends_q.device.type == "meta" or type(ends_q) is not Tensor:
        longest_q = q.shape[0] if max_q is None else max_q
        longest_k = k.shape[0] if max_k is None else max_k
        return (ends_q.shape[0] - 1) * longest_q * longest_k
    return int((ends_q.diff().long() * ends_k.diff().long()).sum())


def _packed_flops(query, key, value, *args, out_val=None, **options) -> int:
    packing, _ = varlen.bind(*args, **options)
    pairs = _pairs(query, key, packing)
    return _flops(query.shape[1], pairs, query.shape[2], value.shape[2], backward=False)


def _packed_backward_flops(
    grad_out, grad_lse, query, key, value, out, lse, *args, out_val=None, **options
) -> int:
    packing, _ = varlen.bind(*args, **options)
    pairs = _pairs(query, key, packing)
    return _flops(query.shape[1], pairs, query.shape[2], value.shape[2], backward=True)


def register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula as register

    register([torch.ops.fa.attention, torch.ops.fa.attention_with_lse])(_dense_flops)
    register(torch.ops.fa.attention_backward)(_dense_backward_flops)
    register(torch.ops.fa.attention_varlen, get_raw=True)(_packed_flops)
    register(torch.ops.fa.attention_varlen_backward, get_raw=True)(_packed_backward_flops)


def register_sharding() -> None:
    import fa_ops.distributed.sharding  # noqa: F401


after_import("torch.utils.flop_counter", register_flops)  # which imports Triton where it can
after_import("torch.distributed.tensor", register_sharding)
