"""`python -m fa_ops bench forward`, `backward`, `memory`: every implementation on every problem."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.backends import reference
from fa_ops.bench import command, peers, problems
from fa_ops.bench.command import Device, Json, Only
from fa_ops.bench.peers import Implementation, failure
from fa_ops.bench.problems import Problem
from fa_ops.bench.timing import Run, Time, device_times, peak_memory
from fa_ops.call.call import attention_call
from fa_ops.testing import assert_within_budget, naive

_GRIDS = problems.PRESETS | problems.BIASED
_DEFAULTS = {"cuda": "standard", "cpu": "cpu"}
Preset = Annotated[
    Literal[tuple(_GRIDS)] | None,
    typer.Option(help="the grid of problems; by default standard, on a CPU cpu"),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="plot the grid into this file (.png, .svg, .pdf)", callback=command.in_existing_folder
    ),
]
Budget = Annotated[float, typer.Option(min=0.1, help="milliseconds to time each cell for")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads")]


def _command(name: str) -> Callable:
    def sweep_command(
        preset: Preset = None,
        only: Only = None,
        device: Device = "auto",
        json: Json = None,
        plot: Plot = None,
        budget: Budget = 200.0,
        threads: Threads = None,
    ) -> None:
        device = command.device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        grid = _GRIDS[preset or _DEFAULTS[device]]()
        chosen = peers.choose(device, only)
        backward = name == "backward"
        with torch.set_grad_enabled(backward):
            steps = command.watched(grid, name, device, [i.name for i in chosen])
            rows = list(sweep(steps, chosen, device, backward, budget))
        facts = command.environment(device)
        title = f"{name}, {facts['device']}, torch {facts['torch']}"
        console = Console()
        if not console.is_terminal:
            console.width = 200  # so that tables written to a file are not truncated
        print_sweep(console, title, rows, backward)
        if json is not None:
            command.write_json(json, device, name, sweep_records(rows, backward))
        if plot is not None:
            draw(plot, title, rows, backward)

    return sweep_command


forward, backward = _command("forward"), _command("backward")
forward.__doc__ = "Compare forward passes with SDPA's kernels, FlexAttention and flash-attn."
backward.__doc__ = "Compare backward passes alone with the same peers."


@dataclasses.dataclass
class Result:
    """One implementation on one problem: a time, or the reason why there is none."""

    implementation: Implementation
    time: Time | None = None
    reason: str | None = None


def sweep(
    problems: Iterable[Problem],
    implementations: list[Implementation],
    device: str,
    backward: bool,
    budget_ms: float,
) -> Iterator[tuple[Problem, list[Result]]]:
    """Check and time all implementations on each problem."""
    for problem in problems:
        checker = Checker(problem, device, backward)
        results, runs = [], {}
        for implementation in implementations:
            run, reason = _prepare(implementation, problem, device, backward, checker)
            results.append(Result(implementation, reason=reason))
            if run is not None:
                runs[implementation.name] = run
        del checker
        times = device_times(runs, device, budget_ms)
        for result in results:
            result.time = times.get(result.implementation.name)
        yield problem, results


def _prepare(
    implementation: Implementation, problem: Problem, device: str, backward: bool, checker: Checker
) -> tuple[Run | None, str | None]:
    """The run, or the reason for an error: a missing package or feature, memory, wrong results."""
    if problem.biases and not implementation.takes_bias:
        return None, "measured without a bias only"
    try:
        leaves = problem.inputs(device, implementation.layout, requires_grad=backward)
        if problem.biases:
            leaves = (*leaves, problem.bias(device, requires_grad=backward))
        call = implementation.build(problem, device)
        with implementation.context():
            out = call(*leaves)
            results = [out]
            if backward:
                cotangent = grad_out(out)
                results += torch.autograd.grad(out, leaves, cotangent)
        wrong = checker.error(results)
    except Exception as error:
        return None, failure(error)
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    if wrong is not None:
        return None, f"WRONG: {wrong}"
    if not backward:
        return Run(lambda _: call(*leaves), context=implementation.context), None
    # Each backward has a forward pass of its own, as compiled peers free their saved tensors.
    run = Run(
        timed=lambda out: torch.autograd.grad(out, leaves, cotangent),
        prepare=lambda: call(*leaves),
        context=implementation.context,
    )
    return run, None


# Compare one kv head's slice of an implementation's results with the fp64 oracle.

NAMES = ("out", "dq", "dk", "dv")


class Checker:
    """The oracle and the error budget for the last kv head of the last sequence of a problem."""

    def __init__(self, problem: Problem, device: str, backward: bool) -> None:
        self.problem, self.backward = problem, backward
        self.expected = self._solve(reference.dense, torch.float64, device)
        self.baseline = self._solve(naive, problem.dtype, device)

    def _slice(self, x: Tensor, H: int) -> Tensor:
        first = H - (H // self.problem.Hkv)
        return x[-1:, first:]

    def _solve(self, function, dtype: torch.dtype, device: str) -> list[Tensor]:
        q, k, v = self.problem.inputs(device, "bhsd")
        heads = (self.problem.Hq, self.problem.Hkv, self.problem.Hkv)
        leaves = [
            self._slice(x, H).to(dtype).requires_grad_(self.backward)
            for x, H in zip((q, k, v), heads)
        ]
        bias = self.problem.bias(device)
        if bias is not None:
            bias = self._slice(bias, self.problem.Hq).to(dtype)
        call = attention_call(*leaves, attn_mask=bias, is_causal=self.problem.causal)
        out, _ = function(call)
        if not self.backward:
            return [out]
        return [out, *torch.autograd.grad(out, leaves, grad_out(out).to(dtype))]

    def error(self, results: list[Tensor]) -> str | None:
        """The error message for [out] or [out, dq, dk, dv, ...] of the whole problem, or None.

        The gradient of a bias is not checked, as it is a sum over sequences.
        """
        heads = (self.problem.Hq, self.problem.Hq, self.problem.Hkv, self.problem.Hkv)
        for name, x, H, expected, baseline in zip(
            NAMES, results, heads, self.expected, self.baseline
        ):
            try:
                assert_within_budget(name, self._slice(x, H), expected, baseline)
            except AssertionError as error:
                return str(error)
        return None


def grad_out(out: Tensor) -> Tensor:
    """A gradient in `out`'s memory layout, with the same values for every sequence and head."""
    generator = torch.Generator(out.device).manual_seed(1)
    one = torch.randn(out.shape[-2:], generator=generator, device=out.device)
    return torch.empty_like(out).copy_(one)


# Tables, ratios, records and plots of the results.


def ratios(results: list[Result]) -> dict[str, float]:
    """The speed of our fastest backend relative to the fastest peer and to FlexAttention."""
    timed = [(r.implementation, r.time.ms) for r in results if r.time is not None]
    ours = [ms for i, ms in timed if i.ours]
    peers = [ms for i, ms in timed if not i.ours]
    flex = [ms for i, ms in timed if i.name == "flex"]
    if not ours or not peers:
        return {}
    return {"best peer": min(peers) / min(ours)} | ({"flex": flex[0] / min(ours)} if flex else {})


def sweep_table(title: str, rows: list[tuple[Problem, list[Result]]], backward: bool) -> Table:
    """A line for each problem: milliseconds and TFLOP/s of each implementation, and ratios."""
    table = Table(title=title, caption="ms and TFLOP/s; the ratios compare our fastest backend")
    table.add_column("problem", no_wrap=True)
    shown = [r.implementation for r in rows[0][1] if _ever_timed(r.implementation.name, rows)]
    for implementation in shown:
        style = "bold" if implementation.ours else None
        table.add_column(escape(implementation.name), justify="right", style=style, no_wrap=True)
    for name in ("vs best peer", "vs flex"):
        table.add_column(name, justify="right", no_wrap=True)
    for problem, results in rows:
        cells = {r.implementation.name: _cell(problem, r, backward) for r in results}
        against = ratios(results)
        last = [f"{against[n]:.2f}x" if n in against else "-" for n in ("best peer", "flex")]
        table.add_row(str(problem), *(cells[i.name] for i in shown), *last)
    return table


def _ever_timed(name: str, rows: list[tuple[Problem, list[Result]]]) -> bool:
    return any(r.time is not None for _, rs in rows for r in rs if r.implementation.name == name)


def _cell(problem: Problem, result: Result, backward: bool) -> str:
    if result.time is None:
        return "-"
    speed = tflops(problem, result.time, backward)
    return f"{result.time.ms:.3f} {speed:5.{0 if speed >= 10 else 2}f}"


def tflops(problem: Problem, time: Time, backward: bool) -> float:
    """TFLOP/s of a problem that takes this time."""
    return problem.flops(backward) / time.ms / 1e9


def refusals(rows: list[tuple[Problem, list[Result]]]) -> dict[str, list[str]]:
    """The reasons why implementations were not timed, each with the problems concerned."""
    reasons: dict[str, list[str]] = {}
    for problem, results in rows:
        for r in results:
            if r.reason is not None:
                reasons.setdefault(f"{r.implementation.name}: {r.reason}", []).append(str(problem))
    return reasons


def print_sweep(
    console: Console, title: str, rows: list[tuple[Problem, list[Result]]], backward: bool
) -> None:
    """Print the table, the reasons for missing results, and a line for each kind of ratio."""
    console.print(sweep_table(title, rows, backward))
    for reason, names in refusals(rows).items():
        where = "everywhere" if len(names) == len(rows) else ", ".join(names)
        console.print(f"not timed: {escape(reason)} ({where})")
    for name in ("flex", "best peer"):
        values = [a[name] for _, results in rows if name in (a := ratios(results))]
        if values:
            mean = statistics.geometric_mean(values)
            console.print(
                f"against {name}: {min(values):.2f}x to {max(values):.2f}x, "
                f"geometric mean {mean:.2f}x over {len(values)} problems"
            )


def sweep_records(rows: list[tuple[Problem, list[Result]]], backward: bool) -> list[dict]:
    """The results for the JSON file: a record for each problem and implementation."""
    records = []
    for problem, results in rows:
        names = ("B", "Hq", "Hkv", "S", "Sk", "D", "causal", "biases")
        shape = {name: getattr(problem, name) for name in names}
        shape["dtype"] = str(problem.dtype).removeprefix("torch.")
        for r in results:
            record = shape | {"implementation": r.implementation.name}
            record["layout"] = r.implementation.layout
            if r.time is None:
                records.append(record | {"not_timed": r.reason})
                continue
            time = {"ms": r.time.ms, "ms_20": r.time.low, "ms_80": r.time.high}
            speed = {"tflops": round(tflops(problem, r.time, backward), 1)}
            records.append(record | time | speed | {"samples": r.time.samples})
    return records


def draw(path: Path, title: str, rows: list[tuple[Problem, list[Result]]], backward: bool) -> None:
    """Plot TFLOP/s over sequence length, one panel for each head dimension and mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [r.implementation.name for r in rows[0][1] if _ever_timed(r.implementation.name, rows)]
    dims = sorted({p.D for p, _ in rows})
    size = (4.2 * len(dims), 6.4)
    figure, axes = plt.subplots(2, len(dims), figsize=size, squeeze=False, layout="constrained")
    for column, D in enumerate(dims):
        for line, causal in enumerate((False, True)):
            panel = [(p, rs) for p, rs in rows if (p.D, p.causal) == (D, causal)]
            axis = axes[line][column]
            axis.set_title(f"D {D}, {'causal' if causal else 'full'}")
            _panel(axis, panel, names, backward)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = min(len(names), 6)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis, rows: list, names: list[str], backward: bool) -> None:
    width = 0.84 / len(names)
    for n, name in enumerate(names):
        heights = []
        for problem, results in rows:
            time = next(r.time for r in results if r.implementation.name == name)
            heights.append(0.0 if time is None else tflops(problem, time, backward))
        at = [x + (n - (len(names) - 1) / 2) * width for x in range(len(rows))]
        axis.bar(at, heights, width, label=name, color=f"C{n}")
    axis.set_xticks(range(len(rows)), [p.lengths for p, _ in rows])
    axis.set(xlabel="sequence length", ylabel="TFLOP/s")
    axis.spines[["top", "right"]].set_visible(False)


# `python -m fa_ops bench memory`: peak memory of attention by sequence length.
#
# Attention written by hand, SDPA and fa_ops compute the same causal attention, forward and
# backward. The peak is that of one step above the memory held before it: query, key, value and the
# gradient of the output are not counted, the output, its gradients and everything in between are.
# On a GPU it is read from torch's allocator, on a CPU from the resident set.

GPU_LENGTHS = "1024,2048,4096,8192,16384,32768,65536"
CPU_LENGTHS = "512,1024,2048,4096"


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, H, S, D) tensors as models write it, with a softmax in float32."""
    S, D = q.shape[-2:]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "eager": eager,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "fa_ops": lambda q, k, v: fa_ops.attention(q, k, v, is_causal=True),
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of one implementation on one problem in MiB, or the reason why there is none."""

    problem: Problem
    implementation: str
    mib: float | None = None
    reason: str | None = None


def measure_peak(problem: Problem, name: str, device: str) -> Peak:
    """Measure a forward and a backward pass, after one that compiles what is missing."""
    q, k, v = problem.inputs(device, "bhsd", requires_grad=True)
    grad_out = torch.ones_like(q)

    def step() -> None:
        torch.autograd.grad(CALLS[name](q, k, v), (q, k, v), grad_out)

    try:
        step()
        peak = peak_memory(step, device)
    except torch.OutOfMemoryError as error:
        return Peak(problem, name, reason=failure(error))
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    if peak is None:
        return Peak(problem, name, reason="the system reports no peak of the resident set")
    return Peak(problem, name, peak / 2**20)


def memory_table(title: str, peaks: list[Peak]) -> Table:
    """A row for each length: MiB of each implementation."""
    result = Table(title=title, caption="peak MiB of a forward and a backward pass")
    result.add_column("tokens", justify="right")
    for name in CALLS:
        result.add_column(name, justify="right")
    for S in dict.fromkeys(peak.problem.S for peak in peaks):
        row = {peak.implementation: peak.mib for peak in peaks if peak.problem.S == S}
        result.add_row(str(S), *("-" if row[n] is None else f"{row[n]:.1f}" for n in CALLS))
    return result


def memory_records(peaks: list[Peak]) -> Iterator[dict]:
    """The results for the JSON file."""
    for peak in peaks:
        shape = {name: getattr(peak.problem, name) for name in ("B", "Hq", "Hkv", "S", "D")}
        record = shape | {"causal": True, "dtype": str(peak.problem.dtype).removeprefix("torch.")}
        record["implementation"] = peak.implementation
        yield record | ({"not_measured": peak.reason} if peak.mib is None else {"mib": peak.mib})


def memory(
    device: command.Device = "auto",
    lengths: Annotated[
        str | None,
        typer.Option(help=f"default: {GPU_LENGTHS} on a GPU, {CPU_LENGTHS} on a CPU"),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="query and key heads")] = 16,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    json: command.Json = None,
) -> None:
    """Compare the peak memory of eager attention, SDPA and fa_ops by sequence length."""
    device = command.device(device)
    default = GPU_LENGTHS if device == "cuda" else CPU_LENGTHS
    chosen = command.integers("--lengths", default if lengths is None else lengths)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    problems = [Problem(1, heads, heads, length, head_dim, True, dtype) for length in chosen]
    steps = command.watched(problems, "memory", device, list(CALLS))
    peaks = [measure_peak(problem, name, device) for problem in steps for name in CALLS]
    facts, console = command.environment(device), Console()
    title = f"1 x {heads} heads of {head_dim}, causal, {facts['device']}, torch {facts['torch']}"
    console.print(memory_table(title, peaks))
    for peak in peaks:
        if peak.reason is not None:
            where = f"{peak.implementation}, {peak.problem.S} tokens"
            console.print(f"not measured: {where}: {peak.reason}", markup=False)
    if json is not None:
        command.write_json(json, device, "memory", list(memory_records(peaks)))
