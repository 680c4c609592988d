"""The command for flash-attn's tests, on a file with a few tests."""

import json
import sys

import pytest
import torch
import typer

from tests.evaluation import flash_upstream

pytestmark = pytest.mark.skipif("flash_attn" in sys.modules, reason="flash-attn is imported")
TESTS = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn_interface import flash_attn_combine

hopper = torch.cuda.get_device_capability("cuda") == (9, 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(3, 5), (7, 7), (9, 999)])
def test_good(seqlen_q, seqlen_k, causal):
    assert hopper and seqlen_k < 999
    q, k = (torch.randn(1, n, 2, 8, device="cuda") for n in (seqlen_q, seqlen_k))
    assert flash_attn_func(q, k, k, causal=causal).device.type == "cpu"


@pytest.mark.parametrize("d", [1, 2, 3])
def test_bad(d):
    if d == 1:
        pytest.skip("for no reason")
    assert False, "never"


def test_flash_attn_kvcache_paged_block_table_bounds():
    raise ValueError("kv_lens")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "test_flash_attn.py"
    path.write_text(TESTS)
    return path


def test_cases_are_drawn_run_and_reported(file, capsys):
    found = file.parent / "found.json"
    with pytest.raises(typer.Exit) as exit:
        flash_upstream.main(file, 10, 0, "cpu", 100, "", 60.0, found)
    assert exit.value.exit_code == 1
    shown = capsys.readouterr().out
    assert "| test_good | 4 | 0 | 0 |" in shown and "| test_bad | 0 | 2 | 1 |" in shown
    assert "test_bad: 2 x AssertionError, line" in shown and "(known: lengths beyond" in shown
    outcomes = json.loads(found.read_text())
    assert [o["status"] for o in outcomes].count("passed") == 4
    assert "flash_attn" not in sys.modules


def test_known_failures_are_no_failures(file):
    with pytest.raises(typer.Exit) as exit:
        flash_upstream.main(file, 3, 0, "cpu", 100, "block_table_bounds", 60.0, None)
    assert exit.value.exit_code == 0


def test_draws_repeat_and_differ_by_seed():
    @pytest.mark.parametrize("a", range(100))
    def test(a):
        pass

    first, again, other = (flash_upstream.draw(test, 5, seed, 9) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 5
    assert torch.tensor([x["a"] for x in first]).unique().numel() == 5


def test_no_case_begins_after_the_time(file, capsys):
    with pytest.raises(typer.Exit) as exit:
        flash_upstream.main(file, 10, 0, "cpu", 100, "", 0.0, None)
    assert exit.value.exit_code == 0 and "test_good" not in capsys.readouterr().out
