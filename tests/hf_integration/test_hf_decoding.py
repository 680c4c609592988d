"""Decoding on a device whose values must not be read: here the CPU, told that reads cost."""

import pytest
import torch
from tiny_models import build, padding, switch, tokens

import hf_integration
from hf_integration import decoding, masks

NEW = 6
OPTIONS = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, disable_compile=True)


@pytest.fixture(autouse=True)
def reads_cost(monkeypatch):
    monkeypatch.setattr(masks, "_reads_are_free", lambda device: False)
    decoding.forget()


def generate(model, name: str, mask, **options):
    switch(model, name)
    hf_integration.mask_counts.clear()
    return model.generate(tokens(), attention_mask=mask, **OPTIONS | options)


@pytest.mark.parametrize("ways", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("pad", ["none", "left"])
def test_masks_stay_small(model_type, cache, pad, ways):
    model, mask = build(model_type), padding()
    mask = torch.ones_like(mask) if pad == "none" else mask
    ours = generate(model, "fa_ops", mask, cache_implementation=cache, **ways)
    assert {name for name in hf_integration.mask_counts if ":" in name} == set()
    if model_type == "llama":
        kind = {"left": "ranges", "none": "lengths" if cache else "full"}[pad]
        assert hf_integration.mask_counts[kind] >= NEW - 1
    eager = generate(model, "eager", mask, cache_implementation=cache, **ways)
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_right_padded_prompts_and_holes_get_exact_masks(cache):
    """Ones behind them leave holes."""
    model, holes = build("llama"), torch.ones_like(padding())
    holes[1, 3:5] = 0
    for mask in (padding(side="right"), holes):
        ours = generate(model, "fa_ops", mask, cache_implementation=cache)
        assert any("no prefill has shown" in name for name in hf_integration.mask_counts)
        eager = generate(model, "eager", mask, cache_implementation=cache)
        assert torch.equal(ours, eager)


def step(model, cache, mask):
    return model(tokens(S=1), past_key_values=cache, attention_mask=mask).logits


def test_a_mask_that_no_prefill_has_shown_is_exact():
    model = build("llama")
    with torch.no_grad():
        switch(model, "eager")
        cache = model(tokens(), use_cache=True).past_key_values
        mask = torch.ones(2, 13, dtype=torch.long)
        mask[0, :6] = 0
        expected = step(model, cache, mask)
        cache.crop(-1)
        switch(model, "fa_ops")
        torch.testing.assert_close(step(model, cache, mask), expected, atol=1e-4, rtol=1e-4)


def test_another_mask_in_decoding_is_an_error_not_a_wrong_result():
    model = build("llama")
    with torch.no_grad():
        cache = model(tokens(), attention_mask=padding(), use_cache=True).past_key_values
        holes = torch.ones(2, 13, dtype=torch.long)
        holes[0, 5:8] = 0
        with pytest.raises(RuntimeError, match="extended by ones: it has holes"):
            step(model, cache, holes)
        decoding.forget()
        step(model, cache, holes)


def test_models_do_not_share_what_was_shown():
    one, other = build("llama"), build("llama")
    with torch.no_grad():
        cache = one(tokens(), attention_mask=padding(), use_cache=True).past_key_values
        hf_integration.mask_counts.clear()
        step(other, cache, torch.cat([padding(), torch.ones(2, 1).long()], 1))
    assert [n for n in hf_integration.mask_counts if "no prefill has shown" in n]


def test_encoder_masks_are_never_followed():
    model = build("bart")
    mask = padding(side="right")
    results = [generate(model, name, mask) for name in ("fa_ops", "eager")]
    assert torch.equal(*results)
