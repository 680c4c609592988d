"""Multi-head latent attention: decoding attends the latents themselves."""

import pytest
import torch
from tiny_models import build, padding, switch, tokens

from hf_integration import call_rewrites

MODELS = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"]


def count(monkeypatch) -> list[int]:
    """The number of queries of every absorbed call."""
    calls = []
    absorb = call_rewrites.absorb_latents

    def counted(layer, query, *rest):
        calls.append(query.shape[2])
        return absorb(layer, query, *rest)

    monkeypatch.setattr(call_rewrites, "absorb_latents", counted)
    return calls


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic cache", "static cache"])
@pytest.mark.parametrize("model_type", MODELS)
def test_decoding_absorbs_the_projections(model_type, cache, monkeypatch):
    model, calls, results = build(model_type), count(monkeypatch), []
    for mask in (torch.ones_like(padding()), padding()):
        for name in ("eager", "fa_ops"):
            switch(model, name)
            out = model.generate(
                tokens(),
                attention_mask=mask,
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
            results.append((out.sequences, torch.stack(out.logits)))
        (eager, logits), (ours, our_logits) = results[-2:]
        assert torch.equal(ours, eager)
        torch.testing.assert_close(our_logits, logits, atol=1e-4, rtol=1e-4)
    assert set(calls) == {1}
    assert len(calls) == 2 * 4 * model.config.num_hidden_layers


def test_latents_are_expanded_if_the_projection_is_no_plain_linear(monkeypatch):
    """A quantised projection, for instance."""

    class Other(torch.nn.Linear):
        pass

    model, calls = build("deepseek_v3"), count(monkeypatch)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Other
    options = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False)
    ours = model.generate(tokens(), **options)
    switch(model, "eager")
    assert torch.equal(ours, model.generate(tokens(), **options))
    assert not calls


def test_other_implementations_expand_latents():
    model = build("deepseek_v3")
    with torch.no_grad():
        eager, sdpa = (switch(model, n) or model(tokens()).logits for n in ("eager", "sdpa"))
    torch.testing.assert_close(sdpa, eager, atol=1e-4, rtol=1e-4)
