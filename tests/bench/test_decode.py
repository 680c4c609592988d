"""The decoding benchmark's arithmetic; its measurements need a GPU."""

import pytest
import torch
from typer.testing import CliRunner

from fa_ops.bench import decode
from fa_ops.bench.cli import app
from fa_ops.bench.decode import PRESETS, Problem, ratio


def test_bytes_are_what_must_be_read():
    assert Problem(2, 1024).bytes() == 2 * 1024 * 8 * 128 * 2 * 2
    assert Problem(2, 1024, fp8=True).bytes() * 2 == Problem(2, 1024).bytes()
    mla = Problem(3, 64, 128, 1, 576, 512, page=64)
    assert mla.shared and mla.bytes() == 3 * 64 * 576 * 2


def test_ragged_lengths_reach_from_one_key_to_all():
    lengths = Problem(64, 32768, ragged=True).lengths()
    assert (lengths[0], lengths[-1], len(lengths)) == (1, 32768, 64)


def test_the_grid_is_the_issues_as_far_as_it_fits():
    grid = PRESETS["issue"]()
    assert {p.B for p in grid} == {1, 8, 64, 256}
    assert {p.S for p in grid if p.B == 1} == {1024, 4096, 8192, 32768, 131072}
    assert all(p.bytes() <= 36e9 for p in grid)


def test_the_ratio_is_against_the_fastest_peer_that_ran():
    results = {"fa_ops": 10.0, "fa_ops bshd": 5.0, "a": 8.0, "b": 9.0, "c": "did not run"}
    assert ratio(results) == 0.8
    assert ratio({"fa_ops": 10.0, "c": "did not run"}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")
def test_without_a_gpu_it_says_so():
    result = CliRunner().invoke(app, ["decode"])
    assert result.exit_code == 2 and "torch sees no such device" in result.output


def test_every_preset_makes_problems():
    assert all(isinstance(p, Problem) for make in PRESETS.values() for p in make())
    assert {i.name for i in decode.IMPLEMENTATIONS if i.ours} == {"fa_ops", "fa_ops bshd"}
