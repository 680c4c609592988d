"""From transformers' mask functions to one range of keys [lo, hi) for each query.

A mask function of transformers.masking_utils maps indices (batch, head, query, key) to bool and is
composed of closures. Two exact ways to find its ranges: `bounds` reads the closures, each kind of
which has a closed form; `search` only calls the function, so that it also works while Dynamo
traces, which cannot read closures.
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

# What always leaves a range that contains the query's own position. `search` relies on that and
# cannot check it, so it is used only if this transformers release has nothing else.
_CONTIGUOUS = {
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "blockwise_overlay",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_causal_mask_function",
    "sliding_window_bidirectional_mask_function",
    "chunked_causal_mask_function",
    "padding_mask_function",
    "packed_sequence_mask_function",
    "add_offsets_to_mask_function",
}
UNKNOWN_OVERLAYS = {
    name for name in vars(masking_utils) if name.endswith(("_overlay", "_mask_function"))
} - _CONTIGUOUS
SEARCH_DIGITS = 6
UNION_CODE = masking_utils.or_masks(causal).__code__


class UnknownMaskFunction(Exception):
    """A mask function that may leave a query more than one range of keys."""


class KeyRange(NamedTuple):
    """Bounds of shape (B or 1, Sq or 1) in absolute key positions; None: no bound on that side."""

    lo: Tensor | None = None
    hi: Tensor | None = None


class Queries(NamedTuple):
    """Queries whose bounds are wanted. Rules append 0-d bool tensors to `conditions`; the bounds
    are exact where all of them hold."""

    batch: Tensor | None  # (B, 1); None where every part is causal
    position: Tensor  # (1 or B, Sq), absolute
    conditions: list[Tensor]


def factory_name(function: MaskFunction) -> str:
    """Which factory of masking_utils made the function, or its own name; "" for any other."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return ""
    return function.__qualname__.partition(".")[0]


def captured(function: MaskFunction) -> dict:
    """The variables that a closure has captured."""
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def conjuncts(function: MaskFunction) -> list[MaskFunction]:
    """The functions whose conjunction this one is, less bidirectional ones, which mask nothing."""
    if function is bidirectional:
        return []
    if factory_name(function) != "and_masks":
        return [function]
    return [leaf for part in captured(function)["mask_functions"] for leaf in conjuncts(part)]


def is_packing(parts: list[MaskFunction]) -> bool:
    """Whether conjuncts keep several documents apart."""
    return any(factory_name(part) == "packed_sequence_mask_function" for part in parts)


def is_causal_packing(parts: list[MaskFunction]) -> bool:
    """Whether conjuncts are causal within each of several documents, and mask nothing else."""
    kinds = [factory_name(part) for part in parts]
    inner = [
        captured(part)["mask_function"] if name == "remap_positions_for_packed_sequence" else part
        for part, name in zip(parts, kinds, strict=True)
        if name != "packed_sequence_mask_function"
    ]
    return is_packing(parts) and bool(inner) and all(part is causal for part in inner)


def can_mask_out(function: MaskFunction, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Whether a conjunct can exclude a key, given first and last query and key positions."""
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

    Raises UnknownMaskFunction where none is known.
    """
    if function is causal:  # not by its name, which Dynamo cannot read
        return KeyRange(hi=at.position + 1)
    rule = _RULES.get(factory_name(function))
    if rule is None:
        raise UnknownMaskFunction(getattr(function, "__qualname__", repr(function)))
    return rule(at, **captured(function))


def intersect(ranges: list[KeyRange]) -> KeyRange:
    """The keys that are in all of the ranges."""
    lows = [each.lo for each in ranges if each.lo is not None]
    highs = [each.hi for each in ranges if each.hi is not None]
    return KeyRange(_fold(torch.maximum, lows), _fold(torch.minimum, highs))


def search(function: MaskFunction, at: Queries, first_key: int, kv_length: int) -> KeyRange:
    """Both ends of every range, from calls of a function that holds at the query itself.

    The distance from the query to either end is found digit by digit in base 16, with six calls
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


def same_value(values: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """First and last + 1 position of each value of `own` in `values`, whose rows never decrease."""
    values = values.contiguous()
    return torch.searchsorted(values, own), torch.searchsorted(values, own, right=True)


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
    return KeyRange(*same_value(documents, documents[at.batch, at.position]))


def _remapped(at: Queries, mask_function: MaskFunction, position_ids: Tensor) -> KeyRange:
    """Bounds in positions within a packed sequence, moved to where the sequence is."""
    own = position_ids.to(at.position.device)[at.batch, at.position]
    found = bounds(mask_function, at._replace(position=own))
    shift = at.position - own
    return KeyRange(*(bound if bound is None else bound + shift for bound in found))


def _union(at: Queries, mask_functions) -> KeyRange:
    """A range and contiguous blocks (images): a range again, because both contain the query."""
    blocks = [part for part in mask_functions if factory_name(part) == "blockwise_overlay"]
    others = [part for part in mask_functions if factory_name(part) != "blockwise_overlay"]
    if len(blocks) != 1 or len(others) != 1:
        raise UnknownMaskFunction("a union other than one range and one block overlay")
    found = bounds(others[0], at)
    ids = captured(blocks[0])["block_sequence_ids"].to(at.position.device)
    ordered = ids.sort(-1).values
    at.conditions.append((_count_segments(ids) == _count_segments(ordered)).all())
    segments = _starts(ids).cumsum(-1)
    first, end = same_value(segments, segments[at.batch, at.position])
    inside = ids[at.batch, at.position] >= 0
    lo, hi = found
    if lo is not None:
        lo = torch.where(inside, torch.minimum(lo, first), lo)
    if hi is not None:
        hi = torch.where(inside, torch.maximum(hi, end), hi)
    return KeyRange(lo, hi)


def _starts(ids: Tensor) -> Tensor:
    """True where a segment of equal ids begins."""
    first = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return torch.cat([first, ids[:, 1:] != ids[:, :-1]], 1)


def _count_segments(ids: Tensor) -> Tensor:
    """How many segments of equal ids each row has; negative ids are outside every block."""
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
