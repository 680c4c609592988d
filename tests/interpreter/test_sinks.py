"""Sinks of +inf and NaN in the Triton kernels."""

from __future__ import annotations

import pytest

from fa_ops.backends.triton import launch
from tests import infinite_sinks

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
