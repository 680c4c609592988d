"""Attention masks that stay small: bool masks of shape (B, 1, Sq, Sk), held as a few integers.

A mask function of transformers returns a mask that is handed from layer to layer as it is, and that
some models compute with. `CompactMask` serves both: the attention function reads its encoding, and
any other operation sees the bool tensor that SDPA's mask function would have returned.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_integration.memo import PerTensorMemo

# How often each encoding was made, dense and float masks with the reason; not counted by Dynamo.
counts: Counter[str] = Counter()
_memo = PerTensorMemo()


class Encoding(enum.Enum):
    """How a mask is held. A value is the name under which masks are counted."""

    FULL = "full"  # every query attends every key
    CAUSAL = "causal"  # causal over the first n keys, aligned at the bottom right
    LENGTHS = "lengths"  # the one query attends keys j < lengths[b]
    RANGES = "ranges"  # query i attends keys ranges[b, 0, i, 0] <= j < ranges[b, 0, i, 1]
    KEYS = "keys"  # the keys that are kept, for every query
    CAUSAL_KEYS = "causal, keys"  # causal over the first n keys, of which some are kept
    RANGES_KEYS = "ranges, keys"  # ranges, of which some keys are kept
    DENSE = "dense"  # what a CompactMask becomes once a model has computed with it

    __hash__ = object.__hash__  # Enum's own is not in C, and decoding steps look encodings up


# The tensors that hold each encoding.
_TENSORS = {
    Encoding.FULL: ("extent",),
    Encoding.CAUSAL: ("extent",),
    Encoding.LENGTHS: ("lengths",),
    Encoding.RANGES: ("ranges",),
    Encoding.KEYS: ("kept",),
    Encoding.CAUSAL_KEYS: ("kept",),
    Encoding.RANGES_KEYS: ("ranges", "kept"),
    Encoding.DENSE: ("dense",),
}


class PackingHint(enum.Enum):
    """What is known of documents that are packed into one row, when a mask is made."""

    NONE = "the mask is not causal, or holds them already together with other limits"
    POSSIBLE = "the mask is causal; positions may show that it covers several documents"
    ONLY = "the key ranges are causal within each document, and nothing else"


class MaskArguments(NamedTuple):
    """A mask as arguments of an attention call."""

    visible_keys: int | None = None  # later keys are sliced off first
    is_causal: bool = False
    key_ranges: Tensor | None = None
    attn_mask: Tensor | None = None
    kv_lens: Tensor | None = None  # (B,)
    packing: PackingHint = PackingHint.NONE

    def without_lens(self) -> MaskArguments:
        """The lengths as key ranges."""
        if self.kv_lens is None:
            return self
        ranges = torch.stack([torch.zeros_like(self.kv_lens), self.kv_lens], -1)
        return self._replace(kv_lens=None, key_ranges=ranges[:, None, None])

    def is_bool_row(self) -> bool:
        """Whether `attn_mask` is a bool mask (B, 1, 1, Sk)."""
        return self.attn_mask.dtype == torch.bool and tuple(self.attn_mask.shape[1:3]) == (1, 1)

    def keep(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """Bool, broadcastable to (B, H, Sq, Sk): all of the mask but a float `attn_mask`."""
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


class CompactMask(Tensor):
    """A bool mask (B, 1, Sq, Sk) that is materialised only if something other than attention
    reads it. Added to floats it is what eager attention adds: 0, or the lowest number.

    Made by the functions below. Attributes: `encoding`, `packing`, and the tensors of the
    encoding:

        extent   (n, 0), without elements: n keys
        lengths  int32 (B,)
        ranges   int32 (B or 1, 1, Sq or 1, 2)
        kept     bool (B or 1, n)
        dense    bool (B, 1, Sq, Sk)
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, encoding: Encoding, packing: PackingHint, shape, *tensors: Tensor):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=tensors[0].device)

    def __init__(self, encoding: Encoding, packing: PackingHint, shape, *tensors: Tensor):
        self.encoding, self.packing = encoding, packing
        for name, tensor in zip(_TENSORS[encoding], tensors, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self):
        return list(_TENSORS[self.encoding]), (self.encoding, self.packing)

    @staticmethod
    def __tensor_unflatten__(tensors, context, shape, stride):
        encoding, packing = context
        return CompactMask(encoding, packing, shape, *(tensors[n] for n in _TENSORS[encoding]))

    def __repr__(self) -> str:
        return f"CompactMask({self.encoding.value}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _COPIES and kwargs.get("dtype") in (None, torch.bool):
            kwargs.pop("dtype", None)
            tensors = (function(tensor, **kwargs) for tensor in args[0].tensors())
            return CompactMask(args[0].encoding, args[0].packing, args[0].shape, *tensors)
        traced = any(type(arg) is CompactMask and not arg.is_concrete() for arg in args)
        if traced and function._schema.is_mutable:
            raise NotImplementedError(
                f"{function} writes to an attention mask in place, which cannot be traced with "
                "attn_implementation='fa_ops'; clone the mask first"
            )
        convert = materialise
        dtypes = [arg.dtype for arg in args if isinstance(arg, Tensor)]
        if function.overloadpacket in _ADDITIONS and any(d.is_floating_point for d in dtypes):
            dtype = next(dtype for dtype in dtypes if dtype.is_floating_point)
            convert = functools.partial(_additive, dtype=dtype)
        args, kwargs = torch.utils._pytree.tree_map_only(CompactMask, convert, (args, kwargs))
        return function(*args, **kwargs)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the mask."""
        return tuple(getattr(self, name) for name in _TENSORS[self.encoding])

    def is_concrete(self) -> bool:
        """Whether the mask holds numbers, and is not being traced."""
        return all(type(tensor) is Tensor for tensor in self.tensors())


_COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}
# Code that adds its mask to scores means eager attention's float mask.
_ADDITIONS = {torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.baddbmm}


def _additive(mask: CompactMask, dtype: torch.dtype) -> Tensor:
    """The mask as transformers' eager attention adds it."""
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        ~materialise(mask), lowest
    )


def materialise(mask: CompactMask) -> Tensor:
    """The mask as a plain bool tensor (B, 1, Sq, Sk).

    From then on the mask is held as that tensor, so that what a model writes to it, or to a view of
    it, holds for attention, and other layers don't materialise it again. While tracing it is made
    anew each time.
    """
    if mask.encoding is Encoding.DENSE:
        return mask.dense
    found = arguments(mask)
    Sq, Sk = mask.shape[2:]
    visible = Sk if found.visible_keys is None else found.visible_keys
    keep = found.keep(Sq, visible, mask.tensors()[0].device)
    if mask.encoding is Encoding.RANGES_KEYS:
        keep = keep & mask.kept[:, None, None]
    if found.visible_keys is not None:
        keep = F.pad(keep, (0, Sk - visible))
    keep = keep.expand(mask.shape)
    if mask.is_concrete():
        counts["dense: the model computes with its mask"] += 1
        keep = mask.dense = keep.contiguous()
        mask.encoding = Encoding.DENSE
    return keep


def full(shape, device: torch.device | str) -> CompactMask:
    """Every query attends every key."""
    return _of_extent(Encoding.FULL, shape, shape[3], device)


def causal(shape, visible_keys: int, device: torch.device | str) -> CompactMask:
    """Causal over the first `visible_keys` keys."""
    return _of_extent(Encoding.CAUSAL, shape, visible_keys, device)


def _of_extent(encoding: Encoding, shape, keys: int, device: torch.device | str) -> CompactMask:
    packing = PackingHint.POSSIBLE if encoding is Encoding.CAUSAL else PackingHint.NONE
    extent = torch.empty((keys, 0), dtype=torch.int32, device=device)
    return CompactMask(encoding, packing, shape, extent)


def lengths(shape, ends: Tensor) -> CompactMask:
    """One query in each row, of keys below `ends`, (B or 1) or (B or 1, 1)."""
    ends = ends.to(torch.int32).flatten()
    if ends.shape[0] != shape[0]:
        ends = ends.expand(shape[0])
    return CompactMask(Encoding.LENGTHS, PackingHint.NONE, shape, ends.contiguous())


def ranges(
    shape,
    lo: Tensor,
    hi: Tensor,
    kept: Tensor | None = None,
    packing: PackingHint = PackingHint.NONE,
) -> CompactMask:
    """Keys lo <= j < hi, from bounds of shape (B or 1, Sq or 1); of these the ones in `kept`."""
    bounds = torch.stack(torch.broadcast_tensors(lo, hi), -1)[:, None].to(torch.int32)
    if kept is None:
        return CompactMask(Encoding.RANGES, packing, shape, bounds)
    return CompactMask(Encoding.RANGES_KEYS, packing, shape, bounds, kept)


def keys(shape, kept: Tensor) -> CompactMask:
    """The keys of a bool `kept` (B or 1, n)."""
    return CompactMask(Encoding.KEYS, PackingHint.NONE, shape, kept)


def causal_keys(shape, kept: Tensor) -> CompactMask:
    """Causal over the first n keys, of which those of a bool `kept` (B or 1, n)."""
    return CompactMask(Encoding.CAUSAL_KEYS, PackingHint.POSSIBLE, shape, kept)


def arguments(mask: Tensor, layer: nn.Module | None = None) -> MaskArguments:
    """A mask, compact or given by the user, as arguments of an attention call of a layer.

    Raises ValueError for a tensor that is no mask.
    """
    if type(mask) is not CompactMask:
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise ValueError(
                f"attention_mask must be bool or floating point, got {mask.dtype} "
                f"{tuple(mask.shape)}"
            )
        return MaskArguments(attn_mask=mask)
    return _ARGUMENTS[mask.encoding](mask, layer)


_EVERYTHING = MaskArguments()


def _causal_keys(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    kept = mask.kept[:, None, None]
    return MaskArguments(kept.shape[3], True, attn_mask=kept, packing=mask.packing)


def _ranges_keys(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    added = _memo.get(mask.kept, layer, lambda: added_to_scores(mask.kept))[:, None, None]
    return MaskArguments(key_ranges=mask.ranges, attn_mask=added, packing=mask.packing)


_ARGUMENTS: dict[Encoding, Callable[[CompactMask, nn.Module | None], MaskArguments]] = {
    Encoding.FULL: lambda mask, layer: _EVERYTHING,
    Encoding.CAUSAL: lambda mask, layer: MaskArguments(
        mask.extent.shape[0], True, packing=mask.packing
    ),
    Encoding.LENGTHS: lambda mask, layer: MaskArguments(kv_lens=mask.lengths),
    Encoding.RANGES: lambda mask, layer: MaskArguments(
        key_ranges=mask.ranges, packing=mask.packing
    ),
    Encoding.KEYS: lambda mask, layer: MaskArguments(attn_mask=mask.kept[:, None, None]),
    Encoding.CAUSAL_KEYS: _causal_keys,
    Encoding.RANGES_KEYS: _ranges_keys,
    Encoding.DENSE: lambda mask, layer: MaskArguments(attn_mask=mask.dense),
}


def added_to_scores(kept: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """0 where a bool tensor is True, -inf elsewhere."""
    zeros = torch.zeros(kept.shape, dtype=dtype, device=kept.device)
    return zeros.masked_fill(~kept, -math.inf)


def range_ends(ranges: Tensor, batch_size: int, layer: nn.Module) -> Tensor:
    """Lengths (B,) that cover every range of shape (B or 1, 1, 1, 2); contiguous."""
    return _memo.get(ranges, layer, lambda: ranges[:, 0, 0, 1].expand(batch_size).contiguous())


def bounded(mask: Tensor, dtype: torch.dtype, layer: nn.Module) -> MaskArguments:
    """A bool mask of one query (B, 1, 1, Sk), with the range of keys outside which none is kept.

    So a kernel reads the filled part of a cache only, and the host reads nothing. Within the range
    the mask is added to the scores, in `dtype`: padding in decoding may have holes.
    """
    row = mask.tensors()[0] if type(mask) is CompactMask else mask
    found = _memo.get(row, layer, lambda: _bound(row.flatten(0, -2), dtype))
    return found._replace(attn_mask=found.attn_mask.to(dtype))


def _bound(kept: Tensor, dtype: torch.dtype) -> MaskArguments:
    valid = kept.to(torch.uint8)
    lo, hi = valid.argmax(-1), kept.shape[-1] - valid.flip(-1).argmax(-1)
    hi = torch.where(kept.any(-1), hi, 0)
    return MaskArguments(
        key_ranges=torch.stack([lo, hi], -1).to(torch.int32)[:, None, None],
        attn_mask=added_to_scores(kept, dtype)[:, None, None],
    )
