"""Which operator of fa_ops computes a layer, and the calls of each.

A choice depends on the kind of a call and not on its numbers, so `Choices` remembers it: a step of
decoding takes as long as the host needs to launch it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

import fa_ops
from hf_integration import encodings, weights
from hf_integration.encodings import CompactMask, MaskArguments, PackingHint
from hf_integration.packing import Documents

_logger = logging.get_logger(__name__)
# Queries up to which a call is a step of decoding, for the kernel that splits the keys, and the
# largest head dimension of the other GPU kernels; smaller heads need that kernel for lengths alone.
MAX_STEP_QUERIES, MAX_HEAD_DIM = 16, 256


class Inputs(NamedTuple):
    """A layer's tensors as the operators take them: (B, H, S, D), one dtype, rows contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskArguments
    sinks: Tensor | None
    options: dict  # scale, dropout_p, softcap


Operator = Callable[[nn.Module, Inputs], Tensor]  # returns (B, Hq, Sq, Dv)


def choose(inputs: Inputs) -> Operator:
    """The operator for a call whose mask is not packed."""
    query, value, mask = inputs.query, inputs.value, inputs.mask
    splits_keys = mask.kv_lens is not None or query.shape[-1] > MAX_HEAD_DIM
    splits_keys = splits_keys or (mask.key_ranges is not None and query.is_cuda)
    if splits_keys and is_step(inputs):
        return step
    return eager if _is_too_wide(query, value) else dense


def is_step(inputs: Inputs) -> bool:
    """Whether the kernel for few queries and many keys can compute the call."""
    query, key, _, mask, sinks, options = inputs
    if mask.attn_mask is not None or options["dropout_p"]:
        return False
    # in this order: a prefill of any length is one graph to a compiler
    if key.shape[2] <= query.shape[2] or query.shape[2] > MAX_STEP_QUERIES:
        return False
    if mask.key_ranges is not None and tuple(mask.key_ranges.shape[1:3]) != (1, 1):
        return False
    if sinks is not None and sinks.dim() != 1:
        return False
    return not (torch.is_grad_enabled() and _requires_grad(*inputs[:3], sinks))


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _is_too_wide(query: Tensor, value: Tensor) -> bool:
    return query.is_cuda and max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM


def step(layer: nn.Module, inputs: Inputs) -> Tensor:
    """A step of decoding, whose keys are split over the GPU."""
    query, key, value, mask, sinks, options = inputs
    lens, B = mask.kv_lens, key.shape[0]
    if lens is None and mask.key_ranges is not None:
        lens = encodings.range_ends(mask.key_ranges, B, layer)
    elif lens is None:
        lens = torch.full((B,), key.shape[2], dtype=torch.int32, device=key.device)
    elif lens.shape[0] != B:  # the model repeats its batch; rows that differ have ranges
        lens = lens[:1].expand(B)
    return fa_ops.attention_with_kv_cache(
        query,
        key,
        value,
        lens,
        is_causal=mask.is_causal,
        scale=options["scale"],
        softcap=options["softcap"],
        sinks=sinks,
        key_ranges=mask.key_ranges,
    )


def dense(layer: nn.Module, inputs: Inputs) -> Tensor:
    """fa_ops.attention."""
    query, key, value, mask, sinks, options = inputs
    if mask.kv_lens is not None:
        mask = mask.without_lens()
    _, is_causal, key_ranges, attn_mask, _, _ = mask
    options = {"is_causal": is_causal, "key_ranges": key_ranges, **options}
    if sinks is None or sinks.dim() == 1:
        return fa_ops.attention(query, key, value, attn_mask, sinks=sinks, **options)
    # A sink per query: it adds exp(sink) to the denominator exp(lse), which scales the row.
    out, lse = fa_ops.attention(query, key, value, attn_mask, return_lse=True, **options)
    share = torch.sigmoid(lse.unsqueeze(-1) - sinks.float())
    return (out * share).to(out.dtype)


def eager(layer: nn.Module, inputs: Inputs) -> Tensor:
    """Eager attention, for heads that are wider than those of any GPU kernel."""
    query, key, value, mask, sinks, options = inputs
    _logger.warning_once(
        f"no GPU kernel has head dimension {max(query.shape[-1], value.shape[-1])}: such layers "
        "run eager attention, with memory for every weight."
    )
    return weights.attention(query, key, value, mask, sinks, **options)[0].transpose(1, 2)


def packed(inputs: Inputs, documents: Documents) -> Tensor:
    """(1, T, Hq, Dv): fa_ops.attention_varlen on documents packed into one row."""
    mask = inputs.mask
    tokens = (t[0].transpose(0, 1) for t in inputs[:3])
    is_causal = mask.is_causal or mask.packing is PackingHint.ONLY
    return fa_ops.attention_varlen(
        *tokens, *documents, is_causal=is_causal, sinks=inputs.sinks, **inputs.options
    )[None]


class Choices:
    """The operators chosen for calls with one query and a compact mask, by the kind of the call.

    Only for calls whose tensors reach the operator as the layer passed them.
    """

    KEPT = 256

    def __init__(self) -> None:
        self._operators: dict[tuple, Operator] = {}

    @staticmethod
    def kind(
        layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: CompactMask, sinks
    ) -> tuple | None:
        """All that a choice depends on, or None for calls whose choice is not remembered."""
        queries, (rows, heads, keys, _) = query.shape, key.shape
        if queries[2] != 1 or (
            torch.is_grad_enabled() and _requires_grad(query, key, value, sinks)
        ):
            return None
        return (
            type(layer), mask.encoding, queries, rows, heads, keys > 1, value.shape[3],
            query.dtype, key.dtype, value.dtype, query.is_cuda,
            query.stride()[3], key.stride()[3], value.stride()[3], sinks is None or sinks.dim(),
        )  # fmt: skip

    def get(self, kind: tuple | None) -> Operator | None:
        return self._operators.get(kind)

    def remember(self, kind: tuple, operator: Operator) -> None:
        if len(self._operators) >= self.KEPT:
            self._operators.clear()
        self._operators[kind] = operator
