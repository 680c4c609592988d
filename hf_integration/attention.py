"""The attention function that transformers calls for `attn_implementation="fa_ops"`.

A call is rewritten until an operator of fa_ops can compute it. Which rewrites apply, and which
operator is chosen, depends on the family of the call (dtypes, layouts, encoding of the mask), but
not on the values of its tensors. An eager decoding step takes as long as the host needs to launch
it, so the decisions for its family are remembered and replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

import fa_ops
from fa_ops.tracing import is_compiling
from hf_integration import (
    call_rewrites,
    distribution,
    encodings,
    explanations,
    hooks,
    operators,
    unsupported_models,
)
from hf_integration.encodings import (
    CompactMask,
    Encoding,
    MaskArguments,
    PackingHint,
    PerTensorCache,
)
from hf_integration.masks import fa_ops_mask
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
        block_indices: ``(B, Hkv, Sq, n)``, the blocks of keys that a query may attend, each of
            ``indexer.block_size`` of the layer; -1: none.
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
    if cache is not None or updates_cache(kwargs):
        _refuse(module, cache, indices, block_indices)
        kwargs |= dict(zip(_LENGTHS, lens, strict=True))
        call = LayerCall(query, key, value, MaskArguments(), sinks, options)
        call = call_rewrites.with_uniform_tensors(
            module, call_rewrites.without_latents(module, call)
        )
        return paged_attention(module, call, cache, kwargs), None
    output_attentions = output_attentions or operators.requested()
    if type(attention_mask) is CompactMask and attention_mask.encoding is Encoding.LISTED:
        indices = attention_mask.lists
    mask = _mask_arguments(module, query, key, attention_mask, is_causal)
    distribution.refuse_others(module, attention_mask)
    if distribution.active() is not None:
        parts = (query, key, value, mask, sinks, options)
        unsupported = (position_bias, indices, block_indices, cu_seq_lens_q, output_attentions)
        return distribution.attention(module, *parts, unsupported), None
    is_compact, family, decisions = type(attention_mask) is CompactMask, None, None
    plain = position_bias is indices is block_indices is cu_seq_lens_q is None
    plain = plain and not (dropout or output_attentions)
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
            block_indices,
        )  # fmt: skip
        call = LayerCall(query, key, value, mask, sinks, options, Extras(*optional))
        decisions, call = _decide(module, call, family)
    out, weights = decisions.operator(module, call)
    return (out if call.up_v is None else call_rewrites.project_out(out, call.up_v)), weights


def fa_ops_8bit_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
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
    if kwargs.get("cache") is not None or updates_cache(kwargs):
        raise NotImplementedError(
            "attn_implementation='fa_ops_8bit' has no continuous batching; use 'paged|fa_ops'"
        )
    return fa_ops_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout,
        eight_bit=not explanations.is_kept(module), **kwargs,
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


def _refuse(module: nn.Module, cache: object, *lists: Tensor | None) -> None:
    """Raise NotImplementedError unless the cache is that of continuous batching, without lists."""
    is_selected = any(x is not None for x in lists)
    if not is_selected and (cache is None or is_paged_cache(cache)):
        return
    what = "keys that an indexer lists in continuous batching" if is_selected else "`cache`"
    raise NotImplementedError(
        f"attn_implementation='fa_ops' does not support {what}, which {type(module).__name__} "
        "passes; " + ("use generate()" if is_selected else "use 'sdpa' or 'eager'")
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
        is_causal = is_causal and not unsupported_models.attends_all(
            getattr(module, "config", None)
        )
    if not is_causal or query.shape[2] == 1:
        return MaskArguments()
    # As in SDPA, query i attends keys 0 to i. Later keys are the unused end of a static cache.
    visible = query.shape[2] if key.shape[2] > query.shape[2] else None
    return MaskArguments(visible, is_causal=True, packing=PackingHint.POSSIBLE)


# Continuous batching: sequences packed into one row, keys in pages of a cache.
#
# transformers passes its PagedAttentionCache as a keyword; from 5.24 on, layers update the cache
# themselves and pass what it adds to their keywords. Steps that only decode also get a block
# table: the pages are then attended in place, and the operator itself writes the new key of each
# sequence. In other steps the cache gathers the keys of all sequences, which are a packed batch.


_lengths_cache = PerTensorCache()  # the number of keys of each sequence before the step


class Pages(NamedTuple):
    """The pages of one layer, and the table of the pages of each sequence."""

    key: Tensor  # (pages, page_size, Hkv, D)
    value: Tensor
    table: Tensor  # int32 (sequences, pages of the longest sequence)


def paged_attention(layer: nn.Module, call: LayerCall, cache: object, keywords: dict) -> Tensor:
    """Causal attention of query (1, Hq, T, D), within the layer's window; returns (1, T, Hq, Dv).

    `keywords` are the other keywords that transformers passes, which describe the batch.
    """
    query, key, value, _, sinks, options = call[:6]
    window = keywords.get("sliding_window") or getattr(layer, "sliding_window", None)
    options = {
        "is_causal": True, "scale": options["scale"], "softcap": options["softcap"], "sinks": sinks,
        "window": (int(window) - 1, 0) if window else None,
    }  # fmt: skip
    if cache is None:
        step = _updated(keywords, key, value)
    elif hasattr(cache, "layer_index_to_group_indices"):
        step = _before_5_19(layer, key, value, cache, window, keywords)
    else:
        step = _update_cache(layer, key, value, cache, keywords)
    k_ends, longest_k, pages, key, value = step
    if pages is not None:
        return _decode_pages(layer, query, key, value, pages, k_ends, options)
    longest_q = keywords.get("max_length_q", keywords.get("max_seqlen_q"))
    tokens = (t[0].transpose(0, 1) for t in (query, key, value))
    out = fa_ops.attention_varlen(
        *tokens, keywords["cu_seq_lens_q"].int(), k_ends, longest_q, longest_k, **options
    )
    return out[None]


Step = tuple[Tensor, int | None, Pages | None, Tensor, Tensor]


def _update_cache(layer: nn.Module, key, value, cache, keywords: dict) -> Step:
    """Let the cache fill in this layer's keywords, and gather the keys unless there is a table."""
    filled = dict(keywords)
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=layer.layer_idx, kwargs=filled
    )
    return _updated(filled, key, value)


def _updated(keywords: dict, key, value) -> Step:
    """The step of a cache that has been updated."""
    pages = None
    if keywords.get("block_table") is not None:
        pages = Pages(keywords["k_cache"], keywords["v_cache"], keywords["block_table"])
    return keywords["cu_seq_lens_k"].int(), keywords["max_length_k"], pages, key, value


def _before_5_19(layer: nn.Module, key, value, cache, window, keywords: dict) -> Step:
    """The same before transformers 5.19: the keywords list the keys to gather for each group."""
    k_ends, longest_k = keywords["cu_seq_lens_k"], keywords["max_seqlen_k"]
    if isinstance(k_ends, dict):
        kind = "sliding_attention" if window else "full_attention"
        k_ends, longest_k = k_ends[kind], longest_k[kind]
    table = keywords.get("block_table")
    if table is None:
        indices = {name: keywords[name] for name in ("read_index", "write_index")}
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=layer.layer_idx, **indices
        )
        key, value = (t.transpose(0, 1)[None] for t in (key, value))
        return k_ends.int(), longest_k, None, key, value
    group, index = cache.layer_index_to_group_indices[layer.layer_idx]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    views = (cache.key_cache[index].view(shape), cache.value_cache[index].view(shape))
    return k_ends.int(), longest_k, Pages(*views, table[group]), key, value


def _decode_pages(
    layer: nn.Module, query, key, value, pages: Pages, k_ends: Tensor, options: dict
) -> Tensor:
    """Attend with one token of each sequence, whose key is written behind the sequence's last."""
    query, key, value = (t[0].transpose(0, 1).unsqueeze(2) for t in (query, key, value))
    N = query.shape[0]
    before = _lengths_cache.get(
        k_ends, layer, lambda: (k_ends[1 : N + 1] - k_ends[:N] - 1).clamp(min=0)
    )
    table = pages.table[:N].int()
    out = fa_ops.attention_with_kv_cache(
        query, pages.key, pages.value, before, table, key=key, value=value, **options
    )
    return out[:, :, 0][None]


def updates_cache(keywords: dict) -> bool:
    """Whether the layer has updated a cache of continuous batching, as transformers 5.24 does."""
    return keywords.get("write_index") is not None


def is_paged_cache(cache: object) -> bool:
    """Whether the `cache` keyword is a cache of continuous batching."""
    return hasattr(cache, "update") and type(cache).__name__ == "PagedAttentionCache"


# The name "flash_attention_2", which other libraries ask for, on request. Code under this name
# expects what FlashAttention does: a 2-D mask is padding, causality is aligned at the last key, and
# the window is an argument if the mask does not contain it.

_CHECK = "_check_and_adjust_attn_implementation"

_originals: dict[object, Callable] = {}  # what transformers had under the names


def take_flash_name() -> None:
    """Register our functions under the names. Idempotent.

    Raises RuntimeError if this transformers release has no method that checks an implementation.
    """
    if _originals:
        return
    adjust = getattr(PreTrainedModel, _CHECK, None)
    if adjust is None:
        raise RuntimeError(f"this transformers release has no PreTrainedModel.{_CHECK}")
    _originals[_CHECK] = adjust
    setattr(PreTrainedModel, _CHECK, _unchecked(adjust))
    registered = AttentionInterface().valid_keys()
    for interface, function in (
        (AttentionInterface, flash_attention_forward),
        (AttentionMaskInterface, fa_ops_mask),
    ):
        for name in hooks.FLASH_NAMES:
            if name in registered:
                _originals[interface, name] = interface().get(name)
                interface.register(name, function)
    hooks.names.update(hooks.FLASH_NAMES)


def give_back_flash_name() -> None:
    """Restore what transformers had under the names. Idempotent."""
    for where, kept in _originals.items():
        if where == _CHECK:
            setattr(PreTrainedModel, _CHECK, kept)
        else:
            interface, name = where
            if kept is None:
                interface._global_mapping.pop(name, None)
            else:
                interface.register(name, kept)
    _originals.clear()
    hooks.names.difference_update(hooks.FLASH_NAMES)


def flash_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """fa_ops_attention_forward with the masks of FlashAttention.

    Raises NotImplementedError for a window without causality that the mask does not contain.
    """
    is_padding = attention_mask is not None and attention_mask.dim() == 2
    is_packed = kwargs.get("cache") is not None or kwargs.get("cu_seq_lens_q") is not None
    if is_padding and attention_mask.shape[1] < key.shape[2]:  # a static cache
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
    if is_padding or (attention_mask is None and not is_packed):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = _mask(module, query, key, attention_mask, causal, sliding_window)
    return fa_ops_attention_forward(
        module, query, key, value, attention_mask, *args, is_causal=is_causal,
        sliding_window=sliding_window, **kwargs,
    )  # fmt: skip


def _mask(
    module: nn.Module, query: Tensor, key: Tensor, padding: Tensor | None, causal: bool,
    window: int | None,
) -> Tensor | None:  # fmt: skip
    """The mask of a call with padding (B, Sk) or none; None where SDPA's meaning is the same."""
    Sq, Sk = query.shape[2], key.shape[2]
    is_bounded = window is not None and window < Sk
    if padding is None and not is_bounded and not (causal and 1 < Sq < Sk):
        return None
    if is_bounded and not causal:
        raise NotImplementedError(f"sliding_window needs causality or a mask, got {window}")
    function = causal_mask_function if causal else bidirectional_mask_function
    return fa_ops_mask(
        batch_size=query.shape[0], q_length=Sq, kv_length=Sk, q_offset=Sk - Sq,
        mask_function=sliding_window_causal_mask_function(window) if is_bounded else function,
        local_size=window if is_bounded else None,
        attention_mask=None if padding is None else padding[:, -Sk:].bool(),
        device=query.device, config=module.config,
    )  # fmt: skip


def _unchecked(adjust: Callable) -> Callable:
    """The method that chooses an implementation, without the checks for flash-attn."""

    @functools.wraps(adjust)
    def wrapper(self, attn_implementation, is_init_check=False, *args, **kwargs):
        if attn_implementation in hooks.names and attn_implementation in hooks.FLASH_NAMES:
            return self.get_correct_attn_implementation(attn_implementation, is_init_check)
        return adjust(self, attn_implementation, is_init_check, *args, **kwargs)

    return wrapper
