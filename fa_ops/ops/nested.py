"""Jagged NestedTensors, (B, H, lengths, D): run as packed sequences, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.call.call import Call, attention_call
from fa_ops.call.options import Operands, Options
from fa_ops.ops import axes, library, varlen

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
