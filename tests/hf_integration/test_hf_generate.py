"""generate(): every strategy and every cache, against eager attention."""

import os
import random

import pytest
import torch
import transformers
from tiny_models import SEQ2SEQ, build, padding, switch, tokens
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer, StaticLayer
from transformers.models.llama.modeling_llama import eager_attention_forward

import hf_integration

NEW = 6
FAMILIES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"]
STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams, sampled": {"do_sample": True, "num_beams": 2},
}


def check_tokens(model, ids=None, **options) -> None:
    """Check that tokens are those of eager attention, unpadded and left padded."""
    ids = tokens() if ids is None else ids
    for mask in (torch.ones_like(ids), padding()[:, : ids.shape[1]][: len(ids)]):
        results = []
        for name in ("eager", "fa_ops"):
            switch(model, name)
            if "assistant_model" in options:
                switch(options["assistant_model"], name)
            torch.manual_seed(0)
            made = {k: make() if callable(make) else make for k, make in options.items()
                    if k != "assistant_model"}  # fmt: skip
            assistant = {k: v for k, v in options.items() if k == "assistant_model"}
            made = {"max_new_tokens": NEW, "min_new_tokens": NEW} | made | assistant
            results.append(model.generate(ids, attention_mask=mask, disable_compile=True, **made))
        assert torch.equal(*results)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_strategy_gives_the_tokens_of_eager_attention(model_type, strategy, cache):
    check_tokens(build(model_type), cache_implementation=cache, **STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", ["greedy", "beams"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("model_type", SEQ2SEQ)
def test_encoder_decoder_caches_give_the_tokens_of_eager_attention(model_type, cache, strategy):
    check_tokens(build(model_type), cache_implementation=cache, **STRATEGIES[strategy])


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_assisted_generation_gives_the_tokens_of_eager_attention(model_type):
    """Steps of several queries on a filled cache, some of which are rolled back."""
    if model_type == "gemma3_text" and transformers.__version__ < "5.18":
        pytest.skip("transformers 5.17 fails with eager attention, too")
    model, assistant = build(model_type), build(model_type, seed=1)
    check_tokens(model, tokens(1), assistant_model=assistant, do_sample=False)


def test_prompt_lookup_gives_the_tokens_of_eager_attention():
    ids = tokens(1, 4).repeat(1, 3)
    check_tokens(build("llama"), ids, prompt_lookup_num_tokens=3, do_sample=False)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "gpt_oss"])
def test_sliding_caches_work_beyond_their_window(model_type, cache):
    """A prompt of twelve tokens and twelve new ones, with windows of five."""
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    check_tokens(build(model_type), cache_implementation=cache, **options)


class Rounded(QuantizedLayer):
    """A quantised cache without the packages that transformers' own backends need."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized):
        numbers, scale = quantized
        return numbers * scale


def quantised(config) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [Rounded(residual_length=4) for _ in range(config.num_hidden_layers)]
    cache.layer_class_to_replicate = None
    return cache


def test_a_quantised_cache_gives_the_tokens_of_eager_attention():
    model = build("llama")
    check_tokens(model, past_key_values=lambda: quantised(model.config), do_sample=False)


def test_a_prefill_in_chunks_gives_the_tokens_of_eager_attention():
    model = build("llama")
    check_tokens(model, prefill_chunk_size=5, do_sample=False)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_padding_inside_one_row_gives_the_tokens_of_eager_attention(model_type, cache):
    """generate() gives padding position 1, which does not begin another document."""
    model, ids, results = build(model_type), tokens(B=1), []
    mask = torch.ones_like(ids)
    mask[:, 4:6] = 0
    for name in ("eager", "fa_ops"):
        switch(model, name)
        options = dict(max_new_tokens=NEW, do_sample=False, disable_compile=True)
        results.append(
            model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
        )
    assert torch.equal(*results)


def test_decoding_makes_no_dense_mask():
    for model_type in FAMILIES:
        model = build(model_type)
        hf_integration.mask_counts.clear()
        for cache in (None, "static"):
            options = dict(max_new_tokens=NEW, do_sample=False, disable_compile=True)
            model.generate(tokens(), cache_implementation=cache, **options)
        assert not [name for name in hf_integration.mask_counts if ":" in name]


def test_a_dictionary_sets_the_implementation():
    model = build("bart")
    ids = tokens()
    with torch.no_grad():
        switch(model, "eager")
        expected = model(ids, decoder_input_ids=ids).logits
        model.set_attn_implementation({"": "fa_ops"})
        ours = model(ids, decoder_input_ids=ids).logits
    assert model.config._attn_implementation == "fa_ops"
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def causal_in_each_layer(module, query, key, value, attention_mask, **options):
    """Eager attention with causality up to the last key of the layer, and no other mask."""
    (Sq, Sk), lowest = (query.shape[2], key.shape[2]), torch.finfo(query.dtype).min
    mask = torch.full((1, 1, Sq, Sk), lowest).triu(Sk - Sq + 1)
    return eager_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register("causal in each layer", causal_in_each_layer)


def pruned(model, ids, kept: list[list[int]]) -> DynamicCache:
    """The cache of a prompt, of which each layer has kept its own keys."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for layer, indices in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = layer.keys[:, :, indices], layer.values[:, :, indices]
    return cache


@pytest.mark.parametrize("case", range(int(os.environ.get("FA_OPS_CACHE_CASES", "40"))))
def test_layers_whose_caches_differ_in_length(case):
    """As after the compression of a cache; two pieces, each of one or several queries."""
    rng, S = random.Random(f"caches {case}"), 12
    B, layers = rng.choice([1, 2]), rng.randint(2, 4)
    # Without earlier keys in the first layer several queries raise, as below.
    kept = [sorted(rng.sample(range(S), rng.randint(i == 0, S))) for i in range(layers)]
    pieces = [tokens(B, rng.choice([1, 1, 2, 5, 20]), seed=case + i) for i in (1, 2)]
    model, given = build(rng.choice(["llama", "qwen3"]), num_hidden_layers=layers), []
    with_mask, results = rng.random() < 0.5, []
    for name in ("fa_ops", "causal in each layer"):
        switch(model, name)
        with torch.no_grad():
            cache, end, given = pruned(model, tokens(B, seed=case), kept), S, []
            for ids in pieces:
                positions = torch.arange(end, end + ids.shape[1]).expand(B, -1)
                end += ids.shape[1]
                mask = torch.ones(B, end, dtype=torch.long) if with_mask else None
                options = {"position_ids": positions, "attention_mask": mask}
                given.append(model(ids, past_key_values=cache, **options).logits)
        results.append(torch.cat(given, 1))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_compiled_layers_whose_caches_differ_in_length():
    model, ids, results = build("llama", num_hidden_layers=2), tokens(1, 4, seed=1), []
    for kept in ([[0, 3, 5], [1, 2, 3, 4, 7, 9]], [[0, 3, 5, 6, 8], [4]]):
        for name in ("fa_ops", "causal in each layer"):
            switch(model, name)
            run = torch.compile(model, backend="eager") if name == "fa_ops" else model
            with torch.no_grad():
                cache = pruned(model, tokens(1), kept)
                positions = torch.arange(12, 16)[None]
                results.append(run(ids, past_key_values=cache, position_ids=positions).logits)
        torch.testing.assert_close(*results[-2:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(4, 7), (7, 4)], ids=["longer", "shorter"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["left", "holes"])
def test_a_mask_with_padding_is_for_layers_of_one_length(kind, count, lengths):
    model = build("llama", num_hidden_layers=2)
    mask = torch.ones(2, 12 + count, dtype=torch.long)
    mask[0, slice(2) if kind == "left" else slice(1, 3)] = 0
    with torch.no_grad():
        cache = pruned(model, tokens(), [list(range(n)) for n in lengths])
        with pytest.raises(ValueError, match="as many keys as LlamaAttention of layer 1, got"):
            model(tokens(S=count, seed=1), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5)], ids=["longer", "shorter"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_static_caches_have_one_size(count, sizes):
    """Also if the prompt fills the first one: which keys are filled in the other is unknown."""
    model = build("llama", num_hidden_layers=2)
    cache = Cache(layers=[StaticLayer(max_cache_len=size) for size in sizes])
    with torch.no_grad(), pytest.raises(ValueError, match="give all layers caches of one length"):
        model(tokens(1, count), past_key_values=cache)


def test_a_first_layer_without_earlier_keys_has_no_mask_for_others():
    """It cannot be told from a static cache that the prompt fills."""
    model = build("llama", num_hidden_layers=2)
    with torch.no_grad():
        cache = pruned(model, tokens(1), [[], [0, 5]])
        with pytest.raises(ValueError, match="the first has earlier keys"):
            model(tokens(1, 3), past_key_values=cache)
