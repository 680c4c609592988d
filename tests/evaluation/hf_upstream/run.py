"""One family's tests with one implementation, in a process of their own; prints JSON."""

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

# The implementation that the tests name -> the beginning of the tests to run. Of the tests for
# FlashAttention 2 only the names count: its package and a GPU are not asked for.
SCOPES = {"sdpa": "test_", "flash_attention_2": "test_flash_attn_2_"}
_ASKED = ("require_flash_attn", "require_torch_accelerator", "slow")
# About the class that holds the tests, not about a model.
_LEFT_OUT = {"test_generation_tester_mixin_inheritance"}


class Result(unittest.TestResult):
    """Test -> [outcome, attention calls, why]."""

    def __init__(self, calls: Counter) -> None:
        super().__init__()
        self.calls, self.found = calls, {}

    def startTest(self, test) -> None:
        super().startTest(test)
        self.calls.clear()

    def _note(self, test, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        if self.found.get(name, ["passed"])[0] == "passed":
            self.found[name] = [outcome, self.calls.total(), why[:300]]

    def addSuccess(self, test) -> None:
        self._note(test, "passed")

    def addSkip(self, test, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test, error) -> None:
        self._note(test, "failed", _line(error))

    addError = addFailure

    def addSubTest(self, test, subtest, error) -> None:
        if error is not None:
            self._note(test, "failed", _line(error))


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


def by_default(implementation: str) -> None:
    """Make it what models use that name none, wherever transformers would take sdpa."""
    settle = PreTrainedModel.get_correct_attn_implementation

    def settled(self, requested_attention, *args, **kwargs):
        chosen = settle(self, requested_attention, *args, **kwargs)
        if requested_attention is None and chosen == "sdpa":
            return settle(self, implementation, *args, **kwargs)
        return chosen

    PreTrainedModel.get_correct_attn_implementation = settled


def run(folder: Path, family: str, scope: str, implementation: str) -> dict[str, list]:
    """Run the tests that name `scope` with `implementation` in its place; changes this process."""
    assert hf_integration.NAME  # the import registers the implementation
    calls: Counter = Counter()
    count(implementation, calls)
    if scope == "sdpa" and implementation != "sdpa":
        by_default(implementation)
    if scope != "sdpa":
        for name in _ASKED:
            setattr(testing_utils, name, lambda test: test)
    case = families.case(family, source.load(folder, {scope: implementation}))
    result = Result(calls)
    names = [n for n in unittest.TestLoader().getTestCaseNames(case) if n not in _LEFT_OUT]
    unittest.TestSuite(case(n) for n in names if n.startswith(SCOPES[scope])).run(result)
    return result.found


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), *sys.argv[2:5])
    Path(sys.argv[5]).write_text(json.dumps(found))
