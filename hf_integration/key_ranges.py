"""Convert mask functions of transformers to one range of keys [lo, hi) for each query.

A mask function of transformers.masking_utils maps indices (batch, head, query, key) to bool and is
composed of closures. Its ranges are found exactly by one of two methods: `bounds` reads the
closures, each kind of which has a closed form; `search` only calls the function, and therefore also
works while Dynamo traces, which cannot read closures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

MaskFunction = Callable[..., Tensor]

causal = masking_utils.causal_mask_function
bidirectional = masking_utils.bidirectional_mask_function

# Mask functions that always keep one range of keys, which contains the query's own position.
# `search` relies on that and cannot check it, so it needs a transformers release without others.
_CONTIGUOUS = {
    "sliding_window_overlay", "sliding_window_bidirectional_overlay", "chunked_overlay",
    "blockwise_overlay", "causal_mask_function", "bidirectional_mask_function",
    "sliding_window_causal_mask_function", "sliding_window_bidirectional_mask_function",
    "chunked_causal_mask_function", "padding_mask_function", "packed_sequence_mask_function",
    "add_offsets_to_mask_function",
}  # fmt: skip
UNKNOWN_OVERLAYS = {
    name for name in vars(masking_utils) if name.endswith(("_overlay", "_mask_function"))
} - _CONTIGUOUS
SEARCH_DIGITS = 6
UNION_CODE = masking_utils.or_masks(causal).__code__


class UnknownMaskFunction(Exception):
    """A mask function that may keep more than one range of keys for a query."""


class KeyRange(NamedTuple):
    """Bounds of shape (B or 1, Sq or 1) in absolute key positions; None: no bound on that side."""

    lo: Tensor | None = None
    hi: Tensor | None = None


class Queries(NamedTuple):
    """The queries to find bounds for."""

    batch: Tensor | None  # (B, 1); None if every part is causal
    position: Tensor  # (1 or B, Sq), absolute
    conditions: list[Tensor]  # 0-d bools that rules append; if all hold, the bounds are exact


def factory_name(function: MaskFunction) -> str:
    """The name of a function of masking_utils, or of the factory that made it; else ""."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return ""
    return function.__qualname__.partition(".")[0]


def captured(function: MaskFunction) -> dict:
    """The variables that a closure has captured."""
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def conjuncts(function: MaskFunction) -> list[MaskFunction]:
    """The functions of which this one is the conjunction, without bidirectional ones."""
    if function is bidirectional:
        return []
    if factory_name(function) != "and_masks":
        return [function]
    return [leaf for part in captured(function)["mask_functions"] for leaf in conjuncts(part)]


def is_packing(parts: list[MaskFunction]) -> bool:
    """Whether conjuncts separate packed documents."""
    return any(factory_name(part) == "packed_sequence_mask_function" for part in parts)


def is_causal_packing(parts: list[MaskFunction]) -> bool:
    """Whether conjuncts are causal within each packed document, and mask nothing else."""
    kinds = [factory_name(part) for part in parts]
    inner = [
        captured(part)["mask_function"] if name == "remap_positions_for_packed_sequence" else part
        for part, name in zip(parts, kinds, strict=True)
        if name != "packed_sequence_mask_function"
    ]
    return is_packing(parts) and bool(inner) and all(part is causal for part in inner)


def can_mask_out(function: MaskFunction, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Whether a conjunct can mask out a key, given the first and last query and key positions."""
    if function is causal:
        return keys[1] > queries[0]
    if factory_name(function) == "sliding_window_overlay":
        return queries[1] - captured(function)["sliding_window"] >= keys[0]
    if factory_name(function) == "sliding_window_bidirectional_overlay":
        window = captured(function)["sliding_window"]
        return max(queries[1] - keys[0], keys[1] - queries[0]) > window
    return True


def bounds(function: MaskFunction, at: Queries) -> KeyRange:
    """The ranges of a mask function in closed form.

    Raises UnknownMaskFunction if no closed form is known.
    """
    if function is causal:  # compared by identity, because Dynamo cannot read its name
        return KeyRange(hi=at.position + 1)
    rule = _RULES.get(factory_name(function))
    if rule is None:
        raise UnknownMaskFunction(getattr(function, "__qualname__", repr(function)))
    return rule(at, **captured(function))


def intersect(ranges: list[KeyRange]) -> KeyRange:
    """The ranges of keys that are in all of the given ranges."""
    lows = [each.lo for each in ranges if each.lo is not None]
    highs = [each.hi for each in ranges if each.hi is not None]
    return KeyRange(_fold(torch.maximum, lows), _fold(torch.minimum, highs))


def search(function: MaskFunction, at: Queries, first_key: int, kv_length: int) -> KeyRange:
    """The ranges of a function that keeps the query's own position, found by calling it.

    The distances from the query to both ends are found digit by digit in base 16, with six calls
    that probe fifteen keys for each query and side. Nothing is read on the host.
    """
    position = at.position.clamp(first_key, first_key + kv_length - 1)[..., None]
    limit = torch.cat([position - first_key, first_key + kv_length - 1 - position], -1)
    step = torch.arange(-1, 2, 2, device=position.device)[:, None]  # to the left, to the right
    digits = torch.arange(1, 16, device=position.device)
    batch, query = at.batch[..., None, None], at.position[..., None, None]
    found, limit = torch.zeros_like(limit)[..., None], limit[..., None]
    for power in reversed(range(SEARCH_DIGITS)):
        distance = found + digits * 16**power
        key = position[..., None] + step * torch.minimum(distance, limit)
        kept = function(batch, torch.zeros_like(batch), query, key) & (distance <= limit)
        found = found + kept.sum(-1, keepdim=True) * 16**power
    left, right = found.squeeze(-1).unbind(-1)
    return KeyRange(position.squeeze(-1) - left, position.squeeze(-1) + right + 1)


def equal_range(values: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The half-open range of each `wanted` value in `values`, whose rows never decrease."""
    values = values.contiguous()
    return torch.searchsorted(values, wanted), torch.searchsorted(values, wanted, right=True)


def _fold(operation: Callable, tensors: list[Tensor]) -> Tensor | None:
    result = None
    for tensor in tensors:
        result = tensor if result is None else operation(result, tensor)
    return result


def _conjunction(at: Queries, mask_functions) -> KeyRange:
    return intersect([bounds(part, at) for part in mask_functions])


def _bidirectional(at: Queries) -> KeyRange:
    return KeyRange()


def _window(at: Queries, sliding_window: int) -> KeyRange:
    return KeyRange(lo=at.position - sliding_window + 1)


def _bidirectional_window(at: Queries, sliding_window: int) -> KeyRange:
    return KeyRange(at.position - sliding_window, at.position + sliding_window + 1)


def _chunk(at: Queries, chunk_size: int, left_padding: Tensor) -> KeyRange:
    start = left_padding.to(at.position.device)[at.batch]
    lo = torch.div(at.position - start, chunk_size, rounding_mode="floor") * chunk_size + start
    return KeyRange(lo, lo + chunk_size)


def _packed(at: Queries, packed_sequence_mask: Tensor) -> KeyRange:
    documents = packed_sequence_mask.to(at.position.device)
    return KeyRange(*equal_range(documents, documents[at.batch, at.position]))


def _remapped(at: Queries, mask_function: MaskFunction, position_ids: Tensor) -> KeyRange:
    """Bounds in positions within a packed document, shifted to where the document begins."""
    position = position_ids.to(at.position.device)[at.batch, at.position]
    found = bounds(mask_function, at._replace(position=position))
    shift = at.position - position
    return KeyRange(*(bound if bound is None else bound + shift for bound in found))


def _union(at: Queries, mask_functions) -> KeyRange:
    """A range united with contiguous blocks (images); both contain the query, so it is a range."""
    blocks = [part for part in mask_functions if factory_name(part) == "blockwise_overlay"]
    others = [part for part in mask_functions if factory_name(part) != "blockwise_overlay"]
    if len(blocks) != 1 or len(others) != 1:
        raise UnknownMaskFunction("a union other than one range and one block overlay")
    found = bounds(others[0], at)
    ids = captured(blocks[0])["block_sequence_ids"].to(at.position.device)
    ordered = ids.sort(-1).values
    at.conditions.append((_count_segments(ids) == _count_segments(ordered)).all())
    segments = _starts(ids).cumsum(-1)
    first, end = equal_range(segments, segments[at.batch, at.position])
    inside = ids[at.batch, at.position] >= 0
    lo, hi = found
    if lo is not None:
        lo = torch.where(inside, torch.minimum(lo, first), lo)
    if hi is not None:
        hi = torch.where(inside, torch.maximum(hi, end), hi)
    return KeyRange(lo, hi)


def _starts(ids: Tensor) -> Tensor:
    """Bool (B, S), True where a segment of equal ids begins."""
    first = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return torch.cat([first, ids[:, 1:] != ids[:, :-1]], 1)


def _count_segments(ids: Tensor) -> Tensor:
    """The number of segments of equal ids in each row; negative ids are outside every block."""
    return (_starts(ids) & (ids >= 0)).sum(-1)


_RULES: dict[str, Callable[..., KeyRange]] = {
    "and_masks": _conjunction,
    "or_masks": _union,
    "bidirectional_mask_function": _bidirectional,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _bidirectional_window,
    "chunked_overlay": _chunk,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _remapped,
}
