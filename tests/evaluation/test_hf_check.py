"""The check of a real model, on two prompts."""

import pytest
import torch
import typer
from torch import tensor

import hf_integration
from fa_ops.cli import demo as smollm
from tests.evaluation import hf_check as check


def test_a_real_model_gives_the_tokens_of_eager_attention():
    if packages := smollm.missing():
        pytest.skip(f"needs {', '.join(packages)}")
    model, tokenizer = smollm.load("cpu", torch.float32)
    rows = check.prompts(tokenizer, 2)
    assert len({len(row) for row in rows}) == 2
    found = {}
    for name in ("eager", hf_integration.NAME):
        model.set_attn_implementation(name)
        found[name] = check.answers(model, rows, 5, "static", check.padding(tokenizer))
    assert check.differing(found["eager"], found["fa_ops"], 0.0) == (0, 0)
    assert len(found["eager"].tokens.unique()) > 3


def test_bad_arguments_are_refused(monkeypatch):
    with pytest.raises(typer.BadParameter, match="dtype must be float32, .*got 'half'"):
        check.main("cpu", "half")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="torch has no such device"):
        check.main("cuda:1", "")


def test_differences_are_counted_by_margin():
    eager = check.Answers(tensor([[1, 2], [3, 4], [5, 6]]), tensor([[9.0, 0.1], [1.0, 9], [9, 9]]))
    actual = check.Answers(tensor([[1, 7], [8, 4], [5, 6]]), eager.margins)
    assert check.differing(eager, actual, 0.0) == (2, 2)
    assert check.differing(eager, actual, 0.5) == (2, 1)
    assert check.differing(eager, actual, 2.0) == (2, 0)
