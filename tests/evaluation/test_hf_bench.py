"""The benchmark command with tiny sizes, and FlashAttention 3 from its own wheel."""

import json
import sys
import types

import pytest
import torch
import typer

import fa_ops
from tests.evaluation import hf_bench as bench
from tests.evaluation import hf_bench_peers as peers
from tests.evaluation.hf_sweep import tiny
from tests.evaluation.hf_sweep.inputs import padding, tokens


def test_the_benchmark_runs(tmp_path):
    file = tmp_path / "bench.json"
    names = "flash_attention_3,fa_ops"
    options = {"implementations": names, "device": "cpu", "modes": "eager", "repeats": 1}
    bench.main(file, **options, tiny=True)
    rows = json.loads(file.read_text())["records"]
    ran = [row for row in rows if "ms" in row or "ms_per_token" in row]
    assert {row["implementation"] for row in ran} == {"fa_ops"}
    assert {row["part"] for row in ran} == set(bench.PARTS) - {"memory"}
    assert all("error" in row for row in rows if row["part"] == "memory")


def test_cases_after_the_budget_are_skipped(tmp_path):
    file = tmp_path / "bench.json"
    options = {"implementations": "sdpa", "device": "cpu", "modes": "eager", "parts": "prefill"}
    bench.main(file, **options, case="4 x 32", budget=0.0, tiny=True)
    rows = json.loads(file.read_text())["records"]
    assert [row["case"] for row in rows] == ["4 x 32", "4 x 32, left padded"]
    assert {row["error"] for row in rows} == {"TimeoutError: skipped: the time budget is spent"}


def test_layers_of_gemma4_run_with_heads_of_512(tmp_path):
    pytest.importorskip("transformers.models.gemma4", reason="not in this transformers release")
    file = tmp_path / "bench.json"
    options = {"device": "cpu", "modes": "eager", "repeats": 1, "tiny": True}
    options |= {"implementations": "fa_ops", "parts": "decode", "case": "batch 2, 32 of 40"}
    bench.main(file, shape="gemma4-global", **options)
    (row,) = json.loads(file.read_text())["records"]
    assert row["ms_per_token"] > 0, row


def test_a_slice_of_a_model_under_tensor_parallelism_trains(tmp_path):
    file = tmp_path / "bench.json"
    options = {"device": "cpu", "modes": "eager", "repeats": 1, "tiny": True, "parts": "train"}
    bench.main(file, shape="llama-70b-slice", implementations="sdpa,fa_ops", **options)
    rows = json.loads(file.read_text())["records"]
    assert {row["implementation"] for row in rows if row["ms"] > 0} == {"sdpa", "fa_ops"}, rows


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"shape": "bert"}, "no shape is called 'bert': llama, llama-70b-slice, gemma4-global"),
        ({"parts": "prefil"}, "no part is called 'prefil': prefill,"),
        ({"modes": "fast"}, "no mode is called 'fast': eager, compiled"),
        ({"implementations": "sdpa,fast"}, "no implementation is called 'fast': sdpa,"),
        ({"device": "cpu"}, "a model of this size needs CUDA"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        bench.main(**arguments)


@pytest.fixture
def wheel(monkeypatch):
    """A module with the signatures of the wheel, computed by fa_ops."""

    def attend(q, k, v, softmax_scale=None, causal=False):
        out = fa_ops.attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, scale=softmax_scale
        )
        return out.transpose(1, 2), None

    def packed(q, k, v, ends_q, ends_k, longest_q, longest_k, softmax_scale=None, causal=False):
        assert int(ends_q.diff().max()) == longest_q == longest_k
        return fa_ops.attention_varlen(
            q, k, v, ends_q, ends_k, is_causal=causal, scale=softmax_scale
        )

    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_func, module.flash_attn_varlen_func = attend, packed
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name == module.__name__)


def test_the_wheel_replaces_flash_attention_3(wheel):
    assert bench._names(["sdpa", "flash_attention_3"]) == ["sdpa", "fa3_fwd"]
    model = tiny.build(next(tiny.configs("llama")), "fa_ops")
    left, right = padding("left"), padding("right")
    for options in ({}, {"attention_mask": left}, {"attention_mask": right}):
        found = []
        for name in ("fa3_fwd", "eager"):
            model.set_attn_implementation(name)
            with torch.no_grad():
                found.append(model(tokens(), use_cache=False, **options).logits)
        kept = options.get("attention_mask", torch.ones_like(left)).bool()
        torch.testing.assert_close(found[0][kept], found[1][kept])


def test_unsupported_calls_of_the_wheel_raise(wheel):
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no backward"):
        peers.forward(torch.nn.Module(), q, q, q)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="without a longer cache"):
        peers.forward(torch.nn.Module(), q[:, :, :1], q, q)


def test_without_the_wheel_the_name_is_unchanged():
    assert bench._names(["flash_attention_3"]) == ["flash_attention_3"]
