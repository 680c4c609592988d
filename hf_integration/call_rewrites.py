"""Rewrites of a layer's call into one that an operator of fa_ops can compute.

A rewrite is a function of the layer and its call that returns a changed call, or the same object if
there is nothing to change. For calls whose decisions are remembered, whether it changes the call
must depend only on the family of the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_integration import latent, packing
from hf_integration.encodings import MaskArguments, PackingHint
from hf_integration.host_reads import is_readable
from hf_integration.operators import LayerCall, is_step
from hf_integration.packing import Documents

Rewrite = Callable[[nn.Module, LayerCall], LayerCall]


def without_hidden_keys(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Slice off the keys behind the last one that any query attends."""
    visible = call.mask.visible_keys
    if visible is None or visible == call.key.shape[2]:
        return call
    return call._replace(key=call.key[:, :, :visible], value=call.value[:, :, :visible])


def without_latents(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Expand latents to the keys and values of every head, or absorb the projections.

    Absorbed calls have wide heads, which on GPUs only the decoding kernel supports.
    """
    query, key, value = call[:3]
    if not latent.is_latent(layer, query, key):
        return call
    scale, extras = call.options["scale"], call.extras
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = call._replace(options=call.options | {"scale": scale})
    may_absorb = extras.indices is extras.cu_seqlens[0] is None and not extras.output_attentions
    may_absorb = may_absorb and latent.can_absorb(layer, query, key)
    if may_absorb and (key.device.type == "cpu" or is_step(call)):
        query, key, value, up_v = latent.absorb(layer, query, key, value)
        return call._replace(query=query, key=key, value=value, up_v=up_v)
    key, value = latent.expand(layer, key, value)
    return call._replace(key=key, value=value)


def with_uniform_tensors(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Give query, key and value one dtype, one batch size and a contiguous last dimension."""
    query, key, value = call[:3]
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
    if query is call.query and key is call.key and value is call.value:
        return call
    return call._replace(query=query, key=key, value=value)


def with_selected_keys(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Mask out the keys that `indices`, (B, Sq, n) or (B, H, Sq, n), do not list; -1 lists none."""
    indices, mask, Sk = call.extras.indices, call.mask, call.key.shape[2]
    if indices is None:
        return call
    indices = torch.where(indices < 0, Sk, indices).long()
    kept = torch.zeros((*indices.shape[:-1], Sk + 1), dtype=torch.bool, device=indices.device)
    kept = kept.scatter(-1, indices, True)[..., :Sk]
    kept = kept.unsqueeze(1) if kept.dim() == 3 else kept
    kept = kept & mask.keep(call.query.shape[2], Sk, call.key.device)
    if mask.attn_mask is not None and mask.attn_mask.dtype != torch.bool:
        kept = mask.attn_mask.masked_fill(~kept, float("-inf"))
    return call._replace(mask=MaskArguments(attn_mask=kept))


def with_documents(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Separate documents that are packed into the only row of a batch.

    cu_seqlens or else positions describe the documents. If nothing else is masked, the call becomes
    a packed one; otherwise the documents become part of the mask. cu_seqlens may also be those of
    all tokens of several rows, as in transformers' FlashAttention path.
    """
    mask, extras, Sq = call.mask, call.extras, call.query.shape[2]
    q_ends, k_ends, *longest = extras.cu_seqlens
    B, Sk = call.query.shape[0], call.key.shape[2]
    if extras.is_user_mask or (B != 1 and (q_ends is None or mask.kv_lens is not None)):
        return call
    if q_ends is not None:
        k_ends = q_ends if k_ends is None else k_ends
        longest = (packing.length(x, layer) for x in longest)
        documents = Documents(q_ends.int(), k_ends.int(), *longest)
    else:
        positions = extras.position_ids
        if mask.packing is PackingHint.NONE or positions is None or Sq == 1:
            return call
        if tuple(positions.shape) != (1, Sq):
            return call
        if not is_readable(positions):
            return call._replace(mask=packing.within_positions(mask, positions, (Sq, Sk)))
        if Sk != Sq:  # earlier keys
            return call
        if packing.hides_tokens(mask):
            if not packing.may_restart(positions, layer):
                return call
            return call._replace(mask=packing.within_positions(mask, positions, (Sq, Sk), True))
        documents = packing.documents(positions, layer, mask.packing is PackingHint.ONLY)
        if documents is None:
            return call
    is_plain = mask.attn_mask is extras.position_bias is None and not extras.output_attentions
    if is_plain and (mask.key_ranges is None or mask.packing is PackingHint.ONLY):
        return call._replace(documents=documents)
    return call._replace(mask=packing.within_documents(mask, documents, (B, Sq, Sk)))


def with_bias(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Add the position bias to the mask, whose dtype becomes one that the operators accept."""
    added, bias = call.mask.attn_mask, call.extras.position_bias
    if bias is not None:
        bias = bias[..., : call.key.shape[2]]
        if added is None:
            added = bias
        elif added.dtype == torch.bool:
            added = bias.masked_fill(~added, float("-inf"))
        else:
            added = bias + added
    if added is not None and added.dtype not in (torch.bool, call.query.dtype):
        added = added.float()
    if added is call.mask.attn_mask:
        return call
    return call._replace(mask=call.mask._replace(attn_mask=added, mask_blocks=None))


REWRITES = (
    without_hidden_keys, without_latents, with_uniform_tensors, with_selected_keys, with_documents,
    with_bias,
)  # fmt: skip
