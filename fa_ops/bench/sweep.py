"""Measure every implementation on every problem, forward or backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.bench.peers import Implementation, failure
from fa_ops.bench.problems import Problem
from fa_ops.bench.timing import Run, Time, device_times
from fa_ops.call.options import Spec
from fa_ops.testing import assert_within_budget, naive


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


# Compare one kv head's slice of an implementation's results with the fp64 oracle.

NAMES = ("out", "dq", "dk", "dv")


class Checker:
    """The oracle and the error budget for the last kv head of the last sequence of a problem."""

    def __init__(self, problem: Problem, device: str, backward: bool) -> None:
        self.problem, self.backward = problem, backward
        self.expected = self._solve(reference.dense, torch.float64, device)
        self.baseline = self._solve(naive, problem.dtype, device)

    def _slice(self, x: Tensor, H: int) -> Tensor:
        first = H - (H // self.problem.Hkv)
        return x[-1:, first:]

    def _solve(self, function, dtype: torch.dtype, device: str) -> list[Tensor]:
        q, k, v = self.problem.inputs(device, "bhsd")
        heads = (self.problem.Hq, self.problem.Hkv, self.problem.Hkv)
        leaves = [
            self._slice(x, H).to(dtype).requires_grad_(self.backward)
            for x, H in zip((q, k, v), heads)
        ]
        bias = self.problem.bias(device)
        if bias is not None:
            bias = self._slice(bias, self.problem.Hq).to(dtype)
        out, _ = function(*leaves, Spec(bias, is_causal=self.problem.causal))
        if not self.backward:
            return [out]
        return [out, *torch.autograd.grad(out, leaves, grad_out(out).to(dtype))]

    def error(self, results: list[Tensor]) -> str | None:
        """The error message for [out] or [out, dq, dk, dv, ...] of the whole problem, or None.

        The gradient of a bias is not checked, as it is a sum over sequences.
        """
        heads = (self.problem.Hq, self.problem.Hq, self.problem.Hkv, self.problem.Hkv)
        for name, x, H, expected, baseline in zip(
            NAMES, results, heads, self.expected, self.baseline
        ):
            try:
                assert_within_budget(name, self._slice(x, H), expected, baseline)
            except AssertionError as error:
                return str(error)
        return None


def grad_out(out: Tensor) -> Tensor:
    """A gradient in `out`'s memory layout, with the same values for every sequence and head."""
    generator = torch.Generator(out.device).manual_seed(1)
    one = torch.randn(out.shape[-2:], generator=generator, device=out.device)
    return torch.empty_like(out).copy_(one)
