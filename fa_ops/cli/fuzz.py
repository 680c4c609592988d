"""`python -m fa_ops fuzz`: compare random calls, forward and backward, with the fp64 oracle."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Annotated, NamedTuple
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fa_ops.bench import command
from fa_ops.bench.command import environment, write_json
from fa_ops.call import backend_option, cache_checks, checks, selected_checks
from fa_ops.call.call import Saved
from fa_ops.plans import dispatch
from fa_ops.testing import Arena, CacheCase, QuantizedCase, assert_right, make_case, random_calls
from fa_ops.testing.inputs import poisoned_memory
from fa_ops.testing.tangents import assert_tangents_close, tangents_refusal

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_PRINTED = 20  # failures that are printed; the JSON file holds all of them
COLUMNS = ("specialisations", "cases", *random_calls.KINDS, "gradients", "failed")


def run(
    backend: Annotated[
        str | None,
        typer.Option(
            help=f"comma-separated: {','.join(backend_option.BACKENDS)}; default: those available"
        ),
    ] = None,
    device: command.Device = "auto",
    cases: Annotated[int, typer.Option(min=1, help="number of cases over all backends")] = 1000,
    each: Annotated[
        int, typer.Option(min=1, help="cases of each specialisation, which share compiled kernels")
    ] = 100,
    seed: Annotated[int, typer.Option(min=0, help="number of the first specialisation")] = 0,
    case: Annotated[
        int | None, typer.Option(min=0, help="run only this case of specialisation --seed")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"comma-separated; default: {','.join(DTYPES)}, on a CPU float64 too"),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help=f"comma-separated; default: {','.join(random_calls.KINDS)}"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="processes; 0: this one; default: one for each core")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="stop after this time")] = None,
    json: command.Json = None,
    arena: Annotated[
        bool, typer.Option("--arena", help="only edge cases, in memory with checked margins")
    ] = False,
    tangents: Annotated[
        bool,
        typer.Option(
            "--tangents", help="those of results and gradients, of dense and packed calls"
        ),
    ] = False,
) -> None:
    """Compare random calls, forward and backward, with the fp64 oracle; fail if one differs."""
    if tangents and arena:
        raise typer.BadParameter("--tangents has no --arena: it compares ordinary calls alone")
    dtypes, kinds = command.words(dtype), DIFFERENTIATED if tangents else KINDS
    if kind:
        known = DIFFERENTIATED if tangents else random_calls.KINDS
        kinds = tuple(command.one_of("--kind", command.words(kind), known))
    targets = [
        target._replace(kinds=kinds, tangents=tangents)
        for target in _targets(command.words(backend), device, dtypes, arena)
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
        console.print(
            f"[bold red]failed[/]: {repeating_command(failure)}{dtype_option}", soft_wrap=True
        )
        console.print(f"  {failure.error}", markup=False, soft_wrap=True)
    console.print(
        f"{tally.cases} of {cases} cases of {len(tally.families)} specialisations {spent}: "
        f"{len(tally.failures)} failed"
    )


def _targets(
    backends: Sequence[str], device: str, dtypes: Sequence[str], arena: bool
) -> list[Target]:
    """Raises typer.BadParameter for an unknown name or a backend that is not available."""
    device = command.device(device)
    allowed = DTYPES | ({"float64": torch.float64} if device == "cpu" else {})
    chosen = tuple(allowed[name] for name in command.one_of("--dtype", dtypes, allowed))
    if not backends:
        known = dispatch.AUTO[device]
        backends = [name for name in known if dispatch.available_error(name) is None] or known
    backends = command.one_of("--backend", backends, backend_option.BACKENDS)
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


def repeating_command(outcome: Outcome) -> str:
    """The command that repeats a single case."""
    target = outcome.target
    options = f"--backend {target.backend} --device {target.device}" + " --arena" * target.arena
    options += " --tangents" * target.tangents
    usual = DIFFERENTIATED if target.tangents else KINDS
    options += f" --kind {','.join(target.kinds)}" * (target.kinds != usual)
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
                    {"again": repeating_command(failure) + dtype_option, "error": failure.error}
                    for failure in self.failures
                    if failure.target == target
                ],
            }
            for target in targets
        ]


# Random calls by number, and the outcome of comparing each with the oracle.

# repeated over the numbers of families
KINDS = ("dense", "packed", "selected", "cached", "dense", "quantized")
DIFFERENTIATED = ("dense", "packed")  # those whose results and gradients have tangents
MAX_DRAWS = 2000  # draws that a backend may refuse before the search for a valid one fails


class Target(NamedTuple):
    """The backend to test, its device, and the dtypes of the calls."""

    backend: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    arena: bool = False  # draw edge cases only, and check margins around all tensors
    kinds: tuple[str, ...] = KINDS  # of the families, in turn
    tangents: bool = False  # compare those of results and gradients, in place of themselves


class Outcome(NamedTuple):
    """The result of one case."""

    target: Target
    family: int
    case: int
    kind: str = ""
    gradients: bool = False  # whether gradients were compared as well
    features: Sequence[str] = ()
    error: str | None = None
    device_lost: bool = False  # the process cannot use its device any more


class FuzzRun(NamedTuple):
    """Cases `first` to `last - 1` of a family, for one target."""

    target: Target
    family: int
    first: int
    last: int


def outcomes(run: FuzzRun) -> Iterator[Outcome]:
    """Run the cases in order."""
    try:
        family = family_of(run.target, run.family)
    except Exception as error:
        yield Outcome(run.target, run.family, run.first, error=_message(error))
        return
    for number in range(run.first, run.last):
        yield _outcome(run.target, run.family, number, family)


def _outcome(target: Target, number: int, index: int, family: random_calls.Family) -> Outcome:
    result = Outcome(target, number, index, family.kind)
    case = None
    try:
        case = _case_of(target, number, index, family)
        result = result._replace(features=random_calls.features(case))
        if target.tangents:
            return result._replace(gradients=assert_tangents_close(case, target.backend))
        arena = Arena() if target.arena else None
        repeated = target.arena or index % 4 == 0
        gradients = has_gradients(target.backend, case)
        compared = assert_right(case, target.backend, arena, repeated, gradients)
        return result._replace(gradients=compared)
    except AssertionError as error:
        return result._replace(error=str(error))
    except Exception as error:  # run the other cases even if one fails
        lost = target.device == "cuda" and _device_is_lost()
        return result._replace(error=f"{case}: {_message(error)}", device_lost=lost)


def _device_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # after an illegal access the CUDA context is unusable
        return True
    return False


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def family_of(target: Target, number: int) -> random_calls.Family:
    """Family `number`: the first draw for this number that the backend supports.

    Of kinds that are not asked for by name, those that the backend lacks become dense ones.

    Raises:
        LookupError: the backend supports none of `MAX_DRAWS` draws.
    """
    kind = target.kinds[number % len(target.kinds)]
    if target.kinds == KINDS and not _has_kernels(target, kind):
        kind = "dense"
    for attempt in range(MAX_DRAWS):
        pick = random.Random(f"{number}.{attempt}").choice
        edges = False if target.tangents else True if target.arena else None
        family = random_calls.family(pick, kind, target.dtypes, edges)
        case = family.case(pick, target.device)
        reason = refusal(target.backend, case)
        if target.tangents and reason is None:
            reason = tangents_refusal(case.fresh().changed(backend=target.backend))
        if reason is None:
            return family
    raise LookupError(
        f"{target.backend} supports none of {MAX_DRAWS} {kind} calls; the last one: {reason}"
    )


def _has_kernels(target: Target, kind: str) -> bool:
    """Whether the backend has kernels of a kind, which not every backend has, on this device."""
    plain = functools.partial(make_case, dtype=torch.float16, device=target.device)
    if kind == "quantized":
        return refusal(target.backend, QuantizedCase(plain())) is None
    return kind != "selected" or refusal(target.backend, plain(lists=(16, 1, 2))) is None


def _case_of(
    target: Target, number: int, index: int, family: random_calls.Family
) -> random_calls.AnyCase:
    for attempt in itertools.count():
        pick = random.Random(f"{number}.{index}.{attempt}").choice
        case = family.case(pick, target.device)
        may_differ = isinstance(case, CacheCase | QuantizedCase)
        if not may_differ or refusal(target.backend, case) is None:
            return case  # a backend supports dense and packed calls of a family in every size
        if attempt == MAX_DRAWS:
            raise LookupError(f"{target.backend} supports none of {MAX_DRAWS} calls of {family}")


def refusal(backend: str, case: random_calls.AnyCase) -> str | None:
    """Why the backend cannot run a case; None where it can."""
    return dispatch.refusal(backend, case.fresh().changed(backend=backend))


def has_gradients(backend: str, case: random_calls.AnyCase) -> bool:
    """Whether the backend has a backward pass for a case that it supports."""
    if isinstance(case, CacheCase | QuantizedCase):
        return False
    call = case.fresh()
    saved = Saved(call.query, None, call.query, call.query)  # that there are some is all they ask
    return dispatch.refusal(backend, call.changed(saved=saved, backend=backend)) is None


@contextlib.contextmanager
def strict(target: Target) -> Iterator[None]:
    """In a `with` block, memory that a backend allocates is NaN until it is written.

    For Triton's interpreter lengths and pages are not checked, as on a GPU. Of its float32 calls,
    all of which are small, two thirds are multiplied in parts, as larger ones are.
    """
    with contextlib.ExitStack() as patches:
        patches.enter_context(poisoned_memory(target.backend))
        if target.backend == "triton":
            from fa_ops.backends.triton import configs

            modes = ("ieee", "split", "loaded")
            drawn = mock.patch.object(configs, "float32_products", lambda *of: modes[hash(of) % 3])
            patches.enter_context(drawn)
        if target.backend == "triton" and target.device == "cpu":
            values = (checks, "values"), (cache_checks, "values"), (selected_checks, "block_values")
            for module, name in values:
                patches.enter_context(mock.patch.object(module, name, lambda *_, **__: None))
        yield


# Worker processes that run random calls in parallel, and are replaced if they crash or hang.

TIMEOUT = 100.0  # seconds for a case, including compilation and the start of the process


def fuzz(runs: Iterable[FuzzRun], workers: int, seconds: float | None) -> Iterator[Outcome]:
    """Run the cases in `workers` processes, or in this one for 0 workers, until time is up.

    If a process ends or exceeds the timeout, its current case fails, and a new process continues
    with the next one. A process that lost its device is replaced as well.
    """
    deadline = time.monotonic() + (seconds or float("inf"))
    if workers == 0:
        for run in runs:
            with strict(run.target):
                for outcome in outcomes(run):
                    yield outcome
                    if time.monotonic() > deadline:
                        return
        return
    waiting = deque(runs)
    pool = [_Worker() for _ in range(min(workers, len(waiting)))]
    try:
        for worker in pool:
            worker.start(waiting.popleft())
        while busy := [worker for worker in pool if worker.run is not None]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            ready = wait([worker.pipe for worker in busy], min(1.0, remaining))
            for worker in busy:
                if worker.pipe in ready or worker.silence() > TIMEOUT:
                    yield from worker.receive()
                if worker.run is None and waiting:
                    worker.start(waiting.popleft())
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    """A process, which is replaced if it crashes, hangs or loses its device, and its run."""

    def __init__(self) -> None:
        self.process: multiprocessing.Process | None = None
        self.run: FuzzRun | None = None

    def start(self, run: FuzzRun) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, child_pipe = context.Pipe()
            self.process = context.Process(target=_serve, args=(child_pipe,), daemon=True)
            self.process.start()
            child_pipe.close()
        self.run, self.last_message = run, time.monotonic()
        self.pipe.send(run)

    def silence(self) -> float:
        """Seconds since the last message from the process."""
        return time.monotonic() - self.last_message

    def receive(self) -> Iterator[Outcome]:
        """Yield the outcome that the process has sent, or a failure if it crashed or hangs."""
        hang = self._failure(f"no result after {TIMEOUT:.0f} s")
        try:
            outcome: Outcome | None = self.pipe.recv() if self.pipe.poll() else hang
        except (EOFError, OSError):
            self.process.join(10)
            outcome = self._failure(f"the process ended with status {self.process.exitcode}")
        self.last_message = time.monotonic()
        if outcome is None:
            self.run = None
            return
        yield outcome
        self.run = self.run._replace(first=outcome.case + 1)
        if outcome.error is not None and outcome.device_lost:
            self.end()
            rest, self.run = self.run, None
            if rest.first < rest.last:
                self.start(rest)

    def _failure(self, error: str) -> Outcome:
        run = self.run
        return Outcome(run.target, run.family, run.first, error=error, device_lost=True)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def _serve(pipe: Connection) -> None:
    """The main function of a worker process: execute runs until the pipe is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            run = pipe.recv()
        except EOFError:
            return
        with strict(run.target):
            for outcome in outcomes(run):
                pipe.send(outcome)
                if outcome.device_lost:
                    return
        pipe.send(None)
