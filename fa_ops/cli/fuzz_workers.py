"""Processes that try random calls side by side, and what becomes of those that crash or hang."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait

import torch

from fa_ops.cli.fuzz_cases import FuzzRun, Outcome, outcomes, strict

PATIENCE = 100.0  # seconds for a case, compilation and the start of the process included


def fuzz(runs: Iterable[FuzzRun], workers: int, seconds: float | None) -> Iterator[Outcome]:
    """Try the runs in as many processes, or in this one if `workers` is 0, until time is up.

    A process that ends or says nothing for long fails the case that it was at, and another goes on
    behind that. After an error of the device, a process is not used any more either.
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
                if worker.pipe in ready or worker.silence() > PATIENCE:
                    yield from worker.news()
                if worker.run is None and waiting:
                    worker.start(waiting.popleft())
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    """A process, and the run it is at; replaced when it cannot go on."""

    def __init__(self) -> None:
        self.process: multiprocessing.Process | None = None
        self.run: FuzzRun | None = None

    def start(self, run: FuzzRun) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        self.run, self.heard = run, time.monotonic()
        self.pipe.send(run)

    def silence(self) -> float:
        return time.monotonic() - self.heard

    def news(self) -> Iterator[Outcome]:
        """What the process says now: an outcome, the end of its run, or nothing any more."""
        run = self.run
        try:
            outcome: Outcome | None = self.pipe.recv() if self.pipe.poll() else _hang(run)
        except (EOFError, OSError):
            self.process.join(10)
            outcome = _crash(run, self.process.exitcode)
        self.heard = time.monotonic()
        if outcome is None:
            self.run = None
            return
        yield outcome
        self.run = run._replace(first=outcome.case + 1)
        if outcome.error is not None and outcome.spoils:
            self.end()
            rest, self.run = self.run, None
            if rest.first < rest.last:
                self.start(rest)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def _hang(run: FuzzRun) -> Outcome:
    error = f"no result after {PATIENCE:.0f} s"
    return Outcome(run.target, run.family, run.first, error=error, spoils=True)


def _crash(run: FuzzRun, status: int | None) -> Outcome:
    error = f"the process ended with status {status}"
    return Outcome(run.target, run.family, run.first, error=error, spoils=True)


def _serve(pipe: Connection) -> None:
    """What a worker process does: run after run, until the other side is gone."""
    torch.set_num_threads(1)
    while True:
        try:
            run = pipe.recv()
        except EOFError:
            return
        with strict(run.target):
            for outcome in outcomes(run):
                pipe.send(outcome)
                if outcome.spoils:
                    return
        pipe.send(None)
