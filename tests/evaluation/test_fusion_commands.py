"""The arguments of the fusion commands."""

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import typer
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="the sweep is over its models")

from tests.compile_passes.spellings import refused
from tests.evaluation import fusion_bench, fusion_corpus, fusion_libraries, fusion_sweep

REFUSED = refused.__file__


@pytest.fixture(autouse=True)
def restored_options():
    """The commands set options of torch.compile, which later tests must not see."""
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with (
        inductor.patch(fallback_random=inductor.fallback_random),
        functorch.patch(enable_autograd_cache=functorch.enable_autograd_cache),
    ):
        yield


def invoke(command, arguments):
    app = getattr(command, "app", None)
    if app is None:
        app = typer.Typer()
        app.command()(command.main)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        (fusion_corpus, ["nowhere.py"], "no such file: nowhere.py"),
        (fusion_corpus, [__file__], "test_fusion_commands.py has no CASES"),
        (fusion_corpus, [__file__, "--modes", "eval,fast"], "of eval, train, dynamic"),
        (fusion_corpus, [REFUSED, "-k", "nosuchcase"], "no case's name contains 'nosuchcase'"),
        (fusion_sweep, ["--slice", "3"], "--slice must be i/n with i below n, got '3'"),
        (fusion_sweep, ["--seconds", "0"], "Invalid value for '--seconds'"),
        (fusion_sweep, ["--json", __file__], "test_fusion_commands.py holds no results"),
        (fusion_sweep, ["--json", "nowhere/a.json"], "no such folder: nowhere"),
        (fusion_sweep, ["nosuchmodel"], "no architecture 'nosuchmodel'"),
        (fusion_libraries, ["--libraries", "nosuchlibrary"], "of timm, x-transformers"),
        (fusion_libraries, ["--json", __file__], "test_fusion_commands.py holds no results"),
        (fusion_bench, ["cost", "--json", "nowhere/a.json"], "no such folder: nowhere"),
        (fusion_bench, ["cost", "--device", "cuda"], "torch finds no CUDA device"),
        (fusion_bench, ["speed", "--device", "cpu"], "needs CUDA; --tiny tries the command"),
        (fusion_bench, ["speed", "--tiny", "--rounds", "0"], "Invalid value for '--rounds'"),
        (fusion_bench, ["speed", "--tiny", "--variants", "fast"], "of sdpa_fused, fa_ops"),
        (fusion_bench, ["speed", "--tiny", "--workloads", "fast"], "eager_prefill, eager_train,"),
    ],
)
def test_bad_arguments_are_refused(command, arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke(command, arguments)
    assert result.exit_code == 2 and message in result.output


def test_the_corpus_command_runs():
    result = invoke(fusion_corpus, [REFUSED, "--modes", "eval", "--no-peer"])
    assert result.exit_code == 0 and "0 wrong" in result.output


def test_the_table_of_libraries(monkeypatch, tmp_path):
    """One model that is fused, one that cannot be built, and a library that is not installed."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(8, 8)

        def forward(self, x):
            return (self.q(x) @ x.mT).softmax(-1) @ x

    def missing():
        raise ImportError("No module named 'timm'")

    models = {"one": lambda: (Attention(), {"x": torch.randn(2, 4, 12, 8)}), "two": missing}
    libraries = {"x-transformers": lambda: models, "timm": missing}
    monkeypatch.setattr(fusion_libraries, "LIBRARIES", libraries)
    monkeypatch.setattr(fusion_libraries.importlib.metadata, "version", lambda name: "1.0")
    arguments = ["--libraries", "x-transformers,timm", "--json", str(tmp_path / "a.json")]
    output = invoke(fusion_libraries, arguments).output
    assert "timm: not installed" in output and "two: skipped: ImportError" in output
    rows = [line.split("│")[1:-1] for line in output.splitlines() if "x-transformers 1.0 " in line]
    assert [[cell.strip() for cell in row[1:5]] for row in rows] == [
        ["1", "eval", "1", "1"],
        ["1", "train", "1", "1"],
    ]


def test_a_workload_that_fails_is_reported():
    sizes = fusion_bench.Sizes(fusion_bench.TINY)
    timing = fusion_bench.Timing("cpu", rounds=1, repeats=1)
    ((name, found),) = fusion_bench.measure({"unknown": []}, sizes, timing, seconds=300)
    assert name == "unknown" and "KeyError: 'unknown'" in found


def test_the_interval_of_a_median():
    middle, low, high = fusion_bench.median_interval([1.0 + i / 100 for i in range(21)])
    assert (middle, low, high) == (1.1, 1.06, 1.15)
    assert fusion_bench.median_interval([2.0]) == (2.0, 2.0, 2.0)
