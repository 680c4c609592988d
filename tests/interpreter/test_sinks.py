"""Sinks of +inf and NaN in the Triton kernels."""

from __future__ import annotations

import importlib

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import attention_call
from tests import infinite_sinks

kernel = importlib.import_module("fa_ops.backends.triton.forward")

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("name", ["causal", "packed", "cache", "8 bits, rows without keys"])
def test_infinite_sinks_leave_no_weight_to_keys(name):
    infinite_sinks.check_results(name, "triton")


@pytest.mark.parametrize("name", ["lengths", "packed"])
def test_their_gradients_are_those_of_lse(name):
    infinite_sinks.check_gradients(name, "triton")


def test_an_infinite_state_has_all_weight():
    infinite_sinks.check_merging("triton")


@pytest.mark.parametrize("size, recomputed", [(4e5, True), (100.0, False)])
def test_keys_far_below_a_sink_are_recomputed(size, recomputed, monkeypatch):
    """A GPU rounds a product differently from the maximum: its weight may be infinite, times 0."""
    calls, replace = [], kernel.replace_nonfinite
    monkeypatch.setattr(kernel, "replace_nonfinite", lambda x: calls.append(1) or replace(x))
    q, k = torch.full((1, 1, 20, 16), size), torch.full((1, 1, 20, 16), -size)
    call = attention_call(q, k, q, sinks=torch.tensor([0.5]))
    out, lse = backend.forward(call)
    assert bool(calls) == recomputed
    expected = reference.forward(call)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
