"""Models whose indexers list the keys, or blocks of keys, that attention reads."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import config, padding, switch, tokens
from transformers import CONFIG_MAPPING, StaticCache

import fa_ops
import hf_integration
from fa_ops.backends import selected as gathering
from fa_ops.ops import token_selection
from hf_integration import encodings, explanations, indexers
from hf_integration.attention import fa_ops_attention_forward
from tests.evaluation.hf_sweep import tiny
from tests.ops.test_selected import Largest

S = 24
HEADS = {"index_n_heads": 16}  # with fewer, scores that are 0 tie, and eager takes any of those
LATENT = {
    "vocab_size": tiny.VOCAB, "hidden_size": 64, "intermediate_size": 48,
    "moe_intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "index_topk": 6, "index_head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LOCAL = ("hidden", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "q_lora_rank",
         "qk_nope_head_dim", "v_head_dim")  # fmt: skip


def dots3_note_text():
    """A layer with lists, and one with a window between it and another one."""
    local = {f"swa_{name}": LATENT[name] for name in LOCAL[1:]}
    kinds = ["indexed_attention", "sliding_attention", "indexed_attention"]
    return CONFIG_MAPPING["dots3_note_text"](
        **LATENT | HEADS | local, num_hidden_layers=3, layer_types=kinds, qk_rope_head_dim=8,
        head_dim=16, sliding_window_size=5, shared_experts_intermediate_size=48,
        swa_head_dim=16, swa_qk_rope_head_dim=8, bos_token_id=1,
    )  # fmt: skip


def glm5_next_text():
    """Lists of pools of two keys, which the second layer shares; the model makes masks of them."""
    made = CONFIG_MAPPING["glm5_next_text"]
    (kind,) = set(made().layer_types) - {"linear_attention"}  # releases name it differently
    return made(
        **LATENT | HEADS, num_hidden_layers=2, layer_types=[kind] * 2,
        indexer_types=["full", "shared"], mlp_layer_types=["dense"] * 2, index_kpool=2,
        linear_head_dim=16, linear_num_heads=4,
    )  # fmt: skip


def minimax_m3_vl_text(block_size: int = 4):
    """Lists of blocks for each key head."""
    return config(
        "minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2, index_block_size=block_size, index_topk_blocks=2, index_local_blocks=1,
    )  # fmt: skip


SHARED = {"indexer_types": ["full", "shared"]}
CONFIGS = {
    "deepseek_v32": lambda: config("deepseek_v32", **HEADS),
    "glm_moe_dsa": lambda: config("glm_moe_dsa", **HEADS | SHARED),
    "axk2": lambda: config("axk2", **HEADS),
    "hy_v4": lambda: config("hy_v4", **HEADS | SHARED),
    "mistral_large4_text": lambda: config(
        "mistral_large4_text", **HEADS | SHARED, no_rope_layers=[1, 0]
    ),
    "dots3_note_text": dots3_note_text,
    "glm5_next_text": glm5_next_text,
    "minimax_m3_vl_text": minimax_m3_vl_text,
}
CONFIGS = {name: make for name, make in CONFIGS.items() if name in CONFIG_MAPPING}
# its indexer reads padding too, of which eager, sdpa and fa_ops have different garbage
READS_PADDING = {"minimax_m3_vl_text"}


def build(name: str, implementation: str = "fa_ops"):
    return tiny.build(CONFIGS[name](), implementation, 0)


def results(model, **options) -> list[torch.Tensor]:
    """What eager attention and fa_ops give at the tokens that are kept."""
    found, keep = [], options.get("attention_mask", torch.ones(2, S)).bool()
    for name in ("eager", "fa_ops"):
        switch(model, name)
        with torch.no_grad():
            found.append(model(tokens(S=S), **options)[0])
    return [x[keep] if keep.dim() == 2 else x for x in found]


def close(found: list[torch.Tensor], atol: float = 1e-4) -> None:
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=atol)


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """The lists of every call of the operator, and its arguments' numbers of queries."""
    found, attend = [], fa_ops.attention_selected

    def counted(query, key, value, lists, **options):
        found.append((tuple(lists.shape), options["block_size"], query.shape[2], key.shape[1]))
        return attend(query, key, value, lists, **options)

    monkeypatch.setattr(fa_ops, "attention_selected", counted)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_models_are_eager_ones(name, calls):
    model = build(name)
    close(results(model))
    sparse = [part for part in model.modules() if getattr(part, "indexer", None) is not None]
    assert sparse and len(calls) >= len(sparse)
    for shape, _, queries, _ in calls:
        assert queries == shape[2] == S and shape[3] < S
    for side in {"left", "right"} - ({"left"} if name in READS_PADDING else set()):
        close(results(model, attention_mask=padding(S, side)))
    model.train()
    gradients = []
    for implementation in ("eager", "fa_ops"):
        switch(model, implementation)
        model.zero_grad()
        model(tokens(S=S))[0].cos().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    eager, ours = gradients
    assert eager.keys() == ours.keys()
    for key, grad in eager.items():
        assert (ours[key] - grad).abs().max() <= 1e-3 * grad.abs().max(), key


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic cache", "static cache"])
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding(name, cache, calls):
    model, found = build(name), []
    kept = torch.ones(2, S).long() if name in READS_PADDING else padding(S)
    for implementation in ("eager", "fa_ops") if model.can_generate() else ():
        switch(model, implementation)
        out = model.generate(
            tokens(S=S), attention_mask=kept, max_new_tokens=4, min_new_tokens=4, do_sample=False,
            cache_implementation=cache, disable_compile=True, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        found.append(torch.stack(out.logits))
    if not found:  # no language model
        rows = StaticCache(model.config, S + 4) if cache else None
        for implementation in ("eager", "fa_ops"):
            switch(model, implementation)
            found.append(steps(model, kept, cache and copy.deepcopy(rows)))
    close(found)
    assert {queries for _, _, queries, _ in calls} == {S, 1}


def steps(model, kept: torch.Tensor, cache) -> torch.Tensor:
    """The results for a prompt's last token and three more ones."""
    given, found = tokens(S=S + 3), []
    with torch.no_grad():
        for i in range(S, S + 4):
            new, padded = given[:, 0 if i == S else i - 1 : i], (0, i - S)
            mask = torch.nn.functional.pad(kept, padded, value=1)
            out = model(new, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out[0][:, -1])
    return torch.stack(found)


# Memory.


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl_text"])
def test_no_tensor_has_an_element_for_each_query_and_key(name, monkeypatch):
    length, part = 1024, 2**17
    for module in (gathering, token_selection, indexers):
        monkeypatch.setitem(module.PART, "cpu", part)
    largest, kept = {}, padding(length)
    for implementation in ("fa_ops", "sdpa"):
        changed = minimax_m3_vl_text(16) if "minimax" in name else CONFIGS[name]()
        model = tiny.build(changed, implementation, 0)
        with torch.no_grad(), Largest() as seen:
            model(tokens(S=length), attention_mask=kept, logits_to_keep=1)
        largest[implementation] = seen.elements
    assert largest["fa_ops"] < length * length < 2 * length * length <= largest["sdpa"]


# What lists cannot do.


class Projection(torch.nn.Linear):
    """Another class of projections, as a quantised one."""


def test_lists_of_all_heads_where_latents_cannot_be_absorbed(calls):
    model = build("deepseek_v32")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Projection
    close(results(model))
    assert {heads for *_, heads in calls} == {4}


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl_text"])
def test_weights_masks_and_dropout_are_those_of_a_dense_mask(name, calls):
    model = build(name)
    i = torch.arange(S)
    keep = (i[:, None] >= i) & ((i[:, None] - i) % 5 < 3) & torch.ones(2, 1, S, S).bool()
    bool_masks = []
    for implementation in ("eager", "fa_ops"):
        switch(model, implementation)
        lowest = torch.finfo(torch.float32).min
        mask = torch.zeros(2, 1, S, S).masked_fill(~keep, lowest) if not bool_masks else keep
        with torch.no_grad():
            bool_masks.append(model(tokens(S=S), attention_mask=mask)[0])
    close(bool_masks)
    listed = len(calls)
    assert bool(listed) == (name == "deepseek_v32")  # tokens are read from the mask, blocks not
    added = torch.zeros(2, 1, S, S).masked_fill(~keep, torch.finfo(torch.float32).min)
    close(results(model, attention_mask=added))
    found = results(model, output_attentions=True)
    close(found)
    with torch.no_grad():
        assert model(tokens(S=S), output_attentions=True).attentions[-1].shape == (2, 4, S, S)
    assert len(calls) == listed


def test_dropout_is_that_of_a_dense_mask(calls):
    model = build("deepseek_v32").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model(tokens(S=S))
    assert not calls


def layer_call(lists: torch.Tensor, block_size: int, **options) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, S, 8, generator=g) for heads in (4, 2, 2))
    layer = torch.nn.Module()
    layer.indexer = torch.nn.Module()
    layer.indexer.block_size, layer.is_causal = block_size, True
    name = "indices" if block_size == 1 else "block_indices"
    return fa_ops_attention_forward(layer, q, k, v, **{name: lists}, **options)[0]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 5])
def test_lists_of_heads_and_entries_out_of_range(heads, block_size, calls):
    """Lists of key heads are lists; those of query heads become a mask. Others are ignored."""
    lists = torch.randint(-1, S // block_size + 3, (2, heads, S, 4))
    out = layer_call(lists, block_size)
    assert len(calls) == (heads != 4)
    blocks = -(-S // block_size)
    kept = encodings.listed_keys(lists, blocks).repeat_interleave(block_size, -1)[..., :S]
    expected = layer_call(torch.arange(S).expand(2, S, S), 1, attention_mask=(
        kept.repeat_interleave(4 // heads, 1) & torch.ones(S, S).tril().bool()
    ))  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_8_bit_products_are_16_bit_ones(caplog):
    model = build("deepseek_v32")
    with torch.no_grad():
        expected = model(tokens(S=S))[0]
        switch(model, "fa_ops_8bit")
        assert torch.equal(model(tokens(S=S))[0], expected)
    assert "keys that an indexer lists" in caplog.text


# The steps of an indexer that are recorded.


def test_what_is_not_recorded_is_computed():
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 8, 5)
    products = q @ k
    with indexers.RecordedScores():
        scores = torch.matmul(q, k)
        assert type(scores) is indexers.IndexScores and scores.shape == products.shape
        assert torch.equal(scores.relu() + 1, products.relu() + 1)
        assert torch.equal(torch.softmax(scores * 2.0, -1), torch.softmax(products * 2.0, -1))
        assert torch.equal(scores.mean((0, 1)), products.mean((0, 1)))
        assert torch.equal((scores * -1.0).relu(), (products * -1.0).relu())
        assert torch.equal(scores[0], products[0])
        written = torch.matmul(q, k)
        written[0] = 7.0
        written.relu_()
        assert torch.equal(written.relu() + 0, products.index_fill(0, torch.tensor(0), 7.0).relu())
        assert scores.dtype == torch.float32 and scores.device == q.device
    assert type(torch.matmul(q, k)) is torch.Tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_explain_names_the_lists(name):
    text = str(hf_integration.explain(build(name)))
    assert "keys by an indexer's lists, in memory linear in them" in text
    assert ("its indexer stores all scores" in text) == (name == "glm5_next_text")


@pytest.mark.parametrize("name", ["deepseek_v4"])
def test_explain_names_what_stays_dense(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers release has no {name}")
    assert "dense mask of its lists" in str(list(explanations.sections(name)))
