"""Who sends which keys to whom, in which step, and what each process computes with them.

Each process asks the owner of keys for those alone that its queries attend, and the owner sends
them directly. In step `t` process `r` attends keys of process `r - t`. Under the scheme
"all_gather" one step has the keys of all processes. All processes make all requests from the mask
of the whole sequence, so that nothing need be agreed on. Masks come first.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import need_tensor
from fa_ops.distributed.layout import Segment, SequenceLayout

# The keys that each query of the whole sequence attends, as half-open intervals on the host.
#
# Every mask of `context_parallel_attention` gives each query one interval of keys. In the keys that
# a process has at hand, segments of the whole in ascending order, it is an interval too, and an
# empty one shows that a step need not be computed.


class Mask(NamedTuple):
    """Which keys each query attends. Tensors are int64 on the CPU."""

    queries: int  # tokens of the whole sequence
    keys: int
    is_causal: bool = False
    left: int = -1  # of the window; -1: unbounded
    right: int = -1
    kv_lens: Tensor | None = None  # (B,), or (documents,) with cu_seqlens
    key_ranges: Tensor | None = None  # (B or 1, Hq or 1, queries or 1, 2)
    cu_seqlens: Tensor | None = None  # (documents + 1,)

    @property
    def aligned_rows(self) -> bool:
        """Whether a query has the same position in every row of the batch."""
        return self.kv_lens is None

    def row(self, b: int) -> Mask:
        """The mask of row `b` of the batch."""
        ranges, lens = self.key_ranges, self.kv_lens
        return self._replace(
            kv_lens=None if lens is None else lens[b : b + 1],
            key_ranges=ranges if ranges is None or len(ranges) == 1 else ranges[b : b + 1],
        )

    def heads(self, heads: slice) -> Mask:
        """The mask of some query heads."""
        ranges = self.key_ranges
        if ranges is None or ranges.shape[1] == 1:
            return self
        return self._replace(key_ranges=ranges[:, heads])

    def offset(self) -> int:
        """The key position of query 0, where it is the same in every row."""
        if self.cu_seqlens is not None:
            return 0
        length = self.keys if self.kv_lens is None else int(self.kv_lens[0].clamp(0, self.keys))
        return length - self.queries

    def digest(self) -> str:
        """A hash of the values of the tensors."""
        known = hashlib.sha1(usedforsecurity=False)
        for t in (self.kv_lens, self.key_ranges, self.cu_seqlens):
            known.update(b"-" if t is None else f"{tuple(t.shape)}".encode())
            if t is not None:
                known.update(t.contiguous().numpy().tobytes())
        return known.hexdigest()[:16]


def check_masks(
    tokens: int, kv_lens: Tensor | None, key_ranges: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise TypeError or ValueError for masks of a whole sequence that cannot be such."""
    given = {"kv_lens": kv_lens, "key_ranges": key_ranges, "cu_seqlens": cu_seqlens}
    for name, t in given.items():
        if t is not None and need_tensor(name, t).dtype != torch.int32:
            found = dtype_name(t.dtype)
            raise TypeError(f"{name} must be int32, got {found}: pass {name}.int()")
    if key_ranges is not None and (
        key_ranges.dim() != 4 or key_ranges.shape[3] != 2 or key_ranges.shape[2] not in (1, tokens)
    ):
        raise ValueError(
            f"key_ranges must have shape (B or 1, Hq or 1, {tokens} or 1, 2), got "
            f"{tuple(key_ranges.shape)}: pass a first key and an end for each query"
        )
    if cu_seqlens is not None:
        check_ends(cu_seqlens, tokens)
    count = None if cu_seqlens is None else len(cu_seqlens) - 1
    if kv_lens is not None and (kv_lens.dim() != 1 or count not in (None, len(kv_lens))):
        shape, each = ("(B,)", "row") if count is None else (f"({count},)", "document")
        raise ValueError(
            f"kv_lens must have shape {shape}, got {tuple(kv_lens.shape)}: pass a number of keys "
            f"for each {each}"
        )


def check_ends(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise ValueError unless these are boundaries of documents in so many tokens."""
    ends = on_host(cu_seqlens)
    if ends.dim() != 1 or not len(ends):
        raise ValueError(
            f"cu_seqlens must have shape (documents + 1,), got {tuple(ends.shape)}: pass the first "
            "token of each document, then the number of tokens"
        )
    if bool((ends.diff() < 0).any()) or ends[0] < 0 or ends[-1] > tokens:
        raise ValueError(
            f"cu_seqlens must not decrease and be within [0, {tokens}], the tokens of all "
            f"processes, got {ends.tolist()[:16]}: pass the boundaries in the whole sequence"
        )


class Ranges(NamedTuple):
    """Half-open intervals of keys, int64 (B or 1, Hq or 1, rows); (0, 0) where empty."""

    lo: Tensor
    hi: Tensor

    def rows(self, rows: slice) -> Ranges:
        """Those of some rows."""
        return Ranges(self.lo[..., rows], self.hi[..., rows])

    def hull(self) -> Segment | None:
        """The smallest interval that contains all; None if all are empty."""
        end = int(self.hi.max()) if self.hi.numel() else 0
        if not end:
            return None
        return int(self.lo.masked_fill(self.hi <= self.lo, end).min()), end

    def pairs(self) -> float:
        """The number of pairs of queries and keys, as a mean over rows of the batch and heads."""
        return float((self.hi - self.lo).sum()) / (self.lo.shape[0] * self.lo.shape[1])

    def queries(self) -> float:
        """The number of queries that attend a key, as a mean over rows of the batch and heads."""
        return float((self.hi > self.lo).sum()) / (self.lo.shape[0] * self.lo.shape[1])


def visible(mask: Mask, queries: Tensor) -> Ranges:
    """The intervals of these queries (rows,), in keys of the whole sequence."""
    i = queries.view(1, 1, -1)
    if mask.cu_seqlens is None:
        length = mask.kv_lens
        if length is None:
            length = torch.full((1,), mask.keys, device=i.device)
        length = length.clamp(0, mask.keys).view(-1, 1, 1)
        lo, hi, position = torch.zeros_like(i), length, i + length - mask.queries
    else:
        lo, hi, position = _in_documents(mask, i)
    lo, hi = torch.broadcast_tensors(lo, hi)
    if mask.is_causal:
        hi = hi.minimum(position + 1)
    if mask.right >= 0:
        hi = hi.minimum(position + mask.right + 1)
    if mask.left >= 0:
        lo = lo.maximum(position - mask.left)
    if mask.key_ranges is not None:
        ranges = mask.key_ranges
        if ranges.shape[2] > 1:
            ranges = ranges[:, :, queries]
        lo, hi = lo.maximum(ranges[..., 0]), hi.minimum(ranges[..., 1])
    return _without_empty(*torch.broadcast_tensors(lo, hi))


def _in_documents(mask: Mask, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(first key, end of keys, position) of each query in its document."""
    ends = mask.cu_seqlens
    inside = (i >= ends[0]) & (i < ends[-1])
    document, start = document_of(mask, i)
    stop = ends[document + 1] if len(ends) > 1 else start
    length = stop - start
    if mask.kv_lens is not None and len(mask.kv_lens):
        length = length.minimum(mask.kv_lens[document].clamp(min=0))
    position = i + length - (stop - start)
    return start, torch.where(inside, start + length, start), position


def document_of(mask: Mask, i: Tensor) -> tuple[Tensor, Tensor]:
    """The document of each token and its first token; of tokens in none, those of any."""
    ends = mask.cu_seqlens
    document = torch.searchsorted(ends[1:].contiguous(), i, right=True)
    document = document.clamp(max=max(0, len(ends) - 2))
    return document, ends[document]


def _without_empty(lo: Tensor, hi: Tensor) -> Ranges:
    there = hi > lo
    return Ranges(torch.where(there, lo, 0), torch.where(there, hi, 0))


def within(ranges: Ranges, segments: tuple[Segment, ...]) -> Ranges:
    """The intervals in the keys of a buffer that holds these ascending segments."""
    lo, hi = torch.zeros_like(ranges.lo), torch.zeros_like(ranges.hi)
    for start, stop in segments:
        lo += (ranges.lo - start).clamp(0, stop - start)
        hi += (ranges.hi - start).clamp(0, stop - start)
    return _without_empty(lo, hi)


def positions(segments: tuple[Segment, ...]) -> Tensor:
    """The tokens of ascending segments, int64 on the CPU."""
    parts = [torch.arange(start, stop, device="cpu") for start, stop in segments]
    return torch.cat(parts) if parts else torch.arange(0, device="cpu")


_known: dict[int, tuple[weakref.ref, int, Tensor]] = {}


def on_host(t: Tensor | None) -> Tensor | None:
    """The values in int64 on the CPU. Those of a GPU's tensor are read once until it is changed."""
    if t is None:
        return None
    if t.device.type == "cpu":
        return t.detach().long()
    version = -1 if t.is_inference() else t._version
    reference, known_version, values = _known.get(id(t), (lambda: None, -1, None))
    if reference() is not t or known_version != version or version < 0:
        values = t.detach().cpu().long()
        if len(_known) >= 64:
            _known.clear()
        _known[id(t)] = weakref.ref(t), version, values
    return values


# What is sent, and computed, in which step.

RING, ALL_GATHER = "ring", "all_gather"

_LIMIT, _LIMIT_KEPT = 32, 2

Parts = tuple[tuple[int, int, int], ...]  # (start, stop, how many tensors are added there)


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


class Step(NamedTuple):
    """One step of one process."""

    receives: tuple[tuple[int, tuple[Segment, ...]], ...]  # (from whom, which keys)
    sends: tuple[tuple[int, tuple[Segment, ...]], ...]  # (to whom, which keys of this process)
    own: tuple[Segment, ...]  # keys of this process that the step attends
    calls: tuple[StepCall, ...]

    @property
    def attends_own_keys_in_one_call(self) -> bool:
        """Whether gradients are those of one call, of keys of this process."""
        return bool(self.own) and not self.receives and len(self.calls) == 1

    @property
    def buffer(self) -> tuple[Segment, ...]:
        """The keys that are attended in this step, in their order in memory."""
        parts = [self.own, *(segments for _, segments in self.receives)]
        return tuple(sorted(sum(parts, ())))


class StepPlan(NamedTuple):
    """All steps of one process."""

    steps: tuple[Step, ...]
    queries: tuple[Segment, ...]
    keys: tuple[Segment, ...]  # of this process
    sent: tuple[Segment, ...]  # keys that steps send which gather none themselves
    parts: int  # the most partial results of a row
    query_parts: Parts  # how many gradients each query has
    key_parts: Parts  # how many each key of this process has, of steps and of other processes
    device_tensors: dict  # the calls' tensors on devices, made when first used

    @property
    def calls(self) -> list[StepCall]:
        """The calls of all steps."""
        return [call for step in self.steps for call in step.calls]


class StepProblem(NamedTuple):
    """What determines the plans of all processes."""

    mask: Mask
    queries: SequenceLayout
    keys: SequenceLayout
    alibi: bool
    batch: int
    has_dropout: bool = False  # calls attend consecutive keys then

    def over(self, inner: int) -> StepProblem:
        """The problem of groups of `inner` processes that follow one another."""
        return self._replace(queries=self.queries.over(inner), keys=self.keys.over(inner))

    def key(self) -> tuple:
        """What equal plans share."""
        mask = self.mask._replace(kv_lens=None, key_ranges=None, cu_seqlens=None)
        return mask, self.mask.digest(), *self[1:]


_plans: dict[tuple, StepPlan] = {}


def plan(problem: StepProblem, scheme: str, rank: int) -> StepPlan:
    """The steps of a process; kept for calls with equal masks."""
    key = (problem.key(), scheme, rank)
    if key not in _plans:
        if len(_plans) >= _LIMIT:
            _plans.clear()
        _plans[key] = _make(problem, scheme, rank)
    return _plans[key]


def requests(problem: StepProblem, attended: Callable[[int], Ranges]) -> list[list]:
    """`requests[r][s]`: the segments of process `s`'s keys that process `r` attends."""
    size, found = problem.queries.size, []
    for r in range(size):
        ranges = attended(r)
        hulls = [ranges.rows(rows).hull() for rows in blocks(problem.queries.segments[r])]
        hulls = [hull for hull in hulls if hull is not None]
        found.append([_needed(problem.keys.segments[s], hulls) for s in range(size)])
    return found


_kept: dict[tuple, tuple[list[Ranges], list[list]]] = {}


def attended_by_all(problem: StepProblem) -> tuple[list[Ranges], list[list]]:
    """What each process attends, and requests; kept for the plans of other schemes."""
    key = problem.key()
    if key not in _kept:
        if len(_kept) >= _LIMIT_KEPT:
            _kept.clear()
        ranges = [of_process(problem, rank) for rank in range(problem.queries.size)]
        _kept[key] = ranges, requests(problem, ranges.__getitem__)
    return _kept[key]


def of_process(problem: StepProblem, rank: int) -> Ranges:
    """The intervals of a process's queries, in keys of the whole."""
    return visible(problem.mask, positions(problem.queries.segments[rank]))


def blocks(segments: tuple[Segment, ...]) -> list[slice]:
    """The rows of a process that each of its segments occupies."""
    found, at = [], 0
    for start, stop in segments:
        found.append(slice(at, at + stop - start))
        at += stop - start
    return found


def _needed(segments: tuple[Segment, ...], hulls: list[Segment]) -> tuple[Segment, ...]:
    """Of each segment, the smallest part that contains what the hulls need of it."""
    found = []
    for start, stop in segments:
        parts = [(max(start, low), min(stop, high)) for low, high in hulls]
        parts = [part for part in parts if part[0] < part[1]]
        if parts:
            found.append((min(low for low, _ in parts), max(high for _, high in parts)))
    return tuple(found)


def _make(problem: StepProblem, scheme: str, rank: int) -> StepPlan:
    size = problem.queries.size
    attended, needs = attended_by_all(problem)
    sources = [[(rank - t) % size] for t in range(size)]
    targets = [[(rank + t) % size] for t in range(size)]
    if scheme == ALL_GATHER:
        sources, targets = [sum(sources, [])], [sum(targets, [])]
    steps = []
    for froms, tos in zip(sources, targets, strict=True):
        receives = tuple((s, needs[rank][s]) for s in froms if s != rank and needs[rank][s])
        sends = tuple((r, needs[r][rank]) for r in tos if r != rank and needs[r][rank])
        own = problem.keys.segments[rank] if rank in froms else ()
        step = Step(receives, sends, own, ())
        calls = _calls(problem, attended[rank], step.buffer, problem.queries.segments[rank])
        steps += _own_keys_first(step._replace(calls=tuple(calls)))
    parts = _most_parts([call for step in steps for call in step.calls])
    held = problem.queries.segments[rank], problem.keys.segments[rank]
    rows = [(call.rows.start, call.rows.stop) for step in steps for call in step.calls]
    return StepPlan(
        tuple(steps), *held, _sent(steps, held[1]), parts, parts_of(rows, problem.queries.local),
        _key_parts(steps, held[1]), {},
    )  # fmt: skip


def _key_parts(steps: list[Step], keys: tuple[Segment, ...]) -> Parts:
    tokens, ranges = sum(stop - start for start, stop in keys), []
    for step in steps:
        if step.attends_own_keys_in_one_call:
            ranges.append((step.calls[0].keys.start, step.calls[0].keys.stop))
        elif step.own and step.calls:
            ranges.append((0, tokens))
        for _, segments in step.sends:
            ranges += [(rows.start, rows.stop) for rows in rows_of(keys, segments)]
    return parts_of(ranges, tokens)


def _own_keys_first(step: Step) -> list[Step]:
    """A step before with the calls that need not wait, if there are any."""
    if not step.own or not step.receives:
        return [step]
    own, rest = [], []
    pairs = list(zip(rows_of(step.buffer, step.own), blocks(step.own), strict=True))
    for call in step.calls:
        start, stop = call.keys.start, call.keys.stop
        found = [mine.start - x.start for x, mine in pairs if x.start <= start and stop <= x.stop]
        if found:
            own.append(call._replace(keys=slice(start + found[0], stop + found[0])))
        else:
            rest.append(call)
    if not own:
        return [step]
    return [Step((), (), step.own, tuple(own)), step._replace(calls=tuple(rest))]


def _sent(steps: list[Step], keys: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Of each segment of this process, the part that is sent out of no step's own buffer."""
    sending = [step for step in steps if not (step.own and step.receives)]
    wanted = [segment for step in sending for _, segments in step.sends for segment in segments]
    return _needed(keys, wanted)


def rows_of(held: tuple[Segment, ...], wanted: tuple[Segment, ...]) -> list[slice]:
    """Where wanted segments, each within one that is held, are in memory."""
    found = []
    for start, stop in wanted:
        at = 0
        for low, high in held:
            if low <= start and stop <= high:
                found.append(slice(at + start - low, at + stop - low))
            at += high - low
    return found


def _most_parts(calls: list[StepCall]) -> int:
    """The largest number of calls that share a row."""
    ends: list[tuple[int, int, int]] = []
    for call in calls:
        batch = call.batches.start or 0
        ends += [(batch, call.rows.start, 1), (batch, call.rows.stop, -1)]
    most = now = 0
    for _, _, change in sorted(ends):
        now += change
        most = max(most, now)
    return most


def _calls(
    problem: StepProblem, ranges: Ranges, buffer: tuple[Segment, ...], queries: tuple[Segment, ...]
) -> list[StepCall]:
    if problem.has_dropout and not problem.alibi:
        return calls_by_segment(ranges, buffer, blocks(queries))
    if not problem.alibi:
        keys = sum(stop - start for start, stop in buffer)
        return calls_for(within(ranges, buffer), keys, blocks(queries))
    if problem.mask.aligned_rows:
        return calls_with_alibi(problem.mask, queries, buffer, slice(None))
    return [
        call
        for b in range(problem.batch)
        for call in calls_with_alibi(problem.mask.row(b), queries, buffer, slice(b, b + 1))
    ]


def parts_of(ranges: list[tuple[int, int]], tokens: int) -> Parts:
    """How many of the ranges contain each token."""
    ends = sorted({0, tokens, *(end for pair in ranges for end in pair)})
    found: list[tuple[int, int, int]] = []
    for start, stop in zip(ends, ends[1:]):
        count = sum(low <= start and stop <= high for low, high in ranges)
        if found and found[-1][2] == count:
            start = found.pop()[0]
        found.append((start, stop, count))
    return tuple(found)


# Calls of the operator that attend given intervals of a buffer of keys.
#
# Intervals that plain causality or a window describes need no `key_ranges`: rows and keys that take
# no part are cut off, and positions are aligned at the bottom right of what remains.


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
