"""The masks that travel through a transformers model: 4-D tensors, small wherever possible.

transformers hands whatever the mask function returns from layer to layer and asks only that it be a
4-D tensor. Nine forms:

    int32, empty, shape (1, 1, 0, 0)    every query attends every key
    int32, empty, shape (1, 1, 0, n)    causal over the first n keys, aligned at the bottom right;
                                        later keys are unused cache
    int32, empty, shape (1, 0, 0, n)    the same, where a padding mask was read and found to be full
    int32 (B, 1, 1, 1)                  lengths: the one query attends keys j < n
    int32 (B or 1, 1, Sq or 1, 2)       key ranges: query i attends keys lo <= j < hi
    int32 (B or 1, 1, Sq, 3)            key ranges that say: causal within packed documents
    int32 (B, 1, 2 Sq + n, 1)           key ranges, then a 1 for each of n keys that is kept
    int8 (B or 1, 1, 1, n)              causal over the first n keys, of which the 1s are kept
    bool, broadcastable (B, H, Sq, Sk)  True keeps
    float, broadcastable                added to the scores

The first three carry everything in their shape: no kernel runs to make them, no device value is
read to use them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_integration.latest import Latest


class Form(NamedTuple):
    """A mask as the arguments of an attention call; keys from `visible` on are cut off first."""

    visible: int | None = None
    is_causal: bool = False
    key_ranges: Tensor | None = None
    attn_mask: Tensor | None = None
    kv_lens: Tensor | None = None  # (B,)
    padding_was_read: bool = False
    causal_documents: bool = False  # key_ranges say nothing else

    def without_lens(self) -> Form:
        """The lengths as key ranges."""
        if self.kv_lens is None:
            return self
        ranges = torch.stack([torch.zeros_like(self.kv_lens), self.kv_lens], -1)
        return self._replace(kv_lens=None, key_ranges=ranges[:, None, None])

    def keep(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """Bool, broadcastable to (B, H, Sq, Sk): everything the form says but a float mask."""
        j = torch.arange(Sk, device=device)
        keep = torch.ones((1, 1, Sq, Sk), dtype=torch.bool, device=device)
        if self.is_causal:
            keep = keep & (j <= torch.arange(Sq, device=device)[:, None] + Sk - Sq)
        if self.kv_lens is not None:
            keep = keep & (j < self.kv_lens[:, None, None, None])
        if self.key_ranges is not None:
            keep = keep & (j >= self.key_ranges[..., :1]) & (j < self.key_ranges[..., 1:])
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            keep = keep & self.attn_mask
        return keep


def full(device: torch.device | str) -> Tensor:
    return torch.empty((1, 1, 0, 0), dtype=torch.int32, device=device)


def causal(visible: int, device: torch.device | str, padding_was_read: bool = False) -> Tensor:
    shape = (1, int(not padding_was_read), 0, visible)
    return torch.empty(shape, dtype=torch.int32, device=device)


def lens(lengths: Tensor, batch_size: int) -> Tensor:
    """From lengths of shape (B or 1) or (B or 1, 1); contiguous, as kernels want them."""
    lengths = lengths.to(torch.int32).flatten()
    if lengths.shape[0] != batch_size:
        lengths = lengths.expand(batch_size)
    lengths = lengths.contiguous()
    mask = lengths.view(batch_size, 1, 1, 1)
    if not torch.compiler.is_compiling():
        setattr(mask, _LENS, lengths)
    return mask


_LENS = "_fa_ops_lens"


def shared_lens(mask: Tensor) -> Tensor | None:
    """The lengths (B,) that a mask of `lens` is a view of, made once for all layers, or None."""
    return getattr(mask, _LENS, None)


def ranges(lo: Tensor, hi: Tensor, causal_documents: bool = False) -> Tensor:
    """From bounds of shape (B or 1, Sq or 1)."""
    lo, hi = torch.broadcast_tensors(lo, hi)
    columns = (lo, hi, torch.zeros_like(lo)) if causal_documents else (lo, hi)
    return torch.stack(columns, -1)[:, None].to(torch.int32)


def causal_keys(keep: Tensor) -> Tensor:
    """From a bool (B or 1, n)."""
    return keep.to(torch.int8)[:, None, None]


def ranges_and_keys(lo: Tensor, hi: Tensor, keep: Tensor) -> Tensor:
    """From bounds of shape (B or 1, Sq or 1) and a bool (B or 1, n)."""
    bounds = ranges(lo, hi).flatten(1)
    rows = max(bounds.shape[0], keep.shape[0])
    parts = (bounds.expand(rows, -1), keep.to(torch.int32).expand(rows, -1))
    return torch.cat(parts, 1)[:, None, :, None]


def read(mask: Tensor, Sk: int, layer: nn.Module) -> Form:
    """What a mask tensor says to a call of Sk keys. Raises ValueError if it is no such form."""
    dtype, shape = mask.dtype, mask.shape
    if dtype == torch.int32 and len(shape) == 4:
        _, heads, rows, columns = shape
        if rows == 0:
            if columns == 0:
                return Form()
            return Form(visible=columns, is_causal=True, padding_was_read=heads == 0)
        if columns == 1:
            if rows == 1:
                return Form(kv_lens=mask.flatten())
            return _latest.of(mask, layer, lambda: _bounds_and_keys(mask, Sk))
        if columns == 2:
            return Form(key_ranges=mask)
        if columns == 3:
            return Form(key_ranges=mask[..., :2], causal_documents=True)
    if dtype == torch.int8 and tuple(shape[1:-1]) == (1, 1):
        return Form(visible=shape[3], is_causal=True, attn_mask=mask.bool())
    if dtype != torch.bool and not dtype.is_floating_point:
        raise ValueError(
            "attention_mask must be bool, floating point or a mask made by fa_ops, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return Form(attn_mask=mask)


def _bounds_and_keys(mask: Tensor, Sk: int) -> Form:
    bounds, keep = mask[..., 0].split([mask.shape[2] - Sk, Sk], -1)
    added = torch.zeros(keep.shape, device=mask.device).masked_fill(keep == 0, -math.inf)
    return Form(key_ranges=bounds.unflatten(-1, (-1, 2)), attn_mask=added[:, :, None])


_latest = Latest()


def ends(key_ranges: Tensor, batch_size: int, layer: nn.Module) -> Tensor:
    """Lengths (B,) that hold every range of shape (B or 1, 1, 1, 2); contiguous."""
    return _latest.of(
        key_ranges, layer, lambda: key_ranges[:, 0, 0, 1].expand(batch_size).contiguous()
    )


def bounded(mask: Tensor, dtype: torch.dtype, layer: nn.Module) -> Form:
    """A bool mask of one query (B, 1, 1, Sk) with the run of keys outside which nothing is kept.

    So a kernel reads the filled part of a cache, and nothing is read by the host. Inside the run
    the mask is added, in `dtype`: padding in decoding may have holes.
    """
    form = _latest.of(mask, layer, lambda: _bound(mask, dtype))
    return form._replace(attn_mask=form.attn_mask.to(dtype))


def _bound(mask: Tensor, dtype: torch.dtype) -> Form:
    valid = mask.to(torch.uint8)
    lo = valid.argmax(-1)
    hi = mask.shape[-1] - valid.flip(-1).argmax(-1)
    hi = torch.where(mask.any(-1), hi, 0)
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return Form(
        key_ranges=torch.stack([lo, hi], -1).to(torch.int32),
        attn_mask=added.masked_fill_(~mask, float("-inf")),
    )


def name(mask: Tensor) -> str:
    if mask.dtype != torch.int32:
        return "causal, keys" if mask.dtype == torch.int8 else "keys"
    if mask.shape[2] > 0:
        if mask.shape[3] > 1:
            return "ranges"
        return "lengths" if mask.shape[2] == 1 else "ranges, keys"
    return "full" if mask.shape[3] == 0 else "causal"
