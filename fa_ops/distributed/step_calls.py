"""Calls of the operator that attend given intervals of a buffer of keys.

Intervals that plain causality or a window describes need no `key_ranges`: rows and keys that take
no part are cut off, and positions are aligned at the bottom right of what remains.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.call import DENSE, MERGE_INTO, Call, Run, Saved
from fa_ops.call.options import Spec, keywords
from fa_ops.distributed.layout import Segment
from fa_ops.distributed.masks import Mask, Ranges, positions, visible, within
from fa_ops.ops import autograd, library
from fa_ops.plans import planning


class LinearBias(NamedTuple):
    """ALiBi where all keys are on one side of all queries: a term per key, and one per row.

    The term of key `j` is `slope * key_terms[j]`, that of row `i` is `slope * row_terms[i]`. The
    latter does not change the weights, and is added to lse.
    """

    key_terms: Tensor  # float64 (keys,)
    row_terms: Tensor  # float64 (rows,)


class StepCall(NamedTuple):
    """One call of the operator: some rows of this process over some keys of a buffer."""

    rows: slice
    keys: slice
    is_causal: bool = False
    left: int = -1
    right: int = -1
    ranges: Tensor | None = None  # int32 (B or 1, Hq or 1, rows, 2), within `keys`
    batches: slice = slice(None)
    alibi: bool | LinearBias = False  # whether the operator's own positions are right, or a bias
    first_key: int = 0  # the token of the first of `keys`; where known, tokens follow one another

    @property
    def form(self) -> str:
        """A word for the mask, as `explain` prints it."""
        if self.ranges is not None:
            return "key ranges"
        if self.left >= 0 or self.right >= 0:
            return "window"
        return "causal" if self.is_causal else "full"


def calls_for(ranges: Ranges, buffer: int, blocks: list[slice]) -> list[StepCall]:
    """The calls that attend these intervals of a buffer.

    `blocks` are the rows of each segment: if no plain mask describes all rows, one may describe
    each block.
    """
    whole = _plain(ranges, slice(0, ranges.hi.shape[2]), buffer)
    if whole is None or whole.ranges is None or len(blocks) < 2:
        return [] if whole is None else [whole]
    parts = [_plain(ranges.rows(rows), rows, buffer) for rows in blocks]
    parts = [part for part in parts if part is not None]
    return parts if all(part.ranges is None for part in parts) else [whole]


def calls_by_segment(
    ranges: Ranges, buffer: tuple[Segment, ...], blocks: list[slice]
) -> list[StepCall]:
    """The same for keys of one segment each; `ranges` are of the whole sequence."""
    calls, at = [], 0
    for start, stop in buffer:
        for call in calls_for(within(ranges, ((start, stop),)), stop - start, blocks):
            first = start + call.keys.start
            calls.append(call._replace(keys=_moved(call.keys, at), first_key=first))
        at += stop - start
    return calls


def _plain(ranges: Ranges, rows: slice, buffer: int) -> StepCall | None:
    """One call for these rows, without `key_ranges` if possible; None if they attend nothing."""
    hull = ranges.hull()
    if hull is None:
        return None
    used = (ranges.hi > ranges.lo).any(0).any(0).nonzero()
    first, last = int(used[0]), int(used[-1]) + 1
    ranges, start = ranges.rows(slice(first, last)), rows.start + first
    rows, keys = slice(start, start + last - first), slice(*hull)
    R, K = last - first, hull[1] - hull[0]
    lo, hi = ranges.lo - hull[0], ranges.hi - hull[0]
    if lo.shape[:2] == (1, 1):
        window = _window(lo.flatten(), hi.flatten(), R, K)
        if window is not None:
            left, right = window
            if right == 0:
                return StepCall(rows, keys, True, left)
            return StepCall(rows, keys, False, left, right)
    there = hi > lo
    pair = torch.stack((torch.where(there, lo, 0), torch.where(there, hi, 0)), -1)
    return StepCall(rows, keys, ranges=pair.int())


def _window(lo: Tensor, hi: Tensor, R: int, K: int) -> tuple[int, int] | None:
    """The window (left, right) that gives these intervals of K keys; None if there is none."""
    position = torch.arange(K - R, K, device="cpu")
    left = right = -1
    if bool((hi < K).any()):
        right = int(hi[0]) - 1 - int(position[0])
        if right < 0 or not torch.equal(hi, (position + right + 1).clamp(max=K)):
            return None
    if bool((lo > 0).any()):
        left = int(position[-1]) - int(lo[-1])
        if left < 0 or not torch.equal(lo, (position - left).clamp(min=0)):
            return None
    return left, right


def calls_with_alibi(
    mask: Mask, queries: tuple[Segment, ...], keys: tuple[Segment, ...], batches: slice
) -> list[StepCall]:
    """The calls for queries and a buffer of keys, in pieces in which distances can be expressed.

    Either positions are aligned, or all keys are on one side of all queries.
    """
    offset, calls, row = mask.offset(), [], 0
    for q in queries:
        at = 0
        for k in keys:
            for piece in _pieces((q[0] + offset, q[1] + offset), k):
                call = _one_sided(mask, *piece, offset, row - q[0] - offset, at - k[0])
                if call is not None:
                    calls.append(call._replace(batches=batches))
            at += k[1] - k[0]
        row += q[1] - q[0]
    return calls


def _pieces(q: Segment, k: Segment) -> list[tuple[Segment, Segment]]:
    """(positions of queries, keys) that are equal, or of which one precedes the other."""
    low, high = max(q[0], k[0]), min(q[1], k[1])
    if low >= high:
        return [(q, k)]
    found = [((low, high), (low, high))]
    for other in ((q[0], low), (high, q[1])):
        found.append((other, (low, high)))
    for other in ((k[0], low), (high, k[1])):
        found.append((q, other))
    return [(a, b) for a, b in found if a[0] < a[1] and b[0] < b[1]]


def _one_sided(
    mask: Mask, q: Segment, k: Segment, offset: int, row: int, key: int
) -> StepCall | None:
    """The call of one piece; `row` and `key` are added to positions to index the tensors."""
    rows, keys = slice(q[0] + row, q[1] + row), slice(k[0] + key, k[1] + key)
    ranges = within(visible(mask, positions((q,)) - offset), (k,))
    if ranges.hull() is None:
        return None
    if q == k:  # aligned as it is: nothing may be cut off
        window = None
        if ranges.lo.shape[:2] == (1, 1):
            window = _window(ranges.lo.flatten(), ranges.hi.flatten(), q[1] - q[0], k[1] - k[0])
        if window is not None:
            return StepCall(rows, keys, window[1] == 0, *window, alibi=True, first_key=k[0])
        ranges = torch.stack(tuple(ranges), -1).int()
        return StepCall(rows, keys, ranges=ranges, alibi=True, first_key=k[0])
    call = _plain(ranges, slice(0, q[1] - q[0]), k[1] - k[0])
    q_at = positions((q,))[call.rows].double()
    k_at = positions((k,))[call.keys].double()
    # measured from the key nearest to the queries, for which a rounding error would matter most
    if q[0] >= k[1]:
        bias = LinearBias(k_at - k_at[-1], k_at[-1] - q_at)
    else:
        bias = LinearBias(k_at[0] - k_at, q_at - k_at[0])
    first = k[0] + call.keys.start
    rows, keys = _moved(call.rows, rows.start), _moved(call.keys, keys.start)
    return call._replace(rows=rows, keys=keys, alibi=bias, first_key=first)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


# The operator's calls in a step, by their plans where the dispatcher would have nothing to do.

_merging: dict[tuple, Run] = {}


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """out and lse. Nothing is recorded for a gradient."""
    if library.can_bypass_dispatcher(q, k, v, *spec.tensors):
        with library.below_autograd():
            return planning.run(Call(DENSE, q, k, v, spec))
    return torch.ops.fa.attention_with_lse(q, k, v, *spec[:3], **keywords(spec))


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, spec: Spec,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k and v."""
    given = grad_out, grad_lse, q, k, v, out, lse
    if library.can_bypass_dispatcher(*given, *spec.tensors) and all(
        g is None or library.have_same_dispatch_keys(g, lse) for g in (grad_out, grad_lse)
    ):
        with library.below_autograd():
            saved = Saved(grad_out, grad_lse, out, lse)
            return autograd.run_backward(Call(DENSE, q, k, v, spec), saved)[:3]
    return torch.ops.fa.attention_backward(*given, *spec[:3], **keywords(spec))[:3]


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a result over other keys into out (B, H, S, D) and lse (B, H, S), in place."""
    kind = (out.dtype, part.dtype, out.shape[3], out.device, out.numel() == 0)
    run = _merging.get(kind)
    if run is None:
        call = Call(MERGE_INTO, out, out, out, backend="auto")
        run = _merging[kind] = planning.plan_for(call).prepare(call)
    run(out, lse, part, part_lse)
