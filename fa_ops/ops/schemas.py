"""The operators' schemas, which alone give the order of arguments: these are read by name."""

from __future__ import annotations

import functools
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from fa_ops.call.call import Call, Signature
from fa_ops.call.options import Operands, Options, is_default, new_operands

# The keyword-only tail of dense and packed operators.
_OPTIONS = (
    "*, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? kv_lens=None, {ranges}"
    "Tensor? dropout_seed=None, bool deterministic=False, str? backend=None"
)
_DENSE = (
    "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
    + _OPTIONS.format(ranges="Tensor? key_ranges=None, ")
    + ", Tensor? mask_blocks=None"
)
_PACKED = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, float dropout_p=0.0, bool is_causal=False, "
    + _OPTIONS.format(ranges="")
)
_QKV = "Tensor query, Tensor key, Tensor value"
_CACHED = (
    "Tensor kv_lens, Tensor? page_table=None, bool is_causal=False, *, float? scale=None, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False, "
    "SymInt num_splits=0, bool batch_invariant=False, str? backend=None, "
    "Tensor? key_ranges=None, Tensor? unified_max=None"
)
_QUANTIZED = (
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool is_causal=False, *, "
    "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, "
    "Tensor? sinks=None, Tensor? kv_lens=None, Tensor? key_ranges=None, "
    "ScalarType? qk_dtype=None, bool smooth_key=True, bool rotate=False, str? backend=None"
)
_PROGRAMMED = (
    "str program, Tensor? attn_mask=None, bool is_causal=False, *, float? scale=None, "
    "SymInt window_left=-1, SymInt window_right=-1, Tensor? sinks=None, Tensor? kv_lens=None, "
    "Tensor? key_ranges=None, Tensor? term_values=None, Tensor? term_indices=None, "
    "Tensor? tile_runs=None, bool deterministic=False, str? backend=None"
)
_TANGENTS = "Tensor? query_t, Tensor? key_t, Tensor? value_t, {mask}Tensor? sinks_t"
_DENSE_TANGENTS = _TANGENTS.format(mask="Tensor? attn_mask_t, ")
_PACKED_TANGENTS = _TANGENTS.format(mask="")
_OF_RESULTS = "Tensor? grad_out_t, Tensor? grad_lse_t, Tensor out_t, Tensor lse_t, Tensor? grad_dot"
_SELECTED = (
    "Tensor block_indices, SymInt block_size, SymInt query_block=1, Tensor? counts=None, "
    "bool is_causal=True, *, float? scale=None, Tensor? sinks=None, Tensor? key_ranges=None, "
    "Tensor? cu_seqlens=None, bool deterministic=False, str? backend=None"
)
_SAVED = f"Tensor grad_out, Tensor? grad_lse, {_QKV}, Tensor out, Tensor lse"

SCHEMAS = {
    "attention": f"({_QKV}, {_DENSE}) -> Tensor",
    "attention_with_lse": f"({_QKV}, {_DENSE}) -> (Tensor, Tensor)",
    # gradients of query, key, value, attn_mask, sinks; the last two are empty where they don't
    # apply
    "attention_backward": f"({_SAVED}, {_DENSE}, bool mask_grad=False) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    # tangents of out and lse, given those of the inputs (None: 0), and the sum over features of
    # grad_out times the tangent of out, empty without grad_out
    "attention_jvp": f"({_QKV}, Tensor out, Tensor lse, {_DENSE_TANGENTS}, Tensor? grad_out, "
    f"{_DENSE}) -> (Tensor, Tensor, Tensor)",
    # tangents of the results of attention_backward
    "attention_backward_jvp": f"({_SAVED}, {_DENSE_TANGENTS}, {_OF_RESULTS}, {_DENSE}, "
    "bool mask_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attention_averaging_rows": f"({_QKV}, {_DENSE}, Tensor averaging_rows, "
    "Tensor? filled_keys=None, float grad_share=1.0) -> (Tensor, Tensor)",
    "attention_varlen": f"({_QKV}, {_PACKED}) -> (Tensor, Tensor)",
    # gradients of query, key, value, sinks
    "attention_varlen_backward": f"({_SAVED}, {_PACKED}) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention_varlen_jvp": f"({_QKV}, Tensor out, Tensor lse, {_PACKED_TANGENTS}, "
    f"Tensor? grad_out, {_PACKED}) -> (Tensor, Tensor, Tensor)",
    "attention_varlen_backward_jvp": f"({_SAVED}, {_PACKED_TANGENTS}, {_OF_RESULTS}, {_PACKED}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "attention_with_kv_cache": "(Tensor query, Tensor key_cache, Tensor value_cache, "
    f"{_CACHED}) -> (Tensor, Tensor)",
    # an operator of its own, so that reading a cache is no mutation to a compiler
    "attention_with_kv_cache_append": "(Tensor query, Tensor(a!) key_cache, "
    f"Tensor(b!) value_cache, Tensor key, Tensor value, {_CACHED}) -> (Tensor, Tensor)",
    # scores changed, and keys masked out, by a program: `fa_ops.programs.program`
    "attention_programmed": f"({_QKV}, {_PROGRAMMED}) -> (Tensor, Tensor)",
    # the same with the largest score of each query, -inf without keys, which has no gradient
    "attention_programmed_max": f"({_QKV}, {_PROGRAMMED}) -> (Tensor, Tensor, Tensor)",
    # gradients of query, key, value, attn_mask, sinks, term_values
    "attention_programmed_backward": f"({_SAVED}, {_PROGRAMMED}, bool mask_grad=False) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # runs of the tiles that the mask of a program may keep, on the device of `like`
    "program_tiles": "(Tensor like, str program, SymInt B, SymInt Hq, SymInt Sq, SymInt Sk, "
    "Tensor? term_values=None, Tensor? term_indices=None) -> Tensor",
    # keys by lists of blocks for each block of queries and kv head, or of tokens for each query
    "attention_selected": f"({_QKV}, {_SELECTED}) -> (Tensor, Tensor)",
    # gradients of query, key, value, sinks
    "attention_selected_backward": f"({_SAVED}, {_SELECTED}) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention_selected_tokens": f"({_QKV}, Tensor token_indices, Tensor? counts=None, *, "
    "float? scale=None, Tensor? sinks=None, str? backend=None) -> (Tensor, Tensor)",
    # lists of the keys with the largest sums over heads of weight * relu(scale * query . key)
    "select_tokens": "(Tensor query, Tensor key, Tensor weights, SymInt count, "
    "bool is_causal=True, *, float? scale=None, Tensor? kv_lens=None, Tensor? key_ranges=None, "
    "Tensor? attn_mask=None) -> Tensor",
    # 16-bit tensors, which it quantises, or e4m3 ones with their scales
    "quantized_attention": f"({_QKV}, {_QUANTIZED}) -> (Tensor, Tensor)",
    # which tiles of a mask attention may skip, and where it need not read the mask
    "mask_blocks": "(Tensor attn_mask) -> Tensor",
    "merge_states": "(Tensor outs, Tensor lses) -> (Tensor, Tensor)",
    # (count,) int64 from torch's generator of the tensor's device; nothing else of it is read
    "dropout_seed": "(Tensor like, SymInt count=1) -> Tensor",
}

_OF_OPERANDS = {"key": "new_key", "value": "new_value"}  # of an append, behind the caches


class Schema:
    """An operator whose arguments are those of the calls of a function, read and written by name.

    The tensors that begin the schema, up to `lse` of a backward pass, are passed as they are; what
    follows are operands and options. Positions are computed once: a dispatcher passes its arguments
    in order, without those at the end that have their defaults.
    """

    def __init__(self, operator: OpOverload, signature: Signature, tensors: int = 3) -> None:
        self.operator, self.signature = operator, signature
        self.has_lse = len(operator._schema.returns) > 1
        self._leading = [x.name for x in operator._schema.arguments[:tensors]]
        arguments = [x for x in operator._schema.arguments[tensors:] if x.name != "mask_grad"]
        self._names = [_OF_OPERANDS.get(x.name, x.name) for x in arguments]
        self._defaults = [x.default_value if x.has_default_value() else None for x in arguments]
        self._positional = [n for n, x in zip(self._names, arguments) if not x.kwarg_only]
        self._keywords = [
            (n, default)
            for n, default, x in zip(self._names, self._defaults, arguments)
            if x.kwarg_only
        ]
        self._at = {name: i for i, name in enumerate(self._names)}
        self._at |= {x.name: i for i, x in enumerate(arguments)}
        # behind the arguments: None for operands that the operator does not have, then its defaults
        # for options of the signature
        others = [name for name in signature.options if name not in self._at]
        self._tail = (None, *(Options._field_defaults[name] for name in others))
        positions = self._at | {n: len(self._names) + 1 + i for i, n in enumerate(others)}
        absent = len(self._names)
        self._operands = itemgetter(*(positions.get(n, absent) for n in Operands._fields))
        self._scalars = itemgetter(*(positions[name] for name in signature.options))

    def bind(self, args: tuple, options: dict[str, Any]) -> tuple[Operands, tuple]:
        """The operands, and the scalars in the signature's order, of an operator's arguments."""
        values = [*args, *self._defaults[len(args) :], *self._tail]
        for name, value in options.items():
            values[self._at[name]] = value
        return new_operands(self._operands(values)), self._scalars(values)

    def call(
        self, query: Tensor | None, key: Tensor | None, value: Tensor | None, args: tuple,
        options: dict[str, Any],
    ) -> Call:  # fmt: skip
        """The call with an operator's arguments."""
        return self.signature.call(query, key, value, *self.bind(args, options))

    def run(self, call: Call) -> Any:
        """Call the operator, of a forward pass."""
        args, options = self.arguments(call)
        return self.operator(call.query, call.key, call.value, *args, **options)

    def leading(self, args: tuple) -> tuple[dict[str, Any], tuple]:
        """The tensors that begin the schema by name, and the arguments behind them."""
        return dict(zip(self._leading, args)), args[len(self._leading) :]

    def arguments(self, call: Call) -> tuple[list, dict[str, Any]]:
        """The operator's arguments for a call, without those keywords that have their defaults."""
        given = dict(zip(Operands._fields, call.operands)) | dict(
            zip(Options._fields, call.options)
        )
        keywords = {
            name: given[name]
            for name, default in self._keywords
            if not is_default(given[name], default)
        }
        return [given[name] for name in self._positional], keywords


@functools.cache
def _arguments_of(operator: OpOverload) -> list[tuple[str, bool]]:
    """Names of arguments, and whether each may be left out."""
    return [(x.name, x.has_default_value()) for x in operator._schema.arguments]


def call_by_name(operator: OpOverload, given: dict[str, Any]) -> Any:
    """Call an operator with those of the given arguments that it has; a missing tensor is None."""
    arguments = _arguments_of(operator)
    return operator(
        **{n: given.get(n) for n, has_default in arguments if n in given or not has_default}
    )
