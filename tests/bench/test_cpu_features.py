"""The benchmark of the CPU backend."""

from __future__ import annotations

import pytest
import torch
import typer

from fa_ops.bench import cpu


def test_run_measures_the_selected_contenders():
    threads = torch.get_num_threads()
    rows = cpu.run(length=64, rounds=1, only="softcap,gradient,naive")
    names = [row.name for row in rows]
    assert names == [
        cpu.BASELINE, "causal, softcap", "causal, float mask with gradient", "naive"
    ]  # fmt: skip
    assert rows[0].forward_ratio == rows[0].training_ratio == 1.0
    assert all(row.forward_ms > 0 and row.training_ms > 0 for row in rows)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", cpu.contenders(16))
def test_every_contender_computes_attention(name):
    contender = cpu.contenders(16)[name]
    out = contender.call(*contender.inputs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    assert out.shape == contender.cotangents[0].shape and torch.isfinite(out).all()
    contender.training()


def test_an_unknown_contender_is_refused_with_the_known_names():
    with pytest.raises(typer.BadParameter, match="no contender is called 'softcup'; there are: "):
        cpu.run(length=64, rounds=1, only="softcup")
