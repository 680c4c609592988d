"""Worker processes that run random calls in parallel, and are replaced if they crash or hang."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait

import torch

from fa_ops.cli.fuzz_cases import FuzzRun, Outcome, outcomes, strict

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
