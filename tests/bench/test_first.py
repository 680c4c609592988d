"""The benchmark of first calls on a CPU; its measurements need a Hopper GPU."""

import dataclasses
import io
import json
import os
import types

import pytest
from rich.console import Console
from typer.testing import CliRunner

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.bench import first
from fa_ops.bench.first import CALLS, FAMILIES, FamilyRow, FirstCall
from fa_ops.cli import bench as app

SLOW = FamilyRow(
    "b",
    FirstCall(64, 1500.0, 2, 1400.0),
    [FirstCall(200, 900.5, 1, 800.0)],
    FirstCall(64, 70.0, 0, 0),
)
FAST = FamilyRow(
    "a", FirstCall(64, 700.0, 1, 600.0), [FirstCall(200, 0.5, 0, 0.0)], FirstCall(64, 20.0, 0, 0.0)
)


def run(*arguments):
    return CliRunner().invoke(app, ["first", *arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "sparse"), "no family is called 'sparse'"),
        (("--rounds", "0"), "Invalid value for '--rounds'"),
        (("--json", "nowhere/a.json"), "no such folder: nowhere"),
    ],
)
def test_invalid_options_are_refused(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.skipif(hopper.available_error() is None, reason="needs a machine without a Hopper GPU")
def test_a_missing_hopper_gpu_is_an_error():
    result = run()
    assert result.exit_code == 2
    assert f"which {hopper.available_error()}"[:60] in result.output


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_call_the_function_of_their_kind(family, monkeypatch):
    called = []
    functions = "attention", "attention_varlen", "attention_with_kv_cache", "quantized_attention"
    for name in functions:
        original = getattr(fa_ops, name)
        monkeypatch.setattr(
            fa_ops, name, lambda *a, f=original, n=name, **o: called.append(n) or f(*a, **o)
        )
    calls = first.measure(family, (65, 3), "cpu", "cpu")
    assert [call.length for call in calls] == [65, 3] and all(call.ms > 0 for call in calls)
    assert [call.compiled for call in calls] == [0, 0]
    dense, packed, cached, quantized = functions
    kinds = {"forward": dense, "backward": dense, "varlen": packed, "quantized": quantized}
    kinds["quantized varlen"] = packed
    assert called == [kinds.get(family.kind, cached)] * 2


def test_compilations_within_a_call_are_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", lambda source: (b"code", ""))
    monkeypatch.setattr(nvrtc, "_path", lambda source: tmp_path / str(hash(source)))
    monkeypatch.setitem(
        CALLS,
        "forward",
        lambda f, S, *_: lambda: nvrtc.cubins("packed", ["packed_ranges"], {"S": S // 64}),
    )
    calls = first.measure(FAMILIES[0], (64, 65, 128), "cpu", "cpu")
    assert [call.compiled for call in calls] == [1, 0, 1]


def test_overlapping_compilations_are_not_counted_twice():
    assert first.covered([]) == 0.0
    assert first.covered([(5.0, 6.0), (1.0, 3.0), (2.0, 4.0), (2.5, 3.0)]) == 4.0


def test_measure_runs_in_a_new_process(tmp_path):
    family = dataclasses.replace(FAMILIES[0], length=32)
    (call,) = first.measure_in_new_process(str(tmp_path), family, (32,), "cpu", "cpu")
    assert call.length == 32 and call.compiled == 0
    with pytest.raises(RuntimeError, match="forward causal D64: its process ended, 1"):
        first.measure_in_new_process(str(tmp_path), family, (32,), "cpu", "nothing")


def test_the_process_uses_only_the_given_cache(tmp_path, monkeypatch):
    environments = []
    monkeypatch.setattr(first, "measure", lambda *_: environments.append(dict(os.environ)))
    monkeypatch.setattr(first.os, "environ", dict(os.environ))
    first._serve(types.SimpleNamespace(send=lambda _: None), str(tmp_path))
    names = ("FA_OPS_CACHE_DIR", "CUDA_CACHE_DISABLE")
    assert [environments[0][name] for name in names] == [str(tmp_path), "1"]


def test_the_table_shows_times_and_compilations():
    console = Console(file=io.StringIO(), width=120)
    console.print(first.table("first calls", [FAST, SLOW]))
    lines = console.file.getvalue().splitlines()
    cells = {line.split("│")[1].strip(): line for line in lines if "│" in line}
    assert [cell.strip() for cell in cells["b"].split("│")[1:-1]] == [
        "b", "1500.0 +2", "1400", "900.5 +1", "70.0",
    ]  # fmt: skip


def test_verdicts_name_calls_over_their_limit():
    assert list(first.verdicts([FAST])) == [
        "all cold within 1000 ms and warm within 50 ms; no other length compiled"
    ]
    missed = FAST._replace(warm=FirstCall(64, 20.0, 1, 15.0))
    assert list(first.verdicts([SLOW, missed])) == [
        "b: cold 1500 ms, more than 1000",
        "b: warm 70 ms, more than 50",
        "a: compiled with a full cache",
        "b: 200 after 64 compiled 1 more",
    ]


def test_the_median_of_several_rounds_is_reported():
    ms = lambda cold, warm: FAST._replace(  # noqa: E731
        cold=FAST.cold._replace(ms=cold), warm=FAST.warm._replace(ms=warm)
    )
    median = first._median([ms(3.0, 1.0), ms(1.0, 2.0), ms(2.0, 3.0)])
    assert (median.cold.ms, median.warm.ms) == (2.0, 2.0)


def test_records_hold_every_result():
    (record,) = first.records([SLOW])
    assert record["cold"] == {"length": 64, "ms": 1500.0, "compiled": 2, "compile_ms": 1400.0}
    assert record["others"][0]["compiled"] == 1 and record["warm"]["ms"] == 70.0


def test_the_command_prints_and_writes_the_results_of_its_processes(monkeypatch, tmp_path):
    processes = []

    def measure(folder, family, lengths):
        processes.append((folder, family.name, lengths))
        ms = 800.0 if len(lengths) > 1 else 20.0
        return [FirstCall(length, ms, 0, 0.0) for length in lengths]

    monkeypatch.setattr(first, "measure_in_new_process", measure)
    monkeypatch.setattr(hopper, "available_error", lambda: None)
    monkeypatch.setattr(first.torch.cuda, "get_device_name", lambda: "a GPU")
    path = tmp_path / "out.json"
    result = run("--only", "varlen", "--rounds", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0] == "first, a GPU: 2 families; hopper"
    assert "first calls, a GPU" in result.output and "no other length compiled" in result.output
    content = json.loads(path.read_text())
    assert content["family"] == "first" and len(content["records"]) == 4
    assert [r["warm"]["ms"] for r in content["records"]] == [20.0] * 4
    folders = [folder for folder, *_ in processes]
    assert folders[::2] == folders[1::2] and len(set(folders)) == 4  # each cold, then warm
    assert [len(lengths) for *_, lengths in processes] == [4, 1] * 4
