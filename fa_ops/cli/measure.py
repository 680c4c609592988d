"""Measure one step of a program: time, memory, attention calls and kernels."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fa_ops
from fa_ops.plans import planning


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
    """The number of attention calls of a step, by the public function or by the operator.

    Compiled code calls the operator; the function may call a backend without the operator.
    """
    calls, within = 0, False
    attention, run = fa_ops.attention, planning.run

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
        return run(*args, **options)

    fa_ops.attention, planning.run = function, operator
    try:
        step()
    finally:
        fa_ops.attention, planning.run = attention, run
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
