"""Compare one kv head's slice of an implementation's results with the fp64 oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.bench.problems import Problem
from fa_ops.testing import assert_within_budget, naive
from fa_ops.types import Spec

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
