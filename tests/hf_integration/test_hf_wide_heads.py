"""Gemma 4, whose global layers have heads of 512: fa_ops attends in every layer."""

from collections import Counter

import pytest
import tiny_models
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import hf_integration

pytest.importorskip("transformers.models.gemma4", reason="not in this transformers release")

CONFIG = dict(
    vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, global_head_dim=512,
    num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=8,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
    layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1,
    eos_token_id=None, max_position_embeddings=256,
)  # fmt: skip
EAGER = ("aten._softmax", "aten.softmax", "aten._scaled_dot_product")


class Operators(TorchDispatchMode):
    """Counts the operators that attend, by head dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith(("fa.attention", *EAGER)):
            self.found[name.split(".")[0], args[0].shape[-1]] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**CONFIG, attn_implementation=hf_integration.NAME)
    return transformers.Gemma4ForCausalLM(config).eval()


@pytest.mark.parametrize("side", [None, "left"])
def test_every_layer_runs_fa_ops_with_the_results_of_eager_mode(model, side):
    inputs = {"input_ids": tiny_models.tokens(S=20)}
    if side is not None:
        inputs["attention_mask"] = tiny_models.padding(20, side)
    kept = inputs.get("attention_mask", torch.ones(2, 20)).bool()
    found, gradients, kinds = [], [], []
    for name in ("eager", "fa_ops"):
        tiny_models.switch(model, name)
        model.zero_grad()
        with Operators() as operators:
            logits = model(**inputs).logits[kept]
            logits.square().sum().backward()
        found.append(logits.detach())
        kinds.append(set(operators.found))
        gradients.append(model.model.layers[1].self_attn.k_proj.weight.grad.clone())
    assert {kind for kind, _ in kinds[0]} == {"aten"}
    assert kinds[1] == {("fa", 32), ("fa", 512)}
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)


def test_generation_is_that_of_eager_mode(model):
    ids, texts = tiny_models.tokens(S=20), []
    for name in ("eager", "fa_ops"):
        tiny_models.switch(model, name)
        texts.append(model.generate(ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(texts[1], texts[0])
