"""Output of a benchmark: tables, ratios, JSON files and plots."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fa_ops
from fa_ops.bench.problems import Problem
from fa_ops.bench.sweep import Result
from fa_ops.bench.timing import Time


def environment(device: str) -> dict[str, str]:
    """The command, the date, the device and the versions, which are reported with every result."""
    spec = sys.modules["__main__"].__spec__  # None unless started by `python -m`
    module = spec.name.removesuffix(".__main__") if spec else "fa_ops"
    facts = {
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "fa_ops": f"{fa_ops.__version__} {_commit()}".strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        facts |= {"cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
        import triton

        facts["triton"] = triton.__version__
    else:
        facts["threads"] = str(torch.get_num_threads())
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""  # installed from a wheel


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
    for reason, problems in refusals(rows).items():
        where = "everywhere" if len(problems) == len(rows) else ", ".join(problems)
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


def write_json(path: Path, device: str, family: str, records: list[dict], **facts: object) -> None:
    """Write the records with the environment that they were measured in, and further facts."""
    content = {"family": family, "environment": environment(device) | facts, "records": records}
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(path: Path, title: str, rows: list[tuple[Problem, list[Result]]], backward: bool) -> None:
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
