"""The mask function that transformers calls for `attn_implementation="fa_ops"`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask, prepare_padding_mask, sdpa_mask

from fa_ops.tracing import is_compiling
from hf_integration import decoding, distribution, encodings, key_ranges, unsupported_models
from hf_integration.encodings import CompactMask, PackingHint, counts, is_readable, reads_are_free
from hf_integration.key_ranges import KeyRange


class Request(NamedTuple):
    """A request for a mask; the names of fields are keywords of transformers' mask functions."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor = 0
    kv_offset: int | Tensor = 0
    mask_function: key_ranges.MaskFunction = key_ranges.causal
    attention_mask: Tensor | None = None  # 2-D padding mask, True keeps
    local_size: int | None = None
    allow_is_causal_skip: bool = True
    allow_is_bidirectional_skip: bool | None = None  # not passed for causal masks
    use_vmap: bool = False
    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None
    config: object = None
    cache: object = None  # no keyword: the cache that the mask is made for

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, 1, Sq, Sk)."""
        return (self.batch_size, 1, self.q_length, self.kv_length)


_KEYWORDS = frozenset(Request._fields) - {"cache"}


class NotCompact(Exception):
    """Raised with the reason why a mask must be dense."""


class Padding(NamedTuple):
    """A padding mask as ranges of keys, relative to the first key in the cache."""

    width: int  # the number of keys
    keys: int | None  # every row keeps exactly the keys [0, keys); None: see the bounds
    lo: Tensor | None = None  # (B, 1)
    hi: Tensor | None = None
    kept: Tensor | None = None  # bool (B, width), unless there are certainly no holes


def fa_ops_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Make the smallest exact mask: a `CompactMask` wherever possible, and never None.

    None would leave causality to the model's `is_causal`, which is not reliable. Device values are
    read at most once in a prefill, and never in decoding or while tracing. A mask that may not be
    one range of keys for each query becomes transformers' dense mask.

    The arguments are those that transformers passes to a mask function, see :class:`Request`.

    Returns:
        A bool mask ``(B, 1, Sq, Sk)``, True where a key is kept; for models that add their mask to
        scores a float mask.
    """
    kwargs |= dict(zip(Request._fields, args, strict=False))
    if distribution.active() is not None:
        kwargs = distribution.whole_mask(kwargs)
    compiling = is_compiling()
    cache = None if compiling else decoding.pop_cache()
    needs = unsupported_models.mask_needs(kwargs.get("config"), may_read_source=not compiling)
    if needs.floating is not None:
        kwargs["dtype"] = kwargs.get("dtype") or torch.float32
        _count(f"float: {needs.floating}", compiling)
        return eager_mask(**kwargs)
    try:
        if not kwargs.keys() <= _KEYWORDS:
            raise NotCompact("unknown keywords")
        if needs.dense is not None:
            raise NotCompact(needs.dense)
        mask = _compact(Request(**kwargs, cache=cache), compiling)
    except NotCompact as reason:
        _count(f"dense: {reason}", compiling)
        return sdpa_mask(
            **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
    _count(mask.encoding.value, compiling)
    return mask


def _count(name: str, compiling: bool) -> None:
    if not compiling:
        counts[name] += 1


def _compact(request: Request, compiling: bool) -> CompactMask:
    if request.use_vmap:
        raise NotCompact("a mask function of the model itself")
    if isinstance(request.kv_offset, Tensor):
        raise NotCompact("a cache whose first position is on the device")
    given = request.attention_mask
    if given is not None and given.dim() != 2:
        raise ValueError(
            f"attention_mask must have shape (B, keys) or (B, heads, queries, keys), got "
            f"{tuple(given.shape)}"
        )
    mask = _newest_token_mask(request)
    if mask is not None:
        return mask
    parts = _parts(request, compiling)
    is_causal = len(parts) == 1 and parts[0] is key_ranges.causal
    found, conditions = KeyRange(), []
    if parts and not is_causal:
        found, conditions = _bounds(request, parts, compiling)
    # Only in cross-attention may kv_length be that of another cache.
    only_padding = not parts and request.mask_function is key_ranges.bidirectional
    padding, q_offset = _read(request, conditions, is_causal, only_padding)
    if only_padding:
        request = request._replace(kv_length=padding.width)
    if not parts and padding.kept is not None:
        return encodings.keys((*request.shape[:3], padding.kept.shape[1]), padding.kept)
    if not parts and padding.keys is not None and padding.keys == padding.width:
        return _whole(request)
    if is_causal and q_offset is not None:
        end = q_offset + request.q_length - request.kv_offset
        kept, keys = padding.kept, padding.keys
        if end <= (padding.width if kept is not None else keys or 0):
            if request.q_length == 1:
                return encodings.step(request.shape, end, kept, request.device)
            if kept is not None:
                return encodings.causal_keys(request.shape, kept[:, :end])
            return encodings.causal(request.shape, end, request.device)
    if is_causal:
        found, _ = _bounds(request, parts, compiling)
    return _ranges(request, found, padding, _packing_hint(request, parts, padding, compiling))


def _newest_token_mask(request: Request) -> CompactMask | None:
    """The mask of one token at the end of a cache without padding, as in most decoding steps.

    None for other requests, and if reading the offset allows a cheaper mask.
    """
    is_plain = request.mask_function is key_ranges.causal and request.attention_mask is None
    if not is_plain or request.q_length != 1:
        return None
    if not isinstance(request.q_offset, Tensor):
        last_key = request.kv_offset + request.kv_length - 1
        return _whole(request) if last_key <= request.q_offset else None
    if reads_are_free(request.device):
        return None
    end = request.q_offset.reshape(1) + (1 - request.kv_offset)
    return encodings.lengths(request.shape, end.clamp(0, request.kv_length))


def _whole(request: Request) -> CompactMask:
    """The mask that keeps all keys. For the newest token of a static cache it is that of the steps
    before, which kept a part of the cache: whether its window is full is no reason for another
    graph.
    """
    is_self = request.mask_function is not key_ranges.bidirectional
    if request.q_length == 1 and is_self and getattr(request.cache, "is_compileable", False):
        return encodings.step(request.shape, request.kv_length, None, request.device)
    return encodings.full(request.shape, request.device)


def _parts(request: Request, compiling: bool) -> list[key_ranges.MaskFunction]:
    """The conjuncts that can mask out a key; while Dynamo traces, the whole function is one."""
    function = request.mask_function
    if compiling:
        parts = [] if function is key_ranges.bidirectional else [function]
    else:
        parts = key_ranges.conjuncts(function)
    keys = (request.kv_offset, request.kv_offset + request.kv_length - 1)
    if isinstance(request.q_offset, Tensor):
        queries = keys  # anywhere in the cache
    else:
        queries = (request.q_offset, request.q_offset + request.q_length - 1)
    if compiling and function is not key_ranges.causal:
        return parts
    return [part for part in parts if key_ranges.can_mask_out(part, queries, keys)]


def _packing_hint(
    request: Request, parts: list[key_ranges.MaskFunction], padding: Padding, compiling: bool
) -> PackingHint:
    """The packing hint for a mask of key ranges."""
    if request.allow_is_bidirectional_skip is not None:
        return PackingHint.NONE
    if compiling or not key_ranges.is_packing(parts):
        return PackingHint.POSSIBLE
    only = padding.keys is not None and key_ranges.is_causal_packing(parts)
    return PackingHint.ONLY if only else PackingHint.NONE


def _bounds(
    request: Request, parts: list[key_ranges.MaskFunction], compiling: bool
) -> tuple[KeyRange, list[Tensor]]:
    is_causal = all(part is key_ranges.causal for part in parts)  # then all rows are the same
    batch = None if is_causal else torch.arange(request.batch_size, device=request.device)[:, None]
    at = key_ranges.Queries(batch, _positions(request), [])
    if compiling and not is_causal:
        if key_ranges.UNKNOWN_OVERLAYS:
            raise NotCompact("mask functions of a newer transformers release while tracing")
        if parts[0].__code__ is key_ranges.UNION_CODE:
            raise NotCompact("block overlays while tracing")
        if request.kv_length > 16**key_ranges.SEARCH_DIGITS:
            raise NotCompact("too many keys to search while tracing")
        return key_ranges.search(parts[0], at, request.kv_offset, request.kv_length), []
    try:
        found = key_ranges.intersect([key_ranges.bounds(part, at) for part in parts])
    except key_ranges.UnknownMaskFunction as unknown:
        raise NotCompact(f"mask function {unknown}") from None
    return found, at.conditions


def _positions(request: Request) -> Tensor:
    """The positions (1, Sq) of the queries in the cache."""
    if request.q_length == 1 and isinstance(request.q_offset, Tensor):
        return request.q_offset.reshape(1, 1)
    return torch.arange(request.q_length, device=request.device)[None] + request.q_offset


def _read(
    request: Request, conditions: list[Tensor], want_offset: bool, only_padding: bool
) -> tuple[Padding, int | None]:
    """Read the padding and, if it is on the device, the query offset, in one read of the device."""
    offset = request.q_offset
    mask = request.attention_mask
    on_device = isinstance(offset, Tensor)
    tensors = [offset if on_device else None, mask, *conditions]
    tracing = not all(is_readable(tensor) for tensor in tensors if tensor is not None)
    may_read = not tracing and (request.q_length > 1 or reads_are_free(request.device))
    if (mask is not None or conditions) and not may_read:
        known_offset = None if on_device else offset
        if tracing and conditions:
            raise NotCompact("packing while tracing")
        if tracing:
            return _kept_keys(request, only_padding), known_offset
        if conditions or request.mask_function is key_ranges.bidirectional:
            raise NotCompact("padding in decoding")
        return _continued(request), known_offset
    padding, scalars = Padding(request.kv_length, request.kv_length), list(conditions)
    if mask is not None:
        padding, is_range = _padding_ranges(request, only_padding)
        count, (all_kept, extensible) = padding.hi - padding.lo, _whole_mask(mask)
        scalars[:0] = padding.lo.max(), count.min(), count.max(), is_range, all_kept, extensible
    if on_device:
        offset = None
        if want_offset and may_read:
            scalars.append(request.q_offset.reshape(()))
    numbers = torch.stack([value.long() for value in scalars]).tolist() if scalars else []
    if on_device and want_offset and may_read:
        offset = numbers.pop()
    if mask is not None:
        last_start, fewest, most, has_no_holes, all_kept, extensible, *numbers = numbers
        if request.mask_function is not key_ranges.bidirectional:
            decoding.remember(request, not all_kept, bool(extensible))
        if not has_no_holes:
            padding = _kept_keys(request, only_padding)
        elif last_start == 0 and fewest == most:
            padding = padding._replace(keys=most)
    if not all(numbers):
        raise NotCompact("blocks that are not contiguous")
    return padding, offset


def _continued(request: Request) -> Padding:
    """The padding of a decoding step, derived from that of the prefill without reading the mask."""
    prefill = decoding.continued(request)
    if prefill is None:
        raise NotCompact("padding in decoding that no prefill has read")
    if not prefill.padded:
        decoding.check(request.attention_mask.all())
        return Padding(request.kv_length, request.kv_length)
    padding, is_range = _padding_ranges(request, False)
    decoding.check(is_range)
    return padding


def _whole_mask(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a padding mask keeps all keys, and whether ones can follow it without making holes.

    Not only of the keys in a window: all masks of a forward pass record the same.
    """
    kept = attention_mask.bool()
    return kept.all(), (kept[:, 1:] >= kept[:, :-1]).all()


def _padding_ranges(request: Request, only_padding: bool) -> tuple[Padding, Tensor]:
    """The ranges of valid keys, and a 0-d tensor: whether every row has only one range."""
    valid = _valid_keys(request, only_padding)
    count, lo = valid.sum(-1), valid.to(torch.uint8).argmax(-1)
    starts = (valid[:, 1:] > valid[:, :-1]).sum(-1) + valid[:, 0]
    return Padding(valid.shape[1], None, lo[:, None], (lo + count)[:, None]), (starts <= 1).all()


def _kept_keys(request: Request, only_padding: bool) -> Padding:
    """The padding if it may have holes: ranges from the first to the last valid key."""
    kept = _valid_keys(request, only_padding)
    valid, width = kept.to(torch.uint8), kept.shape[1]
    lo, hi = valid.argmax(-1), width - valid.flip(-1).argmax(-1)
    return Padding(width, None, lo[:, None], hi[:, None], kept)


def _valid_keys(request: Request, only_padding: bool) -> Tensor:
    """The padding mask as bool (B or 1, keys).

    With `only_padding` nothing else restricts the keys. The length of the mask is then the number
    of keys, because kv_length may be the length of another cache.
    """
    valid = prepare_padding_mask(request.attention_mask, request.kv_length, request.kv_offset)
    if not only_padding or request.kv_offset != 0:
        valid = valid[:, request.kv_offset : request.kv_offset + request.kv_length]
    if valid.shape[0] not in (1, request.batch_size):
        raise NotCompact("a padding mask of another batch size")
    return valid.bool()


def _ranges(
    request: Request, found: KeyRange, padding: Padding, packing: PackingHint
) -> CompactMask:
    relative = found
    if type(request.kv_offset) is not int or request.kv_offset != 0:
        relative = KeyRange(*(b if b is None else b - request.kv_offset for b in found))
    if padding.keys is None:
        # Even if `kept` masks keys, ranges end at the query's own key, from which the beginning of
        # its packed document is computed.
        hi = None if padding.kept is not None and relative.hi is not None else padding.hi
        relative = key_ranges.intersect([relative, KeyRange(padding.lo, hi)])
    end = padding.width if padding.keys is None else padding.keys
    if relative.lo is None and relative.hi is not None and request.q_length == 1:
        return encodings.lengths(request.shape, relative.hi.clamp(0, end))
    lo, hi = relative
    if found.lo is not None:
        lo = lo.clamp(min=0)
    elif lo is None:
        lo = torch.zeros((1, 1), dtype=torch.int64, device=request.device)
    if found.hi is not None:
        hi = hi.clamp(0, end)
    elif hi is None:
        hi = torch.full((1, 1), end, dtype=torch.int64, device=request.device)
    return encodings.ranges(request.shape, lo, hi, padding.kept, packing)
