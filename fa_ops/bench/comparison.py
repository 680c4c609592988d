"""Quantities of problems, each computed by several implementations and timed in alternating rounds.

For the benchmarks of functions of scores, of derivatives and of selected keys. The results of each
implementation are compared with those of the first one before it is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fa_ops.bench import command
from fa_ops.bench.peers import failure
from fa_ops.bench.timing import Run, Time, device_times, peak_memory

Build = Callable[[], Run]  # prepares what is timed, or raises

# The largest difference from the first implementation, relative, in the Frobenius norm.
_LIMITS = {torch.float32: 1e-3, torch.float64: 1e-9}
_LIMIT_16_BITS = 0.03


@dataclasses.dataclass(frozen=True)
class Quantity:
    """What is computed of a problem, such as its forward pass, and by which implementations.

    `make` creates the tensors; ours is the first implementation. Those named in `others` compute
    something else, such as attention of all keys, and are not compared. Our time is also shown
    relative to that of `baseline`, the problem and the name of another quantity. What is `on_host`
    is timed until the device has finished, with the time of the host.
    """

    problem: str
    name: str
    make: Callable[[], dict[str, Build]]
    baseline: tuple[str, str] | None = None
    others: tuple[str, ...] = ()
    flops: float = 0.0
    on_host: bool = False

    def __str__(self) -> str:
        return f"{self.problem}, {self.name}"


@dataclasses.dataclass(frozen=True)
class TimedQuantity:
    """A quantity by one implementation: its time, or the reason why there is none.

    `mib` is the peak memory of the call with what precedes it, `first` the seconds of the first
    call, and `difference` that of the results from the first implementation's.
    """

    quantity: Quantity
    implementation: str
    time: Time | None = None
    mib: float | None = None
    first: float | None = None
    difference: float | None = None
    reason: str | None = None


def measure(quantity: Quantity, device: str, budget_ms: float) -> list[TimedQuantity]:
    """Run and check each implementation, then time all in turn."""
    runs: dict[str, Run] = {}
    found: dict[str, TimedQuantity] = {}
    expected: list[Tensor] = []
    for name, build in quantity.make().items():
        try:
            run = build()
            results, first = _first(run, device)
            difference = None
            if name not in quantity.others:
                expected = expected or results
                difference = _checked(results, expected)
            peak = peak_memory(lambda run=run: _once(run), device)
            mib = None if peak is None else peak / 2**20
            runs[name] = run
            found[name] = TimedQuantity(quantity, name, None, mib, first, difference)
        except Exception as error:
            found[name] = TimedQuantity(quantity, name, reason=failure(error))
        finally:
            if device == "cuda":
                torch.cuda.empty_cache()
    if quantity.on_host:
        runs, timed_on = {name: _until_done(run, device) for name, run in runs.items()}, "cpu"
    else:
        timed_on = device
    for name, measured in device_times(runs, timed_on, budget_ms).items():
        found[name] = dataclasses.replace(found[name], time=measured)
    return list(found.values())


def _until_done(run: Run, device: str) -> Run:
    def timed(state: object) -> None:
        run.timed(state)
        if device == "cuda":
            torch.cuda.synchronize()

    return dataclasses.replace(run, timed=timed)


def _once(run: Run) -> object:
    with run.context():
        return run.timed(run.prepare())


def _first(run: Run, device: str) -> tuple[list[Tensor], float]:
    """The results of a first call, and its seconds."""
    start = time.perf_counter()
    results = _once(run)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    tensors = [results] if isinstance(results, Tensor) else results
    return [t.detach() for t in tensors], seconds


def _checked(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference; raises AssertionError where it is beyond the limit."""
    worst, limit = 0.0, max(_LIMITS.get(t.dtype, _LIMIT_16_BITS) for t in expected)
    for i, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        scale = wanted.float().norm().item()
        difference = (found.float() - wanted.float()).norm().item() / max(scale, 1e-30)
        if not difference <= limit:  # NaN too
            raise AssertionError(f"WRONG: result {i} differs by {difference:.2g}, of {limit:g}")
        worst = max(worst, difference)
    return worst


def forward_run(call: Callable[[], Tensor]) -> Run:
    """A forward pass without autograd."""
    return Run(lambda _: call(), context=torch.no_grad)


def backward_run(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad_out: Tensor) -> Run:
    """A backward pass alone, each after a forward pass of its own."""
    return Run(lambda out: torch.autograd.grad(out, leaves, grad_out), call)


def table(title: str, rows: list[TimedQuantity]) -> Table:
    """A line for each quantity: milliseconds and MiB of each implementation, and ratios."""
    names = list(dict.fromkeys(row.implementation for row in rows if row.time is not None))
    of = _grouped(rows)
    ours = {(q.problem, q.name): _ours(found) for q, found in of.items()}
    result = Table(
        title=title,
        caption="median ms; in brackets: relative to the first implementation, and peak MiB",
    )
    result.add_column("problem", no_wrap=True)
    result.add_column("", no_wrap=True)
    for name in names:
        result.add_column(escape(name), justify="right", no_wrap=True)
    has_base, has_flops = (any(getattr(q, n) for q in of) for n in ("baseline", "flops"))
    for name in ["against"] * has_base + ["TFLOP/s"] * has_flops:
        result.add_column(name, justify="right", no_wrap=True)
    for q, found in of.items():
        first, cells = _ours(found), [_cell(found.get(name), _ours(found)) for name in names]
        if has_base:
            base = None if q.baseline is None else ours.get(q.baseline)
            is_shown = first is not None and base is not None and q.baseline != (q.problem, q.name)
            cells.append(f"{first.ms / base.ms:.2f}x" if is_shown else "-")
        if has_flops:
            is_shown = first is not None and q.flops
            cells.append(f"{q.flops / first.ms / 1e9:.3g}" if is_shown else "-")
        result.add_row(escape(q.problem), q.name, *cells)
    return result


def _grouped(rows: list[TimedQuantity]) -> dict[Quantity, dict[str, TimedQuantity]]:
    of: dict[Quantity, dict[str, TimedQuantity]] = {}
    for row in rows:
        of.setdefault(row.quantity, {})[row.implementation] = row
    return of


def _ours(found: dict[str, TimedQuantity]) -> Time | None:
    """The time of the first implementation."""
    return next(iter(found.values())).time


def _cell(row: TimedQuantity | None, ours: Time | None) -> str:
    if row is None or row.time is None:
        return "-"
    notes = [] if ours is None or ours is row.time else [f"{row.time.ms / ours.ms:.2f}x"]
    notes += [] if row.mib is None else [f"{row.mib:.0f} MiB"]
    return f"{row.time.ms:.3f}" + (f" ({', '.join(notes)})" if notes else "")


def summaries(rows: list[TimedQuantity]) -> Iterator[str]:
    """A line for each implementation and quantity: the range of its times relative to ours."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for q, found in _grouped(rows).items():
        ours = _ours(found)
        for name, row in found.items():
            if ours is not None and row.time not in (None, ours):
                ratios.setdefault((name, q.name), []).append(row.time.ms / ours.ms)
    for (name, what), values in ratios.items():
        mean = statistics.geometric_mean(values)
        yield (
            f"{name}, {what}: {min(values):.2f}x to {max(values):.2f}x of our time, "
            f"geometric mean {mean:.2f}x over {len(values)}"
        )
    firsts: dict[str, list[float]] = {}
    for row in rows:
        if row.first is not None:
            firsts.setdefault(row.implementation, []).append(row.first)
    for name, seconds in firsts.items():
        yield f"{name}, first calls: {min(seconds):.2f} s to {max(seconds):.2f} s"


def records(rows: list[TimedQuantity]) -> Iterator[dict]:
    """The results for the JSON file."""
    for row in rows:
        record: dict = {"problem": row.quantity.problem, "quantity": row.quantity.name}
        record["implementation"] = row.implementation
        if row.time is None:
            yield record | {"not_timed": row.reason}
            continue
        time = {"ms": row.time.ms, "ms_20": row.time.low, "ms_80": row.time.high}
        record |= time | {"mib": row.mib, "first_s": row.first, "difference": row.difference}
        if row.quantity.flops and row.implementation not in row.quantity.others:
            record["tflops"] = row.quantity.flops / row.time.ms / 1e9
        yield record


def compare(
    family: str, quantities: list[Quantity], names: list[str], device: str, budget_ms: float,
    json: Path | None,
) -> None:  # fmt: skip
    """Measure all quantities, print the table, and what was not timed with the reason.

    Interrupted (Ctrl-C), it prints what was measured until then.
    """
    rows: list[TimedQuantity] = []
    with contextlib.suppress(KeyboardInterrupt):
        for quantity in command.watched(quantities, family, device, names, "quantities"):
            rows += measure(quantity, device, budget_ms)
    facts, console = command.environment(device), Console()
    if not console.is_terminal:
        console.width = 220
    console.print(table(f"{family}, {facts['device']}, torch {facts['torch']}", rows))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            reasons.setdefault(f"{row.implementation}: {row.reason}", []).append(str(row.quantity))
    for reason, where in reasons.items():
        console.print(f"not timed: {reason} ({'; '.join(where)})", markup=False)
    for line in summaries(rows):
        console.print(line, markup=False, highlight=False)
    if json is not None:
        command.write_json(json, device, family, list(records(rows)))
