"""Continuous batching: generate_batch on the paged cache gives the tokens of eager generate."""

import inspect
from unittest import mock

import pytest
import torch
from tiny_models import VOCAB, build, switch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import initialization

import fa_ops
from hf_integration import hooks

NEW = 6
PARAMETERS = inspect.signature(ContinuousBatchingConfig).parameters
SIZES = {("page_size" if "page_size" in PARAMETERS else "block_size"): 8}
SIZES |= {"num_blocks": 16, "max_batch_tokens": 32}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (5, 11, 3)]


def alone(model) -> list[list[int]]:
    switch(model, "eager")
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts()]


def batched(model, name: str, **sizes) -> list[list[int]]:
    switch(model, name)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(
        prompts(),
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**SIZES, **sizes),
        warmup=False,
    )
    return [result.generated_tokens for result in out.values()]


def test_the_hook_is_installed():
    assert hooks.states["continuous batching"] == "on"


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_gathered_keys_give_the_tokens_of_eager_attention(model_type):
    """With full layers, sliding layers and sinks."""
    model = build(model_type)
    assert batched(model, "fa_ops") == alone(model)


@pytest.mark.filterwarnings("ignore:The `paged|:FutureWarning")
@pytest.mark.parametrize("name", ["fa_ops", "paged|fa_ops"])
def test_pages_are_attended_in_place(name, monkeypatch):
    """transformers uses this path on CUDA only; its check is disabled here."""
    appended = 0
    attend = fa_ops.attention_with_kv_cache

    def counted(*args, **options):
        nonlocal appended
        appended += options.get("key") is not None
        return attend(*args, **options)

    monkeypatch.setattr(fa_ops, "attention_with_kv_cache", counted)
    model = build("llama")
    check = "ensure_decode_fast_path_is_available"
    with mock.patch.object(initialization, check, lambda *args: None):
        ours = batched(model, name, max_blocks_per_request=8)
    assert appended >= (NEW - 1) * 2  # layers
    assert ours == alone(model)
