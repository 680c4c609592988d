"""The attention backends "fa_ops" and "fa_ops_8bit" of diffusers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'fa-ops[diffusers]'")

import tiny_diffusers
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from tiny_diffusers import TINY, padding, randn

import fa_ops
import hf_integration.diffusers
from hf_integration.diffusers.attention import answers_sdpa
from tests.evaluation import diffusers_bench

# Whether the model's masks are lengths, two runs of keys, or added to scores; None: it has none.
MASKS = {
    "flux": None,
    "qwen_image": "keys",
    "wan": None,
    "sd3": None,
    "sdxl": "dense",
    "z_image": "lengths",
    "hunyuan_video": "lengths",
    "cogvideox": None,
}


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    """diffusers' own backend before and after each test."""
    with attention_backend("native"):
        hf_integration.diffusers.mask_counts.clear()
        yield


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The functions of fa_ops that are called."""
    found = []
    for name in ("attention", "quantized_attention"):
        function = getattr(fa_ops, name)

        def counted(*args, name=name, function=function, **options):
            found.append(name)
            return function(*args, **options)

        monkeypatch.setattr(fa_ops, name, counted)
    return found


def outcome(model, inputs: dict) -> list[torch.Tensor]:
    """The output of a model, and the gradients of its parameters."""
    model.zero_grad()
    out = tiny_diffusers.run(model, inputs)
    (out * randn(*out.shape)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", TINY)
def test_models_give_the_results_and_gradients_of_native_attention(name, calls):
    model, inputs = TINY[name].build(), TINY[name].inputs()
    model.set_attention_backend("native")
    expected = outcome(model, inputs)
    assert not calls
    model.set_attention_backend("fa_ops")
    with fa_ops.use_backend("reference"):  # in float64: not what native attention computes
        actual = outcome(model, inputs)
    assert set(calls) == {"attention"}
    assert len(actual) == len(expected) > 10
    for x, y in zip(actual, expected):
        assert (x - y).abs().max() <= 1e-4 * max(1.0, y.abs().max())
    assert set(hf_integration.diffusers.mask_counts) - {"dense"} <= {MASKS[name]} - {"dense"}
    assert (MASKS[name] is None) == (not hf_integration.diffusers.mask_counts)


def test_checkpointed_training_has_the_same_gradients():
    model, inputs = TINY["flux"].build(), TINY["flux"].inputs()
    model.set_attention_backend("fa_ops")
    expected = outcome(model, inputs)
    model.train()
    model.enable_gradient_checkpointing()
    for x, y in zip(outcome(model, inputs), expected, strict=True):
        assert torch.allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("name", ["flux", "qwen_image", "sd3"])
def test_models_compile_to_one_graph(name):
    model, inputs, graphs = TINY[name].build(), TINY[name].inputs(), []
    model.set_attention_backend("fa_ops")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=lambda g, _: graphs.append(g) or g)
    with torch.no_grad():
        expected = tiny_diffusers.run(model, inputs)
        assert torch.allclose(tiny_diffusers.run(compiled, inputs), expected, atol=1e-5)
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert any("fa.attention" in target for target in targets)
    assert not any("scaled_dot_product" in target for target in targets)


def qkv(Sq: int = 5, Sk: int = 9, heads: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, S, H, 16) for S, H in ((Sq, 4), (Sk, heads), (Sk, heads)))


def sdpa(query, key, value, mask=None, **options):
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*tensors, mask, enable_gqa=True, **options).transpose(
        1, 2
    )


@pytest.mark.parametrize(
    "mask, encoding",
    [
        (padding(4, 9, size=9), "lengths"),
        (padding(4, 9, size=9).flip(1), "ranges"),
        (padding(4, 9, size=9)[:, None, None], "lengths"),
        (padding(4, size=9)[:, None, None], "lengths"),
        (padding(4, 9, size=9) & (torch.arange(9) != 2), "keys"),
        (torch.tril(torch.ones(5, 9, dtype=torch.bool)), "dense"),
        (randn(2, 1, 1, 9), "dense"),
        (randn(2, 4, 5, 9), "dense"),
    ],
)
def test_masks(mask, encoding):
    q, k, v = qkv()
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="fa_ops")
    full = mask[:, None, None] if mask.shape == (2, 9) else mask
    assert torch.allclose(out, sdpa(q, k, v, full), atol=1e-5)
    assert dict(hf_integration.diffusers.mask_counts) == {encoding: 1}


def test_a_row_whose_keys_are_all_masked_gives_zeros():
    q, k, v = qkv()
    out = dispatch_attention_fn(q, k, v, attn_mask=padding(0, 9, size=9), backend="fa_ops")
    assert not out[0].any() and out[1].any()


@pytest.mark.parametrize("Sq, Sk", [(5, 5), (5, 9), (9, 5)])
def test_causality_is_that_of_sdpa(Sq, Sk):
    q, k, v = qkv(Sq, Sk)
    out = dispatch_attention_fn(q, k, v, is_causal=True, backend="fa_ops")
    assert torch.allclose(out, sdpa(q, k, v, is_causal=True), atol=1e-5)
    with pytest.raises(ValueError, match="attn_mask must be None with is_causal=True"):
        dispatch_attention_fn(
            q, k, v, attn_mask=padding(4, 5, size=Sk), is_causal=True, backend="fa_ops"
        )


def test_lse_is_returned_on_request():
    q, k, v = qkv()
    options = {"scale": 0.3, "attention_kwargs": {"return_lse": True}}
    out, lse = dispatch_attention_fn(q, k, v, backend="fa_ops", **options)
    scores = 0.3 * torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(2, 2))
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out, sdpa(q, k, v, scale=0.3), atol=1e-5)


def test_sdpa_calls_of_processors_follow_the_active_backend(calls):
    TINY["sd3"].build().set_attention_backend("fa_ops")
    q, k, v = (x.transpose(1, 2) for x in qkv(heads=4))
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.2)
    attend = attention_processor.F.scaled_dot_product_attention
    assert torch.allclose(attend(q, k, v, scale=0.2), expected, atol=1e-5)
    assert calls == ["attention"]
    assert torch.allclose(attend(q[0], k[0], v[0], scale=0.2), expected[0], atol=1e-5)
    square = torch.tril(torch.ones(2, 9, dtype=torch.bool))  # (Sq, Sk), with Sq equal to B
    masked = F.scaled_dot_product_attention(q[:, :, :2], k, v, square)
    assert torch.allclose(attend(q[:, :, :2], k, v, square), masked, atol=1e-5)
    calls.clear()
    with attention_backend("native"):
        assert torch.equal(attend(q, k, v, scale=0.2), expected)
    assert not calls
    assert attention_processor.F.gelu is F.gelu
    assert F.scaled_dot_product_attention is not attend


def test_8bit_products(calls):
    q, k, v = qkv(64, 96)
    exact = sdpa(q, k, v, padding(40, 96, size=96)[:, None, None])
    with pytest.raises(ValueError, match="is for inference"):
        dispatch_attention_fn(q.requires_grad_(), k, v, backend="fa_ops_8bit")
    assert not calls
    with torch.no_grad():
        out = dispatch_attention_fn(
            q, k, v, attn_mask=padding(40, 96, size=96), backend="fa_ops_8bit"
        )
        assert calls == ["quantized_attention"]
        assert 0 < (out - exact).norm() < 0.08 * exact.norm()
        mask = randn(2, 1, 1, 96)
        out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="fa_ops_8bit")
    assert calls == ["quantized_attention", "attention"]
    assert torch.allclose(out, sdpa(q, k, v, mask), atol=1e-5)


def test_a_model_with_8bit_products_is_close(calls):
    model, inputs = TINY["hunyuan_video"].build(), TINY["hunyuan_video"].inputs()
    with torch.no_grad():
        expected = tiny_diffusers.run(model, inputs)
        model.set_attention_backend("fa_ops_8bit")
        actual = tiny_diffusers.run(model, inputs)
    assert "quantized_attention" in calls
    assert 0 < (actual - expected).norm() < 0.05 * expected.norm()


def test_named_modules_keep_16_bits(calls):
    model, inputs = TINY["hunyuan_video"].build(), TINY["hunyuan_video"].inputs()
    keep, name = hf_integration.diffusers.keep_16_bit, "transformer_blocks.0"
    with pytest.raises(ValueError, match="'transformer_blocks.0' has none: call set_attention_b"):
        keep(model, [name])
    with torch.no_grad():
        model.set_attention_backend("fa_ops_8bit")
        tiny_diffusers.run(model, inputs)
        before = calls.count("quantized_attention"), calls.count("attention")
        calls.clear()
        with pytest.raises(ValueError, match="it has no 'blocks.77'"):
            keep(model, [name, "blocks.77"])
        keep(model, [name])
        tiny_diffusers.run(model, inputs)
    after = calls.count("quantized_attention"), calls.count("attention")
    assert after[0] == before[0] - 1 and after[1] == before[1] + 1
    with pytest.raises(TypeError, match="names must hold names of modules, got 'blocks'"):
        keep(model, "blocks")


def test_the_names_are_members_of_diffusers_list():
    assert AttentionBackendName("fa_ops") is AttentionBackendName.FA_OPS
    assert AttentionBackendName("fa_ops_8bit") is AttentionBackendName.FA_OPS_8BIT
    names = [member.value for member in AttentionBackendName]
    hf_integration.diffusers.register()
    assert [member.value for member in AttentionBackendName] == names
    assert names.count("fa_ops") == 1


def layers(model) -> dict[str, tuple[str, str]]:
    return {e.kind: (e.runs, e.why) for e in hf_integration.diffusers.explain(model).layers}


def test_explain():
    model = TINY["hunyuan_video"].build()
    found = layers(model)
    assert found["HunyuanVideoAttnProcessor2_0"][0] == "native"
    assert "set_attention_backend('fa_ops')" in found["HunyuanVideoAttnProcessor2_0"][1]
    model.set_attention_backend("fa_ops")
    found = layers(model)
    assert {runs for runs, _ in found.values()} == {"fa_ops, backend cpu"}
    assert "it calls SDPA itself" in found["AttnProcessor2_0"][1]
    tiny_diffusers.run(model, TINY["hunyuan_video"].inputs())
    assert "lengths: 2" in str(hf_integration.diffusers.explain(model))


def test_what_is_no_model_or_mask_is_refused():
    with pytest.raises(TypeError, match="got dict; of a pipeline, pass pipeline.transformer"):
        hf_integration.diffusers.explain({})
    with pytest.raises(TypeError, match="attn_mask must be a Tensor or None, got list"):
        dispatch_attention_fn(*qkv(), attn_mask=[1], backend="fa_ops")


def test_explain_names_sdpa_calls_that_are_not_answered(monkeypatch):
    model = TINY["sd3"].build()
    model.set_attention_backend("fa_ops")
    monkeypatch.setattr(attention_processor, "F", F)
    (runs, why) = layers(model)["JointAttnProcessor2_0"]
    assert runs == "torch's scaled_dot_product_attention" and "changes it" in why
    monkeypatch.undo()
    assert answers_sdpa(attention_processor)


def test_the_environment_variable_is_read():
    code = (
        "import hf_integration.diffusers, torch; "
        "from diffusers.models import attention_dispatch as a, attention_processor as p; "
        "print(a._AttentionBackendRegistry.get_active_backend()[0].value, "
        "p.F.scaled_dot_product_attention.__module__)"
    )
    environment = {**os.environ, "DIFFUSERS_ATTN_BACKEND": "fa_ops"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.stdout.split() == ["fa_ops", "hf_integration.diffusers.attention"], run.stderr


def test_the_benchmark_compares_results(monkeypatch, tmp_path):
    monkeypatch.setattr(diffusers_bench, "SHAPES", {"flux": (1, 520), "wan": (1, 16)})
    monkeypatch.setattr(diffusers_bench, "BACKENDS", ("fa_ops", "native", "flash"))
    options = ["--device", "cpu", "--dtype", "float32", "--budget", "1"]
    with fa_ops.use_backend("reference"):
        rows = diffusers_bench.main([*options, "--json", str(tmp_path / "out.json")])
    assert len(rows) == 8  # without flash-attn
    assert all(row["ms"] > 0 and row["error"] < 1e-5 for row in rows)
    assert any(row["error"] > 0 for row in rows)
