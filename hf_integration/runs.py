"""From transformers' mask functions to one run of keys [lo, hi) per query.

A mask function of transformers.masking_utils maps indices (batch, head, query, key) to bool and is
composed of closures. Two exact ways to find its runs: `bounds` reads the closures and knows each
kind in closed form; `search` calls the function only, so that it also works while Dynamo traces,
where closures cannot be read.
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

# What is known to leave a run that contains the query's own position. `search` relies on that and
# cannot check it, so it is used only if this transformers release has nothing else.
_KNOWN = {
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
} - _KNOWN
SEARCH_DIGITS = 6
UNION_CODE = masking_utils.or_masks(causal).__code__


class Unknown(Exception):
    """A mask function that is not known to be a run of keys per query."""


class Run(NamedTuple):
    """Bounds of shape (B or 1, Sq or 1) in absolute key positions; None: no bound on that side."""

    lo: Tensor | None = None
    hi: Tensor | None = None


class Query(NamedTuple):
    """Queries whose bounds are wanted; bounds add 0-d bool tensors that must hold to be exact."""

    batch: Tensor | None  # (B, 1); None where every part is causal
    position: Tensor  # (1 or B, Sq), absolute
    conditions: list[Tensor]


def kind(function: MaskFunction) -> str:
    """Which factory of masking_utils made the function, or its own name; "" for any other."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return ""
    return function.__qualname__.partition(".")[0]


def cells(function: MaskFunction) -> dict:
    """The variables a closure has captured."""
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def conjuncts(function: MaskFunction) -> list[MaskFunction]:
    """The functions whose conjunction this one is, less bidirectional ones, which ask nothing."""
    if function is bidirectional:
        return []
    if kind(function) != "and_masks":
        return [function]
    return [leaf for part in cells(function)["mask_functions"] for leaf in conjuncts(part)]


def is_causal_packing(parts: list[MaskFunction]) -> bool:
    """Whether conjuncts say: causal within each of several documents, and nothing else."""
    kinds = [kind(part) for part in parts]
    if "packed_sequence_mask_function" not in kinds:
        return False
    inner = [
        cells(part)["mask_function"] if name == "remap_positions_for_packed_sequence" else part
        for part, name in zip(parts, kinds, strict=True)
        if name != "packed_sequence_mask_function"
    ]
    return bool(inner) and all(part is causal for part in inner)


def bites(function: MaskFunction, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Whether a conjunct can exclude a key, given first and last query and key positions."""
    if function is causal:
        return keys[1] > queries[0]
    if kind(function) == "sliding_window_overlay":
        return queries[1] - cells(function)["sliding_window"] >= keys[0]
    if kind(function) == "sliding_window_bidirectional_overlay":
        return max(queries[1] - keys[0], keys[1] - queries[0]) > cells(function)["sliding_window"]
    return True


def bounds(function: MaskFunction, at: Query) -> Run:
    """The run of a mask function in closed form. Raises Unknown where none is known."""
    if function is causal:  # without asking for its name, which Dynamo cannot
        return Run(hi=at.position + 1)
    rule = _RULES.get(kind(function))
    if rule is None:
        raise Unknown(getattr(function, "__qualname__", repr(function)))
    return rule(at, **cells(function))


def intersect(runs: list[Run]) -> Run:
    lows = [run.lo for run in runs if run.lo is not None]
    highs = [run.hi for run in runs if run.hi is not None]
    return Run(_fold(torch.maximum, lows), _fold(torch.minimum, highs))


def search(function: MaskFunction, at: Query, first_key: int, kv_length: int) -> Run:
    """Both ends of every run, from calls of a function that holds at the query itself.

    How far a run reaches to either side is found digit by digit in base 16, with six calls that
    probe fifteen keys per query and side. Nothing is read on the host.
    """
    position = at.position.clamp(first_key, first_key + kv_length - 1)[..., None]
    limit = torch.cat([position - first_key, first_key + kv_length - 1 - position], -1)
    step = torch.arange(-1, 2, 2, device=position.device)[:, None]  # to the left, to the right
    digits = torch.arange(1, 16, device=position.device)
    batch, query = at.batch[..., None, None], at.position[..., None, None]
    reach, limit = torch.zeros_like(limit)[..., None], limit[..., None]
    for power in reversed(range(SEARCH_DIGITS)):
        distance = reach + digits * 16**power
        key = position[..., None] + step * torch.minimum(distance, limit)
        kept = function(batch, torch.zeros_like(batch), query, key) & (distance <= limit)
        reach = reach + kept.sum(-1, keepdim=True) * 16**power
    left, right = reach.squeeze(-1).unbind(-1)
    return Run(position.squeeze(-1) - left, position.squeeze(-1) + right + 1)


def _fold(operation: Callable, tensors: list[Tensor]) -> Tensor | None:
    result = None
    for tensor in tensors:
        result = tensor if result is None else operation(result, tensor)
    return result


def _conjunction(at: Query, mask_functions) -> Run:
    return intersect([bounds(part, at) for part in mask_functions])


def _bidirectional(at: Query) -> Run:
    return Run()


def _window(at: Query, sliding_window: int) -> Run:
    return Run(lo=at.position - sliding_window + 1)


def _bidirectional_window(at: Query, sliding_window: int) -> Run:
    return Run(at.position - sliding_window, at.position + sliding_window + 1)


def _chunk(at: Query, chunk_size: int, left_padding: Tensor) -> Run:
    start = left_padding.to(at.position.device)[at.batch]
    lo = torch.div(at.position - start, chunk_size, rounding_mode="floor") * chunk_size + start
    return Run(lo, lo + chunk_size)


def _packed(at: Query, packed_sequence_mask: Tensor) -> Run:
    return _same_value(packed_sequence_mask.to(at.position.device), at)


def _remapped(at: Query, mask_function: MaskFunction, position_ids: Tensor) -> Run:
    """Bounds in positions within a packed sequence, moved to where it stands."""
    own = position_ids.to(at.position.device)[at.batch, at.position]
    run = bounds(mask_function, at._replace(position=own))
    shift = at.position - own
    return Run(*(bound if bound is None else bound + shift for bound in run))


def _union(at: Query, mask_functions) -> Run:
    """A run and contiguous blocks (images): a run again, because both contain the query."""
    blocks = [part for part in mask_functions if kind(part) == "blockwise_overlay"]
    others = [part for part in mask_functions if kind(part) != "blockwise_overlay"]
    if len(blocks) != 1 or len(others) != 1:
        raise Unknown("a union other than one run and one block overlay")
    run = bounds(others[0], at)
    ids = cells(blocks[0])["block_sequence_ids"].to(at.position.device)
    ordered = ids.sort(-1).values
    at.conditions.append((_count_stretches(ids) == _count_stretches(ordered)).all())
    block = _same_value(_starts(ids).cumsum(-1), at)
    inside = ids[at.batch, at.position] >= 0
    lo, hi = run
    if lo is not None:
        lo = torch.where(inside, torch.minimum(lo, block.lo), lo)
    if hi is not None:
        hi = torch.where(inside, torch.maximum(hi, block.hi), hi)
    return Run(lo, hi)


def _same_value(values: Tensor, at: Query) -> Run:
    """The stretch of equal values around each query; `values` (B, S) never decrease along a row."""
    values = values.contiguous()
    own = values[at.batch, at.position]
    return Run(torch.searchsorted(values, own), torch.searchsorted(values, own, right=True))


def _starts(ids: Tensor) -> Tensor:
    """True where a stretch of equal ids begins."""
    first = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return torch.cat([first, ids[:, 1:] != ids[:, :-1]], 1)


def _count_stretches(ids: Tensor) -> Tensor:
    """How many stretches of equal ids each row has; negative ids stand outside every block."""
    return (_starts(ids) & (ids >= 0)).sum(-1)


_RULES: dict[str, Callable[..., Run]] = {
    "and_masks": _conjunction,
    "or_masks": _union,
    "bidirectional_mask_function": _bidirectional,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _bidirectional_window,
    "chunked_overlay": _chunk,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _remapped,
}
