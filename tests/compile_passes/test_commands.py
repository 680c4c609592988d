"""What the commands of compile_passes refuse, before they run anything."""

import sys

import pytest
import torch

from compile_passes import bench, corpus, sweep
from tests.compile_passes.spellings import refused

REFUSED = refused.__file__


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        (corpus, ["nowhere.py"], "no such file: nowhere.py"),
        (corpus, [__file__], "test_commands.py has no CASES"),
        (corpus, [__file__, "--modes", "eval,fast"], "'fast' is none of eval, train, dynamic"),
        (sweep, ["--slice", "3"], "--slice must be i/n with i below n, got '3'"),
        (sweep, ["--seconds", "0"], "--seconds must be at least 1, got 0"),
        (sweep, ["--json", __file__], "test_commands.py holds no results"),
        (sweep, ["--json", "nowhere/a.json"], "no such folder: nowhere"),
        (bench, ["cost", "--json", "nowhere/a.json"], "no such folder: nowhere"),
        (corpus, [REFUSED, "-k", "nosuchcase"], "no case's name contains 'nosuchcase'"),
        (sweep, ["nosuchmodel"], "no architecture 'nosuchmodel'"),
        (bench, ["speed", "--device", "cpu"], "needs CUDA; --tiny tries the command"),
        (bench, ["cost", "--device", "cuda"], "torch sees no such device"),
        (bench, ["speed", "--tiny", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (bench, ["speed", "--tiny", "--variants", "fast"], "'fast' is none of fused, inductor"),
    ],
)
def test_refusals(command, arguments, message, monkeypatch, capsys):
    if command is sweep:
        pytest.importorskip("transformers", reason="the sweep is over its models")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err


def test_the_interval_of_a_median():
    middle, low, high = bench.median_interval([1.0 + i / 100 for i in range(21)])
    assert (middle, low, high) == (1.1, 1.06, 1.15)
    assert bench.median_interval([2.0]) == (2.0, 2.0, 2.0)
