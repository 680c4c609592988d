"""Who sends which keys to whom, in which step, and what each process computes with them.

Each process asks the owner of keys for those alone that its queries attend, and the owner sends
them directly. In step `t` process `r` attends keys of process `r - t`. Under the scheme
"all_gather" one step has the keys of all processes. All processes make all requests from the mask
of the whole sequence, so that nothing need be agreed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fa_ops.distributed import step_calls
from fa_ops.distributed.layout import Segment, SequenceLayout
from fa_ops.distributed.masks import Mask, Ranges, positions, visible, within
from fa_ops.distributed.partial_sums import Parts, parts_of
from fa_ops.distributed.step_calls import StepCall

RING, ALL_GATHER = "ring", "all_gather"

_LIMIT, _LIMIT_KEPT = 32, 2


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
        return step_calls.calls_by_segment(ranges, buffer, blocks(queries))
    if not problem.alibi:
        keys = sum(stop - start for start, stop in buffer)
        return step_calls.calls_for(within(ranges, buffer), keys, blocks(queries))
    if problem.mask.aligned_rows:
        return step_calls.calls_with_alibi(problem.mask, queries, buffer, slice(None))
    return [
        call
        for b in range(problem.batch)
        for call in step_calls.calls_with_alibi(
            problem.mask.row(b), queries, buffer, slice(b, b + 1)
        )
    ]
