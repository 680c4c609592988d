"""The choice of a scheme by its cost, and layouts that give all processes equal work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.call.python_types import Window, need_bool, need_int, sides
from fa_ops.distributed import schedule
from fa_ops.distributed.layout import Members, SequenceLayout, merged, whole_group
from fa_ops.distributed.schedule import (
    Mask,
    Ranges,
    StepProblem,
    check_masks,
    on_host,
    visible,
    within,
)
from fa_ops.distributed.ulysses import split_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# The choice of a scheme, from shapes, numbers of processes and the rate of the link.
#
# Times are estimated for the forward pass, from the pairs of queries and keys that each process
# attends in each step and from the keys that it receives. All processes estimate the times of all
# processes, so that all choose the same.


class Rates(NamedTuple):
    """What a device computes and moves per second, and what starting an exchange costs."""

    flops: float
    memory: float  # bytes
    link: float  # bytes that a process sends, and at the same time receives
    latency: float = 2e-5  # seconds for each exchange


# An H200 in 16 bits, with NVLink; one core of a CPU, with gloo.
_RATES = {"cuda": Rates(7e14, 3e12, 2.8e11, 5e-5), "cpu": Rates(4e10, 5e9, 1e9, 2e-4)}
_measured: dict[tuple, float] = {}


class SchemeChoice(NamedTuple):
    """The scheme of a call, and why.

    Attributes:
        scheme: the scheme that is used.
        seconds: the estimated time of each scheme's forward pass.
        reasons: why the other schemes are not used.
        rates: what the estimates rely on.
        steps: for each step of this process, what it attends; empty for all-to-all.
        transport: how keys travel between processes; empty for all-to-all, which the group's
            backend does.
    """

    scheme: str
    seconds: dict[str, float]
    reasons: dict[str, str]
    rates: Rates
    steps: tuple[str, ...] = ()
    transport: str = ""

    def __str__(self) -> str:
        lines = [f"scheme: {self.scheme}"]
        for name in ("ring", "ulysses", "all_gather"):
            estimate = self.seconds.get(name)
            cost = "" if estimate is None else f"{estimate * 1e3:.3f} ms estimated"
            lines.append(f"  {name}: {', '.join(filter(None, (cost, self.reasons.get(name))))}")
        lines.append(f"  link: {self.rates.link / 1e9:.1f} GB/s")
        if self.transport:
            lines.append(f"  transport: {self.transport}")
        return "\n".join([*lines, *(f"  {step}" for step in self.steps)])


def rates_for(members: Members, device: torch.device) -> Rates:
    """The rates of a device, with the link's as measured, if it was."""
    rates = _RATES.get(device.type, _RATES["cpu"])
    link = _measured.get(_key(members))
    return rates if link is None else rates._replace(link=link)


def _key(members: Members) -> tuple:
    return tuple(members.global_rank(rank) for rank in range(members.size))


def measure_link_rate(members: Members, device: torch.device, megabytes: int = 64) -> float:
    """Measure and keep the bytes per second that every process can pass to the next one.

    All processes must call it, and all get the rate of the slowest.
    """
    x = torch.zeros(megabytes * 2**20, dtype=torch.uint8, device=device)
    y, best = torch.empty_like(x), float("inf")
    to, of = (members.global_rank((members.rank + d) % members.size) for d in (1, -1))
    for _ in range(4 if members.size > 1 else 0):
        _synchronise(device)
        begin = time.perf_counter()
        pair = (
            dist.P2POp(dist.isend, x, to, members.group),
            dist.P2POp(dist.irecv, y, of, members.group),
        )
        for work in dist.batch_isend_irecv(list(pair)):
            work.wait()
        _synchronise(device)
        best = min(best, time.perf_counter() - begin)
    slowest = torch.tensor([best], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, members.group)
    rate = x.numel() / float(slowest) if members.size > 1 else float("inf")
    _measured[_key(members)] = rate
    return rate


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose(
    problem: StepProblem, q: Tensor, k: Tensor, v: Tensor, members: Members,
    without_ulysses: str | None = None,
) -> SchemeChoice:  # fmt: skip
    """The fastest scheme by estimate. `without_ulysses`: why all-to-all is not considered."""
    rates = rates_for(members, q.device)
    sizes = Sizes.of(q, k, v)
    seconds, reasons = {}, {}
    work = _work(problem)
    for name in (schedule.RING, schedule.ALL_GATHER):
        seconds[name] = _in_steps(name, work, sizes, rates)
    error = without_ulysses or split_error(q.shape[1], members.size)
    if error is not None:
        reasons["ulysses"] = error
    else:
        pairs = sum(step.pairs for steps in work for step in steps)
        seconds["ulysses"] = _all_to_all(pairs, sizes, members.size, rates)
    scheme = min(seconds, key=seconds.get)
    reasons |= {name: f"not faster than {scheme}" for name in seconds if name != scheme}
    return SchemeChoice(scheme, seconds, reasons, rates)


class Sizes(NamedTuple):
    """What a query, a key and a pair of both cost, over the batch and heads."""

    query_bytes: int  # of a token's queries
    key_bytes: int  # of a token's keys and values
    out_bytes: int
    pair_flops: int
    out_elements: int
    tokens: int  # of this process

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        """The sizes of a call."""
        B, Hq, S, D = q.shape
        Hkv, Dv, itemsize = k.shape[1], v.shape[3], q.element_size()
        return cls(
            B * Hq * D * itemsize, B * Hkv * (D + Dv) * itemsize, B * Hq * Dv * itemsize,
            2 * B * Hq * (D + Dv), B * Hq * Dv, S,
        )  # fmt: skip


class StepWork(NamedTuple):
    """What a process does in a step."""

    pairs: float  # of queries and keys
    queries: float  # that attend one of the keys
    received: int  # keys


def _work(problem: StepProblem) -> list[list[StepWork]]:
    """What each process does in each step."""
    size = problem.queries.size
    attended, needs = schedule.attended_by_all(problem)
    found = []
    for r in range(size):
        steps, (every, stride) = [], _sampled(attended[r], max(1, problem.queries.local // 2048))
        for s in ((r - t) % size for t in range(size)):
            ranges = within(every, needs[r][s])
            received = 0 if s == r else sum(stop - start for start, stop in needs[r][s])
            steps.append(StepWork(ranges.pairs() * stride, ranges.queries() * stride, received))
        found.append(steps)
    return found


def _sampled(ranges: Ranges, stride: int) -> tuple[Ranges, int]:
    """Every `stride`-th row, and the factor by which their pairs count."""
    return ranges.rows(slice(stride // 2, None, stride)), stride


def _in_steps(name: str, work: list[list[StepWork]], sizes: Sizes, rates: Rates) -> float:
    slowest = 0.0
    for steps in work:
        compute = [step.pairs * sizes.pair_flops / rates.flops for step in steps]
        transfer = [
            n * sizes.key_bytes / rates.link + rates.latency if n else 0.0
            for n in (step.received for step in steps)
        ]
        if name == schedule.ALL_GATHER:
            own = sizes.tokens if any(transfer) else 0  # which are copied next to those that arrive
            copied = 2 * own * sizes.key_bytes / rates.memory
            slowest = max(slowest, sum(compute) + sum(transfer) + copied)
            continue
        # a step's keys arrive while the step before is computed
        total = sum(map(max, compute, [*transfer[1:], 0.0]))
        merged = max(0.0, sum(step.queries for step in steps) - sizes.tokens)
        # a merge reads the part and reads and writes the sum, in float32 if there are several
        parts = sum(step.queries > 0 for step in steps)
        bytes_of_sum = 2 * (sizes.out_bytes if parts < 3 else 4 * sizes.out_elements)
        total += merged * (sizes.out_bytes + bytes_of_sum) / rates.memory
        slowest = max(slowest, total)
    return slowest


def _all_to_all(pairs: float, sizes: Sizes, size: int, rates: Rates) -> float:
    tokens = sizes.tokens * (size - 1) / size  # of the heads that go to other processes
    moved = tokens * (sizes.query_bytes + sizes.key_bytes + sizes.out_bytes)
    copies = 2 * sizes.tokens * (sizes.query_bytes + sizes.key_bytes + sizes.out_bytes)
    latency = 2 * rates.latency if size > 1 else 0.0
    compute = pairs / size * sizes.pair_flops / rates.flops
    return compute + moved / rates.link + copies / rates.memory + latency


# Layouts that give all processes equal work under any mask.


def balanced_layout(
    tokens: int,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunks: int | None = None,
) -> SequenceLayout:
    """Distribute a sequence so that all processes attend about equally many keys.

    The sequence is split into chunks of equal length, or into its documents. In order of the pairs
    of queries and keys that they have, the largest first, each goes to the process with the fewest
    pairs so far, until a process has its share of tokens; documents may be split then. Whole
    documents need no keys of other processes, chunks balance better: the layout with the lower
    estimate of both costs is returned. All processes get equally many tokens, and compute the same
    layout, if they pass the same masks.

    Args:
        tokens: the length of the whole sequence.
        mesh_or_group: as in :func:`context_parallel_attention`.
        is_causal: as in the call, and so are the following masks, of the whole sequence.
        window: ``(left, right)``.
        kv_lens: int32 ``(B,)``, or a length per document with `cu_seqlens`.
        key_ranges: int32 ``(B or 1, Hq or 1, tokens or 1, 2)``.
        cu_seqlens: int32 ``(documents + 1,)``.
        chunks: chunks of each process, of which the layout is made then; ``None``: 8, or as many
            below as divide the tokens. More chunks balance better, and make more and smaller steps.

    Returns:
        A :class:`SequenceLayout`, to be passed to :func:`shard` and to
        :func:`context_parallel_attention`.

    Raises:
        ValueError, TypeError: tokens that the processes, or their chunks, do not divide; masks
            that are not such tensors.
    """
    _, _, size = whole_group(mesh_or_group)
    _check(tokens, is_causal, chunks)
    check_masks(tokens, kv_lens, key_ranges, cu_seqlens)
    is_free = chunks is None
    if chunks is None:
        chunks = next((n for n in (8, 6, 5, 4, 3, 2) if tokens % (n * size) == 0), 1)
    if chunks < 1 or tokens % (chunks * size):
        raise ValueError(
            f"tokens must be a multiple of {max(1, chunks) * size}, {chunks} chunks for each of "
            f"{size} processes, got {tokens}: pad the sequence, or pass fewer chunks"
        )
    left, right = sides(window)
    ranges = on_host(key_ranges)
    mask = Mask(
        tokens, tokens, is_causal, left, right, on_host(kv_lens),
        None if ranges is None else ranges.clamp(0, tokens), on_host(cu_seqlens),
    )  # fmt: skip
    attended = visible(mask, torch.arange(mask.queries, device="cpu"))
    pairs = (attended.hi - attended.lo).double().mean((0, 1))
    before = torch.cat([pairs.new_zeros(1), pairs.cumsum(0)])  # pairs of the tokens before each
    found = [_of_chunks(before, size, chunks)]
    if is_free and size > 1 and mask.cu_seqlens is not None and mask.queries:
        ends, local = mask.cu_seqlens.tolist(), mask.queries // size
        found += [
            _of_documents(before, ends, size, most)
            for most in (local, max(1, local // 2), max(1, local // 4))
        ]
    costs = [_cost(mask, layout, attended, before) for layout in found] if found[1:] else [0.0]
    return found[costs.index(min(costs))]


def _check(tokens: int, is_causal: bool, chunks: int | None) -> None:
    if need_int("tokens", tokens) < 0:
        raise ValueError(f"tokens must be 0 or more, got {tokens}")
    need_bool("is_causal", is_causal)
    if chunks is not None:
        need_int("chunks", chunks)


# Pairs that are attended in the time in which a token's keys and values are received: 32 query and
# 8 key heads of 128 features on an H200, with NVLink at 280 GB/s.
_PAIRS_PER_KEY = 500


def _cost(mask: Mask, layout: SequenceLayout, attended: Ranges, before: Tensor) -> float:
    """The time of the slowest process, in pairs."""

    def of_process(rank: int) -> Ranges:
        held = layout.segments[rank]
        return Ranges(*(torch.cat([x[..., a:b] for a, b in held], -1) for x in attended))

    needs = schedule.requests(StepProblem(mask, layout, layout, False, 1), of_process)
    slowest = 0.0
    for rank, held in enumerate(layout.segments):
        segments = [part for other, part in enumerate(needs[rank]) if other != rank]
        received = sum(stop - start for part in segments for start, stop in part)
        work = sum(float(before[stop] - before[start]) for start, stop in held)
        slowest = max(slowest, work + _PAIRS_PER_KEY * received)
    return slowest


def _of_chunks(before: Tensor, size: int, chunks: int) -> SequenceLayout:
    tokens = len(before) - 1
    length = tokens // (chunks * size)
    work = before[:: max(1, length)].diff().tolist() if length else [0.0] * chunks * size
    loads, held = [0.0] * size, [[] for _ in range(size)]
    for chunk in sorted(range(chunks * size), key=lambda c: (-work[c], c)):
        free = [r for r in range(size) if len(held[r]) < chunks]
        rank = min(free, key=lambda r: (loads[r], r))
        loads[rank] += work[chunk]
        held[rank].append((chunk * length, (chunk + 1) * length))
    return SequenceLayout(tokens, tuple(merged(sorted(part)) for part in held))


def _of_documents(before: Tensor, ends: list[int], size: int, most: int) -> SequenceLayout:
    """Documents in parts of at most `most` tokens, split further where no process has room."""
    tokens = len(before) - 1
    boundaries = {0, *ends, tokens}
    for start, stop in zip(ends, ends[1:]):
        boundaries.update(range(start, stop, most))
    boundaries = sorted(boundaries)
    pairs = before.tolist()
    waiting = sorted(
        zip(boundaries, boundaries[1:]), key=lambda part: (pairs[part[0]] - pairs[part[1]], part)
    )
    loads, room, held = [0.0] * size, [tokens // size] * size, [[] for _ in range(size)]
    for start, stop in waiting:
        while start < stop:
            free = [r for r in range(size) if room[r] >= stop - start]
            free = free or [r for r in range(size) if room[r]]
            rank = min(free, key=lambda r: (loads[r], r))
            at = max(start, stop - room[rank])
            held[rank].append((at, stop))
            loads[rank] += pairs[stop] - pairs[at]
            room[rank] -= stop - at
            stop = at
    return SequenceLayout(tokens, tuple(merged(sorted(part)) for part in held))
