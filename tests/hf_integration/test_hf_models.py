"""Models with "fa_ops" against eager attention, by architecture."""

import pytest
import tiny_models
import torch
import transformers
from tiny_models import CAUSAL, ENCODERS, SEQ2SEQ, VISION, build, padding, switch, tokens
from torch import Tensor

import hf_integration

TOLERANCE = 2e-5  # relative to the largest logit; a wrong mask or feature changes 1e-2 or more


def outputs(model, implementation: str, **inputs) -> Tensor:
    switch(model, implementation)
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def assert_same(model, keep: Tensor | None = None, **inputs) -> None:
    with torch.no_grad():
        eager, ours = (outputs(model, name, **inputs) for name in ("eager", "fa_ops"))
    difference = (ours - eager).abs()
    if keep is not None:
        difference = difference[keep.bool()]
    assert difference.max() <= TOLERANCE * eager.abs().max()


@pytest.mark.parametrize("model_type", [*CAUSAL, *ENCODERS])
def test_logits_of_unpadded_and_padded_batches_are_those_of_eager_attention(model_type):
    model, ids = build(model_type), tokens()
    hf_integration.mask_counts.clear()
    assert_same(model, input_ids=ids)
    for side in ("left", "right"):
        assert_same(model, padding(side=side), input_ids=ids, attention_mask=padding(side=side))
    assert set(hf_integration.mask_counts) <= {"full", "causal", "ranges"}


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic cache", "static cache"])
@pytest.mark.parametrize("model_type", CAUSAL)
def test_greedy_tokens_are_those_of_eager_attention(model_type, cache):
    model = build(model_type)
    if (model_type, cache) == ("llama4_text", "static") and transformers.__version__ < "5.18":
        pytest.skip("transformers 5.17 cannot generate with this model and a static cache")
    for mask in (torch.ones_like(padding()), padding()):
        results = []
        for implementation in ("eager", "fa_ops"):
            switch(model, implementation)
            results.append(
                model.generate(
                    tokens(),
                    attention_mask=mask,
                    max_new_tokens=5,
                    min_new_tokens=5,
                    do_sample=False,
                    cache_implementation=cache,
                    disable_compile=True,
                )  # fmt: skip
            )
        assert torch.equal(*results)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_a_prefill_in_two_pieces_gives_the_logits_of_one(model_type):
    model, ids = build(model_type), tokens()
    with torch.no_grad():
        whole = outputs(model, "eager", input_ids=ids)
        switch(model, "fa_ops")
        first = model(ids[:, :5], use_cache=True)
        second = model(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    ours = torch.cat([first.logits, second.logits], 1)
    assert (ours - whole).abs().max() <= TOLERANCE * whole.abs().max()


GRADIENTS = [*CAUSAL, *ENCODERS, "t5"]


@pytest.mark.parametrize("model_type", GRADIENTS)
def test_gradients_are_those_of_eager_attention(model_type):
    """Of every parameter, with padding; they include sinks (gpt-oss) and position biases (T5)."""
    model = build(model_type)
    inputs = {"input_ids": tokens(), "attention_mask": padding(side="right")}
    if model_type in SEQ2SEQ:
        inputs["decoder_input_ids"] = tokens(S=7)
    gradients = []
    for implementation in ("eager", "fa_ops"):
        out = outputs(model, implementation, **inputs)
        if model_type not in SEQ2SEQ:
            out = out[inputs["attention_mask"].bool()]
        parameters = dict(model.named_parameters())
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() / out.numel()
        grads = torch.autograd.grad(loss, parameters.values(), allow_unused=True)
        gradients.append(dict(zip(parameters, grads, strict=True)))
    for name, eager in gradients[0].items():
        ours = gradients[1][name]
        assert (eager is None) == (ours is None), name
        if eager is not None:
            scale = eager.abs().max().clamp(min=1e-4)
            assert (ours - eager).abs().max() <= 2e-4 * scale, name


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3", "mistral"])
def test_packed_documents_do_not_attend_each_other(model_type):
    model, ids = build(model_type), tokens(1, 12)
    positions = torch.cat([torch.arange(n) for n in (5, 7)])[None]
    with torch.no_grad():
        switch(model, "fa_ops")
        ours = model(ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat(
            [outputs(model, "eager", input_ids=ids[:, r]) for r in (slice(5), slice(5, 12))], 1
        )
    assert (ours - alone).abs().max() <= TOLERANCE * alone.abs().max()


@pytest.mark.parametrize("model_type", SEQ2SEQ)
def test_encoder_decoders_match_eager_attention(model_type):
    model, ids, target = build(model_type), tokens(), tokens(S=7, seed=1)
    assert_same(model, input_ids=ids, decoder_input_ids=target)
    for mask in (padding(side="right"), padding()):
        assert_same(model, input_ids=ids, attention_mask=mask, decoder_input_ids=target)
    results = []
    for implementation in ("eager", "fa_ops"):
        switch(model, implementation)
        options = dict(max_new_tokens=5, min_new_tokens=5, num_beams=2, do_sample=False)
        results.append(model.generate(ids, attention_mask=padding(side="right"), **options))
    assert torch.equal(*results)


def test_whisper_matches_eager_attention():
    model = build("whisper")
    features = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(0))
    assert_same(model, input_features=features, decoder_input_ids=tokens(S=7))


@pytest.mark.parametrize("model_type", VISION)
def test_vision_towers_match_eager_attention(model_type):
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert_same(build(model_type), pixel_values=pixels)


# The layers of StableLM and Nemotron do not pass the argument on to the attention function.
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "t5", "stablelm", "nemotron"])
def test_output_attentions_returns_the_weights_of_eager_attention(model_type):
    model = build(model_type)
    inputs = {"input_ids": tokens(), "attention_mask": padding(side="right")}
    if model_type in SEQ2SEQ:
        inputs["decoder_input_ids"] = tokens(S=7)
    weights = []
    for implementation in ("eager", "fa_ops"):
        switch(model, implementation)
        with torch.no_grad():
            out = model(**inputs, output_attentions=True)
        weights.append(out.encoder_attentions if model_type in SEQ2SEQ else out.attentions)
    rows = inputs["attention_mask"].bool()
    for eager, ours in zip(*weights, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2)[rows], eager.transpose(1, 2)[rows])


def test_output_attentions_of_layers_that_do_not_pass_the_argument_on():
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = build("siglip_vision_model")
    switch(model, "eager")
    expected = model(pixels, output_attentions=True).attentions
    switch(model, "fa_ops")
    for function in (model, torch.compile(model, backend="eager", fullgraph=True)):
        found = function(pixels, output_attentions=True).attentions
        assert len(found) == len(expected) > 0
        torch.testing.assert_close(found, expected)
        assert not function(pixels).attentions  # later calls are fused again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_accurate_as_eager_attention(dtype):
    """With fp32 weights, rotary embeddings return fp32 queries and keys, but values are 16-bit."""
    for model_type in ("llama", "deepseek_v3", "bert"):
        model, ids = build(model_type), tokens()
        exact = outputs(model, "eager", input_ids=ids)
        with torch.autocast("cpu", dtype), torch.no_grad():
            eager, ours = (outputs(model, name, input_ids=ids) for name in ("eager", "fa_ops"))
        error, known = ((out.float() - exact).abs().max() for out in (ours, eager))
        assert error <= 2 * known


def test_dropout_in_training_follows_the_seed():
    model, ids = build("llama", attention_dropout=0.5).train(), tokens()
    torch.manual_seed(0)
    first, second = model(ids).logits, model(ids).logits
    torch.manual_seed(0)
    assert torch.equal(model(ids).logits, first)
    assert not torch.equal(second, first)


BROKEN = {
    "softcap": ("gemma2", {"softcap": None}),
    "sinks": ("gpt_oss", {"s_aux": None}),
    "scaling": ("t5", {"scaling": 3.0}),
    "position bias": ("t5", {"position_bias": None}),
    "mask": ("llama", {"attention_mask": None, "is_causal": True}),
    "window": ("mistral", {"attention_mask": None, "is_causal": True}),
    "direction": ("bert", {"attention_mask": None, "is_causal": True}),
}


@pytest.mark.parametrize("feature", BROKEN)
def test_models_differ_without_the_feature(feature):
    """Negative control: with the feature dropped, the comparison above fails."""
    from transformers import AttentionInterface, AttentionMaskInterface

    model_type, dropped = BROKEN[feature]

    def broken(module, query, key, value, attention_mask=None, **kwargs):
        kwargs = {"attention_mask": attention_mask} | kwargs | dropped
        return hf_integration.fa_ops_attention_forward(module, query, key, value, **kwargs)

    AttentionInterface.register("fa_ops_broken", broken)
    AttentionMaskInterface.register("fa_ops_broken", hf_integration.fa_ops_mask)
    model = build(model_type)
    inputs = {"input_ids": tokens(), "attention_mask": padding()}
    if model_type in SEQ2SEQ:
        inputs["decoder_input_ids"] = tokens(S=7)
    with torch.no_grad():
        eager, ours = (outputs(model, name, **inputs) for name in ("eager", "fa_ops_broken"))
    keep = torch.ones(eager.shape[:2]).bool() if model_type in SEQ2SEQ else padding().bool()
    assert (ours - eager).abs()[keep].max() > 100 * TOLERANCE * eager.abs().max()


def test_every_model_type_is_tiny():
    assert all(sum(p.numel() for p in build(t).parameters()) < 1e6 for t in tiny_models.CAUSAL)
