"""The decoding benchmark without its measurements, which need a GPU."""

import pytest
import torch
from typer.testing import CliRunner

from fa_ops.bench import decode
from fa_ops.bench.decode import DECODE_PRESETS, DecodeProblem, ratio
from fa_ops.cli import bench as app


def test_bytes_count_keys_and_values_that_must_be_read():
    assert DecodeProblem(2, 1024).bytes() == 2 * 1024 * 8 * 128 * 2 * 2
    assert DecodeProblem(2, 1024, fp8=True).bytes() * 2 == DecodeProblem(2, 1024).bytes()
    mla = DecodeProblem(3, 64, 128, 1, 576, 512, page=64)
    assert DecodeProblem(8, 32768, padding=28672).bytes() == DecodeProblem(8, 4096).bytes()
    assert mla.shared and mla.bytes() == 3 * 64 * 576 * 2


def test_ragged_lengths_range_from_one_key_to_all():
    lengths = DecodeProblem(64, 32768, ragged=True).lengths()
    assert (lengths[0], lengths[-1], len(lengths)) == (1, 32768, 64)


def test_the_standard_grid_has_every_problem_that_fits_in_memory():
    grid = DECODE_PRESETS["standard"]()
    assert {p.B for p in grid} == {1, 8, 64, 256}
    assert {p.S for p in grid if p.B == 1} == {1024, 4096, 8192, 32768, 131072}
    assert all(p.bytes() <= 36e9 for p in grid)


def test_ratio_compares_with_the_fastest_peer_that_ran():
    results = {"fa_ops": 10.0, "fa_ops bshd": 5.0, "a": 8.0, "b": 9.0, "c": "did not run"}
    assert ratio(results) == 0.8
    assert ratio({"fa_ops": 10.0, "c": "did not run"}) is None
    assert ratio({"fa_ops triton": 10.0, "fa_ops hopper": 8.0, "a": 9.0}, "fa_ops hopper") == 1.125


def test_several_backends_can_be_compared():
    names = [i.name for i in decode.decoders("triton,hopper")]
    assert names == ["fa_ops triton", "fa_ops triton bshd", "fa_ops hopper", "fa_ops hopper bshd"]
    assert [i.name for i in decode.decoders(None)] == ["fa_ops", "fa_ops bshd"]


def test_summaries_have_a_mean_for_each_combination_of_heads():
    wide, narrow = DecodeProblem(1, 1024), DecodeProblem(1, 1024, 64, 8, 64)
    rows = [
        (wide, {"fa_ops": 10.0, "a": 5.0}),
        (wide, {"fa_ops": 10.0, "a": 20.0}),
        (narrow, {"fa_ops": 10.0, "a": 40.0}),
        (narrow, {"fa_ops": "NotImplementedError: no", "a": 40.0}),
    ]
    assert list(decode.summaries(rows, ["fa_ops"])) == [
        "32/8 D128: fa_ops is 0.50x to 2.00x of the best peer, geometric mean 1.00x over 2 cells",
        "64/8 D64: fa_ops is 4.00x to 4.00x of the best peer, geometric mean 4.00x over 1 cells",
        "all heads: fa_ops is 0.50x to 4.00x of the best peer, geometric mean 1.59x over 3 cells",
    ]
    assert list(decode.failures(rows)) == [
        "fa_ops did not run 1 cells, as B1 1024 64/8 D64: NotImplementedError: no"
    ]


def test_options_are_compared_with_the_same_call_without_them():
    plain, other = DecodeProblem(1, 1024), DecodeProblem(8, 1024, invariant=True)
    invariant = DecodeProblem(1, 1024, invariant=True)
    rows = [
        (invariant, {"fa_ops": 12.0, "a": 5.0}),
        (plain, {"fa_ops": 10.0, "a": 8.0}),
        (other, {"fa_ops": 10.0}),
    ]
    assert list(decode.costs(rows, ["fa_ops", "fa_ops triton"])) == [
        "B1 1024 32/8 D128 invariant: fa_ops takes 1.20x its time without the option"
    ]


def test_no_cell_is_started_after_the_time_limit(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(decode.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(decode, "measure", lambda p, implementations, budget: {"fa_ops": 1.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    problems = [DecodeProblem(1, 1024)] * 4
    assert len(decode._rows(problems, [], 60.0, 5.0)) == 2
    assert "2 cells were not started within 5 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--backend", "cpu"], "no backend that decodes on CUDA is called 'cpu'"),
        (["--preset", "standard", "--heads", "9/3"], "no heads of 'standard' are '9/3'"),
        (["--only", "flsh"], "no implementation is called 'flsh'"),
        (["--preset", "all"], "'all' is not one of 'standard', 'quick'"),
    ],
)
def test_unknown_names_are_refused(options, message):
    result = CliRunner().invoke(app, ["decode", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_an_error():
    result = CliRunner().invoke(app, ["decode"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "torch finds no CUDA device" in result.output


def test_every_preset_is_a_list_of_problems():
    assert all(isinstance(p, DecodeProblem) for make in DECODE_PRESETS.values() for p in make())
