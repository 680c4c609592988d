"""The attention function that transformers calls for `attn_implementation="fa_ops"`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_integration import architectures, encodings, latent, operators, packing, paged, weights
from hf_integration.encodings import CompactMask, MaskArguments, PackingHint
from hf_integration.operators import Choices, Inputs
from hf_integration.packing import Documents
from hf_integration.readable import is_readable

_logger = logging.get_logger(__name__)
_ELSEWHERE = (
    "attn_implementation='fa_ops' does not take `{}`, which {} passes; use 'sdpa' or 'eager'"
)
_WEIGHTS = (
    "`output_attentions=True` asks for attention weights, which fused attention never forms: such "
    "calls run eager attention, with memory for every weight."
)
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_choices = Choices()


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
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """One attention layer of a transformers model.

    Shape: query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), key heads not
    repeated. `attention_mask` is a `CompactMask`, or a bool or float tensor; where it is None,
    `is_causal` (the argument, else the module's) decides. A `sliding_window` among the other
    keywords only repeats what is in the mask.

    `position_ids` separate documents that are packed into one row. `cache` is that of continuous
    batching, with which `kwargs` describe the batch.

    Returns (B, Sq, Hq, Dv), contiguous, and the weights (B, Hq, Sq, Sk) if `output_attentions`
    asks for them, computed as eager attention computes them.

    Raises NotImplementedError for what only another attention implementation takes.
    """
    sinks = sinks if s_aux is None else s_aux
    options = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0}
    kind = None
    plain = block_indices is cache is indices is position_bias is cu_seq_lens_q is None
    plain = plain and type(attention_mask) is CompactMask and not (dropout or output_attentions)
    if plain and not torch.compiler.is_compiling():
        kind = _choices.kind(module, query, key, value, attention_mask, sinks)
        if (operator := _choices.get(kind)) is not None:
            mask = encodings.arguments(attention_mask, module)
            inputs = Inputs(query, key, value, mask, sinks, options)
            return operator(module, inputs).transpose(1, 2), None
    if block_indices is not None or cache is not None:
        own = paged.is_batch(cache)
        _refuse(module, block_indices=block_indices, cache=None if own else cache)
    lens = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if cache is not None:
        kwargs |= dict(zip(_LENGTHS, lens, strict=True))
        return _batched(module, query, key, value, cache, sinks, options, kwargs), None
    passed = (query, key, value)
    mask = _mask_arguments(module, query, key, attention_mask, is_causal)
    visible = mask.visible_keys
    if visible is not None and visible != key.shape[2]:
        key, value = key[:, :, :visible], value[:, :, :visible]
    inputs = Inputs(query, key, value, mask, sinks, options)
    special = output_attentions or indices is not None or cu_seq_lens_q is not None
    inputs, up_v = _without_latents(module, inputs, may_absorb=not special)
    query, key, value = _prepared(*inputs[:3])
    if indices is not None:
        mask = _selected(mask, indices, query, key)
    documents = None
    if position_ids is not None or cu_seq_lens_q is not None:
        is_own = attention_mask is None or type(attention_mask) is CompactMask
        mask, documents = _with_documents(module, mask, is_own, lens, position_ids, query, key)
    if documents is not None:
        only = mask.key_ranges is None or mask.packing is PackingHint.ONLY
        if only and mask.attn_mask is position_bias is None and not output_attentions:
            inputs = Inputs(query, key, value, mask, sinks, inputs.options)
            return operators.packed(inputs, documents), None
        mask = packing.within_documents(mask, documents, query.shape[2])
    if position_bias is not None or mask.attn_mask is not None:
        mask = _biased(mask, position_bias, query, key)
    inputs = Inputs(query, key, value, mask, sinks, inputs.options)
    if output_attentions:
        _logger.warning_once(_WEIGHTS)
        return weights.attention(query, key, value, mask, sinks, **inputs.options)
    operator = operators.choose(inputs)
    unchanged = all(a is b for a, b in zip(passed, inputs, strict=False))
    if kind is not None and unchanged and mask.visible_keys is mask.attn_mask is None:
        _choices.remember(kind, operator)
    out = operator(module, inputs).transpose(1, 2)
    return (out if up_v is None else latent.project_out(out, up_v)), None


def _refuse(module: nn.Module, **passed) -> None:
    for name, value in passed.items():
        if value is not None:
            raise NotImplementedError(_ELSEWHERE.format(name, type(module).__name__))


def _batched(module: nn.Module, query, key, value, cache, sinks, options, keywords) -> Tensor:
    """Continuous batching."""
    if latent.is_latent(module, query, key):
        key, value = latent.expand(module, key, value)
    query, key, value = _prepared(query, key, value)
    return paged.attention(module, query, key, value, cache, sinks, options, keywords)


def _without_latents(
    module: nn.Module, inputs: Inputs, may_absorb: bool
) -> tuple[Inputs, Tensor | None]:
    """Keys and values of every head in place of latents, or where the latents themselves are
    attended, the projection of the output.

    Latents are wide heads: on GPUs only the kernel for decoding has them.
    """
    query, key, value = inputs[:3]
    if not latent.is_latent(module, query, key):
        return inputs, None
    scale = inputs.options["scale"]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    inputs = inputs._replace(options=inputs.options | {"scale": scale})
    may_absorb = may_absorb and latent.can_absorb(module, query, key)
    if may_absorb and (key.device.type == "cpu" or operators.is_step(inputs)):
        query, key, value, up_v = latent.absorb(module, query, key, value)
        return inputs._replace(query=query, key=key, value=value), up_v
    key, value = latent.expand(module, key, value)
    return inputs._replace(key=key, value=value), None


def _with_documents(
    module: nn.Module,
    mask: MaskArguments,
    is_own: bool,
    lens: tuple,
    position_ids: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> tuple[MaskArguments, Documents | None]:
    """The documents packed into the one row of a batch: by cu_seq_lens, or else by positions.

    They are returned, or where the positions cannot be read, made part of the mask. `is_own`: the
    mask is none that a user gave.
    """
    q_ends, k_ends, *longest = lens
    if query.shape[0] != 1 or not is_own:
        return mask, None
    if q_ends is not None:
        k_ends = q_ends if k_ends is None else k_ends
        return mask, Documents(q_ends.int(), k_ends.int(), *longest)
    Sq = query.shape[2]
    if mask.packing is PackingHint.NONE or position_ids is None or Sq == 1:
        return mask, None
    if tuple(position_ids.shape) != (1, Sq):
        return mask, None
    if not is_readable(position_ids):
        return packing.within_positions(mask, position_ids, Sq), None
    return mask, packing.documents(position_ids, module) if key.shape[2] == Sq else None


def _prepared(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype, one batch size, rows contiguous."""
    if not query.dtype == key.dtype == value.dtype:
        device = query.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else value.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.shape[0] != key.shape[0]:  # learned queries, shared by the batch
        query = query.expand(key.shape[0], -1, -1, -1)
    if not (query.stride(-1) == key.stride(-1) == value.stride(-1) == 1):
        tensors = (query, key, value)
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in tensors)
    return query, key, value


def _mask_arguments(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> MaskArguments:
    if mask is not None:
        found = encodings.arguments(mask, module)
        if query.shape[2] == 1 and mask.is_cuda and found.is_bool_row():
            return encodings.bounded(mask, query.dtype, module)
        return found
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and not architectures.attends_all(getattr(module, "config", None))
    if not is_causal or query.shape[2] == 1:
        return MaskArguments()
    # As SDPA aligns it: query i sees keys 0 to i, later keys are the unused end of a static cache.
    visible = query.shape[2] if key.shape[2] > query.shape[2] else None
    return MaskArguments(visible, is_causal=True, packing=PackingHint.POSSIBLE)


def _selected(mask: MaskArguments, indices: Tensor, query: Tensor, key: Tensor) -> MaskArguments:
    """Sparse attention: only the keys whose indices (B, Sq, n) are listed, -1 for none."""
    Sk = key.shape[2]
    shape = (*indices.shape[:-1], Sk + 1)
    slots = torch.where(indices < 0, Sk, indices).long()
    keep = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(-1, slots, True)
    keep = keep[..., :Sk].unsqueeze(1) if indices.dim() == 3 else keep[..., :Sk]
    keep = keep & mask.keep(query.shape[2], Sk, key.device)
    added = mask.attn_mask
    if added is None or added.dtype == torch.bool:
        return MaskArguments(attn_mask=keep)
    return MaskArguments(attn_mask=added.masked_fill(~keep, float("-inf")))


def _biased(mask: MaskArguments, bias: Tensor | None, query: Tensor, key: Tensor) -> MaskArguments:
    """The mask with a bias added to the scores."""
    added = mask.attn_mask
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        if added is None:
            added = bias
        elif added.dtype == torch.bool:
            added = bias.masked_fill(~added, float("-inf"))
        else:
            added = bias + added
    if added.dtype not in (torch.bool, query.dtype):
        added = added.float()
    return mask._replace(attn_mask=added)
