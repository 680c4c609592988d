"""The gradient of sinks on Hopper, from what the kernels leave in memory."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from fa_ops.backends.hopper.backward import sink_gradient

SINKS = torch.tensor([0.5, math.inf, -math.inf])
LSE = torch.tensor([[1.0, 0.5, -math.inf], [math.inf, math.inf, -math.inf], [2.0, -1.0, -math.inf]])
DELTA = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 9.0], [7.0, 8.0, 0.0, 9.0]])  # padded


def gradient(outside: torch.Tensor | None, columns: int) -> list[float]:
    plan = SimpleNamespace(row_sums=lambda workspace: workspace)
    return sink_gradient(SINKS, LSE[:, :columns], plan, DELTA, outside).tolist()


def test_an_infinite_sink_has_all_weight_and_minus_infinity_none():
    of_first = -(math.exp(-0.5) * 1.0 + 1.0 * 2.0)
    torch.testing.assert_close(gradient(None, 2), [of_first, -9.0, 0.0])


def test_tokens_outside_every_sequence_have_no_sink():
    outside = torch.tensor([False, False, True])
    assert gradient(outside, 3) == gradient(None, 2)
