"""Timing: medians over rounds that alternate between all runs, so that heat affects all alike.

Also the peak memory, the calls of attention and the kernels of one step of a program.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import fa_ops
from fa_ops import tracing
from fa_ops.ops.inductor import CallSite
from fa_ops.plans import planning

ROUNDS = 5
_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU so far
_FLUSHES = 8  # they take half a millisecond of GPU time, during which the host launches the run


@dataclasses.dataclass(frozen=True)
class Run:
    """A measurement of `timed(prepare())`, of which only `timed` is timed, within `context`."""

    timed: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext


@dataclasses.dataclass(frozen=True)
class Time:
    """The median of samples in milliseconds, and the 20th and 80th percentiles."""

    ms: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: list[float]) -> Time:
        """Summarise the samples."""
        ordered = sorted(samples)
        low, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.2, 0.8))
        return Time(statistics.median(ordered), low, high, len(ordered))


def device_times(runs: dict[str, Run], device: str, budget_ms: float) -> dict[str, Time]:
    """Device time of each run, measured for about `budget_ms` each."""
    sample = _cuda_samples if device == "cuda" else _cpu_samples
    counts = {}
    for name, run in runs.items():  # warm up, and estimate how many samples fit the budget
        estimate = sample(run, 3)[-1]
        counts[name] = min(max(round(budget_ms / max(estimate, 1e-4) / ROUNDS), 2), 100)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            samples[name] += sample(run, counts[name])
    return {name: Time.of(values) for name, values in samples.items()}


def _cuda_samples(run: Run, count: int) -> list[float]:
    """GPU times by events with a cold L2; flushing L2 also keeps the GPU busy during launches."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    pairs = []
    with run.context():
        for _ in range(count):
            state = run.prepare()
            for _ in range(_FLUSHES):
                flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run.timed(state)
            end.record()
            pairs.append((start, end))
            del state
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _cpu_samples(run: Run, count: int) -> list[float]:
    samples = []
    with run.context():
        for _ in range(count):
            state = run.prepare()
            start = time.perf_counter()
            run.timed(state)
            samples.append((time.perf_counter() - start) * 1e3)
    return samples


def host_times(
    runs: dict[str, Run], device: str, bursts: int = 300, calls: int = 10
) -> dict[str, Time]:
    """Host milliseconds of one call, from bursts that are too short to fill the launch queue.

    The device is idle at the start of a burst. Bursts alternate between the runs.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with _no_collection():
        for burst in range(-bursts // 10, bursts):  # the first tenth warms up
            for name, run in runs.items():
                with run.context():
                    elapsed = _burst(run.timed, calls, device)
                if burst >= 0:
                    samples[name].append(elapsed)
    return {name: Time.of(values) for name, values in samples.items()}


def _burst(timed: Callable[[Any], Any], calls: int, device: str) -> float:
    timed(None)  # warm up: the first call in a new context may be slower
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        timed(None)
    elapsed = (time.perf_counter() - start) * 1e3 / calls
    if device == "cuda":
        torch.cuda.synchronize()
    return elapsed


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# One step of a program: its time, memory, attention calls and kernels.


def seconds(step: Callable[[], object], device: str) -> float:
    """Wall time of one step, with the device synchronised before and after."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def typical_seconds(step: Callable[[], object], device: str, budget: float = 4.0) -> float:
    """Median seconds over as many steps as fit the budget in seconds, from one to nine."""
    times = [seconds(step, device)]
    while len(times) < 9 and sum(times) + times[0] < budget:
        times.append(seconds(step, device))
    return statistics.median(times)


def peak_memory(step: Callable[[], object], device: str) -> int | None:
    """Peak bytes during a step above those held before it; None if the system cannot report it.

    On a GPU this counts torch's allocations. On a CPU it is the growth of the process's resident
    memory, after free memory has been returned to the system.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
    except OSError:
        step()
        return None
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def attention_calls(step: Callable[[], object]) -> int:
    """The number of attention calls of a step, by the public function, the operator or both.

    The function, and the call sites of the code that Inductor generates, may run a plan without the
    operator.
    """
    calls, within = 0, False
    attention, run, at_site = fa_ops.attention, planning.run, CallSite.__call__

    def counted(function):
        def outer(*args, **options):
            nonlocal calls, within
            if within or tracing.is_compiling():  # a call that is traced runs later
                return function(*args, **options)
            calls, within = calls + 1, True
            try:
                return function(*args, **options)
            finally:
                within = False

        return outer

    fa_ops.attention, planning.run = counted(attention), counted(run)
    CallSite.__call__ = counted(at_site)
    try:
        step()
    finally:
        fa_ops.attention, planning.run, CallSite.__call__ = attention, run, at_site
    return calls


def kernels(step: Callable[[], object]) -> list[str]:
    """The names of the CUDA kernels that a step runs, in order, without duplicates."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    names = (event.name for event in profile.events() if event.device_type == kind)
    return list(dict.fromkeys(name for name in names if not name.startswith("Mem")))
