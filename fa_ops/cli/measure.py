"""Time, memory and attention calls of one step."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fa_ops
from fa_ops import planning


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(step: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def typical_seconds(step: Callable[[], object], device: str, budget: float = 4.0) -> float:
    """The median over as many runs as fit the budget: at least one, at most nine."""
    times = [seconds(step, device)]
    while len(times) < 9 and sum(times) + times[0] < budget:
        times.append(seconds(step, device))
    return statistics.median(times)


def peak_memory(step: Callable[[], object], device: str) -> int | None:
    """The most bytes that a step holds above what was held before it; None where nothing tells.

    On a GPU: what torch's allocator handed out. On a CPU: the process's resident memory, after the
    allocator has given back what is free.
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
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
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
    """How many attention calls of fa_ops a step makes: by its function, or as the operator.

    Compiled code calls the operator; the function may reach a backend without it.
    """
    calls, within = 0, False
    attention, prepared_for = fa_ops.attention, planning.prepared_for

    def function(*args, **options):
        nonlocal calls, within
        calls, within = calls + 1, True
        try:
            return attention(*args, **options)
        finally:
            within = False

    def operator(*args, **options):
        nonlocal calls
        calls += not within
        return prepared_for(*args, **options)

    fa_ops.attention, planning.prepared_for = function, operator
    try:
        step()
    finally:
        fa_ops.attention, planning.prepared_for = attention, prepared_for
    return calls


def kernels(step: Callable[[], object]) -> list[str]:
    """The names of the CUDA kernels that a step runs, in order, each once."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    names = (event.name for event in profile.events() if event.device_type == kind)
    return list(dict.fromkeys(name for name in names if not name.startswith("Mem")))
