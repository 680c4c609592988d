"""The sweep command on a few models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.evaluation.hf_sweep import scenarios
from tests.evaluation.hf_sweep.__main__ import main

ROOT = Path(__file__).parents[2]


def test_the_sweep_runs_and_continues(tmp_path, capsys):
    file = tmp_path / "sweep.json"
    types = ["gemma2", "bloom", "vit"]
    main(types, file, "fa_ops,sdpa")
    out = capsys.readouterr().out
    found = json.loads(file.read_text())["types"]
    assert {r[0] for r in found["gemma2"]["fa_ops"].values()} == {"pass", "skip"}
    assert found["gemma2"]["sdpa"].keys() == found["gemma2"]["fa_ops"].keys()
    assert found["bloom"]["fa_ops"]["nopad"][0] == "unrouted"
    # the result of sdpa for Gemma 2, which has a softcap, depends on the release of transformers
    assert ["nopad", "2/0/0/1/0"] in [line.split()[:2] for line in out.splitlines()]
    command = [sys.executable, "-m", "tests.evaluation.hf_sweep", *types, "--json", str(file)]
    again = subprocess.check_output([*command, "--only-report"], text=True, timeout=200, cwd=ROOT)
    assert again.splitlines() == out.splitlines()[-len(again.splitlines()) :]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"types": ["nosuch"]}, "'nosuch' is not a model type"),
        ({"scenarios": "nopad,fast"}, "no scenario is called 'fast'"),
        ({"against": "fast"}, "no implementation is called 'fast'"),
        ({"json_file": Path(__file__)}, "test_hf_sweep.py holds no results"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        main(**arguments)


def test_a_broken_feature_fails_its_scenario(monkeypatch):
    from transformers import AttentionInterface

    import hf_integration
    from tests.evaluation.hf_sweep import run

    def no_sinks(*args, s_aux=None, **kwargs):
        return hf_integration.fa_ops_attention_forward(*args, **kwargs)

    base = run.Base("gpt_oss")
    AttentionInterface.register("fa_ops", no_sinks)
    try:
        results = run.compare(base, "fa_ops", ["nopad", "sink", "window", "static"])
    finally:
        hf_integration.register()
    assert [status for status, _ in results.values()] == ["fail"] * 4


def test_there_are_as_many_scenarios_as_in_the_docs():
    assert len(scenarios.SCENARIOS) == 13
