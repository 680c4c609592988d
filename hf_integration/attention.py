"""The attention function that transformers calls for `attn_implementation="fa_ops"`.

A call is rewritten until an operator of fa_ops can compute it. Which rewrites apply, and which
operator is chosen, depends on the family of the call (dtypes, layouts, encoding of the mask), but
not on the values of its tensors. An eager decoding step takes as long as the host needs to launch
it, so the decisions for its family are remembered and replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fa_ops.tracing import is_compiling
from hf_integration import (
    architectures,
    call_rewrites,
    distribution,
    encodings,
    explaining,
    latent,
    operators,
    paged,
)
from hf_integration.encodings import CompactMask, Encoding, MaskArguments, PackingHint
from hf_integration.operators import Extras, LayerCall

MAX_REMEMBERED = 256
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Decisions(NamedTuple):
    """The rewrites that change a call, in order, and the operator for the rewritten call."""

    rewrites: tuple[call_rewrites.Rewrite, ...]
    operator: operators.Operator


_remembered: dict[tuple, Decisions] = {}


def fa_ops_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cache: object = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool = False,
    eight_bit: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute one attention layer of a transformers model.

    Args:
        module: the layer.
        query: ``(B, Hq, Sq, D)``.
        key: ``(B, Hkv, Sk, D)``; heads are not repeated.
        value: ``(B, Hkv, Sk, Dv)``.
        attention_mask: a `CompactMask`, or a bool or float tensor that broadcasts to
            ``(B, Hq, Sq, Sk)``.
        scaling: factor on the products; ``None``: ``1 / sqrt(D)``.
        dropout: probability of dropping a weight.
        is_causal: whether a call without a mask is causal; ``None``: the module's attribute.
        softcap: as in :func:`fa_ops.attention`.
        s_aux: ``(Hq,)``, another name of `sinks`.
        sinks: ``(Hq,)``, as in :func:`fa_ops.attention`.
        position_bias: float, added to the scores; may require grad.
        indices: ``(B, Sq, n)`` or ``(B, Hq, Sq, n)``, the keys that a query may attend; -1: none.
        block_indices: not supported.
        cache: the cache of continuous batching; `kwargs` then describe the batch.
        cu_seq_lens_q: int32 ``(documents + 1,)``, boundaries of packed documents.
        cu_seq_lens_k: the same for keys.
        max_length_q: the number of queries of the longest document.
        max_length_k: the same for keys.
        position_ids: separate documents that are packed into one row.
        output_attentions: also return the weights, as eager attention computes them.
        eight_bit: compute prompts, and other calls with more than 16 queries, with 8-bit products,
            where they can.
        kwargs: not used otherwise. The mask already contains `sliding_window`.

    Returns:
        ``(B, Sq, Hq, Dv)``, contiguous, and the weights ``(B, Hq, Sq, Sk)`` or None.

    Raises:
        NotImplementedError: an argument that only other attention implementations support.
    """
    sinks = sinks if s_aux is None else s_aux
    options = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0}
    lens = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if cache is not None or block_indices is not None or paged.is_updated(kwargs):
        _refuse(module, block_indices, cache)
        kwargs |= dict(zip(_LENGTHS, lens, strict=True))
        call = LayerCall(query, key, value, MaskArguments(), sinks, options)
        call = call_rewrites.with_uniform_tensors(
            module, call_rewrites.without_latents(module, call)
        )
        return paged.attention(module, call, cache, kwargs), None
    output_attentions = output_attentions or operators.requested()
    mask = _mask_arguments(module, query, key, attention_mask, is_causal)
    distribution.refuse_others(module, attention_mask)
    if distribution.active() is not None:
        parts = (query, key, value, mask, sinks, options)
        unsupported = (position_bias, indices, cu_seq_lens_q, output_attentions)
        return distribution.attention(module, *parts, unsupported), None
    is_compact, family, decisions = type(attention_mask) is CompactMask, None, None
    plain = position_bias is indices is cu_seq_lens_q is None and not (dropout or output_attentions)
    if plain and is_compact and not is_compiling():
        family = _family(query, key, value, attention_mask.encoding, mask, sinks, eight_bit)
        decisions = _remembered.get(family)
    if decisions is not None:
        call = LayerCall(query, key, value, mask, sinks, options)
        for rewrite in decisions.rewrites:
            call = rewrite(module, call)
    else:
        is_user_mask = not is_compact and attention_mask is not None
        optional = (
            position_bias, indices, lens, position_ids, is_user_mask, output_attentions, eight_bit,
        )  # fmt: skip
        call = LayerCall(query, key, value, mask, sinks, options, Extras(*optional))
        decisions, call = _decide(module, call, family)
    out, weights = decisions.operator(module, call)
    return (out if call.up_v is None else latent.project_out(out, call.up_v)), weights


def fa_ops_8bit_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Compute one attention layer with 8-bit products, as `attn_implementation="fa_ops_8bit"`.

    Decoding steps have 16-bit products, as they would have to quantise the whole cache. Calls whose
    mask is dense or float, packed documents, and calls that return weights have them too, with a
    warning, and so have layers that :func:`keep_16_bit` names. Arguments and results are those of
    :func:`fa_ops_attention_forward`.

    Raises:
        ValueError: dropout, or a gradient would be recorded.
        NotImplementedError: continuous batching.
    """
    if dropout or (torch.is_grad_enabled() and operators.any_requires_grad(query, key, value)):
        raise ValueError(
            "attn_implementation='fa_ops_8bit' is for inference: call the model in eval() mode "
            "under torch.no_grad(), or train with 'fa_ops'"
        )
    if kwargs.get("cache") is not None or paged.is_updated(kwargs):
        raise NotImplementedError(
            "attn_implementation='fa_ops_8bit' has no continuous batching; use 'paged|fa_ops'"
        )
    return fa_ops_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout,
        eight_bit=not explaining.is_kept(module), **kwargs,
    )  # fmt: skip


def _decide(layer: nn.Module, call: LayerCall, family: tuple | None) -> tuple[Decisions, LayerCall]:
    """Decide how to compute a call, and remember it for its family; also rewrite the call."""
    applied = []
    for rewrite in call_rewrites.REWRITES:
        rewritten = rewrite(layer, call)
        if rewritten is not call:
            applied.append(rewrite)
            call = rewritten
    decisions = Decisions(tuple(applied), operators.choose(call))
    if family is not None:
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        _remembered[family] = decisions
    return decisions, call


def _family(
    query, key, value, encoding, mask: MaskArguments, sinks, eight_bit: bool
) -> tuple | None:
    """Everything that the decisions for one query with a compact mask depend on.

    None for calls whose decisions are not remembered.
    """
    queries, (B, Hkv, Sk, D) = query.shape, key.shape
    # Latents, which are narrower than queries, are rewritten depending on the layer's weights.
    if queries[2] != 1 or queries[3] != D:
        return None
    if torch.is_grad_enabled() and operators.any_requires_grad(query, key, value, sinks):
        return None
    visible = Sk if mask.visible_keys is None else mask.visible_keys
    return (
        encoding, queries, B, Hkv, visible > 1, visible == Sk, mask.kv_lens is None, value.shape[3],
        query.dtype, key.dtype, value.dtype, query.is_cuda,
        query.stride()[3], key.stride()[3], value.stride()[3], sinks is None or sinks.dim(),
        eight_bit,
    )  # fmt: skip


def _refuse(module: nn.Module, block_indices: Tensor | None, cache: object) -> None:
    """Raise NotImplementedError unless the cache is that of continuous batching."""
    if block_indices is None and (cache is None or paged.is_batch(cache)):
        return
    name = "cache" if block_indices is None else "block_indices"
    raise NotImplementedError(
        f"attn_implementation='fa_ops' does not support `{name}`, which {type(module).__name__} "
        "passes; use 'sdpa' or 'eager'"
    )


def _mask_arguments(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> MaskArguments:
    if mask is not None:
        found = encodings.arguments(mask, module)
        restricts = type(mask) is CompactMask and mask.encoding is not Encoding.FULL
        # A process of a distribution has a part of the keys.
        if restricts and mask.shape[3] != key.shape[2] and distribution.active() is None:
            return encodings.for_keys(mask, found, key.shape[2], module)
        is_row = found.attn_mask is not None and query.shape[2] == 1 and found.is_bool_row()
        if is_row and mask.is_cuda:
            return encodings.bounded(mask, query.dtype, module)
        return operators.with_mask_blocks(found, query.shape[2], module)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and not architectures.attends_all(getattr(module, "config", None))
    if not is_causal or query.shape[2] == 1:
        return MaskArguments()
    # As in SDPA, query i attends keys 0 to i. Later keys are the unused end of a static cache.
    visible = query.shape[2] if key.shape[2] > query.shape[2] else None
    return MaskArguments(visible, is_causal=True, packing=PackingHint.POSSIBLE)
