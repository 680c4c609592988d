"""Documents packed into one row, separated by position_ids.

transformers' mask functions consider positions only if there is neither an attention mask nor a
cache, and by default there is a cache. Its FlashAttention path always does for a single row, and so
does this module: in causal self-attention over one row without earlier keys, a document begins at
every token with the smallest position of the kept ones, in every mode. Gaps, repeats and padding
begin none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_integration import encodings, key_ranges
from hf_integration.encodings import MaskArguments, PackingHint
from hf_integration.host_reads import PerTensorMemo, is_readable


class Documents(NamedTuple):
    """The ends of the documents packed into one row, among the queries and among the keys."""

    q_ends: Tensor  # int32 (documents + 1,), beginning with 0
    k_ends: Tensor
    longest_q: int | None = None
    longest_k: int | None = None


# One memo for each value, as several may be derived from one tensor.
_memo, _gaps, _falling = PerTensorMemo(), PerTensorMemo(), PerTensorMemo()


def documents(position_ids: Tensor, layer: nn.Module, at_gaps: bool = False) -> Documents | None:
    """The documents of one row of positions (1, S), or None if there is only one document.

    With `at_gaps` they are those of transformers' masks, which separate also at gaps and repeats.
    Reads the device once in a forward pass.
    """
    memo = _gaps if at_gaps else _memo
    return memo.get(position_ids, layer, lambda: _find(position_ids[0], at_gaps))


def may_restart(position_ids: Tensor, layer: nn.Module) -> bool:
    """Whether any position is not above the one before it; reads the device as `documents`."""
    return _falling.get(position_ids, layer, lambda: bool((position_ids.diff() <= 0).any()))


def _find(positions: Tensor, at_gaps: bool) -> Documents | None:
    if at_gaps:
        starts = ((positions.diff() != 1).nonzero()[:, 0] + 1).tolist()
    else:
        starts = (_begins_document(positions, None).nonzero()[:, 0]).tolist()
    if not starts:
        return None
    ends = [0, *starts, positions.shape[0]]
    longest = max(b - a for a, b in zip(ends, ends[1:], strict=False))
    on_device = torch.tensor(ends, dtype=torch.int32, device=positions.device)
    return Documents(on_device, on_device, longest, longest)


def _begins_document(positions: Tensor, kept: Tensor | None) -> Tensor:
    """Bool (S,), True where a document begins after another.

    `kept` (S,) is False for padding, at which positions are arbitrary, and which begins none. If
    padding precedes the first kept token of a document, positions may count it or not. They do if
    they rise by ones from the smallest to that token's, which is no continuation of an only token.
    """
    i = torch.arange(positions.shape[0], device=positions.device)
    if kept is None:
        return (positions == positions.min()) & (i > 0)
    last = torch.where(kept, i, -1).cummax(0).values
    before = torch.cat([torch.full_like(last[:1], -1), last[:-1]])
    smallest = torch.where(kept, positions, positions.max()).min()
    first = i - (positions - smallest)  # the token with the smallest position, if they count
    rises = torch.cat([torch.zeros_like(kept[:1]), positions.diff() == 1])
    counted = (first > before) & (torch.where(rises, 0, i).cummax(0).values <= first)
    continues = (first == i - 1) & (positions[before.clamp(min=0)] == smallest)
    return kept & (before >= 0) & counted & ~continues


def length(longest: int | Tensor | None, layer: nn.Module) -> int | None:
    """The longest document, of which some callers give a tensor.

    The host reads it once in a forward pass; None where it cannot, which leaves it unknown.
    """
    if not isinstance(longest, Tensor):
        return longest
    return _memo.get(longest, layer, longest.item) if is_readable(longest) else None


def within_documents(
    mask: MaskArguments, documents: Documents, shape: tuple[int, int, int]
) -> MaskArguments:
    """The mask with every query restricted to the keys of its own document in its row.

    `shape` is (B, Sq, Sk); the documents are those of the tokens of all rows.
    """
    (q_ends, k_ends, *_), (B, Sq, Sk) = documents, shape
    i = torch.arange(B * Sq, device=q_ends.device, dtype=torch.int32).view(B, Sq)
    document = torch.searchsorted(q_ends, i, right=True).clamp(1, q_ends.shape[0] - 1)
    before = torch.arange(B, device=q_ends.device, dtype=torch.int32)[:, None] * Sk
    lo, hi = k_ends[document - 1] - before, k_ends[document] - before
    return _restricted(mask, lo.clamp(0, Sk), hi.clamp(0, Sk))


def within_positions(
    mask: MaskArguments, position_ids: Tensor, shape: tuple[int, int], is_whole: bool = False
) -> MaskArguments:
    """The same for positions (1, S) that the host may not read, and a causal mask.

    `shape` is (Sq, Sk). A document begins as many keys before a query's own key as queries. That is
    the key of its number if the keys `is_whole` are the tokens, and else the last one it attends.
    """
    (Sq, Sk), device = shape, position_ids.device
    i, ranges = torch.arange(Sq, device=device), mask.key_ranges
    end = i + (Sk - Sq + 1) if is_whole or ranges is None else ranges[0, 0, :, 1]
    begins = _begins_document(position_ids[0], _kept(mask, end))
    document = (begins & (end[0] <= 1)).cumsum(0)  # one document if there are earlier keys
    first, after = key_ranges.equal_range(document, document)
    lo = torch.where(first > 0, end - (i + 1 - first), 0)
    if ranges is None:
        return _restricted(mask._replace(is_causal=False), lo, end)
    return _restricted(mask, lo, end + (after - i - 1))


def hides_tokens(mask: MaskArguments) -> bool:
    """Whether a mask of one row, other than documents alone, may hide whole tokens."""
    has_ranges = mask.key_ranges is not None and mask.packing is not PackingHint.ONLY
    return has_ranges or _has_holes(mask)


def _has_holes(mask: MaskArguments) -> bool:
    """Whether the mask of one row hides keys other than by a range; always while tracing."""
    return mask.attn_mask is not None and tuple(mask.attn_mask.shape[:3]) == (1, 1, 1)


def _kept(mask: MaskArguments, end: Tensor) -> Tensor | None:
    """Bool (Sq,), whether the own keys of queries, those before `end`, are kept; None: all."""
    if _has_holes(mask):
        kept = mask.attn_mask[0, 0, 0]
        kept = kept if kept.dtype == torch.bool else kept == 0
        return kept.gather(0, (end - 1).clamp(0, kept.shape[0] - 1).long())
    if mask.key_ranges is None:
        return None
    lo, hi = mask.key_ranges[0, 0].unbind(-1)
    return (lo < end) & (end <= hi)


def _restricted(mask: MaskArguments, lo: Tensor, hi: Tensor) -> MaskArguments:
    """The mask with the keys of each query restricted to bounds (B, Sq) or (Sq,)."""
    lo, hi = (x.reshape(-1, 1, x.shape[-1]) for x in (lo, hi))
    if mask.key_ranges is not None:
        lo = torch.maximum(mask.key_ranges[..., 0], lo)
        hi = torch.minimum(mask.key_ranges[..., 1], hi)
    kept = mask.attn_mask
    if kept is not None and kept.dtype == torch.bool:  # which excludes key ranges
        kept = encodings.added_to_scores(kept)  # its blocks are the same
    return mask._replace(key_ranges=torch.stack([lo, hi], -1).int(), attn_mask=kept)
