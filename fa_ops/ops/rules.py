"""Rules for other parts of PyTorch: vmap, FLOP counting, checkpointing, DTensor, Inductor,
NestedTensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from fa_ops import tracing
from fa_ops.call.call import Call, attention_call, rows_contiguous
from fa_ops.call.options import Operands, Options
from fa_ops.ops import (
    axes,
    dense,
    fully_masked_rows,
    kv_cache,
    library,
    masks,
    merge,
    programmed,
    quantized,
    selected,
    token_selection,
    varlen,
)
from fa_ops.ops.axes import BATCH, HEADS
from fa_ops.ops.library import after_import

# The vmap rules: the mapped dimension is folded into the batch or the heads.
#
# Folding into the batch is right unless sinks are mapped or need a gradient per sample; folding
# into the heads is right unless lengths are mapped. If neither is right, and under dropout (whose
# mask depends on batch and head), the operator runs once per sample.


_MASK = ("attn_mask", "attn_mask_t")


class _Fold:
    """Folds N samples into `axis` of every tensor of a call."""

    def __init__(self, axis: int, N: int, call: dict, mapped: set[str]) -> None:
        self.axis, self.N, self.axes, self.mapped = axis, N, axes.of(call), mapped
        self.size = call["query"].shape[self.axes["query"][axis] + ("query" in mapped)]
        self.mask_shape = None  # of one sample
        if call.get("mask_grad"):
            mask = call["attn_mask"]
            self.mask_shape = mask.shape["attn_mask" in mapped :]

    def fold(self, name: str, x: object) -> object:
        """The argument of the folded call; mapped arguments have their samples in dimension 0."""
        if not isinstance(x, Tensor) or name not in self.axes or self.axes[name][self.axis] is None:
            return x
        position, mapped = self.axes[name][self.axis], name in self.mapped
        samples = x if mapped else x.unsqueeze(0)
        missing = axes.RANKS.get(name, 0) - (samples.dim() - 1)
        if missing > 0:
            shape = (samples.shape[0], *[1] * missing, *samples.shape[1:])
            samples = samples.reshape(shape)
        sizes = [self.N, *samples.shape[1:]]
        if self.axis in axes.BROADCAST.get(name, ()) and sizes[position + 1] == 1:
            if not mapped and not (name in _MASK and self.mask_shape is not None):
                return _rows_or_row(name, x)
            sizes[position + 1] = self.size
        folded = samples.expand(sizes).movedim(0, position).flatten(position, position + 1)
        return _rows_or_row(name, folded)

    def unfold(self, name: str, x: Tensor) -> tuple[Tensor, int | None]:
        """A result and the dimension of its samples."""
        if axes.is_absent(name, x):
            return x, None
        position = self.axes[name][self.axis]
        x = x.unflatten(position, (self.N, x.shape[position] // self.N))
        if name == "attn_mask":
            x = x.movedim(position, 0)
            one = [1] * (4 - len(self.mask_shape)) + list(self.mask_shape)
            if one[position] == 1:
                x = x.sum(position + 1, keepdim=True)
            return x.reshape(self.N, *self.mask_shape), 0
        return x, position


def _rows_or_row(name: str, x: Tensor) -> Tensor:
    """ALiBi slopes without their batch dimension where all batch elements share them."""
    if name == "alibi_slopes" and x.dim() == 2 and x.shape[0] == 1:
        return x.squeeze(0)
    return x


def _axis(call: dict, mapped: set[str]) -> int | None:
    """The axis to fold into; None where folding is not possible."""
    packed, backward = "cu_seqlens_q" in call, call.get("grad_out") is not None
    rank = call["query"].dim() - ("query" in mapped)
    if call.get("dropout_p") or call.get("q_scale") is not None or rank != (3 if packed else 4):
        return None
    if call.get("cu_seqlens") is not None:  # which divide the only row of a batch
        return None
    own_sinks = mapped & {"sinks", "sinks_t"} or (backward and call.get("sinks") is not None)
    if not packed and not own_sinks:
        return BATCH
    if "block_indices" in call:  # whose heads are those of the keys
        return None
    return None if mapped & {"kv_lens", "cu_seqlens_q", "cu_seqlens_k"} else HEADS


def _rule(operator: OpOverload, info, dims: dict, call: dict):
    mapped = {name for name, dim in dims.items() if dim is not None}
    call = {
        name: x.movedim(dims[name], 0) if name in mapped else x
        for name, x in call.items()
        if name != "dropout_seed" or call.get("dropout_p")
    }
    for name in ("query", "key", "value"):
        call[name] = rows_contiguous(call[name])
    if call.get("attn_mask_t") is not None and mapped & set(_MASK):
        for name in set(_MASK) - mapped:  # a mask and its tangent have one shape
            call[name] = call[name].expand(info.batch_size, *call[name].shape)
        mapped |= set(_MASK)
    axis = _axis(call, mapped)
    if axis is None:
        return _one_by_one(operator, info.batch_size, mapped, call)
    fold = _Fold(axis, info.batch_size, call, mapped)
    results = operator(**{name: fold.fold(name, x) for name, x in call.items()})
    names = axes.RESULTS[operator._opname]
    if len(names) == 1:
        return fold.unfold(names[0], results)
    pairs = [fold.unfold(name, x) for name, x in zip(names, results, strict=True)]
    return tuple(x for x, _ in pairs), tuple(dim for _, dim in pairs)


def _one_by_one(operator: OpOverload, N: int, mapped: set[str], call: dict):
    results = [
        operator(**{name: x[n] if name in mapped else x for name, x in call.items()})
        for n in range(N)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(one) for one in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _no_samples(operator: OpOverload, dims: dict, call: dict):
    """Results over zero samples, of the shapes and dtypes that a call of one sample has."""

    def sample(name: str, x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        shape = x.shape if dims[name] is None else x.movedim(dims[name], 0).shape[1:]
        return x.new_empty(shape, device="meta")

    results = operator(**{name: sample(name, x) for name, x in call.items()})
    like = next(x for x in call.values() if isinstance(x, Tensor))
    if isinstance(results, Tensor):
        return like.new_empty((0, *results.shape), dtype=results.dtype), 0
    empty = tuple(like.new_empty((0, *x.shape), dtype=x.dtype) for x in results)
    return empty, (0,) * len(empty)


def _merge_rule(operator: OpOverload, info, dims: dict, call: dict):
    N = info.batch_size

    def behind_states(name: str) -> Tensor:
        x, dim = call[name], dims[name]
        if dim is None:
            return x.unsqueeze(1).expand(x.shape[0], N, *x.shape[1:])
        return x.movedim(dim, 1)

    return operator(behind_states("outs"), behind_states("lses")), (0, 0)


def _separate_rule(operator: OpOverload, info, dims: dict, call: dict):
    """One call per sample. A cache that all samples share cannot be written by each of them."""
    mapped = {name for name, dim in dims.items() if dim is not None}
    if operator is kv_cache.APPEND and not {"key_cache", "value_cache"} <= mapped:
        raise ValueError("vmap over an append needs key_cache and value_cache mapped too")
    call = {name: x.movedim(dims[name], 0) if name in mapped else x for name, x in call.items()}
    return _one_by_one(operator, info.batch_size, mapped, call)


def _register(operator: OpOverload, rule) -> None:
    def batched(info, dims: tuple, call: dict):
        if info.batch_size == 0:
            return _no_samples(operator, dims[0], call)
        return rule(operator, info, dims[0], call)

    def kernel(*args, **options):
        call = axes.bind(operator, args, options)
        return library.run_vmap_rule(batched, lambda call: operator(**call), call)

    library.lib.impl(operator._opname, kernel, "FuncTorchBatched")


for _operator in (
    dense.ATTENTION,
    dense.WITH_LSE,
    dense.BACKWARD,
    dense.JVP,
    dense.BACKWARD_JVP,
    varlen.VARLEN,
    varlen.BACKWARD,
    varlen.JVP,
    varlen.BACKWARD_JVP,
    quantized.QUANTIZED_ATTENTION,
    selected.BLOCKS,
    selected.BACKWARD,
):
    _register(_operator, _rule)
_register(merge.MERGE, _merge_rule)
for _operator in (
    kv_cache.READ,
    kv_cache.APPEND,
    fully_masked_rows.OPERATOR,
    masks.MASK_BLOCKS,
    programmed.PROGRAMMED_ATTENTION,
    programmed.WITH_MAX,
    programmed.BACKWARD,
    selected.TOKENS,
    token_selection.SELECT,
):
    _register(_operator, _separate_rule)


SAC_OPS = (
    dense.ATTENTION,
    dense.WITH_LSE,
    varlen.VARLEN,
    programmed.PROGRAMMED_ATTENTION,
    programmed.WITH_MAX,
    selected.BLOCKS,
    merge.MERGE,
)
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


def _jvp_flops(heads: int, pairs: int, D: int, Dv: int, backward: bool, y: bool) -> int:
    """FLOPs of tangents: five matmuls of results, ten of gradients, twelve with those of y."""
    features = 7 * D + (5 if y else 3) * Dv if backward else 3 * D + 2 * Dv
    return 2 * heads * pairs * features


def _dense_jvp_flops(query, key, value, *args, **options) -> int:
    B, Hq, Sq, D = query
    return _jvp_flops(B * Hq, Sq * key[2], D, value[3], False, False)


def _dense_backward_jvp_flops(grad_out, grad_lse, query, key, value, *args, **options) -> int:
    B, Hq, Sq, D = query
    return _jvp_flops(B * Hq, Sq * key[2], D, value[3], True, args[7] is not None)


def _packed_jvp_flops(query, key, value, *args, out_val=None, **options) -> int:
    call = varlen.OPERATORS.jvp.call(query, key, value, args[7:], options)
    pairs = _pairs(call)
    return _jvp_flops(query.shape[1], pairs, query.shape[2], value.shape[2], False, False)


def _packed_backward_jvp_flops(
    grad_out, grad_lse, query, key, value, *args, out_val=None, **options
) -> int:
    call = varlen.OPERATORS.backward_jvp.call(query, key, value, args[11:], options)
    pairs, y = _pairs(call), args[6] is not None
    return _jvp_flops(query.shape[1], pairs, query.shape[2], value.shape[2], True, y)


def _pairs(call: Call) -> int:
    """Query-key pairs over all sequences; a bound where the lengths are symbolic."""
    ends_q, ends_k = call.operands.cu_seqlens_q, call.operands.cu_seqlens_k
    max_q, max_k = call.options.max_seqlen_q, call.options.max_seqlen_k
    if ends_q.device.type == "meta" or type(ends_q) is not Tensor:
        longest_q = call.query.shape[0] if max_q is None else max_q
        longest_k = call.key.shape[0] if max_k is None else max_k
        return (ends_q.shape[0] - 1) * longest_q * longest_k
    return int((ends_q.diff().long() * ends_k.diff().long()).sum())


def _packed_flops(query, key, value, *args, out_val=None, **options) -> int:
    call = varlen.OPERATORS.forward.call(query, key, value, args, options)
    pairs = _pairs(call)
    return _flops(query.shape[1], pairs, query.shape[2], value.shape[2], backward=False)


def _packed_backward_flops(
    grad_out, grad_lse, query, key, value, out, lse, *args, out_val=None, **options
) -> int:
    call = varlen.OPERATORS.backward.call(query, key, value, args, options)
    pairs = _pairs(call)
    return _flops(query.shape[1], pairs, query.shape[2], value.shape[2], backward=True)


def _selected_flops(query, key, value, block_indices, block_size, *args, **options) -> int:
    B, Hq, Sq, D = query
    pairs = Sq * min(block_indices[3] * block_size, key[2])
    return _flops(B * Hq, pairs, D, value[3], backward=False)


def _selected_backward_flops(
    grad_out, grad_lse, query, key, value, out, lse, block_indices, block_size, *args, **options
) -> int:
    B, Hq, Sq, D = query
    pairs = Sq * min(block_indices[3] * block_size, key[2])
    return _flops(B * Hq, pairs, D, value[3], backward=True)


def _selected_tokens_flops(query, key, value, token_indices, *args, **options) -> int:
    T, Hq, D = query
    return _flops(Hq, T * token_indices[1], D, value[2], backward=False)


def _select_flops(query, key, weights, count, *args, **options) -> int:
    B, H, Sq, D = query
    return 2 * B * H * Sq * key[2] * (D + 1)


def _cached_flops(query, key_cache, value_cache, *args, out_val=None, **options) -> int:
    """FLOPs of the keys in use; of the whole capacity where the lengths are symbolic."""
    schema = kv_cache.APPENDING if args[0].is_floating_point() else kv_cache.READING
    call = schema.call(query, key_cache, value_cache, args, options)
    B, Hq, Sq, D = query.shape
    lens, key = call.operands.kv_lens, call.operands.new_key
    new = 0 if key is None else key.shape[2]
    if lens.device.type == "meta" or type(lens) is not Tensor:
        keys = B * call.num_keys
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

    programmed_names = "attention_programmed", "attention_programmed_max"
    dense_names = "attention", "attention_with_lse", *programmed_names, "quantized_attention"
    register(*dense_names)(_dense_flops)
    register("attention_backward", "attention_programmed_backward")(_dense_backward_flops)
    register("attention_jvp")(_dense_jvp_flops)
    register("attention_backward_jvp")(_dense_backward_jvp_flops)
    register("attention_selected")(_selected_flops)
    register("attention_selected_backward")(_selected_backward_flops)
    register("attention_selected_tokens")(_selected_tokens_flops)
    register("select_tokens")(_select_flops)
    register("attention_varlen", get_raw=True)(_packed_flops)
    register("attention_varlen_backward", get_raw=True)(_packed_backward_flops)
    register("attention_varlen_jvp", get_raw=True)(_packed_jvp_flops)
    register("attention_varlen_backward_jvp", get_raw=True)(_packed_backward_jvp_flops)
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


# Jagged NestedTensors, (B, H, lengths, D): run as packed sequences, without padding.

_RAGGED = 2  # the dimension of lengths


def _cu_seqlens(x: Tensor) -> Tensor:
    return x.offsets().to(torch.int32)


def _tokens(name: str, x: Tensor) -> Tensor:
    """(T, H, D), or (H, T) of an lse, in memory."""
    if not x.is_nested or x.layout != torch.jagged or x._ragged_idx != _RAGGED:
        raise ValueError(
            f"{name} must be a jagged NestedTensor (B, H, lengths, ...) where another argument is "
            "one: build it as (B, lengths, H, D) and transpose(1, 2)"
        )
    if x.lengths() is not None:
        raise ValueError(
            f"{name} must not have holes between its sequences: build it anew from {name}.unbind()"
        )
    values = x.values()  # (H, T, D): the batch dimension is gone, the rest is in order
    return values.transpose(0, 1) if values.dim() == 3 else values


def _nested(values: Tensor, like: Tensor) -> Tensor:
    """Tokens (T, H, D) or an lse (H, T) in the structure of `like`."""
    values = values.transpose(0, 1) if values.dim() == 3 else values
    return library.nested_like(values, like)


def _pack(call: dict) -> tuple[dict, Call]:
    """Tensors as tokens, and a packed call with the other arguments."""
    for name in ("attn_mask", "key_ranges", "mask_blocks"):
        if call.get(name) is not None:
            raise NotImplementedError(
                f"{name} does not go with NestedTensors, use kv_lens or window"
            )
    others = (*Operands._fields, *Options._fields)
    arguments = {name: call[name] for name in others if name in call}
    names = ("query", "key", "value", "grad_out", "grad_lse", "out", "lse")
    given = {name: call[name] for name in names if call.get(name) is not None}
    tokens = {name: _tokens(name, x) for name, x in given.items()}
    _need_same_lengths(call["key"], call["value"])
    ends = {"cu_seqlens_q": _cu_seqlens(call["query"]), "cu_seqlens_k": _cu_seqlens(call["key"])}
    return tokens, attention_call(None, None, None, **arguments | ends)


def _need_same_lengths(key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless keys and values are as many; not read on a GPU, nor while tracing."""
    ends = key.offsets(), value.offsets()
    if ends[0] is ends[1] or not tracing.can_read(*ends) or torch.equal(*ends):
        return
    of_key, of_value = (x.diff().tolist() for x in ends)
    raise ValueError(f"value must have the lengths of key, {of_key}, got {of_value}")


def _forward_rule(cls, operator, types, args: tuple, options: dict | None = None):
    call = axes.bind(operator, args, options or {})
    tokens, packed = _pack(call)
    rest, keywords = varlen.OPERATORS.forward.arguments(packed)
    out, lse = varlen.VARLEN(*tokens.values(), *rest, **keywords)
    out = _nested(out, call["query"])
    return (out, _nested(lse, call["query"])) if operator._opname != "attention" else out


def _backward_rule(cls, operator, types, args: tuple, options: dict | None = None):
    call = axes.bind(operator, args, options or {})
    tokens, packed = _pack(call)
    rest, keywords = varlen.OPERATORS.backward.arguments(packed)
    names = ("grad_out", "grad_lse", "query", "key", "value", "out", "lse")
    dq, dk, dv, dsinks = varlen.BACKWARD(*(tokens.get(name) for name in names), *rest, **keywords)
    like = (call["query"], call["key"], call["value"])
    grads = [_nested(grad, x) for grad, x in zip((dq, dk, dv), like, strict=True)]
    return *grads, dq.new_empty(0), dsinks


for _name in ("attention", "attention_with_lse"):
    library.register_subclass_rule(_name, library.NestedTensor, _forward_rule)
library.register_subclass_rule("attention_backward", library.NestedTensor, _backward_rule)


def _quantized_rule(cls, operator, types, args: tuple, options: dict | None = None):
    call = axes.bind(operator, args, options or {})
    name = next((n for n, x in call.items() if isinstance(x, library.NestedTensor)), "query")
    raise ValueError(
        f"{name} must not be a NestedTensor: 8-bit products attend dense tensors, and with scales "
        "packed ones, see attention_varlen"
    )


library.register_subclass_rule("quantized_attention", library.NestedTensor, _quantized_rule)
