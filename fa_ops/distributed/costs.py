"""The choice of a scheme, from shapes, numbers of processes and the rate of the link.

Times are estimated for the forward pass, from the pairs of queries and keys that each process
attends in each step and from the keys that it receives. All processes estimate the times of all
processes, so that all choose the same.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.distributed import plans
from fa_ops.distributed.layout import Members
from fa_ops.distributed.masks import Ranges, within
from fa_ops.distributed.plans import StepProblem
from fa_ops.distributed.ulysses import split_error


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
    for name in (plans.RING, plans.ALL_GATHER):
        seconds[name] = _stepwise(name, work, sizes, rates)
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
    attended, needs = plans.attended_by_all(problem)
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


def _stepwise(name: str, work: list[list[StepWork]], sizes: Sizes, rates: Rates) -> float:
    slowest = 0.0
    for steps in work:
        compute = [step.pairs * sizes.pair_flops / rates.flops for step in steps]
        transfer = [
            n * sizes.key_bytes / rates.link + rates.latency if n else 0.0
            for n in (step.received for step in steps)
        ]
        if name == plans.ALL_GATHER:
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
