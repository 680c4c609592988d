"""`bench memory` on the CPU: what is measured, and what attention written by hand stores."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fa_ops.bench import sweep
from fa_ops.bench.problems import Problem
from fa_ops.cli import bench as app


def run(*arguments):
    return CliRunner().invoke(app, ["memory", "--device", "cpu", *map(str, arguments)])


def test_all_implementations_compute_the_same():
    q, k, v = Problem(1, 2, 2, 33, 16, True, torch.float32).inputs("cpu", "bhsd")
    expected = sweep.CALLS["eager"](q, k, v)
    for call in sweep.CALLS.values():
        torch.testing.assert_close(call(q, k, v), expected)


def test_peaks_are_written_and_those_of_fa_ops_are_linear(tmp_path):
    path = tmp_path / "memory.json"
    lengths = "1024,2048"
    result = run("--lengths", lengths, "--heads", 2, "--head-dim", 32, "--json", path)
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert content["family"] == "memory" and content["environment"]["date"]
    records = content["records"]
    assert len(records) == 6 and all("mib" in r or r["not_measured"] for r in records)
    peaks = {(r["implementation"], r["S"]): r["mib"] for r in records if "mib" in r}
    if len(peaks) == 6:  # the system reports peaks
        scores = 2 * 2048 * 2048 * 4 / 2**20
        assert peaks["eager", 2048] > scores > 2 * peaks["fa_ops", 2048]


def test_a_peak_that_cannot_be_measured_has_a_reason(monkeypatch):
    def out_of_memory(step, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    problem = Problem(1, 1, 1, 8, 8, True, torch.float32)
    monkeypatch.setattr(sweep, "peak_memory", out_of_memory)
    assert "Tried to allocate" in sweep.measure_peak(problem, "eager", "cpu").reason
    monkeypatch.setattr(sweep, "peak_memory", lambda step, device: None)
    (record,) = sweep.memory_records([sweep.measure_peak(problem, "eager", "cpu")])
    assert "resident set" in record["not_measured"] and "mib" not in record


@pytest.mark.parametrize("lengths", ["0", "12,x"])
def test_invalid_lengths_are_refused(lengths):
    result = run("--lengths", lengths)
    assert result.exit_code == 2 and "must be positive integers" in result.output
