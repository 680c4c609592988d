"""`explain(model)` and `python -m fa_ops doctor --model`."""

import warnings

import pytest
import tiny_models
import torch
from tiny_models import build
from transformers import AutoModel
from typer.testing import CliRunner

import hf_integration
from fa_ops.cli import app


def layers(model) -> dict[str, tuple[int, str, str]]:
    return {e.kind: (len(e.names), e.runs, e.why) for e in hf_integration.explain(model).layers}


def test_equal_layers_are_grouped():
    count, runs, why = layers(build("llama"))["LlamaAttention"]
    assert (count, runs) == (2, "fa_ops, backend cpu")
    assert "masks stay compact" in why and "triton: needs" in why
    found = hf_integration.explain(build("gpt_oss")).layers
    assert [len(e.names) for e in found] == [1, 1]
    assert ["sliding_window 5" in e.why for e in found] == [True, False]
    assert all("sinks" in e.why for e in found)


def test_latent_attention_is_named():
    (about,) = hf_integration.explain(build("deepseek_v3")).layers
    assert "attend the latents themselves" in about.why


def test_other_implementations_are_named():
    model = build("bart")
    tiny_models.switch(model, "sdpa")
    assert {e.runs for e in hf_integration.explain(model).layers} == {"sdpa"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bloom = AutoModel.from_config(tiny_models.config("bloom"), attn_implementation="fa_ops")
    assert layers(bloom)["BloomAttention"][1] == "its own attention code"


def test_mask_counts_and_hooks_are_shown():
    model = build("llama")
    hf_integration.mask_counts.clear()
    model(tiny_models.tokens())
    text = str(hf_integration.explain(model))
    assert "model.layers.0.self_attn and 1 more (LlamaAttention): fa_ops, backend cpu" in text
    assert "causal: 1" in text and "continuous batching: on" in text


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


def test_a_model_on_the_meta_device_is_explained():
    with torch.device("meta"):
        model = AutoModel.from_config(tiny_models.config("llama"), attn_implementation="fa_ops")
    assert all(p.is_meta for p in model.parameters())
    assert layers(model)["LlamaAttention"][:2] == (2, "fa_ops, backend cpu")


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        hf_integration.explain("llama")
    with pytest.raises(TypeError, match="as_flash_attention_2 must be a bool, got 'fa_ops'"):
        hf_integration.register("fa_ops")


def test_doctor_explains_a_model_type_at_its_full_size():
    assert "DogeAttention  32 x fa_ops" in (out := doctor("--model", "doge").stdout)
    assert "masks stay compact until the model computes with them" in out
    out = doctor("--model", "gemma3_text").stdout
    assert "22 x fa_ops, backend cpu" in out and "sliding_window 4096" in out


@pytest.mark.parametrize("model_type", ["mpt", "xglm"])
def test_doctor_shows_models_with_their_own_attention_code(model_type):
    out = doctor("--model", model_type).stdout
    assert "has its own attention code" in out


def test_doctor_explains_the_model_of_a_folder(tmp_path):
    tiny_models.config("llama").save_pretrained(tmp_path)
    out = doctor("--model", str(tmp_path)).stdout
    assert "model llama" in out and "LlamaAttention  2 x fa_ops" in out


def test_doctor_refuses_a_config_without_a_model():
    result = doctor("--model", "encoder-decoder")
    assert result.exit_code == 2 and "encoder-decoder" in result.output


def test_doctor_refuses_a_folder_without_a_model(tmp_path):
    result = doctor("--model", str(tmp_path))
    assert result.exit_code == 2 and "no model's config can be read from" in result.output


def test_doctor_refuses_an_unknown_model_type():
    result = doctor("--model", "nosuch")
    assert result.exit_code == 2 and "neither a folder nor a model type" in result.output
