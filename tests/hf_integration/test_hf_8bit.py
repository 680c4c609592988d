"""attn_implementation="fa_ops_8bit": prefills with 8-bit products, refused in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

import fa_ops
import hf_integration
from hf_integration import attention, operators

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def logits(model, name, tokens, **options):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(tokens, **options).logits


@pytest.fixture
def calls(monkeypatch):
    made = []
    original = fa_ops.quantized_attention
    monkeypatch.setattr(
        operators.fa_ops, "quantized_attention",
        lambda *args, **options: made.append(options) or original(*args, **options),
    )  # fmt: skip
    return made


@pytest.mark.parametrize("padding", [0, 9])
def test_a_prefill_is_close_to_16_bits_but_not_equal(model, calls, padding):
    tokens = torch.randint(97, (2, 70))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    expected = logits(model, "fa_ops", tokens, attention_mask=mask)[:, padding:]
    actual = logits(model, "fa_ops_8bit", tokens, attention_mask=mask)[:, padding:]
    assert len(calls) == 2  # one of each layer
    assert (calls[0]["key_ranges"] is not None) == (padding > 0)
    error = (actual - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.05


def test_named_layers_keep_16_bits(model, calls):
    tokens = torch.randint(97, (2, 70))
    hf_integration.keep_16_bit(model, ["model.layers.1"])
    logits(model, "fa_ops_8bit", tokens)
    assert len(calls) == 1  # of the first layer
    notes = str(hf_integration.explain(model))
    assert "16-bit products, as keep_16_bit chose" in notes and "8-bit products for" in notes
    hf_integration.keep_16_bit(model, ["model"])
    assert torch.equal(logits(model, "fa_ops_8bit", tokens), logits(model, "fa_ops", tokens))
    hf_integration.keep_16_bit(model, [])
    logits(model, "fa_ops_8bit", tokens)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "names, message",
    [
        ("model", "got 'model'"), (None, "got None"), ([1], r"got \[1\]"),
        (["model.layers.2"], "no 'model.layers.2'"),
    ],
)  # fmt: skip
def test_names_of_other_layers_are_refused(names, message, model):
    with pytest.raises((TypeError, ValueError), match=f"names must .*{message}"):
        hf_integration.keep_16_bit(model, names)


def test_a_config_is_no_model(model):
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got LlamaConfig"):
        hf_integration.keep_16_bit(model.config, [])


def test_sinks_and_windows(calls):
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=20
    )
    model, tokens = GptOssForCausalLM(config).eval(), torch.randint(97, (1, 60))
    expected = logits(model, "eager", tokens)
    actual = logits(model, "fa_ops_8bit", tokens)
    assert len(calls) == 2 and all(call["sinks"] is not None for call in calls)
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05  # a token may be routed to another expert


def test_decoding_steps_have_16_bit_products(model, calls):
    model.set_attn_implementation("fa_ops_8bit")
    with torch.no_grad():
        model.generate(torch.randint(97, (1, 30)), max_new_tokens=5, do_sample=False)
    assert len(calls) == 2  # of the prefill alone


def test_a_first_token_is_computed_as_the_implementation_says(model):
    """The decisions for one query are remembered, and those of the two names differ."""
    token = torch.randint(97, (1, 1))
    expected = {name: logits(model, name, token) for name in ("eager", "fa_ops")}
    for first in ("fa_ops_8bit", "fa_ops"):
        attention._remembered.clear()
        found = {name: logits(model, name, token) for name in (first, "fa_ops", "fa_ops_8bit")}
        assert torch.equal(found["fa_ops"], expected["fa_ops"])
        assert not torch.equal(found["fa_ops_8bit"], expected["fa_ops"])
    assert torch.allclose(expected["fa_ops"], expected["eager"], atol=1e-5)


def test_training_is_refused(model):
    model.set_attn_implementation("fa_ops_8bit")
    tokens = torch.randint(97, (1, 30))
    with pytest.raises(ValueError, match="'fa_ops_8bit' is for inference"):
        model(tokens)
    layer = nn.Module().train()
    q = torch.randn(1, 2, 20, 8)
    with pytest.raises(ValueError, match="is for inference"):
        hf_integration.fa_ops_8bit_attention_forward(layer, q, q, q, dropout=0.1)
    for keywords in ({"cache": object()}, {"write_index": torch.arange(20)}):
        with pytest.raises(NotImplementedError, match="has no continuous batching"):
            hf_integration.fa_ops_8bit_attention_forward(layer, q, q, q, **keywords)


def test_a_mask_with_holes_has_16_bit_products_and_a_warning(calls, monkeypatch):
    warned = []
    monkeypatch.setattr(operators._logger, "warning_once", warned.append)
    q = torch.randn(1, 2, 20, 8)
    mask = torch.rand(1, 1, 20, 20) > 0.3
    actual, _ = hf_integration.fa_ops_8bit_attention_forward(nn.Module(), q, q, q, mask)
    assert torch.equal(actual, fa_ops.attention(q, q, q, mask).transpose(1, 2))
    assert not calls and "16-bit products" in warned[0]


def test_explain_says_so(model):
    model.set_attn_implementation("fa_ops_8bit")
    explanation = str(hf_integration.explain(model))
    assert "8-bit products for prompts and more than 16 queries" in explanation


def test_compiled_models_agree(model):
    tokens = torch.randint(97, (1, 40))
    expected = logits(model, "fa_ops_8bit", tokens)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        actual = compiled(tokens).logits
    assert torch.allclose(actual, expected, atol=1e-5)
