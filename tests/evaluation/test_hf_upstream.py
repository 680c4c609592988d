"""The command for transformers' tests, on a source distribution with a few tests."""

import json
from collections import Counter

import pytest
import transformers
import typer

from tests.evaluation.hf_upstream import families, report, run
from tests.evaluation.hf_upstream.__main__ import main

TESTS = """
import torch
from transformers.testing_utils import require_flash_attn, slow

from .generation.test_utils import GenerationTesterMixin
from .test_other import HERE


class ModelTesterMixin(GenerationTesterMixin):
    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        return inputs_dict

    def forward(self, **options):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = self.all_model_classes[0]._from_config(config, **options).eval()
        with torch.no_grad():
            return model, model(**inputs)[0]

    def test_default(self):
        model, _ = self.forward()
        assert model.config._attn_implementation == "sdpa"

    def test_with_sdpa_alone(self):
        model, _ = self.forward(attn_implementation="sdpa")
        assert model.config._attn_implementation == "sd" + "pa"

    def test_without(self):
        self.skipTest("for no reason")

    @require_flash_attn
    @slow
    def test_flash_attn_2_runs(self):
        model, _ = self.forward(attn_implementation="flash_attention_2")
        assert HERE
"""


@pytest.fixture
def folder(tmp_path):
    def make(version: str = transformers.__version__):
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nVersion: {version}\n")
        (tmp_path / "tests" / "test_modeling_common.py").write_text(TESTS)
        (tmp_path / "tests" / "test_other.py").write_text("HERE = True\n")
        return tmp_path

    return make


def test_the_tests_run_with_fa_ops_and_are_compared(folder, tmp_path, capsys):
    pytest.importorskip("parameterized")
    file = tmp_path / "results.json"
    with pytest.raises(typer.Exit) as end:
        main(folder(), "llama", file, 200)
    assert end.value.exit_code == 1
    runs = json.loads(file.read_text())["llama"]
    outcomes = {name: [test[0] for test in found.values()] for name, found in runs.items()}
    passed = ["passed", "skipped", "passed", "skipped"]  # in the order of their names
    assert outcomes == {
        "sdpa": passed,
        "fa_ops for sdpa": ["passed", "skipped", "failed", "skipped"],
        "fa_ops for flash_attention_2": ["passed"],
    }
    layers = families.FAMILIES["llama"][2]["num_hidden_layers"]
    calls = [test[1] for test in runs["fa_ops for sdpa"].values()]
    assert calls == [layers, 0, layers, 0]
    assert runs["fa_ops for flash_attention_2"]["test_flash_attn_2_runs"][1] == layers
    row = "| llama | 2 / 0 / 2 | 1 / 1 / 2 | 1 / 0 / 0 | 1 | 4 |"
    printed = capsys.readouterr().out
    assert row in printed
    assert "llama: test_with_sdpa_alone: AssertionError" in printed


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_runs_forward(family):
    tester = families.Tester(family)
    config, inputs = tester.prepare_config_and_inputs_for_common()
    for name in families.FAMILIES[family][1]:
        model = getattr(transformers, name)._from_config(config)
        if "MultipleChoice" in name:
            rows = {k: v[:, None].repeat(1, tester.num_choices, 1) for k, v in inputs.items()}
        model(**(rows if "MultipleChoice" in name else inputs))


def test_bad_arguments_are_refused(folder, tmp_path):
    pytest.importorskip("parameterized")

    def refused(path, families: str) -> str:
        with pytest.raises(typer.BadParameter) as error:
            main(path, families)
        return str(error.value)

    assert refused(folder(), "lama").startswith("no model is called 'lama': llama, qwen2")
    installed = transformers.__version__
    assert f"transformers 4.0.0, installed is {installed}" in refused(folder("4.0.0"), "llama")
    found = refused(tmp_path / "tests", "llama")
    assert found.endswith("has no PKG-INFO beside tests/test_modeling_common.py")


def test_a_test_that_did_not_run_is_a_regression():
    base = {"test_a": ["passed", 2, ""], "test_b": ["failed", 1, "x"]}
    replaced = {"test_a": ["skipped", 0, "why"], "test_b": ["passed", 1, ""]}
    assert report.regressions(base, replaced) == ["test_a"]
    assert report.regressions(base, {}) == ["test_a"]
    runs = {report.key(*names): base for names in report.RUNS} | {"fa_ops for sdpa": "not done"}
    assert not report.is_good({"llama": runs})
    assert "llama, fa_ops for sdpa: not done" in report.lines({"llama": runs})
    assert report.is_good({})


def test_a_failed_subtest_is_a_failure():
    import unittest

    class Case(unittest.TestCase):
        def test_it(self):
            with self.subTest(1):
                raise KeyError("gone")

    result = run.Result(Counter())
    Case("test_it").run(result)
    assert result.found["test_it"][0] == "failed"
