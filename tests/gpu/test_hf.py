"""transformers on a GPU: generated tokens, synchronisation, gradients and compiled models."""

import contextlib

import pytest
import torch

pytest.importorskip("transformers")

from hf_integration import decoding
from tests.evaluation.hf_sweep import inputs, scenarios, tiny

MODELS = ["llama", "gpt_oss", "gemma2", "deepseek_v3"]


def build(model_type: str, implementation: str, dtype=torch.float32):
    config = next(tiny.configs(model_type, **scenarios.WINDOW))
    return tiny.build(config, implementation).to("cuda", dtype)


def prompt(side: str | None):
    mask = torch.ones(inputs.B, inputs.S).long() if side is None else inputs.padding(side)
    return {"input_ids": inputs.tokens().cuda(), "attention_mask": mask.cuda()}


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("model_type", MODELS)
def test_generated_tokens_equal_those_of_eager_attention(model_type, cache, side):
    """With a static cache transformers compiles decoding into CUDA graphs. Eager attention uses a
    dynamic one, as that of DeepSeek does not compile with torch 2.11."""
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = build(model_type, "eager").generate(**prompt(side), **options)
    model = build(model_type, "fa_ops")
    found = model.generate(**prompt(side), cache_implementation=cache, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_padding_before_the_window_of_a_second_piece(model_type):
    """The window of the second piece has no padding, the masks of the following steps do."""
    from transformers import DynamicCache

    given, results = prompt("left"), []
    pieces = [given["input_ids"][:, :n] for n in (4, 1, 1, 1)]
    for name in ("fa_ops", "eager"):
        model, mask = build(model_type, name), given["attention_mask"]
        cache, found = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(**given, past_key_values=cache)
            for piece in pieces:
                mask = torch.cat([mask, torch.ones_like(piece)], 1)
                out = model(piece, attention_mask=mask, past_key_values=cache)
                found.append(out.logits[:, -1])
        results.append(torch.stack(found))
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("static", [False, True])
def test_decoding_steps_do_not_synchronise(static, side):
    from transformers import DynamicCache, StaticCache

    model, given = build("llama", "fa_ops", torch.bfloat16), prompt(side)
    decoding.forget()
    options = {"config": model.config} | ({"max_cache_len": 64} if static else {})
    cache = (StaticCache if static else DynamicCache)(**options)
    mask = given["attention_mask"]
    with torch.no_grad():
        model(**given, past_key_values=cache)
        for step in range(3):
            mask = torch.cat([mask, mask.new_ones((inputs.B, 1))], 1)
            token = {"input_ids": given["input_ids"][:, :1], "attention_mask": mask}
            with no_synchronisation() if step else contextlib.nullcontext():
                model(**token, past_key_values=cache)


@pytest.mark.parametrize("model_type", ["llama", "bert", "t5", "siglip"])
def test_gradients_equal_those_of_eager_attention(model_type):
    from tests.evaluation.hf_sweep import run

    base = run.Base(model_type)
    given = {name: t.cuda() for name, t in base.inputs.items()}
    found = [build(model_type, name) for name in ("eager", "fa_ops")]
    eager, ours = (
        {n: g.cpu() for n, g in scenarios.grad(model.cuda(), given).items()} for model in found
    )
    assert scenarios.difference(eager, ours, "grad") is None


def random_prompt(S: int) -> dict:
    """Two rows; the first one has an eighth of left padding, and a gap in its mask."""
    mask = torch.ones((2, S), dtype=torch.long, device="cuda")
    mask[0, : S // 8] = mask[0, S // 2 : S // 2 + 3] = 0
    ids = torch.randint(3, inputs.LAST_TEXT_TOKEN, (2, S), device="cuda")
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "gemma2", "bert"])
def test_compiled_models_compute_padded_batches(model_type):
    eager, ours = (build(model_type, name) for name in ("eager", "fa_ops"))
    given = random_prompt(40)
    if model_type == "bert":
        del given["use_cache"]
    with torch.no_grad():
        expected = eager(**given)[0]
        actual = torch.compile(ours, fullgraph=True)(**given)[0]
    kept = given["attention_mask"].bool()
    torch.testing.assert_close(actual[kept], expected[kept], atol=2e-3, rtol=2e-3)


def test_compiled_padded_prefill_uses_no_quadratic_memory():
    model, S = build("llama", "fa_ops", torch.bfloat16), 16384
    run, given = torch.compile(model, fullgraph=True), random_prompt(S)
    with torch.no_grad():
        for _ in range(2):  # the first call compiles
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(**given, logits_to_keep=1)
    assert torch.cuda.max_memory_allocated() - before < 2 * S * S  # a byte for each pair


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", [None, "left"])
def test_inference_mode_gives_the_same_tokens(cache, side):
    model = build("llama", "fa_ops")
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(model.generate(**prompt(side), cache_implementation=cache, **options))
    assert torch.equal(*found)
