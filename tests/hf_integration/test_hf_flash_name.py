"""register(as_flash_attention_2=True): models under this name run on fa_ops, until it is undone."""

import importlib.util

import pytest
import tiny_models
import torch
from test_hf_batching import alone, batched
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedModel

import fa_ops
import hf_integration
from hf_integration import attention, hooks

NAME = "flash_attention_2"


@pytest.fixture
def named():
    hf_integration.register(as_flash_attention_2=True)
    yield
    hf_integration.register()


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of fa_ops.attention."""
    found, attend = [], fa_ops.attention
    monkeypatch.setattr(fa_ops, "attention", lambda *a, **o: found.append(1) or attend(*a, **o))
    return found


def state():
    """What registration may change."""
    method = PreTrainedModel._check_and_adjust_attn_implementation
    tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    return method, [dict(table) for table in tables], set(hooks.names)


def test_it_is_undone():
    before = state()
    hf_integration.register(as_flash_attention_2=True)
    hf_integration.register(as_flash_attention_2=True)
    assert AttentionInterface()[NAME] is attention.flash_attention_forward
    assert AttentionMaskInterface()[NAME] is hf_integration.fa_ops_mask
    hf_integration.register()
    hf_integration.register()
    assert state() == before


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("flash_attn", "kernels")),
    reason="flash-attn, or the package that downloads it, is installed",
)
def test_without_it_transformers_asks_for_the_package():
    with pytest.raises((ImportError, ValueError)):
        AutoModel.from_config(tiny_models.config("llama"), attn_implementation=NAME)


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "bert", "modernbert", "t5"],
)
def test_models_give_the_results_of_eager_attention(model_type, named, calls):
    model = tiny_models.build(model_type)
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == NAME
    ids, mask = tiny_models.tokens(), tiny_models.padding()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model_type == "t5":
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        found = model(**inputs)[0]
        made = len(calls)
        tiny_models.switch(model, "eager")
        expected = model(**inputs)[0]
    kept = slice(None) if model_type == "t5" else mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], atol=1e-4, rtol=1e-4)
    assert made > 0 and len(calls) == made


def test_generation(named):
    model = tiny_models.build("mistral")
    ids, mask = tiny_models.tokens(), tiny_models.padding()
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    texts = []
    for name in (NAME, "eager"):
        model.set_attn_implementation(name)
        texts.append(model.generate(ids, **options))
    assert torch.equal(*texts)


def test_packed_rows_are_separate_sequences(named, packed_calls):
    """As collators without padding make them: the positions of a row begin anew."""
    model = tiny_models.build("llama")
    model.set_attn_implementation(NAME)
    ids = tiny_models.tokens(1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        found = model(ids, position_ids=positions, use_cache=False)[0]
        model.set_attn_implementation("eager")
        parts = [model(part)[0] for part in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(found, torch.cat(parts, 1), atol=1e-4, rtol=1e-4)
    assert packed_calls and set(packed_calls) == {2}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("model_type", ["llama", "bert", "mistral"])
def test_lengths_of_documents_are_those_of_all_tokens(model_type, rows, named, packed_calls):
    """The longest one may be a tensor, as transformers' own helper makes it."""
    model = tiny_models.build(model_type)
    model.set_attn_implementation(NAME)
    ids = tiny_models.tokens(1)
    ends = torch.tensor([0, 6, 9, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in ends.diff()])[None]
    longest = ends.diff().max()
    with torch.no_grad():
        found = model(
            ids.view(rows, -1), position_ids=positions.view(rows, -1), cu_seq_lens_q=ends,
            cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest,
        )[0]  # fmt: skip
        model.set_attn_implementation("eager")
        parts = [model(part)[0] for part in ids.split(ends.diff().tolist(), 1)]
    torch.testing.assert_close(found.flatten(0, 1)[None], torch.cat(parts, 1), atol=1e-4, rtol=1e-4)
    if model_type != "mistral":  # whose window is a mask
        assert packed_calls and set(packed_calls) == {3}


@pytest.mark.filterwarnings("ignore:The `paged|:FutureWarning")
def test_continuous_batching(named):
    model = tiny_models.build("llama")
    assert batched(model, NAME) == alone(model)


class Layer(nn.Module):
    """What an attention function is given of a layer."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal, self.config = is_causal, tiny_models.config("llama")


PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("Sq", [1, 4, 9])
def test_masks_mean_what_they_mean_to_flash_attention(Sq, padded, is_causal, window):
    q, k, v = (torch.randn(2, 2, n, 8) for n in (Sq, 12 if padded else 9, 12 if padded else 9))
    layer, mask = Layer(is_causal), PADDING if padded else None
    if window and not is_causal:
        with pytest.raises(NotImplementedError, match="sliding_window needs causality.*got 3"):
            attention.flash_attention_forward(layer, q, k, v, mask, sliding_window=window)
        return
    out, _ = attention.flash_attention_forward(layer, q, k, v, mask, sliding_window=window)
    i, j = torch.arange(Sq)[:, None] + 9 - Sq, torch.arange(9)
    keep = (j <= i) if is_causal else torch.ones(Sq, 9, dtype=torch.bool)
    if window:
        keep = keep & (j > i - window)
    keep = keep & PADDING.bool()[:, None, None] if padded else keep.expand(2, 1, Sq, 9)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :9], v[:, :, :9], attn_mask=keep
    )
    rows = keep.any(-1).transpose(1, 2)[..., 0]
    torch.testing.assert_close(out[rows], expected.transpose(1, 2)[rows])


def test_models_with_their_own_attention_keep_their_default(named):
    with pytest.warns(UserWarning, match="instead of 'flash_attention_2'"):
        model = AutoModel.from_config(tiny_models.config("bloom"), attn_implementation=NAME)
    assert model.config._attn_implementation == "eager"
