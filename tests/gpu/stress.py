"""Thousands of calls of random shapes back to back, on two streams at once:

    python -m tests.gpu.stress [--launches 10000] [--seed 0]

Two host threads, each with a stream of its own, draw from the same fixed problems: forward, forward
and backward, packed, decoding, and decoding over a latent cache. Each problem is held against the
oracle first, alone; then every result is compared with the one it gave alone, on the device and
without waiting: bit for bit, or, for gradients that are not deterministic, within the least that
the error budget allows. Memory is filled with NaN before it goes back to the allocator, so that
what a kernel leaves unwritten is not an earlier, right result.

Ends with 1 after a wrong result, an error or too long a time, with 2 where a stream makes no
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

BURST = 16  # calls whose results are kept until they are compared
HOLD = 3_000_000  # clock cycles that a stream waits for a burst to queue up behind
PATIENCE = 20.0  # seconds without progress that are a hang


class Alone:
    """A problem's call, and the results that it gave with nothing else running."""

    def __init__(self, problem: Problem) -> None:
        problem.check()
        self.problem, self.call = problem, problem.call()
        self.expected = self.call()
        exact = problem.exact()
        # the budget is never less than this ulp of the largest number
        self.loose = [
            x.float().abs().max() * torch.finfo(x.dtype).eps for x in self.expected[exact:]
        ]
        self.exact = exact
        torch.cuda.synchronize()

    def differs(self, results: Results) -> Tensor:
        """bool, one element, on the device."""
        n, wrong = self.exact, []
        for found, expected in zip(results[:n], self.expected):
            wrong.append((found.view(torch.int16) != expected.view(torch.int16)).any())
        for found, expected, most in zip(results[n:], self.expected[n:], self.loose):
            # NaN is within nothing
            wrong.append(~((found.float() - expected.float()).abs().max() <= most))
        return torch.stack(wrong).any()


class Caller(threading.Thread):
    """Calls on a stream of its own, in an order that its seed draws."""

    def __init__(self, name: str, seed: str, launches: int, known: list[Alone]) -> None:
        super().__init__(name=name, daemon=True)
        self.random, self.launches, self.known = random.Random(seed), launches, known
        self.stream = torch.cuda.Stream()
        self.wrong = torch.zeros(len(known), dtype=torch.int64, device=DEVICE)
        # bursts that the device has done, in memory that the host reads without asking CUDA
        self.count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.done = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self.bursts: list[list[int]] = []  # which problems each holds
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
        torch.cuda._sleep(HOLD)
        results = []
        for _ in range(calls):
            chosen.append(self.random.randrange(len(self.known)))
            results.append(self.known[chosen[-1]].call())
            self.launched += 1
        for which, found in zip(chosen, results):
            self.wrong[which].add_(self.known[which].differs(found))
            for x in found:
                x.fill_(float("nan"))
        self.count.add_(1)
        self.done.copy_(self.count, non_blocking=True)

    def where(self) -> str:
        """What was launched last, and what the device may still be at."""
        done = int(self.done)
        lines = [f"{self.name}: {self.launched} calls launched, {done} bursts done"]
        if self.bursts and self.bursts[-1]:
            lines.append(f"  launched last: {self.known[self.bursts[-1][-1]].problem}")
        for which in self.bursts[done] if done < len(self.bursts) else ():
            lines.append(f"  not known to be done: {self.known[which].problem}")
        return "\n".join(lines)


def watch(callers: list[Caller]) -> bool:
    """Wait until all have ended; False where none got on for `PATIENCE` seconds."""
    seen, since = None, time.monotonic()
    while any(caller.is_alive() for caller in callers):
        now = [(caller.launched, int(caller.done)) for caller in callers]
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            return False
        time.sleep(0.02)
    return True


def stress(launches: int, known: list[Alone], seed: int) -> int:
    """Exit status. A process that hangs is ended here, as nothing else would end it."""
    shares = (launches // 2, launches - launches // 2)
    callers = [Caller(f"stream {n}", f"{seed}/{n}", share, known) for n, share in enumerate(shares)]
    torch.cuda.synchronize()
    start = time.monotonic()
    for caller in callers:
        caller.start()
    if not watch(callers):
        print("HANG", *(caller.where() for caller in callers), sep="\n", flush=True)
        faulthandler.dump_traceback()
        os._exit(2)
    seconds = time.monotonic() - start
    for caller in callers:
        if caller.error is not None:
            print(f"{caller.name}: {caller.error!r}", caller.where(), sep="\n")
    if any(caller.error for caller in callers):
        return 1
    wrong = torch.stack([caller.wrong for caller in callers]).sum(0).tolist()
    for alone, count in zip(known, wrong):
        if count:
            print(f"WRONG {count} times: {alone.problem}")
    made = Counter(
        known[which].problem.kind for c in callers for burst in c.bursts for which in burst
    )
    print(f"{sum(made.values())} launches, {seconds:.1f} s, {sum(wrong)} mismatches")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(made.items())))
    return 1 if sum(wrong) or sum(made.values()) != launches else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the problems and their order")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for everything")
    options = parser.parse_args()
    if (reason := hopper.available_error()) is not None:
        parser.error(f"these are calls of the hopper backend, which {reason}")
    # a thread that needs no lock of Python's: the last resort where one is held in a launch
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    start, known = time.monotonic(), []
    for problem in problems(options.seed):
        try:
            known.append(Alone(problem))
        except AssertionError as error:
            print(f"WRONG alone: {problem}: {error}")
            return 1
    alone = time.monotonic() - start
    print(f"{len(known)} problems, right when alone, {alone:.1f} s", flush=True)
    return stress(options.launches, known, options.seed)


if __name__ == "__main__":
    sys.exit(main())
