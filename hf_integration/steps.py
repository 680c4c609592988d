"""A layer of a decoding step, the short way.

A step of one token takes as long as the host needs to launch it, and of all that an attention
function has to look for, such a layer has next to nothing. What is told here without a doubt is
attended at once; the rest of the calls go the long way, which decides all of this again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fa_ops
from hf_integration import encodings, latent
from hf_integration.encodings import CompactMask, Encoding

WIDEST = 256  # head dimension that every kernel has


def attend(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor | None:
    """(B, Hq, 1, Dv) for one query of each row and a mask of ours, or None: go the long way.

    Query (B, Hq, 1, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), of one dtype. Must not be
    asked while compiling.
    """
    (B, _, Sq, D), (rows, heads, Sk, _), dtype = query.shape, key.shape, query.dtype
    if Sq != 1 or Sk == 1 or rows != B or D > WIDEST or value.shape[3] > WIDEST:
        return None
    if dtype is not key.dtype or dtype is not value.dtype or type(mask) is not CompactMask:
        return None
    if not query.stride()[3] == key.stride()[3] == value.stride()[3] == 1:
        return None
    if heads == 1 and latent.is_latent(layer, query, key):
        return None
    if sinks is not None and sinks.dim() != 1:
        return None
    match mask.encoding:
        case Encoding.FULL:
            return fa_ops.attention(query, key, value, scale=scale, softcap=softcap, sinks=sinks)
        case Encoding.LENGTHS:
            lens, ranges = mask.lengths, None
        case Encoding.RANGES if mask.is_cuda:
            lens, ranges = encodings.range_ends(mask.ranges, B, layer), mask.ranges
        case _:
            return None
    if lens.shape[0] != B or (torch.is_grad_enabled() and _records(query, key, value, sinks)):
        return None
    return fa_ops.attention_with_kv_cache(
        query, key, value, lens, scale=scale, softcap=softcap, sinks=sinks, key_ranges=ranges
    )


def _records(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)
