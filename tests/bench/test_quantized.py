"""`bench quantized` on the CPU: what is timed, and what is reported."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fa_ops.bench import quantized
from fa_ops.bench.problems import PRESETS, Problem
from fa_ops.bench.timing import Time
from fa_ops.cli import bench as app

PROBLEM = Problem(1, 4, 2, 40, 32, True, torch.float32)


def test_all_calls_compute_attention():
    q, k, v = PROBLEM.inputs("cpu", "bshd")
    wanted = quantized.CALLS[quantized.BASELINE](PROBLEM, q, k, v)()
    for name in list(quantized.CALLS)[1:4]:
        found = quantized.CALLS[name](PROBLEM, q, k, v)()
        error = ((found.float() - wanted).norm() / wanted.norm()).item()
        assert 0 < error < 0.1, name


def test_times_and_reasons_are_written(tmp_path):
    path = tmp_path / "quantized.json"
    arguments = ["--device", "cpu", "--preset", "tiny", "--budget", "1", "--json", str(path)]
    result = CliRunner().invoke(app, ["quantized", *arguments])
    assert result.exit_code == 0, result.output
    assert "not timed: flash-attn 3" in result.output
    content = json.loads(path.read_text())
    assert content["family"] == "quantized"
    timed = [r["call"] for r in content["records"] if r.get("ms", 0) > 0]
    assert timed == list(quantized.CALLS)[:4] * 2


def test_without_a_preset_a_cpu_measures_problems_of_its_own(monkeypatch):
    measured = []
    monkeypatch.setattr(quantized, "measure", lambda problem, *_: measured.append(problem) or [])
    assert CliRunner().invoke(app, ["quantized", "--device", "cpu"]).exit_code == 0
    assert measured == PRESETS["quantized-cpu"]()


def test_the_longest_kernel_is_attention():
    row = quantized.MeasuredCall(
        PROBLEM, "a", Time(2.0, 2.0, 2.0, 1), {"quantize": 0.25, "attention": 0.5}
    )
    base = quantized.MeasuredCall(PROBLEM, quantized.BASELINE, Time(3.0, 3.0, 3.0, 1))
    assert row.attention_ms == 0.5 and base.attention_ms is None
    shown = [list(column.cells) for column in quantized.table("", [base, row]).columns]
    assert [column[1] for column in shown[2:5]] == ["2.000", "0.500", "0.250"]
    assert shown[6] == ["1.00x", "1.50x"]


@pytest.mark.parametrize("arguments", [["--preset", "none"], ["--only", "none"]])
def test_unknown_names_are_refused(arguments):
    result = CliRunner().invoke(app, ["quantized", "--device", "cpu", *arguments])
    assert result.exit_code == 2 and "'none'" in result.output
