"""Compare checkouts of fa_ops in one process, by its public functions:

    python -m tests.gpu.compare ../before . --preset lengths --only "D64 causal,S512"
    python -m tests.gpu.compare ../before . --groups host --processes 3

A checkout is a source tree, as created by `git worktree add`. For each call this prints
milliseconds (for `host`, microseconds of host time and the ratio to SDPA), the speed relative to
the first checkout, and the relative difference from its results, which is 0 if they are bitwise
equal. Geometric means of every group follow. With several processes, each starts with the checkouts
in another order, and medians are reported, as the placement of objects in memory changes host times
by a few per cent.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from fa_ops.bench.command import in_existing_folder, one_of, words
from fa_ops.bench.problems import PRESETS
from fa_ops.bench.timing import Run, device_times, host_times
from tests.gpu import checkouts
from tests.gpu.compared_calls import DEVICE, GROUPS, Call, host_sdpa, rows
from tests.kernels import relative_error

ROOT = Path(__file__).parents[2]
ALL = (*GROUPS, "host")


class Compared(NamedTuple):
    """One row: milliseconds and relative differences of each checkout."""

    group: str
    name: str
    ms: list[float]
    differences: list[float]
    sdpa_ms: float | None = None  # in the group `host`

    @property
    def ratios(self) -> list[float]:
        return [self.ms[0] / x for x in self.ms]

    def __str__(self) -> str:
        unit, digits = (1e3, 2) if self.group == "host" else (1.0, 4)
        text = f"{self.group:22}{self.name:36}"
        for ms, ratio, difference in zip(self.ms, self.ratios, self.differences):
            text += f"  {ms * unit:9.{digits}f} {ratio:6.3f}x ({difference:.0e})"
            text += f" {ms / self.sdpa_ms:5.2f} SDPA" if self.sdpa_ms else ""
        return text


def compare(
    versions: Sequence[ModuleType],
    groups: Sequence[str],
    preset: str,
    only: str,
    backend: str | None,
    budget: float,
    bursts: int,
) -> Iterator[Compared | str]:
    """Yield every row of the groups, or the reason why a row is skipped."""
    sdpa = {f"{name} of torch": _run(call, None, None) for name, call in host_sdpa().items()}
    for group in groups:
        for name, make in rows(group, preset, only):
            try:
                calls = [_make_call(make, fa, backend) for fa in versions]
                results = [_results(call, fa, backend) for call, fa in zip(calls, versions)]
            except NotImplementedError as error:
                yield f"{group:22}{name:36}  skipped: {error}"
                continue
            runs = {
                fa.__name__: _run(call, fa, backend)
                for call, fa in zip(calls, versions)
            }  # fmt: skip
            if group == "host":
                peer = [n for n in sdpa if ("backward" in n) == ("backward" in name)][0]
                times = host_times(runs | {peer: sdpa[peer]}, DEVICE, bursts)
            else:
                peer, times = None, device_times(runs, DEVICE, budget)
            ms = [times[fa.__name__].ms for fa in versions]
            differences = [_difference(tensors, results[0]) for tensors in results]
            yield Compared(group, name, ms, differences, times[peer].ms if peer else None)


def _make_call(make, fa: ModuleType, backend: str | None) -> Call:
    with _context(True, fa, backend):
        return make(fa)


def _run(call: Call, fa: ModuleType | None, backend: str | None) -> Run:
    return Run(call.run, call.prepare, lambda: _context(call.records, fa, backend))


@contextlib.contextmanager
def _context(records: bool, fa: ModuleType | None, backend: str | None) -> Iterator[None]:
    chosen = contextlib.nullcontext() if backend is None or fa is None else fa.use_backend(backend)
    with torch.set_grad_enabled(records), chosen:
        yield


def _results(call: Call, fa: ModuleType, backend: str | None) -> list[Tensor]:
    with _context(call.records, fa, backend):
        result = call.run(call.prepare())
    return [result] if isinstance(result, Tensor) else list(result)


def _difference(results: Sequence[Tensor], first: Sequence[Tensor]) -> float:
    """The largest relative difference of a tensor."""
    return max(relative_error(a, b) for a, b in zip(results, first))


def in_processes(trees: Sequence[Path], count: int, options: Sequence[str]) -> list[Compared]:
    """Medians over several processes, each of which starts with another checkout."""
    rows_by_process = []
    for n in range(count):
        shift = n % len(trees)
        rotated = [*trees[shift:], *trees[:shift]]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.json")
            command = [sys.executable, "-m", "tests.gpu.compare", *map(str, rotated), *options]
            subprocess.run([*command, "--json", str(file)], cwd=ROOT, check=True)
            rows = [Compared(*row) for row in json.loads(file.read_text())]
        back = len(trees) - shift
        rows_by_process.append(
            [row._replace(ms=[*row.ms[back:], *row.ms[:back]]) for row in rows]
        )  # fmt: skip
    return [_median(same_row) for same_row in zip(*rows_by_process)]


def _median(rows: Sequence[Compared]) -> Compared:
    ms = [statistics.median(column) for column in zip(*(row.ms for row in rows))]
    sdpa = [row.sdpa_ms for row in rows if row.sdpa_ms]
    return rows[0]._replace(ms=ms, sdpa_ms=statistics.median(sdpa) if sdpa else None)


def means(compared: Sequence[Compared], trees: Sequence[Path]) -> Iterator[str]:
    """Yield the geometric mean of the ratios of every group, for all checkouts but the first."""
    for group in dict.fromkeys(row.group for row in compared):
        columns = zip(*(row.ratios for row in compared if row.group == group))
        for tree, column in list(zip(trees, columns))[1:]:
            mean = statistics.geometric_mean(column)
            yield f"{group}: {tree} is {mean:.3f}x as fast, geometric mean over {len(column)} rows"


def main(
    trees: Annotated[list[Path], typer.Argument(help="checkouts; the first is the baseline")],
    groups: Annotated[str, typer.Option(help="comma-separated")] = ",".join(ALL),
    preset: Annotated[str, typer.Option(help=", ".join(PRESETS))] = (
        "lengths" if DEVICE == "cuda" else "tiny"
    ),
    only: Annotated[
        str, typer.Option(help="problems that contain all words of one of these, comma-separated")
    ] = "",
    backend: Annotated[str | None, typer.Option(help="default: selected automatically")] = None,
    budget: Annotated[
        float, typer.Option(min=0.1, help="milliseconds to time each call for")
    ] = 60.0,
    bursts: Annotated[int, typer.Option(min=10, help="samples of each host time")] = 300,
    processes: Annotated[int, typer.Option(min=1, help="report medians over processes")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", callback=in_existing_folder)] = None,
) -> None:
    """Time checkouts alternately by their public functions, and compare their results."""
    chosen = one_of("--groups", words(groups), ALL)
    one_of("--preset", [preset], PRESETS)
    if not any(True for group in chosen for _ in rows(group, preset, only)):
        raise typer.BadParameter(f"--only must name problems of {preset}, got {only!r}")
    trees = [tree.resolve() for tree in trees]
    os.environ.setdefault("FA_OPS_CACHE_DIR", str(checkouts.CACHE))
    if processes > 1:
        options = ["--groups", ",".join(chosen), "--preset", preset, "--only", only]
        options += ["--budget", str(budget), "--bursts", str(bursts)]
        options += ["--backend", backend] if backend else []
        compared = in_processes(trees, processes, options)
        print(f"medians over {processes} processes", *compared, sep="\n")
    else:
        compared = []
        with tempfile.TemporaryDirectory() as folder:
            versions = _load(trees, Path(folder), backend)
            for row in compare(versions, chosen, preset, only, backend, budget, bursts):
                print(row, flush=True)
                compared += [row] if isinstance(row, Compared) else []
    for line in means(compared, trees):
        print(line)
    if json_file is not None:
        json_file.write_text(json.dumps(compared))


def _load(trees: Sequence[Path], folder: Path, backend: str | None) -> list[ModuleType]:
    try:
        versions = [checkouts.load(tree, folder) for tree in trees]
        for fa in versions if backend else ():
            fa.use_backend(backend)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return versions


if __name__ == "__main__":
    typer.run(main)
