"""The command for torch's tests of SDPA, on a file with a few tests that call aten's operator."""

import json
import sys
import unittest

import pytest
import torch
import typer

from fa_ops.compat import sdpa
from tests.evaluation import torch_upstream

TESTS = """
import unittest
import torch
from beside import flash
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.common_utils import TestCase, parametrize


class TestFlash(TestCase):
    @parametrize("scale", [0.5, 1.0, 2.0])
    def test_scale(self, device, scale):
        q = torch.randn(1, 2, 5, 8, device=device)
        self.assertEqual(flash(q, scale), flash(q, scale))

    def test_scale_of_nothing(self, device):
        raise ValueError("with any kernel")

    def test_refused(self, device):
        with self.assertRaises(NotImplementedError):
            flash(torch.randn(1, 2, 5, 8, device=device), 1.0)

    def test_warned_once_in_a_process(self, device):
        with self.assertWarnsRegex(UserWarning, "on tensors of dimension other than 2"):
            torch.ones(2, 2, 2).T

    def test_too_large(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    @onlyCUDA
    def test_elsewhere(self, device):
        pass


instantiate_device_type_tests(TestFlash, globals(), only_for=("cpu",))
"""
BESIDE = """
import torch


def flash(q, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, scale=scale)[0]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "test_few.py"
    path.write_text(TESTS)
    (tmp_path / "beside.py").write_text(BESIDE)
    yield path
    sys.modules.pop("beside", None), sys.modules.pop("torch_upstream_test_few", None)


def test_cases_run_with_and_without_the_kernels(file, capsys):
    found = file.parent / "found.json"
    with pytest.raises(typer.Exit) as exit:
        torch_upstream.main(file, 2, 0, "cpu", "", 60.0, found)
    assert exit.value.exit_code == 1
    outcomes = {}
    for row in json.loads(found.read_text()):
        outcomes.setdefault(row["test"], []).append((row["alone"], row["replaced"], row["calls"]))
    assert outcomes == {
        "test_scale": [("failed", "passed", 2)] * 2,  # a CPU has no such kernels of torch's own
        "test_scale_of_nothing": [("failed", "failed", 0)],
        "test_refused": [("passed", "failed", 1)],
        "test_warned_once_in_a_process": [("passed", "passed", 0)],
        "test_too_large": [("skipped", "skipped", 0)],
        "test_elsewhere": [("skipped", "skipped", 0)],
    }
    shown = capsys.readouterr().out
    assert (
        "| test_scale | 2 of 2 | 4 | 0 |" in shown and "| test_refused | 0 of 1 | 1 | 1 |" in shown
    )
    assert "test_refused_cpu: AssertionError: NotImplementedError not raised" in shown
    with pytest.raises(NotImplementedError):  # nothing stays registered
        torch.ops.aten._scaled_dot_product_flash_attention(*[torch.randn(1, 2, 5, 8)] * 3)


def test_failures_of_torch_alone_are_none_of_ours(file):
    with pytest.raises(typer.Exit) as exit:
        torch_upstream.main(file, 3, 0, "cpu", "scale", 60.0, None)
    assert exit.value.exit_code == 0


def test_calls_that_go_to_another_kernel_are_not_counted(monkeypatch):
    def refuse(*_args, **_options):
        raise NotImplementedError("dropout")

    monkeypatch.setitem(sdpa.KERNELS, "_scaled_dot_product_flash_attention", refuse)

    class Test(unittest.TestCase):
        def test_flash(self):
            torch.ops.aten._scaled_dot_product_flash_attention(*[torch.randn(1, 2, 5, 8)] * 3)

    outcome = torch_upstream.compare("test_flash", Test("test_flash"), "cpu")
    assert (outcome.replaced, outcome.calls) == ("failed", 0) and "dropout" in outcome.why


def test_no_case_begins_after_the_time(file, capsys):
    with pytest.raises(typer.Exit) as exit:
        torch_upstream.main(file, 2, 0, "cpu", "", 0.0, None)
    assert exit.value.exit_code == 0 and "test_scale" not in capsys.readouterr().out
