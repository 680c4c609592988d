"""Runs `attention` and `attention_varlen` once their arguments are collected.

A plan runs eager calls that need not go through PyTorch's dispatcher; the operator runs all others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa_ops import planning
from fa_ops.argument_types import checked_options, checked_packing
from fa_ops.call import DENSE, PACKED, Call, PackedTensors
from fa_ops.ops import autocast, autograd, dense, library, lookup, varlen
from fa_ops.ops.library import Route
from fa_ops.types import NO_TENSORS, DenseTensors, Spec


def attend(
    query: Tensor, key: Tensor, value: Tensor, tensors: DenseTensors | PackedTensors,
    scalars: tuple, kind: str, with_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """out, or (out, lse), of a dense or a packed call; `scalars` are those of `planning.key_of`."""
    route, plan, geometry = lookup.find(kind, query, key, value, tensors, scalars, True)
    if route is Route.AUTOCAST:
        cast = autocast.cast_attention
        return autocast.below(attend, cast, query, key, value, tensors, scalars, kind, with_lse)
    if route is Route.RECORD and tensors.alibi_slopes is not None:
        autograd.refuse_gradient_of(tensors.alibi_slopes)
    if plan is None:
        options = checked_options(query, key, value, tensors, scalars)
        args = _positional(tensors, scalars, kind)
        if geometry is None or not library.is_strided(query, key, value, *tensors):
            return _by_operator(query, key, value, args, options, kind, with_lse)
        call = _described(query, key, value, args, options, kind)
        plan = planning.prepare(geometry, call, scalars)
    if route is Route.RECORD:
        operators = dense.OPERATORS if kind == DENSE else varlen.OPERATORS
        recording = autograd.Recording(operators, plan, with_lse, type(tensors))
        others = () if tensors is NO_TENSORS else tensors
        return autograd.Attention.apply(recording, query, key, value, *others)
    out, lse = plan.run(query, key, value, tensors, with_lse)
    return (out, lse) if with_lse else out


def _positional(tensors: DenseTensors | PackedTensors, scalars: tuple, kind: str) -> tuple:
    """The operators' positional arguments after value."""
    is_causal, dropout_p, *_ = scalars
    if kind == DENSE:
        return tensors.attn_mask, dropout_p, is_causal
    ends = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    return *checked_packing(*ends, *scalars[-2:]), dropout_p, is_causal


def _by_operator(
    query: Tensor, key: Tensor, value: Tensor, args: tuple, options: dict[str, Any], kind: str,
    with_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if kind == DENSE:
        operator = dense.WITH_LSE if with_lse else dense.ATTENTION
        return operator(query, key, value, *args, **options)
    out, lse = varlen.VARLEN(query, key, value, *args, **options)
    return (out, lse) if with_lse else out


def _described(
    query: Tensor, key: Tensor, value: Tensor, args: tuple, options: dict[str, Any], kind: str
) -> Call:
    if kind == DENSE:
        return Call(DENSE, query, key, value, Spec(*args, **options))
    packing, spec = varlen.bind(*args, **options)
    return Call(PACKED, query, key, value, spec, packing)
