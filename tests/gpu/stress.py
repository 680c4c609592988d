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
import dataclasses
import faulthandler
import functools
import itertools
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

import fa_ops
from fa_ops.backends import hopper
from fa_ops.testing import (
    CacheCase,
    Case,
    PackedCase,
    assert_cache_close,
    assert_close_to_oracle,
)

BACKEND, DEVICE = "hopper", "cuda"
BURST = 16  # calls whose results are kept until they are compared
HOLD = 3_000_000  # clock cycles that a stream waits for a burst to queue up behind
PATIENCE = 20.0  # seconds without progress that are a hang
SHAPES = 4  # of each family
MOST_SCORES, MOST_NUMBERS = 2**27, 2**23  # of a problem's scores and queries

Results = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Calls of one shape; with `gradients` a backward pass follows."""

    kind: str
    case: Case | PackedCase | CacheCase
    gradients: bool = False

    def check(self) -> None:
        """Against the oracle. Raises AssertionError."""
        if isinstance(self.case, CacheCase):
            assert_cache_close(self.case, BACKEND)
        else:
            assert_close_to_oracle(self.case, BACKEND, self.gradients)

    def call(self) -> Callable[[], Results]:
        """The same call again and again, of inputs that are made here."""
        if isinstance(self.case, CacheCase):
            q, k, v, cache, spec = self.case.fresh()
            args = q, k, v, spec.kv_lens, cache.page_table, spec.is_causal
            return lambda: (fa_ops.attention_with_kv_cache(*args, backend=BACKEND),)
        q, k, v, spec = self.case.fresh()
        options = {
            "is_causal": spec.is_causal, "deterministic": spec.deterministic, "backend": BACKEND,
        }  # fmt: skip
        if isinstance(self.case, PackedCase):
            attend = functools.partial(fa_ops.attention_varlen, **options)
            inputs = q, k, v, *self.case.packing()
        else:
            attend, inputs = functools.partial(fa_ops.attention, **options), (q, k, v)
        if not self.gradients:
            return lambda: (attend(*inputs),)
        out = attend(*inputs)
        grad, _ = self.case.grad_outputs(out, out)

        def both() -> Results:
            # leaves of this call alone: autograd would make streams wait for those that share one
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = attend(*leaves, *inputs[3:])
            return out.detach(), *torch.autograd.grad(out, leaves, grad)

        return both

    def exact(self) -> int:
        """How many of its results repeat their bits; the others are gradients added up in no
        order."""
        features = getattr(self.case, "features", self.case)
        return 4 if not self.gradients or features.deterministic else 1


def problems(seed: int) -> list[Problem]:
    """`SHAPES` of each family, which is what kernels are compiled for."""
    r = random.Random(seed)
    half = {"dtype": torch.bfloat16, "device": DEVICE}
    whole = half | {"dtype": torch.float16}
    causal = {"is_causal": True} | half
    dense = [
        *((causal | {"D": D, "Dv": D}, gradients) for D in (64, 128, 256) for gradients in (0, 1)),
        *(
            (whole | {"D": 128, "Dv": 128, "deterministic": True}, gradients)
            for gradients in (0, 1)
        ),
        (causal | {"D": 64, "Dv": 64, "deterministic": True}, 1),
    ]
    found = []
    for _ in range(SHAPES):
        for fields, gradients in dense:
            kind = "forward and backward" if gradients else "forward"
            found.append(Problem(kind, _dense(r, fields), bool(gradients)))
        for D, gradients in ((64, True), (128, False)):
            found.append(Problem("packed", _packed(r, causal | {"D": D, "Dv": D}), gradients))
        for D, page in ((64, 0), (128, 0), (128, 16), (128, 64)):
            fields = {"Hkv": 8, "D": D, "Dv": D, "bshd": r.random() < 0.5}
            kind = "decode, paged" if page else "decode"
            found.append(Problem(kind, _cached(r, page, r.choice((8, 32)), half | fields)))
        for page in (0, 64):
            fields = {"Hkv": 1, "D": 576, "Dv": 512, "shared": True}
            heads = r.choice((16, 64, 128))
            found.append(Problem("latent decode", _cached(r, page, heads, half | fields)))
    return found


def _dense(r: random.Random, fields: dict) -> Case:
    """Lengths, then a batch and heads with which the oracle takes neither long nor much memory."""
    Sq = r.choice((17, 65, 200, 512, 1000, 1537, 2048, 3000))
    Sk = Sq if r.random() < 0.7 else r.choice((64, 333, 1024))
    most = min(MOST_SCORES // (Sq * Sk), MOST_NUMBERS // (max(Sq, Sk) * fields["D"]))
    heads = itertools.product((1, 2, 5), (1, 4, 8), (1, 2, 4))
    fitting = sorted((h for h in heads if math.prod(h) <= most), key=math.prod)
    B, Hkv, group = r.choice(fitting[len(fitting) * 2 // 3 :])  # many tiles rather than few
    return Case(
        B=B, Hq=Hkv * group, Hkv=Hkv, Sq=Sq, Sk=Sk, layout=r.choice(("bhsd", "bshd")),
        seed=r.randrange(2**31), **fields,
    )  # fmt: skip


def _packed(r: random.Random, fields: dict) -> PackedCase:
    Hkv = r.choice((2, 8))
    lengths = tuple(r.choice((1, 0, 63, 300, 777, 1200)) for _ in range(r.randrange(2, 6)))
    case = Case(Hq=Hkv * r.choice((1, 2)), Hkv=Hkv, seed=r.randrange(2**31), **fields)
    return PackedCase((500, *lengths), (500, *lengths), 0, case)


def _cached(r: random.Random, page: int, heads: int, fields: dict) -> CacheCase:
    B, S = r.choice((1, 3, 4)), r.choice((100, 512, 1200))
    lens = tuple(r.randint(0, S) for _ in range(B - 1)) + (S,)
    return CacheCase(
        B=B, Hq=heads, S=S, lens=lens, page_size=page, seed=r.randrange(2**31), **fields
    )  # fmt: skip


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
