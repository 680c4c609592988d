"""Decoding on a device whose values must not be read; the CPU is treated as one.

Attention calls the operators that it chooses on a GPU.
"""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import build, padding, switch, tokens
from transformers import DynamicCache

import hf_integration
from fa_ops.plans import planning
from hf_integration import decoding, masks

NEW = 6
OPTIONS = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, disable_compile=True)


@pytest.fixture(autouse=True)
def without_reads(monkeypatch):
    monkeypatch.setattr(masks, "reads_are_free", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    decoding.forget()


def generate(model, name: str, mask, **options):
    switch(model, name)
    hf_integration.mask_counts.clear()
    return model.generate(tokens(), attention_mask=mask, **OPTIONS | options)


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("pad", ["none", "left"])
def test_masks_stay_compact(model_type, cache, pad, search):
    model, mask = build(model_type), padding()
    mask = torch.ones_like(mask) if pad == "none" else mask
    ours = generate(model, "fa_ops", mask, cache_implementation=cache, **search)
    assert {name for name in hf_integration.mask_counts if ":" in name} == set()
    if model_type == "llama":
        kind = {"left": "ranges", "none": "lengths" if cache else "full"}[pad]
        assert hf_integration.mask_counts[kind] >= NEW - 1
    eager = generate(model, "eager", mask, cache_implementation=cache, **search)
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_right_padding_and_holes_get_exact_masks(cache):
    """The ones appended in decoding make holes of right padding."""
    model, holes = build("llama"), torch.ones_like(padding())
    holes[1, 3:5] = 0
    for mask in (padding(side="right"), holes):
        ours = generate(model, "fa_ops", mask, cache_implementation=cache)
        assert any("no prefill has read" in name for name in hf_integration.mask_counts)
        eager = generate(model, "eager", mask, cache_implementation=cache)
        assert torch.equal(ours, eager)


def step(model, cache, mask):
    return model(tokens(S=1), past_key_values=cache, attention_mask=mask).logits


def test_a_mask_without_a_prefill_is_exact():
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


def test_a_mask_after_a_step_that_was_not_seen_is_exact():
    """Another implementation has run the step before, whose token the mask hides."""
    model, results = build("llama"), []
    masks = [torch.tensor([[1] * 12 + tail] * 2) for tail in ([], [0], [0, 1])]
    for names in (("fa_ops", "eager", "fa_ops"), ("eager",) * 3):
        cache = DynamicCache(config=model.config)
        for name, mask in zip(names, masks, strict=True):
            switch(model, name)
            ids = tokens(S=12 if mask is masks[0] else 1)
            with torch.no_grad():
                out = model(ids, attention_mask=mask, past_key_values=cache).logits
        results.append(out)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_a_mask_that_does_not_continue_the_prefill_raises():
    model = build("llama")
    with torch.no_grad():
        cache = model(tokens(), attention_mask=padding(), use_cache=True).past_key_values
        holes = torch.ones(2, 13, dtype=torch.long)
        holes[0, 5:8] = 0
        with pytest.raises(RuntimeError, match="extended by ones: it has holes"):
            step(model, cache, holes)
        decoding.forget()
        step(model, cache, holes)


MASKS = {"left": padding(), "none": torch.ones_like(padding()), "holes": torch.ones(2, 12).long()}
MASKS["holes"][1, 3:5] = 0


def steps(model, seed: int, mask, count: int = NEW):
    """A greedy request, one forward pass at a time; yields the logits of each."""
    ids, cache = tokens(seed=seed), None
    for _ in range(count):
        with torch.no_grad():
            out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        yield out.logits[:, -1]
        ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)


@pytest.mark.parametrize("beside", [None, [1, 1, 1, 1], [0, 0, 1, 1]], ids=str)
def test_steps_after_every_padding_of_a_prompt(beside):
    """Prompts of four tokens, alone and beside another row."""
    model = build("llama")
    for kept in itertools.product([0, 1], repeat=4):
        mask, results = torch.tensor([kept] if beside is None else [kept, beside]), []
        for name in ("fa_ops", "eager"):
            switch(model, name)
            cache, ids, found = DynamicCache(config=model.config), tokens(len(mask), 4), []
            for count in range(3):
                longer = torch.cat([mask, torch.ones(len(mask), count, dtype=torch.long)], 1)
                with torch.no_grad():
                    out = model(ids, attention_mask=longer, past_key_values=cache)
                found.append(out.logits)
                ids = tokens(len(mask), 1, seed=count)
            results.append(torch.cat(found[1:], 1))  # rows of the prompt may attend nothing
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4, msg=str(kept))


@pytest.mark.parametrize("kind", ["left", "none", "holes"])
@pytest.mark.parametrize("change", ["repeated", "selected"])
def test_a_cache_whose_batch_changes_between_steps(change, kind):
    """The mask of the prompt says nothing about the rows of another batch."""
    model, results = build("llama"), []
    prompt = torch.ones(2, 12, dtype=torch.long)
    mask = MASKS[kind].repeat_interleave(2, 0) if change == "repeated" else MASKS[kind][:1]
    for name in ("fa_ops", "eager"):
        switch(model, name)
        cache, found = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(tokens(), attention_mask=prompt, past_key_values=cache)
            if change == "repeated":
                cache.batch_repeat_interleave(2)
            else:
                cache.batch_select_indices(torch.tensor([0]))
            for count in (1, 2):
                longer = torch.cat([mask, torch.ones(len(mask), count, dtype=torch.long)], 1)
                ids = tokens(len(mask), 1, seed=count)
                out = model(ids, attention_mask=longer, past_key_values=cache)
                found.append(out.logits)
        results.append(torch.stack(found))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kinds", list(itertools.permutations(MASKS, 2)), ids="-".join)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_interleaved_requests_do_not_share_masks(model_type, kinds):
    """Two requests of one batch size and length on one model, a step of each in turn."""
    model = build(model_type)
    requests = [steps(model, seed, MASKS[kind]) for seed, kind in enumerate(kinds)]
    interleaved = [list(pair) for pair in zip(*requests, strict=True)]
    switch(model, "eager")
    for seed, kind in enumerate(kinds):
        for ours, expected in zip(interleaved, steps(model, seed, MASKS[kind]), strict=True):
            torch.testing.assert_close(ours[seed], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["left", "holes"])
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_padding_before_the_window_of_a_second_piece(model_type, kind):
    """The window of the second piece has no padding, the masks of the following steps do."""
    model, results = build(model_type), []
    pieces = [tokens(S=4, seed=1), *[tokens(S=1)] * 3]
    for name in ("fa_ops", "eager"):
        switch(model, name)
        mask, cache, found = MASKS[kind], DynamicCache(config=model.config), []
        with torch.no_grad():
            model(tokens(), attention_mask=mask, past_key_values=cache)
            for piece in pieces:
                mask = torch.cat([mask, torch.ones_like(piece)], 1)
                out = model(piece, attention_mask=mask, past_key_values=cache)
                found.append(out.logits[:, -1])
        results.append(torch.stack(found))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_interleaved_requests_keep_compact_masks():
    model = build("llama")
    hf_integration.mask_counts.clear()
    for _ in zip(*(steps(model, 0, MASKS[kind]) for kind in ("left", "none")), strict=True):
        pass
    assert {name for name in hf_integration.mask_counts if ":" in name} == set()


def test_threads_do_not_share_masks():
    model, kinds = build("llama"), list(MASKS) * 2

    def generated(kind):
        ids, mask = tokens(seed=kinds.index(kind)), MASKS[kind]
        return model.generate(ids, attention_mask=mask, **OPTIONS)

    with ThreadPoolExecutor(len(kinds)) as pool:
        ours = list(pool.map(generated, kinds))
    switch(model, "eager")
    for kind, found in zip(kinds, ours, strict=True):
        assert torch.equal(found, generated(kind))


def test_another_model_may_continue_a_cache():
    """Requests are identified by their caches, not by their models."""
    one, other = build("llama"), build("llama")
    with torch.no_grad():
        cache = one(tokens(), attention_mask=padding(), use_cache=True).past_key_values
        hf_integration.mask_counts.clear()
        step(other, cache, torch.cat([padding(), torch.ones(2, 1).long()], 1))
    assert set(hf_integration.mask_counts) == {"ranges"}


def test_a_recorded_mask_is_freed_with_its_cache():
    model = build("llama")
    with torch.no_grad():
        out = model(tokens(), attention_mask=padding(), use_cache=True)
        assert len(decoding._read) == 1
        del out
        gc.collect()
    assert len(decoding._read) == 0
    model(tokens(), attention_mask=padding(), use_cache=False)
    assert len(decoding._read) == 0


def test_encoder_masks_are_not_recorded():
    model = build("bart")
    mask = padding(side="right")
    results = [generate(model, name, mask) for name in ("fa_ops", "eager")]
    assert torch.equal(*results)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("model_type, kind", [*(("llama", kind) for kind in MASKS), ("t5", "left")])
def test_steps_share_plans_between_powers_of_two(model_type, kind, cache):
    """T5 adds a float mask that grows with the cache."""
    model, counts = build(model_type), []
    forward = model.forward

    def counted(*args, **options):
        counts.append(len(planning._plans))
        return forward(*args, **options)

    model.forward = counted
    planning.forget()
    generate(model, "fa_ops", MASKS[kind], cache_implementation=cache, max_new_tokens=32)
    lengths = range(3, 32) if model_type == "t5" else range(14, 44)
    families = {(n.bit_length(), (n - 1).bit_length()) for n in lengths}
    assert len(counts) > 25 and counts[-1] - counts[3] < len(families)
    assert planning._prepared


@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_mask_longer_than_its_keys_is_cut(model_type, reads, monkeypatch):
    """A mask for a whole generation, with padding in the middle, as eager attention cuts it."""
    monkeypatch.setattr(masks, "reads_are_free", lambda device: reads)  # as on a CPU
    model, (prompt, step) = build(model_type), (tokens(2, 9), tokens(2, 1, seed=1))
    mask = torch.zeros(2, 20, dtype=torch.long)
    mask[:, :10] = 1
    mask[0, 2:5] = 0
    out = {}
    for name in ("fa_ops", "eager"):
        switch(model, name)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt, attention_mask=mask[:, :9], past_key_values=cache)
            out[name] = model(step, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(out["fa_ops"], out["eager"], atol=1e-4, rtol=1e-4)
