"""Masks of diffusers as arguments of fa_ops, of which lengths and ranges of keys cost the least."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fa_ops.tracing import is_compiling
from hf_integration.host_reads import is_readable, reads_are_free

# How often each encoding was made (not while tracing).
counts: Counter[str] = Counter()


def arguments(mask: Tensor | None, key: Tensor) -> dict[str, Tensor]:
    """The keyword arguments of an attention call that express a mask.

    Args:
        mask: bool or float, ``(B, Sk)`` for keys, or broadcastable to ``(B, H, Sq, Sk)``.
        key: ``(B, Sk, H, D)``.

    Returns:
        ``kv_lens`` or ``key_ranges`` where the mask keeps one run of keys for all queries of a row
        and the host can read it without waiting; elsewhere ``attn_mask``, and for masks of keys
        also ``kv_lens``, behind which no key is kept.
    """
    if mask is None:
        return {}
    if mask.shape == key.shape[:2]:
        mask = mask[:, None, None]
    if mask.dtype != torch.bool or mask.dim() != 4 or not mask.shape[1] == mask.shape[2] == 1:
        return _counted("dense", attn_mask=mask)
    kept = mask[:, 0, 0].expand(*key.shape[:2])
    ends = (kept * torch.arange(1, kept.shape[1] + 1, device=mask.device)).amax(1).int()
    if is_compiling() or not (reads_are_free(mask.device) and is_readable(mask)):
        return _counted("keys", attn_mask=mask, kv_lens=ends)
    starts = kept.int().argmax(1).int()
    if not torch.equal(ends - starts, kept.sum(1)):
        return _counted("keys", attn_mask=mask, kv_lens=ends)
    if not starts.any():
        return _counted("lengths", kv_lens=ends)
    return _counted("ranges", key_ranges=torch.stack([starts, ends], -1)[:, None, None])


def _counted(encoding: str, **found: Tensor) -> dict[str, Tensor]:
    if not is_compiling():
        counts[encoding] += 1
    return found
