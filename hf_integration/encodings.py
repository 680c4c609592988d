"""Compact attention masks: bool masks of shape (B, 1, Sq, Sk) that are stored as a few integers.

A mask made by a mask function of transformers is passed unchanged to every layer, but some models
compute with it. `CompactMask` supports both: the attention function reads its encoding, and any
other operation gets the bool tensor that SDPA's mask function would have returned.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_ops.call.options import dtype_name
from fa_ops.tracing import can_read, is_capturing, is_compiling

# What masks are made of is read on the host, once for all layers of a forward pass.


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values: not while tracing, under vmap or during graph capture."""
    return can_read(tensor, waiting=True)


def reads_are_free(device: torch.device | str) -> bool:
    """Whether the host can read tensors on a device without synchronising with it."""
    return torch.device(device).type == "cpu"


class PerTensorCache:
    """The values derived from a few tensors, each valid until its tensor is changed in place.

    Several are kept because a model has a mask for each kind of layer. Inference tensors do not
    count their changes, and a CUDA graph must record how its values are computed. For these a value
    is valid until the layer that computed it requests it again, which is the next forward pass.
    Thread-safe.
    """

    MAX_ENTRIES = 4

    def __init__(self) -> None:
        # (tensor, version, id of the layer, value); replaced as a whole, because threads share it
        self._entries: tuple[tuple, ...] = ()

    def get(self, tensor: Tensor, layer: nn.Module | None, compute: Callable[[], Any]) -> Any:
        """Return the value derived from `tensor`, computed if the tensor is new or has changed."""
        if is_compiling():
            return compute()
        version, others = _version(tensor), []
        for entry in self._entries:
            known_tensor, known_version, layer_id, value = entry
            if known_tensor() is not tensor:
                others.append(entry)
            elif known_version == version and (type(version) is int or layer_id != id(layer)):
                return value
        value = compute()
        entry = (weakref.ref(tensor), version, id(layer), value)
        self._entries = (entry, *others[: self.MAX_ENTRIES - 1])
        return value


def _version(tensor: Tensor) -> int | str:
    """The number of in-place changes, or why it cannot be relied on."""
    if is_capturing(tensor.device):
        return "capturing"
    return "inference" if tensor.is_inference() else tensor._version


# The encodings of masks.

# How often each encoding was made (not while tracing); dense and float masks with the reason.
counts: Counter[str] = Counter()
# One cache for each value, as several may be derived from one tensor.
_ends, _added, _bounded = PerTensorCache(), PerTensorCache(), PerTensorCache()


class Encoding(enum.Enum):
    """The encoding of a mask. The values are the names under which masks are counted."""

    FULL = "full"  # every query attends every key
    CAUSAL = "causal"  # causal over the first n keys, aligned at the bottom right
    LENGTHS = "lengths"  # the only query attends keys j < lengths[b]
    RANGES = "ranges"  # query i attends keys ranges[b, 0, i, 0] <= j < ranges[b, 0, i, 1]
    KEYS = "keys"  # every query attends the kept keys
    CAUSAL_KEYS = "causal, keys"  # causal over the kept ones of the first n keys
    RANGES_KEYS = "ranges, keys"  # the kept keys in ranges
    LISTED = "listed"  # query i attends the keys in lists[b, i], which need no other mask
    DENSE = "dense"  # a CompactMask after a model has computed with it

    __hash__ = object.__hash__  # Enum's is slow, and every decoding step looks encodings up


class PackingHint(enum.Enum):
    """The relation of a mask to documents that may be packed into one row."""

    NONE = "the mask is not causal, or already separates documents, but not only that"
    POSSIBLE = "the mask is causal; positions may show that it covers several documents"
    ONLY = "the key ranges are causal within each document, and mask nothing else"


class MaskArguments(NamedTuple):
    """A mask as arguments of an attention call."""

    visible_keys: int | None = None  # later keys are sliced off first
    is_causal: bool = False
    key_ranges: Tensor | None = None
    attn_mask: Tensor | None = None
    kv_lens: Tensor | None = None  # (B,)
    packing: PackingHint = PackingHint.NONE
    mask_blocks: Tensor | None = None  # those of `attn_mask`

    def without_lens(self) -> MaskArguments:
        """The same mask with its lengths as key ranges."""
        ranges = torch.stack([torch.zeros_like(self.kv_lens), self.kv_lens], -1)
        return self._replace(kv_lens=None, key_ranges=ranges[:, None, None])

    def is_bool_row(self) -> bool:
        """Whether `attn_mask` is a bool mask (B, 1, 1, Sk), with several keys."""
        shape = tuple(self.attn_mask.shape[1:])
        return self.attn_mask.dtype == torch.bool and shape[:2] == (1, 1) and shape[2] > 1

    def keep(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """The mask without a float `attn_mask`, as bool broadcastable to (B, H, Sq, Sk)."""
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
    """A bool mask (B, 1, Sq, Sk) that is materialised only if code other than attention reads it.

    Added to floats it is the mask that eager attention adds: 0, or the lowest finite number. The
    constructors are below. Attributes: `encoding`, `packing`, and the tensors of the encoding:

        extent   (n, 0), no elements: n keys
        lengths  int32 (B,)
        ranges   int32 (B or 1, 1, Sq or 1, 2)
        kept     bool (B or 1, n)
        lists    int (B, Sq, n)
        dense    bool (B, 1, Sq, Sk)

    `end` is the number of keys that the only query may attend, if the host knows it: an eager call
    slices the later ones off. It is no part of the encoding, so that no graph depends on it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, encoding: Encoding, packing: PackingHint, shape, *tensors: Tensor):
        """Make a tensor without storage; `__init__` sets the attributes."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=tensors[0].device)

    def __init__(self, encoding: Encoding, packing: PackingHint, shape, *tensors: Tensor):
        self.encoding, self.packing, self.end = encoding, packing, None
        for name, tensor in zip(_codec(encoding).tensors, tensors, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self):
        return list(_codec(self.encoding).tensors), (self.encoding, self.packing)

    @staticmethod
    def __tensor_unflatten__(tensors, context, shape, stride):
        names = _codec(context[0]).tensors
        return CompactMask(*context, shape, *(tensors[name] for name in names))

    def __repr__(self) -> str:
        return f"CompactMask({self.encoding.value}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _COPIES and kwargs.get("dtype") in (None, torch.bool):
            kwargs.pop("dtype", None)
            tensors = (function(tensor, **kwargs) for tensor in args[0].tensors())
            return CompactMask(args[0].encoding, args[0].packing, args[0].shape, *tensors)
        if function is _aten.select.int and args[1:] == (1, 0) and args[0].is_concrete():
            return MaskRows(args[0])
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
        """The tensors of the encoding."""
        return tuple(getattr(self, name) for name in _codec(self.encoding).tensors)

    def is_concrete(self) -> bool:
        """Whether the tensors have values, as they do not while being traced."""
        return all(type(tensor) is Tensor for tensor in self.tensors())


class MaskRows(Tensor):
    """A `CompactMask` without its dimension of heads, (B, Sq, Sk), as indexers take it.

    Only an indexer that is recorded reads `mask`; any other operation gets the bool tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, mask: CompactMask):
        """Make a tensor without storage."""
        shape = (mask.shape[0], *mask.shape[2:])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=mask.device)

    def __init__(self, mask: CompactMask):
        self.mask = mask

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (_aten.detach.default, _aten.alias.default):
            return MaskRows(args[0].mask)
        given = torch.utils._pytree.tree_map_only(MaskRows, materialise_rows, (args, kwargs or {}))
        return function(*given[0], **given[1])


def materialise_rows(rows: MaskRows) -> Tensor:
    """The rows of a mask as a plain bool tensor (B, Sq, Sk)."""
    return materialise(rows.mask)[:, 0]


_aten = torch.ops.aten
_COPIES = {each.default for each in (_aten.detach, _aten.alias, _aten.clone, _aten._to_copy)}
# Code that adds its mask to scores expects the float mask of eager attention.
_ADDITIONS = {_aten.add, _aten.add_, _aten.baddbmm}


def _additive(mask: CompactMask, dtype: torch.dtype) -> Tensor:
    """The mask as transformers' eager attention adds it to scores."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~materialise(mask), torch.finfo(dtype).min)


def materialise(mask: CompactMask) -> Tensor:
    """Return the mask as a plain bool tensor (B, 1, Sq, Sk), and store it as that.

    Attention then sees what a model writes to the tensor or to a view of it, and other layers do
    not materialise the mask again. A traced mask is materialised each time.
    """
    if mask.encoding is Encoding.DENSE:
        return mask.dense
    found = arguments(mask)
    Sq, Sk = mask.shape[2:]
    if mask.encoding is Encoding.LISTED:
        found = found._replace(attn_mask=listed_keys(mask.lists[:, None], Sk))
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
    """A mask with which every query attends every key."""
    return CompactMask(Encoding.FULL, PackingHint.NONE, shape, _extent(shape[3], device))


def causal(shape, visible_keys: int, device: torch.device | str) -> CompactMask:
    """A causal mask over the first `visible_keys` keys."""
    return CompactMask(Encoding.CAUSAL, PackingHint.POSSIBLE, shape, _extent(visible_keys, device))


def _extent(count: int, device: torch.device | str) -> Tensor:
    return torch.empty((count, 0), dtype=torch.int32, device=device)


def lengths(shape, ends: Tensor) -> CompactMask:
    """A mask for one query that attends the keys below `ends`, (B or 1) or (B or 1, 1)."""
    ends = ends.to(torch.int32).flatten()
    if ends.shape[0] != shape[0]:
        ends = ends.expand(shape[0])
    return CompactMask(Encoding.LENGTHS, PackingHint.NONE, shape, ends.contiguous())


def step(shape, end: int, kept: Tensor | None, device: torch.device | str) -> CompactMask:
    """A mask for one query over those of the first `end` keys that are True in `kept` (B or 1, n).

    The encoding has one shape for every `end`, so that all steps over a static cache are one graph.
    """
    if kept is None:
        ends = torch.full((shape[0],), end, dtype=torch.int32, device=device)
        mask = CompactMask(Encoding.LENGTHS, PackingHint.NONE, shape, ends)
    else:
        mask = keys(shape, F.pad(kept[:, :end], (0, shape[3] - end)))
    mask.end = end
    return mask


def ranges(
    shape, lo: Tensor, hi: Tensor, kept: Tensor | None = None, packing=PackingHint.NONE
) -> CompactMask:
    """A mask of the keys lo <= j < hi, (B or 1, Sq or 1), that are True in `kept` if given."""
    bounds = torch.stack(torch.broadcast_tensors(lo, hi), -1)[:, None].to(torch.int32)
    if kept is None:
        return CompactMask(Encoding.RANGES, packing, shape, bounds)
    return CompactMask(Encoding.RANGES_KEYS, packing, shape, bounds, kept)


def keys(shape, kept: Tensor) -> CompactMask:
    """A mask with which every query attends the keys that are True in `kept` (B or 1, n)."""
    return CompactMask(Encoding.KEYS, PackingHint.NONE, shape, kept)


def causal_keys(shape, kept: Tensor) -> CompactMask:
    """A causal mask over those of the first n keys that are True in `kept` (B or 1, n)."""
    return CompactMask(Encoding.CAUSAL_KEYS, PackingHint.POSSIBLE, shape, kept)


def listed(shape, lists: Tensor) -> CompactMask:
    """A mask with which each query attends the keys in lists (B, Sq, n); -1 lists none."""
    return CompactMask(Encoding.LISTED, PackingHint.NONE, shape, lists)


def listed_keys(lists: Tensor, count: int) -> Tensor:
    """Bool (..., count), True at the numbers in lists (..., n), of which others say nothing."""
    at = torch.where((lists < 0) | (lists > count), count, lists).long()
    kept = torch.zeros((*at.shape[:-1], count + 1), dtype=torch.bool, device=at.device)
    return kept.scatter(-1, at, True)[..., :count]


def arguments(mask: Tensor, layer: nn.Module | None = None) -> MaskArguments:
    """A mask, compact or passed by the user, as arguments of an attention call of a layer.

    Raises ValueError for a tensor that is neither bool nor floating point.
    """
    if type(mask) is not CompactMask:
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise ValueError(
                f"attention_mask must be bool or floating point, got {dtype_name(mask.dtype)} "
                f"{tuple(mask.shape)}"
            )
        return MaskArguments(attn_mask=mask)
    return _codec(mask.encoding).arguments(mask, layer)


def for_keys(mask: CompactMask, found: MaskArguments, Sk: int, layer: nn.Module) -> MaskArguments:
    """The arguments `found` of a mask, for a layer with another number of keys, `Sk`.

    transformers makes one mask for all layers, from the cache of one of them. In a layer with more
    or fewer earlier keys, plain causality ends at that layer's own last key.

    Raises ValueError for other masks: which keys they mean in this layer is unknown.
    """
    Sq, n = mask.shape[2:]
    # Without earlier keys the mask may be that of a static cache, which is filled later.
    if mask.encoding is Encoding.CAUSAL and found.visible_keys == n > Sq:
        return found._replace(visible_keys=None)
    where = f" of layer {layer.layer_idx}" if hasattr(layer, "layer_idx") else ""
    raise ValueError(
        f"attention_mask must have as many keys as {type(layer).__name__}{where}, got {n} for {Sk} "
        f"keys ({mask.encoding.value}, {Sq} queries): transformers makes one mask for all layers. "
        "Caches may differ in length if they are dynamic, the first has earlier keys, and no "
        "padding, window or document is masked; otherwise give all layers caches of one length"
    )


class Codec(NamedTuple):
    """The attributes of a `CompactMask` that store an encoding, and their decoder."""

    tensors: tuple[str, ...]
    arguments: Callable[[CompactMask, nn.Module | None], MaskArguments]


_NO_MASK = MaskArguments()


def _causal_keys(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    kept = mask.kept[:, None, None]
    return MaskArguments(kept.shape[3], True, attn_mask=kept, packing=mask.packing)


def _ranges_keys(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    added = _added.get(mask.kept, layer, lambda: added_to_scores(mask.kept))[:, None, None]
    return MaskArguments(key_ranges=mask.ranges, attn_mask=added, packing=mask.packing)


def _causal(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    return MaskArguments(mask.extent.shape[0], True, packing=mask.packing)


# A graph that read the end of a mask, even to compare it with None, would be one for that end.
def _lengths(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    if is_compiling() or mask.end is None:
        return MaskArguments(kv_lens=mask.lengths)
    return MaskArguments(mask.end, True)


def _keys(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    if is_compiling() or mask.end is None:
        return MaskArguments(attn_mask=mask.kept[:, None, None])
    return MaskArguments(mask.end, attn_mask=mask.kept[:, None, None, : mask.end])


def _ranges(mask: CompactMask, layer: nn.Module | None) -> MaskArguments:
    return MaskArguments(key_ranges=mask.ranges, packing=mask.packing)


_CODECS = {
    Encoding.FULL: Codec(("extent",), lambda mask, layer: _NO_MASK),
    Encoding.CAUSAL: Codec(("extent",), _causal),
    Encoding.LENGTHS: Codec(("lengths",), _lengths),
    Encoding.RANGES: Codec(("ranges",), _ranges),
    Encoding.KEYS: Codec(("kept",), _keys),
    Encoding.CAUSAL_KEYS: Codec(("kept",), _causal_keys),
    Encoding.RANGES_KEYS: Codec(("ranges", "kept"), _ranges_keys),
    Encoding.LISTED: Codec(("lists",), lambda mask, layer: _NO_MASK),
    Encoding.DENSE: Codec(("dense",), lambda mask, _: MaskArguments(attn_mask=mask.dense)),
}
_CODECS_BY_NAME = {encoding.value: codec for encoding, codec in _CODECS.items()}


def _codec(encoding: Encoding) -> Codec:
    """The codec of an encoding, by its name: Dynamo of torch 2.11 hashes no enum members."""
    return _CODECS_BY_NAME[encoding.value]


def added_to_scores(kept: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that is 0 where a bool tensor is True, and -inf elsewhere."""
    zeros = torch.zeros(kept.shape, dtype=dtype, device=kept.device)
    return zeros.masked_fill(~kept, -math.inf)


def range_ends(ranges: Tensor, batch_size: int, layer: nn.Module) -> Tensor:
    """The ends of key ranges (B or 1, 1, 1, 2) as contiguous lengths (B,)."""
    return _ends.get(ranges, layer, lambda: ranges[:, 0, 0, 1].expand(batch_size).contiguous())


def bounded(mask: Tensor, dtype: torch.dtype, layer: nn.Module) -> MaskArguments:
    """A bool mask (B, 1, 1, Sk) of one query as the range of keys that contains all kept ones.

    A kernel then reads only the filled part of a cache, and the host reads nothing. The mask itself
    is added to the scores, in `dtype`, because the padding of a decoding step may have holes.
    """
    row = mask.tensors()[0] if type(mask) is CompactMask else mask
    found = _bounded.get(row, layer, lambda: _bound(row.flatten(0, -2), dtype))
    return found._replace(visible_keys=row.shape[-1], attn_mask=found.attn_mask.to(dtype))


def _bound(kept: Tensor, dtype: torch.dtype) -> MaskArguments:
    valid = kept.to(torch.uint8)
    lo, hi = valid.argmax(-1), kept.shape[-1] - valid.flip(-1).argmax(-1)
    hi = torch.where(kept.any(-1), hi, 0)
    return MaskArguments(
        key_ranges=torch.stack([lo, hi], -1).to(torch.int32)[:, None, None],
        attn_mask=added_to_scores(kept, dtype)[:, None, None],
    )
