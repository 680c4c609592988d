"""The vmap rules: the mapped dimension is folded into the batch or the heads.

Folding into the batch is right unless sinks are mapped or need a gradient per sample; folding into
the heads is right unless lengths are mapped. If neither is right, and under dropout (whose mask
depends on batch and head), the operator runs once per sample.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from fa_ops.call import rows_contiguous
from fa_ops.ops import (
    averaging_rows,
    axes,
    dense,
    kv_cache,
    library,
    masks,
    merge,
    quantized,
    varlen,
)
from fa_ops.ops.axes import BATCH, HEADS


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
            if not mapped and not (name == "attn_mask" and self.mask_shape is not None):
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
    packed, backward = "cu_seqlens_q" in call, "grad_out" in call
    rank = call["query"].dim() - ("query" in mapped)
    if call.get("dropout_p") or call.get("q_scale") is not None or rank != (3 if packed else 4):
        return None
    own_sinks = "sinks" in mapped or (backward and call.get("sinks") is not None)
    if not packed and not own_sinks:
        return BATCH
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
    varlen.VARLEN,
    varlen.BACKWARD,
    quantized.QUANTIZED_ATTENTION,
):
    _register(_operator, _rule)
_register(merge.MERGE, _merge_rule)
for _operator in (kv_cache.READ, kv_cache.APPEND, averaging_rows.OPERATOR, masks.MASK_BLOCKS):
    _register(_operator, _separate_rule)
