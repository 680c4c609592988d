"""The description of one attention call, and the plan that a backend makes for such calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.call.options import (
    NO_OPERANDS,
    Cache,
    Operands,
    OperandSet,
    Packing,
    Quantization,
    Spec,
    new_operands,
)

# The kinds of calls.
DENSE = "dense"  # (B, H, S, D) tensors
PACKED = "packed"  # (T, H, D) tokens of sequences that follow one another
CACHED = "cached"  # queries against a key-value cache, which new keys and values may extend
PAGED = "paged"  # (T, H, D) tokens of sequences whose keys are in pages
APPEND = "append"  # writes the new keys and values of a cached call, and rotates its queries
QUANTIZED = "quantized"  # (B, H, S, D) tensors whose products are of 8-bit numbers
QUANTIZED_PACKED = "packed quantized"  # the same of packed sequences, whose keys may be in pages
MERGE = "merge"  # partial results over disjoint keys; query, key and value are its `outs`
MASK_BLOCKS = "mask blocks"  # of a mask, which is all three of query, key and value
MERGE_INTO = "merge into"  # one such result into another, in place; all three are its `out`


_NO_CACHE, _NO_SCALES = Cache(), Quantization()


class Saved(NamedTuple):
    """The inputs of a backward pass in addition to the arguments of the forward pass."""

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    mask_grad: bool = False


OPERANDS_OF = {
    DENSE: OperandSet(Operands._fields[:7]),
    PACKED: OperandSet(
        ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sinks", "kv_lens", "dropout_seed")
    ),
    CACHED: OperandSet(
        ("kv_lens", "page_table", "key_ranges", "alibi_slopes", "sinks", "new_key", "new_value",
         "k_scale", "v_scale", "rotary_cos", "rotary_sin", "unified_max")
    ),
    PAGED: OperandSet(("cu_seqlens_q", "kv_lens", "page_table", "alibi_slopes", "sinks")),
    QUANTIZED: OperandSet(("sinks", "kv_lens", "key_ranges", "q_scale", "k_scale", "v_scale")),
    QUANTIZED_PACKED: OperandSet(
        ("cu_seqlens_q", "cu_seqlens_k", "page_table", "sinks", "kv_lens", "q_scale", "k_scale",
         "v_scale")
    ),
}  # fmt: skip
"""The operands that the calls of a kind may have."""


class Call(NamedTuple):
    """A call of one kind. Its backward pass is a call of its own, with `saved`."""

    kind: str
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    spec: Spec = Spec()
    packing: Packing | None = None
    cache: Cache | None = None
    saved: Saved | None = None
    backend: str = "auto"  # the name that the caller asked for
    quantization: Quantization | None = None

    @property
    def tensors(self) -> Operands:
        """The tensors besides query, key and value; `NO_OPERANDS` itself where there are none."""
        spec, packing, cache, quantization = self.spec, self.packing, self.cache, self.quantization
        if packing is cache is quantization is None:
            return spec.tensors
        scales = quantization or cache or _NO_SCALES
        ends_q, ends_k, *_ = packing or (None, None)
        cache = cache or _NO_CACHE
        return new_operands((
            spec.attn_mask, spec.alibi_slopes, spec.sinks, spec.kv_lens, spec.key_ranges,
            spec.dropout_seed, spec.mask_blocks, ends_q, ends_k, cache.page_table, cache.key,
            cache.value, quantization and quantization.q_scale, scales.k_scale, scales.v_scale,
            cache.rotary_cos, cache.rotary_sin, cache.unified_max,
        ))  # fmt: skip

    def with_tensors(self, operands: Operands) -> Call:
        """The call with other tensors besides query, key and value."""
        spec, packing, cache, quantization = self.options_with(operands)
        return self._replace(spec=spec, packing=packing, cache=cache, quantization=quantization)

    def without_tensors(self) -> Call:
        """The call's options alone, which may be kept."""
        options = self._replace(query=None, key=None, value=None, saved=None)
        return options if self.tensors is NO_OPERANDS else options.with_tensors(NO_OPERANDS)

    def options_with(
        self, operands: Operands
    ) -> tuple[Spec, Packing | None, Cache | None, Quantization | None]:
        """spec, packing, cache and quantization of this call with other tensors."""
        t, packing, cache, quantization = operands, self.packing, self.cache, self.quantization
        if packing is not None:
            packing = Packing(
                t.cu_seqlens_q, t.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k
            )
        if cache is not None and quantization is not None:
            cache = Cache(t.page_table)
        elif cache is not None:
            cache = Cache(
                t.page_table, t.new_key, t.new_value, t.k_scale, t.v_scale, t.rotary_cos,
                t.rotary_sin, cache.rotary_interleaved, cache.num_splits, cache.batch_invariant,
                t.unified_max,
            )  # fmt: skip
        if quantization is not None:
            quantization = Quantization(t.q_scale, t.k_scale, t.v_scale, *quantization[3:])
        return self.spec.with_tensors(t), packing, cache, quantization

    def arguments_with(self, operands: Operands) -> tuple:
        """The arguments of backends' functions after query, key and value."""
        if self.packing is self.cache is self.quantization is None:
            return (self.spec if operands is NO_OPERANDS else self.spec.with_tensors(operands),)
        spec, packing, cache, quantization = self.options_with(operands)
        return (packing if packing is not None else cache or quantization), spec

    @property
    def num_keys(self) -> int:
        """Keys of a row of the batch, or all tokens of a packed call; the capacity of a cache."""
        if self.kind in (PACKED, QUANTIZED_PACKED) and self.cache is None:
            return self.key.shape[0]
        if self.cache is not None and self.cache.page_table is not None:
            return self.cache.page_table.shape[1] * self.key.shape[1]
        return self.key.shape[2]

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries or no keys, and nothing to write."""
        q, k = self.query, self.key
        if self.kind != CACHED:
            return not (q.numel() and k.numel())
        table = self.cache.page_table
        has_room = k.numel() > 0 and (table is None or table.numel() > 0)
        return not has_room or (self.cache.key is None and not q.numel())

    @property
    def writes_cache(self) -> bool:
        """Whether new keys are appended, or anything is rotated, before the call attends."""
        cache = self.cache
        return cache is not None and (cache.key is not None or cache.rotary_cos is not None)

    def without_new(self) -> Call:
        """The call that remains once the new keys and values are in the cache."""
        spec, new = self.spec, self.cache.key
        if new is not None:
            spec = spec._replace(kv_lens=spec.kv_lens + new.shape[2])
        return self.read_only()._replace(spec=spec)

    def read_only(self) -> Call:
        """The call that attends the same cache, writes nothing and has the same lengths."""
        cache = self.cache
        rest = cache._replace(key=None, value=None, rotary_cos=None, rotary_sin=None)
        return self._replace(kind=CACHED, cache=rest)


# Forward: run(query, key, value, operands, with_lse) -> (out, lse), where lse may be None if not
#     with_lse.
# Backward: run(grad_out, grad_lse, query, key, value, out, lse, operands) -> Gradients, or a tuple
#     in their order that may end after the gradient of value.
# APPEND: run(query, key, value, operands) -> (query, kv_lens with the new keys).
# MERGE: run(outs, lses) -> (out, lse).
# MERGE_INTO: run(out, lse, part, part_lse) -> None, which writes out and lse.
# MASK_BLOCKS: run(mask) -> mask_blocks.
Run = Callable[..., Any]


class Plan(NamedTuple):
    """The way a backend runs a family of calls that differ only in lengths and strides of keys."""

    kernel: str  # the name that `explain` shows
    # Makes what runs calls with this call's geometry; compiles what is missing, keeps no tensor.
    prepare: Callable[[Call], Run]


def decoding(plan: Plan) -> Plan:
    """The plan of dense calls with few queries, given one of cached calls."""

    def prepare(call: Call) -> Run:
        return plan.prepare(call._replace(kind=CACHED, cache=Cache()))

    return Plan(plan.kernel, prepare)


def append_then_attend(writer: Plan, attend: Plan, name: str = "") -> Plan:
    """The plan that writes the new keys of cached calls and rotates their queries, then attends.

    `name`: of the attending backend, if it is another one than that which writes.
    """

    def prepare(call: Call) -> Run:
        write, rest, cos = writer.prepare(call), call.read_only(), call.cache.rotary_cos
        if cos is not None and cos.shape[1]:  # rotated queries are a tensor of their own
            rest = rest._replace(query=rest.query.new_empty(rest.query.shape))
        run = attend.prepare(rest)

        def write_and_attend(q, k, v, operands, with_lse=True):
            q, kv_lens = write(q, k, v, operands)
            t = operands
            left = new_operands((
                None, t.alibi_slopes, t.sinks, kv_lens, t.key_ranges, None, None, None, None,
                t.page_table, None, None, None, t.k_scale, t.v_scale, None, None, t.unified_max,
            ))  # fmt: skip
            return run(q, k, v, left, with_lse)

        return write_and_attend

    kernels = f"{writer.kernel}, then {attend.kernel}"
    return Plan(f"{kernels} of {name}" if name else kernels, prepare)


_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def general(kernel: str, function: Callable) -> Plan:
    """The plan that calls a backend's function of all arguments.

    Forward functions are `function(query, key, value, [packing, cache or quantization,] spec) ->
    (out, lse)`,
    backward ones `function(grad_out, grad_lse, query, key, value, out, lse, [packing,] spec,
    [mask_grad])`.
    """

    def prepare(call: Call) -> Run:
        options, mask_grad = call.without_tensors(), ()
        if call.saved is not None:
            mask_grad = (True,) if call.saved.mask_grad else ()
            return lambda grad_out, grad_lse, q, k, v, out, lse, operands: function(
                *_dense_rows(grad_out, grad_lse, q, k, v, out, lse),
                *options.arguments_with(operands),
                *mask_grad,
            )

        def run(q, k, v, operands, with_lse=True):
            # views of what a function allocates are no views to its caller
            with _below_autograd():
                return function(q, k, v, *options.arguments_with(operands))

        return run

    return Plan(kernel, prepare)


def plan_by_kind(
    call: Call, forward: Callable, backward: Callable, varlen_forward: Callable,
    varlen_backward: Callable, cache_forward: Callable, merge_states: Callable,
) -> Plan:  # fmt: skip
    """The plan of a backend that has one function for each kind of call."""
    if call.kind == MERGE:
        return Plan("merge", lambda call: merge_states)
    if call.kind == MERGE_INTO:
        return Plan("merge", lambda call: functools.partial(_merge_into, merge_states))
    if call.kind == CACHED:
        return general("cache", cache_forward)
    if call.saved is not None:
        return general("backward", backward if call.kind == DENSE else varlen_backward)
    return general("forward", forward if call.kind == DENSE else varlen_forward)


def _merge_into(
    merge_states: Callable, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
) -> None:
    outs = torch.stack((out, part.to(out.dtype)))
    merged, merged_lse = merge_states(outs, torch.stack((lse, part_lse)))
    out.copy_(merged)
    lse.copy_(merged_lse)


def _dense_rows(grad_out, grad_lse, q, k, v, out, lse) -> tuple[Tensor | None, ...]:
    """With rows of grad_out and out contiguous; a sum's gradient has strides of 0."""
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    return rows_contiguous(grad_out), grad_lse, q, k, v, rows_contiguous(out), lse.contiguous()


def rows_contiguous(t: Tensor) -> Tensor:
    """The tensor, copied unless its last dimension is contiguous."""
    return t if t.stride()[-1] == 1 else t.contiguous()
