"""Run thousands of calls of random shapes back to back on two streams:

    python -m tests.gpu.stress [--launches 10000] [--seed 0]

Two host threads, each with its own stream, draw from the same problems: forward, forward and
backward, packed, decoding, and decoding over a latent cache. Each problem is first compared with
the oracle while nothing else runs. Every later result is compared with that first one on the device
and without synchronisation: bitwise, or, for gradients that are not deterministic, within the
smallest error budget. Results are filled with NaN before their memory is freed, so that a later
kernel cannot reuse correct values.

Exits with status 1 after a wrong result, an error or a timeout, and with 2 if a stream makes no
progress.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import threading
import time
from collections import Counter

import torch
from torch import Tensor

from fa_ops.backends import hopper
from tests.gpu.stress_problems import DEVICE, Problem, Results, problems

BURST = 16  # calls whose results are compared together
SLEEP_CYCLES = 3_000_000  # a stream sleeps for so long while a burst is queued
TIMEOUT = 20.0  # seconds without progress after which a stream counts as hanging


class Expected:
    """A problem's call, and the results that it has while nothing else runs."""

    def __init__(self, problem: Problem) -> None:
        problem.check()
        self.problem, self.call = problem, problem.call()
        self.expected = self.call()
        exact = problem.exact()
        # the error budget is at least one ulp of the largest number
        self.tolerances = [
            x.float().abs().max() * torch.finfo(x.dtype).eps for x in self.expected[exact:]
        ]
        self.exact = exact
        torch.cuda.synchronize()

    def differs(self, results: Results) -> Tensor:
        """Whether results are wrong, as a bool tensor on the device."""
        n, wrong = self.exact, []
        for actual, expected in zip(results[:n], self.expected):
            wrong.append((actual.view(torch.int16) != expected.view(torch.int16)).any())
        for actual, expected, tolerance in zip(results[n:], self.expected[n:], self.tolerances):
            # negated, so that NaN is wrong
            wrong.append(~((actual.float() - expected.float()).abs().max() <= tolerance))
        return torch.stack(wrong).any()


class Caller(threading.Thread):
    """A thread that makes calls on its own stream, in an order drawn from its seed."""

    def __init__(self, name: str, seed: str, launches: int, expected: list[Expected]) -> None:
        super().__init__(name=name, daemon=True)
        self.random, self.launches, self.expected = random.Random(seed), launches, expected
        self.stream = torch.cuda.Stream()
        self.wrong = torch.zeros(len(expected), dtype=torch.int64, device=DEVICE)
        # the number of finished bursts; the host reads pinned memory without calling CUDA
        self.count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.done = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self.bursts: list[list[int]] = []  # indices of the problems in each burst
        self.launched, self.error = 0, None

    def run(self) -> None:
        try:
            with torch.cuda.stream(self.stream):
                while self.launched < self.launches:
                    self._burst(min(BURST, self.launches - self.launched))
            self.stream.synchronize()
        except BaseException as error:
            self.error = error

    def _burst(self, calls: int) -> None:
        chosen: list[int] = []
        self.bursts.append(chosen)
        torch.cuda._sleep(SLEEP_CYCLES)
        results = []
        for _ in range(calls):
            chosen.append(self.random.randrange(len(self.expected)))
            results.append(self.expected[chosen[-1]].call())
            self.launched += 1
        for index, tensors in zip(chosen, results):
            self.wrong[index].add_(self.expected[index].differs(tensors))
            for x in tensors:
                x.fill_(float("nan"))
        self.count.add_(1)
        self.done.copy_(self.count, non_blocking=True)

    def progress(self) -> str:
        """The last launch, and the calls that the device may not have finished."""
        done = int(self.done)
        lines = [f"{self.name}: {self.launched} calls launched, {done} bursts done"]
        if self.bursts and self.bursts[-1]:
            lines.append(f"  launched last: {self.expected[self.bursts[-1][-1]].problem}")
        for index in self.bursts[done] if done < len(self.bursts) else ():
            lines.append(f"  possibly unfinished: {self.expected[index].problem}")
        return "\n".join(lines)


def wait_for(callers: list[Caller]) -> bool:
    """Wait for all threads to end; return False if none makes progress for `TIMEOUT` seconds."""
    last, since = None, time.monotonic()
    while any(caller.is_alive() for caller in callers):
        now = [(caller.launched, int(caller.done)) for caller in callers]
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > TIMEOUT:
            return False
        time.sleep(0.02)
    return True


def stress(launches: int, expected: list[Expected], seed: int) -> int:
    """Make all calls and return the exit status. If a stream hangs, the process exits here."""
    callers = [
        Caller(f"stream {n}", f"{seed}/{n}", count, expected)
        for n, count in enumerate((launches // 2, launches - launches // 2))
    ]
    torch.cuda.synchronize()
    start = time.monotonic()
    for caller in callers:
        caller.start()
    if not wait_for(callers):
        print("HANG", *(caller.progress() for caller in callers), sep="\n", flush=True)
        faulthandler.dump_traceback()
        os._exit(2)
    seconds = time.monotonic() - start
    for caller in callers:
        if caller.error is not None:
            print(f"{caller.name}: {caller.error!r}", caller.progress(), sep="\n")
    if any(caller.error for caller in callers):
        return 1
    wrong = torch.stack([caller.wrong for caller in callers]).sum(0).tolist()
    for one, count in zip(expected, wrong):
        if count:
            print(f"WRONG {count} times: {one.problem}")
    kinds = Counter(
        expected[index].problem.kind for c in callers for burst in c.bursts for index in burst
    )
    print(f"{kinds.total()} launches, {seconds:.1f} s, {sum(wrong)} mismatches")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return 1 if sum(wrong) or kinds.total() != launches else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and their order")
    parser.add_argument("--timeout", type=float, default=300.0, help="limit in seconds")
    options = parser.parse_args()
    if (reason := hopper.available_error()) is not None:
        parser.error(f"these are calls of the hopper backend, which {reason}")
    # this exits even if a launch blocks while it holds Python's global lock
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    start, expected = time.monotonic(), []
    for problem in problems(options.seed):
        try:
            expected.append(Expected(problem))
        except AssertionError as error:
            print(f"WRONG without other calls: {problem}: {error}")
            return 1
    seconds = time.monotonic() - start
    print(f"{len(expected)} problems checked against the oracle in {seconds:.1f} s", flush=True)
    return stress(options.launches, expected, options.seed)


if __name__ == "__main__":
    sys.exit(main())
