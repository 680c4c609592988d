"""Rules for other parts of PyTorch: FLOP counting, selective checkpointing, DTensor, Inductor."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.ops import dense, kv_cache, merge, varlen
from fa_ops.ops.imports import after_import
from fa_ops.types import Packing

SAC_OPS = (dense.ATTENTION, dense.WITH_LSE, varlen.VARLEN, merge.MERGE)
"""The operators whose results selective activation checkpointing should save.

Examples:
    >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    >>> save = partial(create_selective_checkpoint_contexts, [*fa_ops.SAC_OPS])
    >>> checkpoint(block, x, use_reentrant=False, context_fn=save)
"""


# FLOPs follow torch's convention for attention: multiply-adds of the dense products, masks not
# counted.


def _flops(heads: int, pairs: int, D: int, Dv: int, backward: bool) -> int:
    """FLOPs of `pairs` query-key pairs per head: two matmuls forward, five backward."""
    return 2 * heads * pairs * (3 * D + 2 * Dv if backward else D + Dv)


def _dense_flops(query, key, value, *args, **options) -> int:
    B, Hq, Sq, D = query
    return _flops(B * Hq, Sq * key[2], D, value[3], backward=False)


def _dense_backward_flops(grad_out, grad_lse, query, key, value, *args, **options) -> int:
    B, Hq, Sq, D = query
    return _flops(B * Hq, Sq * key[2], D, value[3], backward=True)


def _pairs(q: Tensor, k: Tensor, packing: Packing) -> int:
    """Query-key pairs over all sequences; a bound where the lengths are symbolic."""
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


def _cached_flops(query, key_cache, value_cache, *args, out_val=None, **options) -> int:
    """FLOPs of the keys in use; of the whole capacity where the lengths are symbolic."""
    if args[0].is_floating_point():
        options["key"], options["value"], *args = args
    cache, spec = kv_cache.bind(*args, **options)
    B, Hq, Sq, D = query.shape
    lens, new = spec.kv_lens, 0 if cache.key is None else cache.key.shape[2]
    if lens.device.type == "meta" or type(lens) is not Tensor:
        table = cache.page_table
        capacity = key_cache.shape[2] if table is None else table.shape[1] * key_cache.shape[1]
        keys = B * capacity
    else:
        keys = int((lens.long() + new).sum())
    return _flops(Hq, Sq * keys, D, value_cache.shape[3], backward=False)


def register_flops() -> None:
    """Register the operators' formulas with torch's FLOP counter."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    def register(*names: str, **options):
        operators = [getattr(torch.ops.fa, name) for name in names]
        for operator in operators:
            flop_registry.pop(operator, None)  # of modules that were dropped and imported again
        return register_flop_formula(operators, **options)

    register("attention", "attention_with_lse", "quantized_attention")(_dense_flops)
    register("attention_backward")(_dense_backward_flops)
    register("attention_varlen", get_raw=True)(_packed_flops)
    register("attention_varlen_backward", get_raw=True)(_packed_backward_flops)
    cached = "attention_with_kv_cache", "attention_with_kv_cache_append"
    register(*cached, get_raw=True)(_cached_flops)


def register_sharding() -> None:
    """Register the operators' sharding rules with DTensor."""
    from fa_ops.distributed import sharding  # noqa: F401


def register_lowering() -> None:
    """Give Inductor a lowering for the offset of a view, where torch has none (2.11 to 2.14).

    Without it the offset is 0 in graphs with dynamic shapes: keys appended to a view of a larger
    tensor, such as the cache of one layer, would be written to the beginning of that tensor.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    offset = torch.ops.aten.sym_storage_offset.default
    if offset in lowering.lowerings:
        return

    @lowering.register_lowering(offset)
    def storage_offset(view):
        if not hasattr(V.graph, "graph_input_storage_offsets"):
            return view.get_layout().offset  # as_strided counts from the beginning of an input
        found = V.graph.current_node.meta["val"]
        return found.node.expr if isinstance(found, torch.SymInt) else int(found)


after_import("torch._inductor.lowering", register_lowering)
after_import("torch.utils.flop_counter", register_flops)  # which imports Triton where it can
after_import("torch.distributed.tensor", register_sharding)
