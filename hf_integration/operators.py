"""A layer's attention call and the operators that compute it; masks in blocks, recorded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

import fa_ops
from fa_ops.call.options import (
    MASK_BLOCK,
    MAX_DECODING_QUERIES,
    MAX_HEAD_DIM,
    MAX_QUANTIZED_HEAD_DIM,
)
from fa_ops.plans import dispatch
from fa_ops.tracing import is_compiling
from hf_integration import encodings
from hf_integration.encodings import MaskArguments, PackingHint, PerTensorCache

_logger = logging.get_logger(__name__)


class Documents(NamedTuple):
    """The ends of the documents packed into one row, among the queries and among the keys."""

    q_ends: Tensor  # int32 (documents + 1,), beginning with 0
    k_ends: Tensor
    longest_q: int | None = None
    longest_k: int | None = None


class Extras(NamedTuple):
    """Arguments that only rewrites read; calls whose decisions are remembered have none."""

    position_bias: Tensor | None = None
    indices: Tensor | None = None  # lists of keys
    cu_seqlens: tuple = (None, None, None, None)  # of queries, of keys, and the longest of each
    position_ids: Tensor | None = None
    is_user_mask: bool = False  # the mask is not a CompactMask
    output_attentions: bool = False
    eight_bit: bool = False  # compute prefills with 8-bit products
    block_indices: Tensor | None = None  # lists of blocks of keys


NO_EXTRAS = Extras()


class LayerCall(NamedTuple):
    """The attention call of a layer; its tensors are (B, H, S, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskArguments
    sinks: Tensor | None
    options: dict  # scale, dropout_p, softcap
    extras: Extras = NO_EXTRAS
    documents: Documents | None = None  # packed into one row, and not part of the mask
    up_v: Tensor | None = None  # the projection of the output, if latents are attended
    lists: Tensor | None = None  # int32 (B, Hkv or 1, Sq, n): the only blocks of keys
    block_size: int = 1  # keys of a block


# Returns (B, Sq, Hq, Dv), and the weights (B, Hq, Sq, Sk) or None.
Operator = Callable[[nn.Module, LayerCall], tuple[Tensor, Tensor | None]]


@torch.compiler.assume_constant_result  # so that torch.compile warns while it traces
def _warn_once(message: str) -> None:
    _logger.warning_once(message)


def choose(call: LayerCall) -> Operator:
    """The operator for a call to which all rewrites have been applied."""
    query, mask = call.query, call.mask
    if call.extras.eight_bit and not _is_short(call):
        reason = _why_not_eight_bit(call)
        if reason is None:
            return quantized
        _warn_once(f"{reason}: such calls of 'fa_ops_8bit' have 16-bit products.")
    if call.lists is not None:
        return selected
    if call.documents is not None:
        return packed
    if call.extras.output_attentions:
        return with_weights
    splits_keys = mask.kv_lens is not None or query.shape[-1] > MAX_HEAD_DIM
    splits_keys = splits_keys or (mask.key_ranges is not None and query.is_cuda)
    if splits_keys and is_step(call):
        return step
    return eager if is_too_wide(call) else dense


def is_step(call: LayerCall) -> bool:
    """Whether the decoding kernel, for few queries and many keys, supports the call."""
    query, key, value, mask, sinks, options = call[:6]
    if mask.attn_mask is not None or options["dropout_p"]:
        return False
    # In this order, so that torch.compile traces one graph for prefills of all lengths.
    if key.shape[2] <= query.shape[2] or query.shape[2] > MAX_DECODING_QUERIES:
        return False
    if mask.key_ranges is not None and tuple(mask.key_ranges.shape[1:3]) != (1, 1):
        return False
    if sinks is not None and sinks.dim() != 1:
        return False
    return not (torch.is_grad_enabled() and any_requires_grad(query, key, value, sinks))


def _is_short(call: LayerCall) -> bool:
    """Whether there are so few queries that quantising all keys would take longer than reading."""
    return call.key.shape[2] > call.query.shape[2] and call.query.shape[2] <= MAX_DECODING_QUERIES


def _why_not_eight_bit(call: LayerCall) -> str | None:
    """Why a call cannot have 8-bit products, or None."""
    if call.lists is not None:
        return "keys that an indexer lists"
    if call.documents is not None:
        return "documents that are packed into one row"
    if call.extras.output_attentions:
        return "`output_attentions=True`"
    if call.mask.attn_mask is not None:
        return "a mask that is neither causal nor one range of keys for each query"
    if call.sinks is not None and call.sinks.dim() != 1:
        return "sinks for each query"
    if call.query.is_cuda and head_dim(call) > MAX_QUANTIZED_HEAD_DIM:
        return f"a head dimension above {MAX_QUANTIZED_HEAD_DIM}"
    return None


def is_too_wide(call: LayerCall) -> bool:
    """Whether no GPU kernel but the decoding kernel has the head dimensions of the call."""
    return call.query.is_cuda and head_dim(call) > MAX_HEAD_DIM


def head_dim(call: LayerCall) -> int:
    """The larger head dimension."""
    return max(call.query.shape[-1], call.value.shape[-1])


def any_requires_grad(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors that are not None requires a gradient."""
    return any(t is not None and t.requires_grad for t in tensors)


def step(layer: nn.Module, call: LayerCall) -> tuple[Tensor, None]:
    """A decoding step by fa_ops.attention_with_kv_cache, which splits the keys over the GPU."""
    query, key, value, mask, sinks, options = call[:6]
    lens, B = mask.kv_lens, key.shape[0]
    if lens is None and mask.key_ranges is not None:
        lens = encodings.range_ends(mask.key_ranges, B, layer)
    elif lens is None:
        lens = torch.full((B,), key.shape[2], dtype=torch.int32, device=key.device)
    elif lens.shape[0] != B:  # the model repeats its batch; rows that differ have key ranges
        lens = lens[:1].expand(B)
    out = fa_ops.attention_with_kv_cache(
        query, key, value, lens, is_causal=mask.is_causal, scale=options["scale"],
        softcap=options["softcap"], sinks=sinks, key_ranges=mask.key_ranges,
    )  # fmt: skip
    return out.transpose(1, 2), None


def dense(layer: nn.Module, call: LayerCall) -> tuple[Tensor, None]:
    """A call of fa_ops.attention."""
    query, key, value, mask, sinks, options = call[:6]
    if mask.kv_lens is not None:
        mask = mask.without_lens()
    _, is_causal, key_ranges, attn_mask, _, _, blocks = mask
    options = {
        "is_causal": is_causal, "key_ranges": key_ranges, "mask_blocks": blocks, **options,
    }  # fmt: skip
    if sinks is None or sinks.dim() == 1:
        out = fa_ops.attention(query, key, value, attn_mask, sinks=sinks, **options)
        return out.transpose(1, 2), None
    # A sink per query adds exp(sink) to the denominator exp(lse), which scales the row.
    out, lse = fa_ops.attention(query, key, value, attn_mask, return_lse=True, **options)
    share = torch.sigmoid(lse.unsqueeze(-1) - sinks.float())
    return (out * share).to(out.dtype).transpose(1, 2), None


def selected(layer: nn.Module, call: LayerCall) -> tuple[Tensor, None]:
    """Attention over the keys that lists name, in memory linear in the lists."""
    query, key, value, mask, sinks, options = call[:6]
    lists = call.lists
    if not query.is_cuda or call.extras.block_indices is not None:
        out = fa_ops.attention_selected(
            query, key, value, lists, block_size=call.block_size, is_causal=mask.is_causal,
            key_ranges=mask.key_ranges, scale=options["scale"], sinks=sinks,
        )  # fmt: skip
        return out.transpose(1, 2), None
    B, _, Sq, _ = query.shape  # lists of tokens without the keys that the mask hides
    first = torch.arange(B, device=lists.device, dtype=torch.int32).view(-1, 1, 1) * key.shape[2]
    tokens = lists[:, 0].expand(B, -1, -1)
    tokens = torch.where(tokens < 0, tokens, tokens + first).flatten(0, 1)
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = fa_ops.attention_selected_tokens(
        *rows, tokens, scale=options["scale"], sinks=sinks
    )  # fmt: skip
    return out.unflatten(0, (B, Sq)), None


def quantized(layer: nn.Module, call: LayerCall) -> tuple[Tensor, None]:
    """A call of fa_ops.quantized_attention."""
    query, key, value, mask, sinks, options = call[:6]
    if mask.kv_lens is not None:
        mask = mask.without_lens()
    out = fa_ops.quantized_attention(
        query, key, value, mask.is_causal, key_ranges=mask.key_ranges, sinks=sinks,
        scale=options["scale"], softcap=options["softcap"],
    )  # fmt: skip
    return out.transpose(1, 2), None


def eager(layer: nn.Module, call: LayerCall) -> tuple[Tensor, None]:
    """Eager attention, for heads that are wider than those of any GPU kernel."""
    _warn_once(
        f"no GPU kernel has head dimension {max(call.query.shape[-1], call.value.shape[-1])}: such "
        "layers run eager attention, with memory for every weight."
    )
    return _eager_attention(call)[0], None


def with_weights(layer: nn.Module, call: LayerCall) -> tuple[Tensor, Tensor]:
    """Eager attention, which has weights to return."""
    _warn_once(
        "`output_attentions=True` requests attention weights, which fused attention never forms: "
        "such calls run eager attention, with memory for every weight."
    )
    return _eager_attention(call)


def _eager_attention(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Attention with its weights; those of a row without any visible key are zero."""
    query, key, value, mask, sinks, options = call[:6]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale, softcap = options["scale"], options["softcap"]
    scores = (query @ key.transpose(-1, -2)).float()
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if mask.attn_mask is not None and mask.attn_mask.dtype != torch.bool:
        scores = scores + mask.attn_mask
    keep = mask.keep(query.shape[2], key.shape[2], query.device)
    scores = scores.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        scores = torch.cat([scores, column.float().expand(*scores.shape[:3], 1)], -1)
    is_empty = (scores == float("-inf")).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    p = F.dropout(p[..., : key.shape[2]], options["dropout_p"]).to(value.dtype)
    return (p @ value).transpose(1, 2).contiguous(), p


def packed(layer: nn.Module, call: LayerCall) -> tuple[Tensor, None]:
    """A call of fa_ops.attention_varlen, for documents that are packed into one row, or several."""
    B = call.query.shape[0]
    rows = (t.transpose(1, 2) for t in call[:3])
    tokens = (t[0] if B == 1 else t.flatten(0, 1) for t in rows)
    is_causal = call.mask.is_causal or call.mask.packing is PackingHint.ONLY
    out = fa_ops.attention_varlen(
        *tokens, *call.documents, is_causal=is_causal, sinks=call.sinks, **call.options
    )
    return out[None], None


# mask_blocks of the dense masks that transformers or users make.

_blocks_cache = PerTensorCache()
_skips_tiles = torch.compiler.assume_constant_result(dispatch.skips_tiles)


def with_mask_blocks(found: MaskArguments, queries: int, layer: nn.Module) -> MaskArguments:
    """The same with `mask_blocks` of a dense mask, made once for the layers that share the mask."""
    mask = found.attn_mask
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return found
    # queries are not compared in compiled code, which would be compiled again for short prompts
    pays = is_compiling() or queries >= MASK_BLOCK
    if not (pays and _skips_tiles(mask.device.type)):
        return found
    blocks = _blocks_cache.get(mask, layer, lambda: fa_ops.mask_blocks(mask))
    return found._replace(mask_blocks=blocks)


try:
    from transformers.utils.output_capturing import _active_collector as _collector

    _collector.global_var  # noqa: B018
except (ImportError, AttributeError) as error:
    _collector = None
    state = f"off: {error}"
else:
    state = "on"


# Whether the running model returns attention weights, which `output_attentions=True` requests.
#
# Most models pass this argument on to the attention function. The layers of some do not (SigLIP,
# Nemotron, StableLM): transformers collects the weights from what their attention returns.


def requested() -> bool:
    """Whether transformers is collecting weights from attention layers."""
    if _collector is None:
        return False
    # A model that is compiled as a whole sets the global variable, as torch.compile cannot trace
    # context variables. Layers that are compiled on their own read None.
    collected = _collector.global_var if is_compiling() else _collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)
