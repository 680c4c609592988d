"""Sinks of +inf and NaN on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests import infinite_sinks

BACKENDS = ("triton", "hopper")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", infinite_sinks.CALLS)
def test_infinite_sinks_leave_no_weight_to_keys(name, backend):
    infinite_sinks.check_results(name, backend, "cuda", torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", infinite_sinks.WITH_GRADIENTS)
def test_their_gradients_are_those_of_lse(name, backend):
    infinite_sinks.check_gradients(name, backend, "cuda", torch.bfloat16)


def test_an_infinite_state_has_all_weight():
    infinite_sinks.check_merging("triton", "cuda")
