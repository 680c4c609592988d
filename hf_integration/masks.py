"""The mask function that transformers calls for `attn_implementation="fa_ops"`."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask, prepare_padding_mask, sdpa_mask

from hf_integration import architectures, decoding, forms, runs
from hf_integration.hidden import is_hidden

# How often each form was made, dense and float ones with the reason; not counted by Dynamo.
counts: Counter[str] = Counter()


class Request(NamedTuple):
    """What transformers asks for; field names are the keywords of its mask functions."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor = 0
    kv_offset: int | Tensor = 0
    mask_function: runs.MaskFunction = runs.causal
    attention_mask: Tensor | None = None  # 2-D padding mask, True keeps
    local_size: int | None = None
    allow_is_causal_skip: bool = True
    allow_is_bidirectional_skip: bool = False
    use_vmap: bool = False
    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None
    config: object = None


_KEYWORDS = frozenset(Request._fields)
_UNSKIPPABLE = ("packed_sequence_mask_function", "remap_positions_for_packed_sequence", "or_masks")


class NotARun(Exception):
    """Why a mask has to be dense."""


class Padding(NamedTuple):
    """A padding mask as runs of keys, relative to the first key in the cache."""

    width: int  # how many keys there are
    keys: int | None  # every row keeps exactly the keys [0, keys); None: the bounds below
    lo: Tensor | None = None  # (B, 1)
    hi: Tensor | None = None
    kept: Tensor | None = None  # bool (B, width), unless there are certainly no holes


def fa_ops_mask(*args, **kwargs) -> Tensor:
    """The smallest exact mask for a request: a form of `hf_integration.forms`, never None.

    None would leave causality to the model's `is_causal`, which is not reliable. Device values are
    read at most once in a prefill and never in decoding or while tracing. What is not certainly a
    run of keys per query becomes transformers' own dense mask.
    """
    kwargs |= dict(zip(Request._fields, args, strict=False))
    compiling = torch.compiler.is_compiling()
    facts = architectures.facts(kwargs.get("config"), look=not compiling)
    if facts.floating is not None:
        kwargs["dtype"] = kwargs.get("dtype") or torch.float32
        _count(f"float: {facts.floating}", compiling)
        return eager_mask(**kwargs)
    try:
        if not kwargs.keys() <= _KEYWORDS:
            raise NotARun("keywords that are not known")
        if facts.dense is not None:
            raise NotARun(facts.dense)
        mask = _compact(Request(**kwargs), compiling)
    except NotARun as reason:
        _count(f"dense: {reason}", compiling)
        return sdpa_mask(
            **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
    _count(forms.name(mask), compiling)
    return mask


def _count(name: str, compiling: bool) -> None:
    if not compiling:
        counts[name] += 1


def _compact(request: Request, compiling: bool) -> Tensor:
    if request.use_vmap:
        raise NotARun("a mask function of the model's own")
    if isinstance(request.kv_offset, Tensor):
        raise NotARun("a cache whose first position is on the device")
    mask = _of_newest_token(request)
    if mask is not None:
        return mask
    parts = _parts(request, compiling)
    is_causal = len(parts) == 1 and parts[0] is runs.causal
    run, conditions = runs.Run(), []
    if parts and not is_causal:
        run, conditions = _bounds(request, parts, compiling)
    padding, q_offset = _read(request, conditions, is_causal, whole=not parts)
    if padding.kept is not None:
        return _with_keys(request, None if is_causal else run, parts, padding, compiling)
    if not parts and padding.keys is not None and padding.keys == padding.width:
        return forms.full(request.device)
    if is_causal and padding.keys is not None and q_offset is not None:
        end = q_offset + request.q_length - request.kv_offset
        if end <= padding.keys:
            return forms.causal(end, request.device, request.attention_mask is not None)
    packed = not compiling and padding.keys is not None and runs.is_causal_packing(parts)
    if is_causal:
        run, _ = _bounds(request, parts, compiling)
    return _ranges(request, run, padding, packed)


def _of_newest_token(request: Request) -> Tensor | None:
    """The mask of one token behind a cache without padding, which most steps of decoding ask for.

    None where the request is another, or where reading its offset tells more.
    """
    plain = request.mask_function is runs.causal and request.attention_mask is None
    if not plain or request.q_length != 1:
        return None
    if not isinstance(request.q_offset, Tensor):
        last_key = request.kv_offset + request.kv_length - 1
        return forms.full(request.device) if last_key <= request.q_offset else None
    if _reads_are_free(request.device):
        return None
    end = request.q_offset.reshape(1) + (1 - request.kv_offset)
    return forms.lens(end.clamp(0, request.kv_length), request.batch_size)


def _parts(request: Request, compiling: bool) -> list[runs.MaskFunction]:
    """The conjuncts that can exclude a key; the whole is one part while Dynamo traces."""
    function = request.mask_function
    if compiling:
        parts = [] if function is runs.bidirectional else [function]
    else:
        parts = runs.conjuncts(function)
        _check_not_forced(request, parts)
    keys = (request.kv_offset, request.kv_offset + request.kv_length - 1)
    if isinstance(request.q_offset, Tensor):
        queries = keys  # somewhere in the cache
    else:
        queries = (request.q_offset, request.q_offset + request.q_length - 1)
    unknown = compiling and function is not runs.causal
    return parts if unknown else [part for part in parts if runs.bites(part, queries, keys)]


def _check_not_forced(request: Request, parts: list[runs.MaskFunction]) -> None:
    """A model may ask for a materialised mask; decoding, packing and blocks set the same flags."""
    forced = not (request.allow_is_causal_skip or request.allow_is_bidirectional_skip)
    if forced and request.q_length > 1 and not any(runs.kind(p) in _UNSKIPPABLE for p in parts):
        raise NotARun("the model asks for a materialised mask")


def _bounds(
    request: Request, parts: list[runs.MaskFunction], compiling: bool
) -> tuple[runs.Run, list[Tensor]]:
    is_causal = all(part is runs.causal for part in parts)  # which is the same in every row
    batch = None if is_causal else torch.arange(request.batch_size, device=request.device)[:, None]
    at = runs.Query(batch, _positions(request), [])
    if compiling and not is_causal:
        if runs.UNKNOWN_OVERLAYS:
            raise NotARun("mask functions of a newer transformers release, while tracing")
        if parts[0].__code__ is runs.UNION_CODE:
            raise NotARun("block overlays, while tracing")
        if request.kv_length > 16**runs.SEARCH_DIGITS:
            raise NotARun("too many keys to search, while tracing")
        return runs.search(parts[0], at, request.kv_offset, request.kv_length), []
    try:
        return runs.intersect([runs.bounds(part, at) for part in parts]), at.conditions
    except runs.Unknown as unknown:
        raise NotARun(f"mask function {unknown}") from None


def _positions(request: Request) -> Tensor:
    """(1, Sq), of the queries in the cache."""
    if request.q_length == 1 and isinstance(request.q_offset, Tensor):
        return request.q_offset.reshape(1, 1)
    return torch.arange(request.q_length, device=request.device)[None] + request.q_offset


def _read(
    request: Request, conditions: list[Tensor], want_offset: bool, whole: bool
) -> tuple[Padding, int | None]:
    """The padding, and the query offset where that is on the device, in one read of the device."""
    offset = request.q_offset
    mask = request.attention_mask
    on_device = isinstance(offset, Tensor)
    asked = [offset if on_device else None, mask, *conditions]
    tracing = any(is_hidden(tensor) for tensor in asked if tensor is not None)
    may_read = not tracing and (request.q_length > 1 or _reads_are_free(request.device))
    if (mask is not None or conditions) and not may_read:
        if tracing and conditions:
            raise NotARun("packing while tracing")
        if tracing:
            return _kept_keys(request, whole), None
        if conditions or request.mask_function is runs.bidirectional:
            raise NotARun("padding in decoding")
        return _followed(request), None if on_device else offset
    padding, wanted = Padding(request.kv_length, request.kv_length), list(conditions)
    if mask is not None:
        padding, is_run = _padding_runs(request, whole)
        count, reaches_end = padding.hi - padding.lo, request.attention_mask[:, -1].all()
        wanted[:0] = padding.lo.max(), count.min(), count.max(), is_run, reaches_end
    if on_device:
        offset = None
        if want_offset and may_read:
            wanted.append(request.q_offset.reshape(()))
    if not wanted:
        return padding, offset
    numbers = torch.stack([value.long() for value in wanted]).tolist()
    if on_device and want_offset:
        offset = numbers.pop()
    if mask is not None:
        last_start, fewest, most, has_no_holes, reaches_end, *numbers = numbers
        if request.mask_function is not runs.bidirectional:
            decoding.remember(request, last_start > 0, bool(has_no_holes and reaches_end))
        if not has_no_holes:
            padding = _kept_keys(request, whole)
        elif last_start == 0 and fewest == most:
            padding = padding._replace(keys=most)
    if not all(numbers):
        raise NotARun("blocks that are not contiguous")
    return padding, offset


def _reads_are_free(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu"


def _followed(request: Request) -> Padding:
    """The padding of a step of decoding, from what the prefill has shown; nothing is read."""
    known = decoding.followed(request)
    if known is None:
        raise NotARun("padding in decoding that no prefill has shown")
    if not known.padded:
        decoding.check(request.attention_mask.all())
        return Padding(request.kv_length, request.kv_length)
    padding, is_run = _padding_runs(request, False)
    decoding.check(is_run)
    return padding


def _padding_runs(request: Request, whole: bool) -> tuple[Padding, Tensor]:
    """The valid keys of every row, and whether they are a run in each, a bool that is not read."""
    valid = _valid_keys(request, whole)
    count, lo = valid.sum(-1), valid.to(torch.uint8).argmax(-1)
    starts = (valid[:, 1:] > valid[:, :-1]).sum(-1) + valid[:, 0]
    return Padding(valid.shape[1], None, lo[:, None], (lo + count)[:, None]), (starts <= 1).all()


def _kept_keys(request: Request, whole: bool) -> Padding:
    """The padding where it may have holes: runs end with the last valid key."""
    kept = _valid_keys(request, whole)
    valid, width = kept.to(torch.uint8), kept.shape[1]
    lo, hi = valid.argmax(-1), width - valid.flip(-1).argmax(-1)
    return Padding(width, None, lo[:, None], hi[:, None], kept)


def _valid_keys(request: Request, whole: bool) -> Tensor:
    """The padding mask as bool (B or 1, keys).

    `whole`: nothing but the padding restricts the keys, so its own length counts; kv_length may be
    that of another cache then.
    """
    valid = prepare_padding_mask(request.attention_mask, request.kv_length, request.kv_offset)
    if not whole or request.kv_offset != 0:
        valid = valid[:, request.kv_offset : request.kv_offset + request.kv_length]
    if valid.shape[0] not in (1, request.batch_size):
        raise NotARun("a padding mask of another batch size")
    return valid.bool()


def _with_keys(
    request: Request,
    run: runs.Run | None,
    parts: list[runs.MaskFunction],
    padding: Padding,
    compiling: bool,
) -> Tensor:
    """The mask where padding has holes, or may have while tracing: a flag for each key."""
    if not parts:
        return padding.kept[:, None, None]
    if run is None:
        if not isinstance(request.q_offset, Tensor):
            end = request.q_offset + request.q_length - request.kv_offset
            if end <= padding.width:
                return forms.causal_keys(padding.kept[:, :end])
        run, _ = _bounds(request, parts, compiling)
    return _ranges(request, run, padding, False)


def _ranges(request: Request, run: runs.Run, padding: Padding, packed: bool) -> Tensor:
    own = run
    if type(request.kv_offset) is not int or request.kv_offset != 0:
        own = runs.Run(*(b if b is None else b - request.kv_offset for b in run))
    if padding.keys is None:
        own = runs.intersect([own, runs.Run(padding.lo, padding.hi)])
    end = padding.width if padding.keys is None else padding.keys
    if own.lo is None and own.hi is not None and request.q_length == 1:
        return forms.lens(own.hi.clamp(0, end), request.batch_size)
    lo, hi = own
    if run.lo is not None:
        lo = lo.clamp(min=0)
    elif lo is None:
        lo = torch.zeros((1, 1), dtype=torch.int64, device=request.device)
    if run.hi is not None:
        hi = hi.clamp(0, end)
    elif hi is None:
        hi = torch.full((1, 1), end, dtype=torch.int64, device=request.device)
    if padding.kept is not None:
        lo, hi = (bound.expand(-1, request.q_length) for bound in (lo, hi))
        return forms.ranges_and_keys(lo, hi, padding.kept)
    return forms.ranges(lo, hi, packed)
