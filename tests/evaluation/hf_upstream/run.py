"""Run the tests of a family with an implementation, and write the results as JSON."""

from __future__ import annotations

import json
import sys
import unittest
from collections import Counter
from pathlib import Path

import torch
from transformers import AttentionInterface, PreTrainedModel, testing_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_integration
from tests.evaluation.hf_upstream import families, source

# The implementation that the tests name -> the prefix of the tests to run. Tests of FlashAttention
# 2 run without its package and without a GPU.
SCOPES = {"sdpa": "test_", "flash_attention_2": "test_flash_attn_2_"}
_REQUIREMENTS = ("require_flash_attn", "require_torch_accelerator", "slow")
# It tests the class that contains the tests, not a model.
_EXCLUDED = {"test_generation_tester_mixin_inheritance"}


class Result(unittest.TestResult):
    """Test -> [outcome, attention calls, reason]."""

    def __init__(self, calls: Counter) -> None:
        super().__init__()
        self.calls, self.found = calls, {}

    def startTest(self, test) -> None:
        """Reset the count of attention calls."""
        super().startTest(test)
        self.calls.clear()

    def _record(self, test, outcome: str, reason: str = "") -> None:
        name = test.id().rpartition(".")[2]
        if self.found.get(name, ["passed"])[0] == "passed":
            self.found[name] = [outcome, self.calls.total(), reason[:300]]

    def addSuccess(self, test) -> None:
        """Record a passed test."""
        self._record(test, "passed")

    def addSkip(self, test, reason: str) -> None:
        """Record a skipped test."""
        self._record(test, "skipped", reason)

    def addFailure(self, test, error) -> None:
        """Record a failed test."""
        self._record(test, "failed", _line(error))

    addError = addFailure

    def addSubTest(self, test, subtest, error) -> None:
        """Record a test with a failed subtest."""
        if error is not None:
            self._record(test, "failed", _line(error))


def _line(error: tuple) -> str:
    text = str(error[1]).strip().splitlines()
    return f"{error[0].__name__}: {text[0] if text else ''}"


def count(implementation: str, calls: Counter) -> None:
    """Count the calls of a registered attention function."""
    function = ALL_ATTENTION_FUNCTIONS[implementation]

    def counted(*args, **kwargs):
        if not torch.compiler.is_compiling():
            calls[implementation] += 1
        return function(*args, **kwargs)

    AttentionInterface.register(implementation, counted)


def make_default(implementation: str) -> None:
    """Make an implementation the default of models for which transformers would choose sdpa."""
    choose = PreTrainedModel.get_correct_attn_implementation

    def replaced(self, requested_attention, *args, **kwargs):
        chosen = choose(self, requested_attention, *args, **kwargs)
        if requested_attention is None and chosen == "sdpa":
            return choose(self, implementation, *args, **kwargs)
        return chosen

    PreTrainedModel.get_correct_attn_implementation = replaced


def run(folder: Path, family: str, scope: str, implementation: str) -> dict[str, list]:
    """Run the tests of `scope` with `implementation` in its place; changes global state."""
    assert hf_integration.NAME  # the import registers the implementation
    calls: Counter = Counter()
    count(implementation, calls)
    if scope == "sdpa" and implementation != "sdpa":
        make_default(implementation)
    if scope != "sdpa":
        for name in _REQUIREMENTS:
            setattr(testing_utils, name, lambda test: test)
    case = families.case(family, source.load(folder, {scope: implementation}))
    result = Result(calls)
    names = [n for n in unittest.TestLoader().getTestCaseNames(case) if n not in _EXCLUDED]
    unittest.TestSuite(case(n) for n in names if n.startswith(SCOPES[scope])).run(result)
    return result.found


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), *sys.argv[2:5])
    Path(sys.argv[5]).write_text(json.dumps(found))
