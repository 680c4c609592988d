"""`python -m fa_ops bench accuracy` on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import fa_ops
from fa_ops.bench import accuracy
from fa_ops.bench.accuracy import Errors
from fa_ops.cli import bench as app
from tests.evaluation import perplexity


def run(*arguments):
    return CliRunner().invoke(app, ["accuracy", "--device", "cpu", *arguments])


def test_the_command_prints_and_writes_errors(tmp_path):
    file = tmp_path / "accuracy.json"
    sizes = ("--lengths", "130,256", "--queries", "16", "--heads", "2", "--head-dim", "32")
    result = run(*sizes, "--only", "gaussian,needle", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "flash-attn 3 fp8" in result.output and "needle" in result.output
    found = json.loads(file.read_text())["records"]
    assert {(r["distribution"], r["length"]) for r in found} == {
        (name, length) for name in ("gaussian", "needle") for length in (130, 256)
    }
    ran = {r["implementation"]: r["rmse"] for r in found if "rmse" in r and r["length"] == 256}
    assert 1e-4 < ran["bfloat16"] < 0.01 < ran["int8"] < 0.06


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "12,x"), "lengths must be positive integers, got '12,x'"),
        (("--lengths", ","), "lengths must be positive integers, got ','"),
        (("--only", "uniform"), "no distribution is called 'uniform'"),
    ],
)
def test_invalid_options_are_refused(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output


def test_errors_are_those_of_known_differences():
    exact = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    assert Errors.of(exact, exact) == (0.0, pytest.approx(1.0), 0.0)
    found = Errors.of(exact + torch.tensor([[0.0, 0.0], [0.0, 1.0]]), exact)
    assert found.rmse == pytest.approx(1 / 50**0.5) and found.worst_row == pytest.approx(0.2)


@pytest.mark.parametrize("name", accuracy.DISTRIBUTIONS)
def test_8_bits_with_scales_of_their_own_beat_one_scale(name):
    inputs = accuracy.draw(name, 512, 32, 2, 64, "cpu")
    again = accuracy.draw(name, 512, 32, 2, 64, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(inputs, again))
    found = accuracy.measure(inputs)
    best = min(found["int8"].rmse, found["int8 rotated"].rmse)
    assert found["bfloat16"].rmse < best < 1.02 * found["e4m3 per tensor"].rmse


@pytest.mark.parametrize("name", accuracy.DISTRIBUTIONS)
def test_heads_may_be_narrow(name):
    errors = accuracy.measure(accuracy.draw(name, 64, 4, 1, 12, "cpu"))
    assert 0 < errors["int8"].rmse < 0.3


def test_the_needle_is_what_its_query_attends():
    inputs = accuracy.draw("needle", 1000, 20, 1, 64, "cpu")
    q, k, v = inputs
    weights = torch.softmax(q.double() @ k.double().mT / 8.0, -1)[0, 0]
    share = weights[torch.arange(20), torch.arange(20) * 50]
    assert 0.7 < share.mean() < 0.99
    wanted = fa_ops.attention(*(x.double() for x in inputs))
    assert torch.allclose(accuracy.exact_attention(inputs), wanted)


def test_the_text_is_long_enough_for_the_language_model():
    assert len(perplexity.text()) > 25_000
