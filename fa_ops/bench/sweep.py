"""Measure every implementation on every problem, forward or backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from fa_ops.bench.check import Checker, grad_out
from fa_ops.bench.peers import Implementation, failure
from fa_ops.bench.problems import Problem
from fa_ops.bench.timing import Run, Time, device_times


@dataclasses.dataclass
class Result:
    """One implementation on one problem: a time, or the reason why there is none."""

    implementation: Implementation
    time: Time | None = None
    reason: str | None = None


def sweep(
    problems: list[Problem],
    implementations: list[Implementation],
    device: str,
    backward: bool,
    budget_ms: float,
) -> Iterator[tuple[Problem, list[Result]]]:
    """Check and time all implementations on each problem."""
    for problem in problems:
        checker = Checker(problem, device, backward)
        results, runs = [], {}
        for implementation in implementations:
            run, reason = _prepare(implementation, problem, device, backward, checker)
            results.append(Result(implementation, reason=reason))
            if run is not None:
                runs[implementation.name] = run
        del checker
        times = device_times(runs, device, budget_ms)
        for result in results:
            result.time = times.get(result.implementation.name)
        yield problem, results


def _prepare(
    implementation: Implementation, problem: Problem, device: str, backward: bool, checker: Checker
) -> tuple[Run | None, str | None]:
    """The run, or the reason for an error: a missing package or feature, memory, wrong results."""
    if problem.biases and not implementation.takes_bias:
        return None, "measured without a bias only"
    try:
        leaves = problem.inputs(device, implementation.layout, requires_grad=backward)
        if problem.biases:
            leaves = (*leaves, problem.bias(device, requires_grad=backward))
        call = implementation.build(problem, device)
        with implementation.context():
            out = call(*leaves)
            results = [out]
            if backward:
                cotangent = grad_out(out)
                results += torch.autograd.grad(out, leaves, cotangent)
        wrong = checker.error(results)
    except Exception as error:
        return None, failure(error)
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    if wrong is not None:
        return None, f"WRONG: {wrong}"
    if not backward:
        return Run(lambda _: call(*leaves), context=implementation.context), None
    # Each backward has a forward pass of its own, as compiled peers free their saved tensors.
    run = Run(
        timed=lambda out: torch.autograd.grad(out, leaves, cotangent),
        prepare=lambda: call(*leaves),
        context=implementation.context,
    )
    return run, None
