"""`python -m fa_ops bench quantized`: attention with 8-bit products against 16-bit attention.

A whole call of `quantized_attention` starts from 16-bit tensors, so that quantisation counts. Calls
of e4m3 tensors, ours and those of FlashAttention 3 and FlashInfer, start from numbers and scales
that are there; all transpose the values. On a GPU a profile separates the time of the attention
kernel, the longest one of a call, from that of the others.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fa_ops
from fa_ops.bench import command, peers
from fa_ops.bench.peers import E4M3, failure, scaled_call, scaled_flash_attn_3
from fa_ops.bench.problems import PRESETS, Problem
from fa_ops.bench.timing import Run, Time, device_times

_PROFILED = 10  # calls
BASELINE = "bfloat16"
_DEFAULTS = {"cuda": "quantized", "cpu": "quantized-cpu"}  # the grid that a device is measured on
_PRESET = "the grid of problems; by default quantized, on a CPU quantized-cpu"

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class MeasuredCall:
    """One call on one problem: its time and that of its kernels in milliseconds, or a reason."""

    problem: Problem
    call: str
    time: Time | None = None
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    reason: str | None = None

    @property
    def attention_ms(self) -> float | None:
        """Milliseconds of the longest kernel; None without a profile."""
        return max(self.kernels.values(), default=None)


def _baseline(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    return lambda: fa_ops.attention(q, k, v, is_causal=problem.causal)


def _quantized(dtype: torch.dtype) -> Callable[..., Call]:
    def build(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: fa_ops.quantized_attention(q, k, v, is_causal=problem.causal, qk_dtype=dtype)

    return build


# Each builds what is timed, from the problem and tensors in (B, S, H, D) order.
CALLS: dict[str, Callable[..., Call]] = {
    BASELINE: _baseline,
    "int8, quantised by the call": _quantized(torch.int8),
    "e4m3, quantised by the call": _quantized(E4M3),
    "e4m3 tensors": lambda problem, *qkv: scaled_call(*qkv, problem.causal),
    "flash-attn 3, e4m3 tensors": lambda problem, *qkv: scaled_flash_attn_3(*qkv, problem.causal),
    "flashinfer, e4m3 tensors": lambda problem, *qkv: peers.flashinfer_scaled_call(
        *qkv, problem.causal
    ),
}


def measure(
    problem: Problem, names: list[str], device: str, budget_ms: float
) -> Iterator[MeasuredCall]:
    """Time the calls of these names, alternating between them, and profile them on a GPU."""
    q, k, v = problem.inputs(device, "bshd")
    runs, kernels, reasons = {}, {}, {}
    for name in names:
        try:
            call = CALLS[name](problem, q, k, v)
            call()
            kernels[name] = kernel_times(call) if device == "cuda" else {}
            runs[name] = Run(lambda _, call=call: call())
        except Exception as error:
            reasons[name] = failure(error)
    times = device_times(runs, device, budget_ms)
    for name in names:
        if name in times:
            yield MeasuredCall(problem, name, times[name], kernels[name])
        else:
            yield MeasuredCall(problem, name, reason=reasons[name])


def kernel_times(call: Call) -> dict[str, float]:
    """Mean milliseconds per call of each of its kernels on the GPU, by name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_PROFILED):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        if event.self_device_time_total > 0:
            times[event.key] += event.self_device_time_total / 1e3 / _PROFILED
    return dict(times)


def tflops(problem: Problem, ms: float) -> float:
    """TFLOP/s of a problem that takes this many milliseconds."""
    return problem.flops() / ms / 1e9


def table(title: str, rows: list[MeasuredCall]) -> Table:
    """A line for each problem and call."""
    result = Table(title=title, caption="ms; TFLOP/s of the attention kernel alone")
    result.add_column("problem", no_wrap=True)
    result.add_column("call", no_wrap=True)
    for name in ("whole call", "attention", "other kernels", "TFLOP/s", f"against {BASELINE}"):
        result.add_column(name, justify="right", no_wrap=True)
    baselines = {row.problem: row.time for row in rows if row.call == BASELINE}
    for row in rows:
        if row.time is None:
            continue
        cells, ms = ["-"] * 3, row.attention_ms
        if ms is not None:
            others = sum(row.kernels.values()) - ms
            cells = [f"{ms:.3f}", f"{others:.3f}", f"{tflops(row.problem, ms):.0f}"]
        baseline = baselines.get(row.problem)
        ratio = f"{baseline.ms / row.time.ms:.2f}x" if baseline else "-"
        result.add_row(str(row.problem), escape(row.call), f"{row.time.ms:.3f}", *cells, ratio)
    return result


def records(rows: list[MeasuredCall]) -> Iterator[dict]:
    """The results for the JSON file."""
    for row in rows:
        shape = {n: getattr(row.problem, n) for n in ("B", "Hq", "Hkv", "S", "D", "causal")}
        record = shape | {"call": row.call}
        if row.time is None:
            yield record | {"not_timed": row.reason}
            continue
        time = {"ms": row.time.ms, "ms_20": row.time.low, "ms_80": row.time.high}
        yield record | time | {"kernels_ms": row.kernels}


def main(
    device: command.Device = "auto",
    preset: Annotated[Literal[tuple(PRESETS)] | None, typer.Option(help=_PRESET)] = None,
    only: command.Only = None,
    budget: Annotated[float, typer.Option(min=0.1, help="milliseconds to time each call")] = 200.0,
    json: command.Json = None,
) -> None:
    """Compare attention with 8-bit products with 16-bit attention and with peers in fp8."""
    device = command.device(device)
    grid = PRESETS[preset or _DEFAULTS[device]]()
    names = command.matching(only, CALLS, "call")
    rows: list[MeasuredCall] = []
    with torch.no_grad():
        for problem in command.watched(grid, "quantized", device, names):
            rows += measure(problem, names, device, budget)
            if device == "cuda":
                torch.cuda.empty_cache()
    facts, console = command.environment(device), Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table(f"8-bit products, {facts['device']}, torch {facts['torch']}", rows))
    for row in rows:
        if row.reason is not None:
            console.print(f"not timed: {row.call}, {row.problem}: {row.reason}", markup=False)
    if json is not None:
        command.write_json(json, device, "quantized", list(records(rows)))
