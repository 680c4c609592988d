"""Sinks of +inf and NaN, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests import infinite_sinks

BACKENDS = ("cpu", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", infinite_sinks.CALLS)
def test_infinite_sinks_leave_no_weight_to_keys(name, backend):
    infinite_sinks.check_results(name, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", infinite_sinks.WITH_GRADIENTS)
def test_their_gradients_are_those_of_lse(name, backend, dtype):
    infinite_sinks.check_gradients(name, backend, dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_infinite_state_has_all_weight(backend):
    infinite_sinks.check_merging(backend)
