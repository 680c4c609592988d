"""The attention function that transformers calls for `attn_implementation="fa_ops"`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.utils import logging

import fa_ops
from hf_integration import architectures, encodings, latent, packing, paged, steps, weights
from hf_integration.encodings import CompactMask, MaskArguments, PackingHint
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
# Queries up to which a call is a step of decoding, for the kernel that splits the keys, and the
# head dimension from which GPUs have no other; smaller ones go there by themselves without lengths.
FEW_QUERIES, WIDE = 16, 256


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
    keywords only repeats what the mask says already.

    `position_ids` tell documents apart that are packed into one row. `cache` is that of continuous
    batching, with which `kwargs` describe the batch.

    Returns (B, Sq, Hq, Dv), contiguous, and the weights (B, Hq, Sq, Sk) if `output_attentions`
    asks for them, computed as eager attention computes them.

    Raises NotImplementedError for what only another attention implementation takes.
    """
    plain = block_indices is cache is indices is position_bias is cu_seq_lens_q is None
    plain = plain and attention_mask is not None and not (dropout or output_attentions)
    sinks = sinks if s_aux is None else s_aux
    if plain and not torch.compiler.is_compiling():
        out = steps.attend(
            module, query, key, value, attention_mask, scaling, softcap or 0.0, sinks
        )
        if out is not None:
            return out.transpose(1, 2), None
    if block_indices is not None or cache is not None:
        own = paged.is_batch(cache)
        _refuse(module, block_indices=block_indices, cache=None if own else cache)
    options = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0}
    lens = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if cache is not None:
        kwargs |= dict(zip(_LENGTHS, lens, strict=True))
        return _batched(module, query, key, value, cache, sinks, options, kwargs), None
    form = _mask_arguments(module, query, key, attention_mask, is_causal)
    visible = form.visible_keys
    if visible is not None and visible != key.shape[2]:
        key, value = key[:, :, :visible], value[:, :, :visible]
    up_v = None
    if latent.is_latent(module, query, key):
        options["scale"] = query.shape[-1] ** -0.5 if scaling is None else scaling
        special = output_attentions or indices is not None or cu_seq_lens_q is not None
        if not special and _may_absorb(module, query, key, value, form, sinks, options):
            query, key, value, up_v = latent.absorb(module, query, key, value)
        else:
            key, value = latent.expand(module, key, value)
    query, key, value = _prepared(query, key, value)
    if indices is not None:
        form = _selected(form, indices, query, key)
    documents = None
    if position_ids is not None or cu_seq_lens_q is not None:
        is_own = attention_mask is None or type(attention_mask) is CompactMask
        form, documents = _with_documents(module, form, is_own, lens, position_ids, query, key)
    if documents is not None:
        only = form.packing is PackingHint.ONLY
        compact = form.attn_mask is None and (form.key_ranges is None or only)
        if compact and position_bias is None and not output_attentions:
            return _packed(query, key, value, documents, form, sinks, options), None
        form = packing.within_documents(form, documents, query.shape[2])
    if position_bias is not None or form.attn_mask is not None:
        form = _biased(form, position_bias, query, key)
    if output_attentions:
        _logger.warning_once(_WEIGHTS)
        return weights.attention(query, key, value, form, sinks, **options)
    out = _attend(module, query, key, value, form, sinks, options).transpose(1, 2)
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


def _may_absorb(module: nn.Module, query, key, value, form, sinks, options) -> bool:
    """Latents are wide heads: on GPUs only the kernel for decoding has them."""
    if not latent.can_absorb(module, query, key):
        return False
    return key.device.type == "cpu" or _is_step(query, key, value, form, sinks, options)


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


def _selected(form: MaskArguments, indices: Tensor, query: Tensor, key: Tensor) -> MaskArguments:
    """Sparse attention: only the keys whose indices (B, Sq, n) are listed, -1 for none."""
    Sk = key.shape[2]
    shape = (*indices.shape[:-1], Sk + 1)
    slots = torch.where(indices < 0, Sk, indices).long()
    keep = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(-1, slots, True)
    keep = keep[..., :Sk].unsqueeze(1) if indices.dim() == 3 else keep[..., :Sk]
    keep = keep & form.keep(query.shape[2], Sk, key.device)
    mask = form.attn_mask
    if mask is None or mask.dtype == torch.bool:
        return MaskArguments(attn_mask=keep)
    return MaskArguments(attn_mask=mask.masked_fill(~keep, float("-inf")))


def _biased(form: MaskArguments, bias: Tensor | None, query: Tensor, key: Tensor) -> MaskArguments:
    """The form with a bias added to the scores."""
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        if form.attn_mask is None:
            form = form._replace(attn_mask=bias)
        elif form.attn_mask.dtype == torch.bool:
            form = form._replace(attn_mask=bias.masked_fill(~form.attn_mask, float("-inf")))
        else:
            form = form._replace(attn_mask=bias + form.attn_mask)
    mask = form.attn_mask
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        form = form._replace(attn_mask=mask.float())
    return form


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskArguments,
    sinks: Tensor | None,
    options: dict,
) -> Tensor:
    needed = form.kv_lens is not None or query.shape[-1] > WIDE
    needed = needed or (form.key_ranges is not None and query.is_cuda)
    if needed and _is_step(query, key, value, form, sinks, options):
        return _step(module, query, key, value, form, sinks, options)
    if _is_too_wide(query, value):
        width = max(query.shape[-1], value.shape[-1])
        _logger.warning_once(
            f"no GPU kernel has head dimension {width}: such layers run eager attention, with "
            "memory for every weight."
        )
        return weights.attention(query, key, value, form, sinks, **options)[0].transpose(1, 2)
    form = form.without_lens()
    options = options | {"is_causal": form.is_causal, "key_ranges": form.key_ranges}
    if sinks is None or sinks.dim() == 1:
        return fa_ops.attention(query, key, value, form.attn_mask, sinks=sinks, **options)
    # A sink per query: it adds exp(sink) to the denominator exp(lse), which scales the row.
    out, lse = fa_ops.attention(query, key, value, form.attn_mask, return_lse=True, **options)
    share = torch.sigmoid(lse.unsqueeze(-1) - sinks.float())
    return (out * share).to(out.dtype)


def _is_too_wide(query: Tensor, value: Tensor) -> bool:
    return query.is_cuda and max(query.shape[-1], value.shape[-1]) > WIDE


def _is_step(
    query: Tensor, key: Tensor, value: Tensor, form: MaskArguments, sinks, options
) -> bool:
    """Whether the kernel for few queries and many keys can take the call."""
    if form.attn_mask is not None or options["dropout_p"]:
        return False
    # in this order: a prefill of any length is one graph to a compiler
    if key.shape[2] <= query.shape[2] or query.shape[2] > FEW_QUERIES:
        return False
    if form.key_ranges is not None and tuple(form.key_ranges.shape[1:3]) != (1, 1):
        return False
    if sinks is not None and sinks.dim() != 1:
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
    return not any(t.requires_grad for t in tensors)


def _step(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskArguments,
    sinks: Tensor | None,
    options: dict,
) -> Tensor:
    lens, B = form.kv_lens, key.shape[0]
    if lens is None and form.key_ranges is not None:
        lens = encodings.range_ends(form.key_ranges, B, module)
    elif lens is None:
        lens = torch.full((B,), key.shape[2], dtype=torch.int32, device=key.device)
    elif lens.shape[0] != B:  # the model repeats its batch; rows that differ have ranges
        lens = lens[:1].expand(B)
    return fa_ops.attention_with_kv_cache(
        query,
        key,
        value,
        lens,
        is_causal=form.is_causal,
        scale=options["scale"],
        softcap=options["softcap"],
        sinks=sinks,
        key_ranges=form.key_ranges,
    )


def _packed(query, key, value, documents: Documents, form: MaskArguments, sinks, options) -> Tensor:
    tokens = (t[0].transpose(0, 1) for t in (query, key, value))
    causal = form.is_causal or form.packing is PackingHint.ONLY
    out = fa_ops.attention_varlen(*tokens, *documents, is_causal=causal, sinks=sinks, **options)
    return out[None]
