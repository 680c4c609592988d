"""`python -m fa_ops fuzz`: compare random calls, forward and backward, with the fp64 oracle."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fa_ops import dispatch
from fa_ops.bench.report import environment, write_json
from fa_ops.cli import options
from fa_ops.cli.fuzz_cases import KINDS, FuzzRun, Outcome, Target
from fa_ops.cli.fuzz_workers import fuzz
from fa_ops.testing import draws

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_PRINTED = 20  # failures that are printed; the JSON file holds all of them
COLUMNS = ("specialisations", "cases", *draws.KINDS, "gradients", "failed")


def run(
    backend: Annotated[
        str | None, typer.Option(help="comma-separated; default: those available on the device")
    ] = None,
    device: options.Device = "auto",
    cases: Annotated[int, typer.Option(min=1, help="number of cases over all backends")] = 1000,
    each: Annotated[
        int, typer.Option(min=1, help="cases of each specialisation, which share compiled kernels")
    ] = 100,
    seed: Annotated[int, typer.Option(min=0, help="number of the first specialisation")] = 0,
    case: Annotated[
        int | None, typer.Option(min=0, help="run only this case of specialisation --seed")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="comma-separated: bfloat16, float16, float32, float64")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="comma-separated: dense, packed, cached, quantized")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="processes; 0: this one; default: one for each core")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="stop after this time")] = None,
    json: options.Json = None,
    arena: Annotated[
        bool, typer.Option("--arena", help="only edge cases, in memory with checked margins")
    ] = False,
) -> None:
    """Compare random calls, forward and backward, with the fp64 oracle; fail if one differs."""
    dtypes = options.words(dtype)
    kinds = tuple(options.one_of("--kind", options.words(kind), draws.KINDS)) if kind else KINDS
    targets = [
        target._replace(kinds=kinds)
        for target in _targets(options.words(backend), device, dtypes, arena)
    ]
    if case is not None:
        runs = [FuzzRun(target, seed, case, case + 1) for target in targets]
        cases, workers = len(targets), 0
    else:
        runs = list(plan(targets, cases, each, seed))
    if workers is None:
        workers = max(1, (os.cpu_count() or 1) - (targets[0].device == "cuda"))
    start, tally = time.monotonic(), Tally()
    steps = fuzz(runs, workers, seconds)
    for outcome in track(steps, "cases", cases, console=Console(stderr=True), transient=True):
        tally.add(outcome)
    spent = f"in {time.monotonic() - start:.0f} s with {max(1, workers)} processes"
    dtype_option = f" --dtype {','.join(dtypes)}" if dtypes else ""
    _print(tally, targets, cases, spent, dtype_option)
    if json is not None:
        write_json(json, targets[0].device, "fuzz", tally.records(targets, dtype_option))
    if tally.failures or tally.cases < cases:
        raise SystemExit(1)


def _print(
    tally: Tally, targets: Sequence[Target], cases: int, spent: str, dtype_option: str
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    facts = environment(targets[0].device)
    title = f"random calls against the oracle, {facts['device']}, torch {facts['torch']}"
    title += ", with margins around all tensors" * targets[0].arena
    console.print(tally.summary(title, targets))
    console.print(tally.feature_table(targets))
    for failure in tally.failures[:MAX_PRINTED]:
        console.print(f"[bold red]failed[/]: {command(failure)}{dtype_option}", soft_wrap=True)
        console.print(f"  {failure.error}", markup=False, soft_wrap=True)
    console.print(
        f"{tally.cases} of {cases} cases of {len(tally.families)} specialisations {spent}: "
        f"{len(tally.failures)} failed"
    )


def _targets(
    backends: Sequence[str], device: str, dtypes: Sequence[str], arena: bool
) -> list[Target]:
    """Raises typer.BadParameter for an unknown name or a backend that is not available."""
    device = options.device(device)
    allowed = DTYPES | ({"float64": torch.float64} if device == "cpu" else {})
    chosen = tuple(allowed[name] for name in options.one_of("--dtype", dtypes, allowed))
    if not backends:
        known = dispatch.AUTO[device]
        backends = [name for name in known if dispatch.available_error(name) is None] or known
    backends = options.one_of("--backend", backends, dispatch.BACKENDS)
    for name in backends:
        reason = dispatch.available_error(name)
        if reason is not None:
            raise typer.BadParameter(f"--backend {name}: {reason}")
    return [Target(name, device, chosen, arena) for name in backends]


def plan(targets: Sequence[Target], cases: int, each: int, seed: int) -> Iterator[FuzzRun]:
    """Divide the cases among the targets, with `each` cases of every family from `seed` on."""
    remaining = [cases // len(targets) + (i < cases % len(targets)) for i in range(len(targets))]
    for family in itertools.count(seed):
        for i, target in enumerate(targets):
            count = min(each, remaining[i])
            remaining[i] -= count
            if count:
                yield FuzzRun(target, family, 0, count)
        if not any(remaining):
            return


def command(outcome: Outcome) -> str:
    """The command that repeats a single case."""
    target = outcome.target
    options = f"--backend {target.backend} --device {target.device}" + " --arena" * target.arena
    options += f" --kind {','.join(target.kinds)}" * (target.kinds != KINDS)
    return f"python -m fa_ops fuzz {options} --seed {outcome.family} --case {outcome.case}"


def _feature_order(word: str) -> tuple:
    """Sort key: features in alphabetical order, then head dimensions in numerical order."""
    is_dim = word.startswith("head dim ")
    return is_dim, int(word.split()[-1]) if is_dim else word.lower()


class Tally:
    """Counts of cases and features by backend, and the failures."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter] = {}
        self.features: dict[str, Counter] = {}
        self.families: set[tuple[str, int]] = set()
        self.failures: list[Outcome] = []
        self.cases = 0

    def add(self, outcome: Outcome) -> None:
        """Count one case."""
        name = outcome.target.backend
        self.cases += 1
        counts = self.counts.setdefault(name, Counter())
        if (name, outcome.family) not in self.families:
            self.families.add((name, outcome.family))
            counts["specialisations"] += 1
        counts["cases"] += 1
        counts[outcome.kind] += 1
        counts["gradients"] += outcome.gradients
        counts["failed"] += outcome.error is not None
        self.features.setdefault(name, Counter()).update(outcome.features)
        if outcome.error is not None:
            self.failures.append(outcome)

    def summary(self, title: str, targets: Sequence[Target]) -> Table:
        """The table of counts, a row for each target."""
        table = Table(title=title, title_justify="left")
        table.add_column("backend")
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for target in targets:
            counts = self.counts.get(target.backend, Counter())
            table.add_row(target.backend, *(str(counts[column]) for column in COLUMNS))
        return table

    def feature_table(self, targets: Sequence[Target]) -> Table:
        """The number of cases with each feature, a column for each target."""
        table = Table(title="cases by feature", title_justify="left")
        table.add_column("feature")
        for target in targets:
            table.add_column(target.backend, justify="right")
        words = {word for counts in self.features.values() for word in counts}
        for word in sorted(words, key=_feature_order):
            counts = (self.features.get(t.backend, Counter())[word] for t in targets)
            table.add_row(word, *(str(count) for count in counts))
        return table

    def records(self, targets: Sequence[Target], dtype_option: str) -> list[dict]:
        """The counts and failures of each target, for the JSON file."""
        return [
            {
                "backend": target.backend,
                "counts": dict(self.counts.get(target.backend, {})),
                "features": dict(self.features.get(target.backend, {})),
                "failures": [
                    {"again": command(failure) + dtype_option, "error": failure.error}
                    for failure in self.failures
                    if failure.target == target
                ],
            }
            for target in targets
        ]
