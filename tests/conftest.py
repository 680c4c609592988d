"""Uninitialised memory is NaN in all tests, so that a kernel that skips some outputs fails."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import trace_rules

from fa_ops.plans import planning
from fa_ops.testing.inputs import poisoned_memory
from tests.distributed.processes import verdicts  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def nan_poisoned_memory():
    with poisoned_memory():
        yield
    torch._dynamo.reset()
    if torch.empty not in trace_rules.get_torch_obj_rule_map():
        trace_rules.clear_lru_cache()  # a table that Dynamo made while functions were replaced


@pytest.fixture(autouse=True)
def no_plans_of_other_tests():
    """Plans hold functions of backends, which tests replace."""
    planning.forget()
    yield
    planning.forget()
