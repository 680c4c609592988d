"""Time the Hopper backward pass for every division of a group of query heads into parts:

    python -m tests.gpu.parts [--deterministic] [--budget 60] [--only "H8/1,S4096"]

Prints TFLOP/s for tuning `configs.group_parts`, whose current choice is marked by a star.
"""

from __future__ import annotations

import argparse
import functools

import torch

from fa_ops.backends.hopper import backward, configs
from fa_ops.bench.problems import PRESETS, Problem
from fa_ops.bench.timing import Run, device_times
from fa_ops.call.call import Saved, attention_call
from tests.gpu import hopper_calls
from tests.kernels import relative_error

MORE = [
    Problem(B, Hq, Hkv, S, D, causal)
    for Hq, Hkv in ((32, 8), (28, 4), (8, 1))
    for D in (128, 64)
    for causal in (True, False)
    for B, S in ((32, 512), (8, 2048), (1, 2048), (1, 16384))
]


def runs_of(problem: Problem, deterministic: bool) -> tuple[dict[str, Run], int]:
    """A call for each number of parts, compared with undivided groups, and the current choice."""
    q, k, v = problem.inputs("cuda", "bshd")
    call = attention_call(q, k, v, is_causal=problem.causal, deterministic=deterministic)
    out, lse = hopper_calls.forward(call)
    grad, group = torch.randn_like(out), problem.Hq // problem.Hkv
    choose, chosen = configs.group_parts, []
    runs, first = {}, None
    for parts in (n for n in range(1, group + 1) if group % n == 0):
        plan = functools.lru_cache(backward.BackwardPlan)

        def timed(_, parts=parts, plan=plan):
            backward._plan = plan
            backward.group_parts = lambda *of: chosen.append(choose(*of)) or parts
            return hopper_calls.backward(call._replace(saved=Saved(grad, None, out, lse)))

        runs[str(parts)] = Run(timed)
        grads = timed(None)[:3]
        first = first or grads
        error = max(relative_error(a, b) for a, b in zip(grads, first))
        assert error < 1e-2, f"{problem} in {parts} parts: relative error {error}"
    return runs, chosen[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    wanted = [set(words.split()) for words in options.only.split(",")]
    grouped = [p for p in (*PRESETS["models"](), *MORE) if p.Hq > p.Hkv]
    for problem in (p for p in grouped if any(w <= {*str(p).split()} for w in wanted)):
        runs, chosen = runs_of(problem, options.deterministic)
        times = device_times(runs, "cuda", options.budget)
        rate = {n: problem.flops(backward=True) / t.ms / 1e9 for n, t in times.items()}
        cells = (f"{n}{'*' * (int(n) == chosen)}: {x:4.0f}" for n, x in rate.items())
        print(f"{problem!s:28}", *cells, sep="  ", flush=True)
        del runs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
