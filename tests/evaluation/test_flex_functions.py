"""The list of functions of scores and masks, on one shape: results and gradients are torch's."""

from __future__ import annotations

from collections import Counter

import torch

from tests.evaluation import flex_functions


def test_functions_give_what_torch_gives():
    listed = flex_functions.cases("", several=0, seed=0)
    found, counts = [], Counter()
    for case in listed:
        if (case.shape, case.dtype) == ("odd lengths", torch.float64):
            outcome = flex_functions.run(case, "cpu")
            counts[outcome.status] += 1
            if not flex_functions.is_expected(case, outcome):
                found.append(outcome)
    assert not found
    assert counts["passed"] > 160 and counts["refused"] == 1 and counts["beyond torch"] <= 1


def test_what_differs_is_found(monkeypatch):
    """A function that is wrong by a little, and one that is refused for no known reason."""
    case = flex_functions.Case("factor of heads", None, "mask_mod", "few queries", torch.float64)
    assert flex_functions.run(case).status == "passed"
    expected = flex_functions._expected
    wrong = lambda q, k, v, s, m: expected(q, k, v, lambda x, *at: s(x, *at) * 1.001, m)  # noqa: E731
    monkeypatch.setattr(flex_functions, "_expected", wrong)
    outcome = flex_functions.run(case)
    assert outcome.status == "failed" and outcome.why.startswith("out differs by")
    refused = flex_functions.Outcome(str(case), "refused", "calls digamma")
    assert not flex_functions.is_expected(case, refused)
