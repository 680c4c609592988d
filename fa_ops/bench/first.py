"""`python -m fa_ops bench first`: what the first call of a family of shapes waits for.

Each first call is made in a process of its own, in which nothing but imports, a CUDA context, an
unrelated kernel and the inputs came before it. With an empty cache of kernels it compiles; the
next process finds what that one stored. Calls of other lengths follow the first one there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, NamedTuple, Optional
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from fa_ops.backends import hopper
from fa_ops.backends.hopper import compiler
from fa_ops.bench import report
from fa_ops.bench.first_families import FAMILIES, KernelFamily
from fa_ops.cli import options

COLD_MS, WARM_MS = 1000.0, 50.0  # what a first call may take
PATIENCE = 120.0  # seconds for a process
console = Console()


class First(NamedTuple):
    """A call that was synchronised: milliseconds, kernels compiled, milliseconds in which some
    were."""

    length: int
    ms: float
    compiled: int
    compile_ms: float


class FamilyRow(NamedTuple):
    """Of one family: the first call with an empty cache, the calls behind it, and the first call
    with a full one."""

    family: str
    cold: First
    others: list[First]
    warm: First


@contextlib.contextmanager
def _compilations() -> Iterator[list[tuple[float, float]]]:
    """When each compilation in a `with` block began and ended; several may run at once."""
    spans: list[tuple[float, float]] = []
    compile_source = compiler.compile_source

    def timed(*args):
        start = time.perf_counter()
        try:
            return compile_source(*args)
        finally:
            spans.append((start, time.perf_counter()))

    with mock.patch.object(compiler, "compile_source", timed):
        yield spans


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what some span covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def measure(
    family: KernelFamily, lengths: tuple[int, ...], device: str, backend: str
) -> list[First]:
    """Calls of these lengths, one behind the other, in this process; each is synchronised."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    unrelated = torch.ones(8, device=device, requires_grad=True)
    (unrelated + 1.0).backward(torch.ones_like(unrelated))  # torch imports for its first gradient
    found = []
    for length in lengths:
        call = family.call(length, device, backend)
        wait()
        with _compilations() as spans:
            start = time.perf_counter()
            result = call()
            wait()
            ms = (time.perf_counter() - start) * 1e3
        del result
        found.append(First(length, ms, len(spans), covered(spans) * 1e3))
    return found


def _serve(pipe: Connection, folder: str, *measurement) -> None:
    os.environ["FA_OPS_CACHE_DIR"] = folder
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # NVRTC would remember what others compiled
    pipe.send(measure(*measurement))


def alone(
    folder: str,
    family: KernelFamily,
    lengths: tuple[int, ...],
    device: str = "cuda",
    backend: str = "hopper",
) -> list[First]:
    """`measure` in a process that has imported this module and done nothing else.

    Raises:
        RuntimeError: the process ended without a result, or said nothing for long.
    """
    # A fork of one that has: nearly all of a start would be torch's import.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    args = (theirs, folder, family, lengths, device, backend)
    process = context.Process(target=_serve, args=args, daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            raise RuntimeError(f"{family.name}: no result after {PATIENCE:.0f} s")
        return ours.recv()
    except EOFError:
        process.join(10)
        raise RuntimeError(f"{family.name}: its process ended, {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def row(family: KernelFamily) -> FamilyRow:
    with tempfile.TemporaryDirectory() as folder:
        cold, *others = alone(folder, family, (family.length, *family.others))
        (warm,) = alone(folder, family, (family.length,))
    return FamilyRow(family.name, cold, others, warm)


def _told(rows: list[FamilyRow]) -> list[FamilyRow]:
    """A line on stderr for each, as all of them take a while."""
    for r in rows:
        others = ", ".join(_cell(other) for other in r.others)
        line = f"{r.family}: cold {_cell(r.cold)} ms, then {others}, warm {_cell(r.warm)}"
        Console(stderr=True, width=200).print(line, highlight=False)
    return rows


def _median(rows: list[FamilyRow]) -> FamilyRow:
    """The row whose cold call is the median one, with the median warm call."""
    by = lambda name: sorted(rows, key=lambda r: getattr(r, name).ms)  # noqa: E731
    middle = (len(rows) - 1) // 2
    return by("cold")[middle]._replace(warm=by("warm")[middle].warm)


def table(title: str, rows: list[FamilyRow]) -> Table:
    """A line a family: milliseconds, and how many kernels were compiled meanwhile."""
    made = Table(title=title, caption="ms of a synchronised call; +1: it compiled a kernel")
    made.add_column("family", no_wrap=True)
    lengths = [other.length for other in rows[0].others]
    behind = [f"then {length}" for length in lengths]
    for name in ("cold", "of it NVRTC", *behind, "warm"):
        made.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        others = [_cell(other) for other in r.others]
        made.add_row(
            r.family, _cell(r.cold), f"{r.cold.compile_ms:.0f}", *others, _cell(r.warm)
        )  # fmt: skip
    return made


def _cell(first: First) -> str:
    return f"{first.ms:.1f}" + (f" +{first.compiled}" if first.compiled else "")


def verdicts(rows: list[FamilyRow]) -> Iterator[str]:
    """What was slower than it should be, or compiled where it should not; or that nothing was."""
    slow = [
        f"{r.family}: {kind} {first.ms:.0f} ms, more than {limit:.0f}"
        for r in rows
        for kind, first, limit in (("cold", r.cold, COLD_MS), ("warm", r.warm, WARM_MS))
        if first.ms > limit
    ]
    stale = [f"{r.family}: compiled with a full cache" for r in rows if r.warm.compiled]
    again = [
        f"{r.family}: {other.length} after {r.cold.length} compiled {other.compiled} more"
        for r in rows
        for other in r.others
        if other.compiled
    ]
    yield from slow + stale + again or [
        f"all cold within {COLD_MS:.0f} ms and warm within {WARM_MS:.0f} ms; "
        "no other length compiled"
    ]


def records(rows: list[FamilyRow]) -> list[dict]:
    return [
        {
            "family": r.family,
            "cold": r.cold._asdict(),
            "others": [other._asdict() for other in r.others],
            "warm": r.warm._asdict(),
        }
        for r in rows
    ]


def main(
    only: Annotated[Optional[str], typer.Option(help="words in the families' names")] = None,  # noqa: UP045
    rounds: Annotated[int, typer.Option(min=1, help="processes of each kind; the median")] = 1,
    json: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", help="write every number here", callback=options.in_existing_folder),
    ] = None,
) -> None:
    """First calls on a Hopper GPU with an empty and a full cache of kernels: milliseconds."""
    names = options.matching(only, [family.name for family in FAMILIES], "family")
    chosen = [family for family in FAMILIES if family.name in names]
    if reason := hopper.available_error():
        raise typer.BadParameter(f"first calls are those of the Hopper tier, which {reason}")
    try:
        measured = [_told([row(family) for _ in range(rounds)]) for family in chosen]
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    rows = [_median(several) for several in measured]
    console.width = max(console.width, 120)
    console.print(table(f"first calls, {torch.cuda.get_device_name()}", rows))
    for line in verdicts(rows):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if json is not None:
        report.write_json(
            json, "cuda", "first", [r for several in measured for r in records(several)]
        )
