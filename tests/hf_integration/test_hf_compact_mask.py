"""A compact mask in code that computes with it is the bool mask of SDPA."""

import pytest
import torch
import transformers
from tiny_models import build, padding, switch, tokens
from torch import Tensor
from transformers import Siglip2VisionConfig, Siglip2VisionModel

import hf_integration
from hf_integration import encodings
from hf_integration.encodings import CompactMask, Encoding

SHAPE = (2, 1, 4, 6)
LO, HI = torch.tensor([[0, 1, 2, 2], [0] * 4]), torch.tensor([[2, 3, 4, 5], [6, 1, 0, 3]])
KEPT = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]]).bool()
J = torch.arange(6)
BETWEEN = ((LO[..., None] <= J) & (HI[..., None] > J))[:, None]
CAUSAL = (torch.arange(4)[:, None] + 1 >= J) & (J < 5)  # over the first five keys
EXPECTED = {
    "full": (lambda: encodings.full(SHAPE, "cpu"), torch.ones(SHAPE).bool()),
    "causal": (lambda: encodings.causal(SHAPE, 5, "cpu"), CAUSAL.expand(SHAPE)),
    "ranges": (lambda: encodings.ranges(SHAPE, LO, HI), BETWEEN),
    "keys": (lambda: encodings.keys(SHAPE, KEPT), KEPT[:, None, None].expand(SHAPE)),
    "causal, keys": (
        lambda: encodings.causal_keys(SHAPE, KEPT[:, :5]),
        CAUSAL & KEPT[:, None, None],
    ),
    "ranges, keys": (
        lambda: encodings.ranges(SHAPE, LO, HI, KEPT),
        BETWEEN & KEPT[:, None, None],
    ),
    "lengths": (
        lambda: encodings.lengths((2, 1, 1, 6), torch.tensor([2, 5])),
        (torch.tensor([[2], [5]]) > J)[:, None, None],
    ),
    "lengths of a step": (
        lambda: encodings.step((2, 1, 1, 6), 4, None, "cpu"),
        (J < 4).expand(2, 1, 1, 6),
    ),
    "keys of a step": (
        lambda: encodings.step((2, 1, 1, 6), 4, KEPT, "cpu"),
        (KEPT & (J < 4))[:, None, None],
    ),
}
OPERATIONS = {
    "flip": lambda mask: mask.flip(-1),
    "repeat and reshape": lambda mask: mask.repeat(1, 3, 1, 1).reshape(-1, *mask.shape[2:]),
    "slice": lambda mask: mask[:, :, -1:, 1:4],
    "invert": lambda mask: ~mask,
    "where": lambda mask: torch.where(mask, 0.0, float("-inf")),
    "concatenate": lambda mask: torch.cat([mask, mask], -1),
    "convert": lambda mask: mask.to(torch.float32) + 1,
    "pad": lambda mask: torch.nn.functional.pad(mask, (0, 2), value=True),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", EXPECTED)
def test_every_operation_gives_that_of_the_bool_mask(name, operation):
    make, expected = EXPECTED[name]
    mask = make()
    assert mask.encoding.value == name.removesuffix(" of a step")
    assert (mask.shape, mask.dtype, mask.device) == (expected.shape, torch.bool, expected.device)
    assert torch.equal(OPERATIONS[operation](mask), OPERATIONS[operation](expected))


@pytest.mark.parametrize("name", EXPECTED)
def test_every_operation_in_a_graph_gives_that_of_the_bool_mask(name):
    """For a mask that is an argument of a compiled function, and one that is made inside."""

    def all_operations(mask):
        return [operation(mask) for operation in OPERATIONS.values()]

    torch._dynamo.reset()
    make, expected = EXPECTED[name]
    run = torch.compile(all_operations, backend="aot_eager", fullgraph=True)
    for ours, other in zip(run(make()), all_operations(expected), strict=True):
        assert torch.equal(ours, other)
    run = torch.compile(lambda: all_operations(make()), backend="aot_eager", fullgraph=True)
    for ours, other in zip(run(), all_operations(expected), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("name", EXPECTED)
def test_added_to_scores_it_is_the_float_mask_of_eager_attention(name):
    make, expected = EXPECTED[name]
    scores = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    lowest = torch.finfo(torch.float32).min
    added = scores + torch.zeros(expected.shape).masked_fill(~expected, lowest)
    in_place = scores.clone()
    in_place += make()
    for found in (scores + make(), make() + scores, in_place):
        assert torch.equal(found, added)
    run = torch.compile(lambda mask: scores + mask, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(make()), added)


def attend(mask, queries=4):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, queries, 8, generator=generator)
    k, v = (torch.randn(2, 2, 6, 8, generator=generator) for _ in range(2))
    return hf_integration.fa_ops_attention_forward(torch.nn.Module(), q, k, v, mask)[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_attention_gives_that_of_the_bool_mask(name):
    make, expected = EXPECTED[name]
    queries = expected.shape[2]
    torch.testing.assert_close(attend(make(), queries), attend(expected, queries))


WRITES = {
    "itself": lambda mask: mask.logical_not_(),
    "a view": lambda mask: mask[:, :, 1:3].fill_(True),
    "an element": lambda mask: mask.__setitem__((0, 0, -1, 5), True),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", EXPECTED)
def test_attention_sees_writes_to_a_mask(name, write):
    make, expected = EXPECTED[name]
    mask, expected = make(), expected.clone()
    WRITES[write](mask)
    WRITES[write](expected)
    assert torch.equal(mask & True, expected)
    torch.testing.assert_close(attend(mask), attend(expected))


def test_a_write_in_a_graph_raises():
    torch._dynamo.reset()
    run = torch.compile(WRITES["itself"], backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="writes to an attention mask in place"):
        run(encodings.ranges(SHAPE, LO, HI))


def test_copies_stay_compact():
    for copied in (Tensor.detach, Tensor.clone, lambda mask: mask.to("cpu", copy=True)):
        for make, _ in EXPECTED.values():
            copy = copied(make())
            assert type(copy) is CompactMask and copy.encoding is make().encoding
            assert copy.packing is make().packing


def test_a_mask_is_materialised_once():
    hf_integration.mask_counts.clear()
    mask = encodings.ranges(SHAPE, LO, HI)
    assert mask.encoding is Encoding.RANGES
    _ = mask.flip(-1), mask[:, 0], mask.float()
    assert mask.encoding is Encoding.DENSE
    assert hf_integration.mask_counts == {"dense: the model computes with its mask": 1}


def test_gradient_checkpointing_saves_masks():
    """Without a cache, because recomputing would append to it again."""
    model, mask = build("mistral").train(), padding(side="right")
    found = []
    for reentrant in (None, True, False):
        if reentrant is not None:
            kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
            model.gradient_checkpointing_enable(**kwargs)
        model.zero_grad()
        model(tokens(), attention_mask=mask, use_cache=False).logits.square().mean().backward()
        found.append(model.model.embed_tokens.weight.grad.clone())
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("padded", [False, True])
def test_siglip2_repeats_the_mask_of_its_pooling_head(padded, compiled):
    config = Siglip2VisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_patches=64, patch_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Siglip2VisionModel(config).eval()
    kept, shapes = torch.ones(2, 64, dtype=torch.long), torch.tensor([[8, 8], [8, 8]])
    if padded:
        kept[1, 48:], shapes[1, 0] = 0, 6
    inputs = (torch.randn(2, 64, 8 * 8 * 3), kept, shapes)
    found = []
    for name in ("eager", "fa_ops"):
        model.set_attn_implementation(name)
        run = torch.compile(model, backend="eager") if compiled and name == "fa_ops" else model
        torch._dynamo.reset()
        with torch.no_grad():
            found.append(run(*inputs).pooler_output)
    torch.testing.assert_close(found[1], found[0])


GEMMA4 = dict(
    vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16,
    sliding_window=8, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
    layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, bos_token_id=1,
    eos_token_id=None, initializer_range=0.3, max_position_embeddings=256,
    num_kv_shared_layers=4, num_global_key_value_heads=2, enable_moe_block=False,
)  # fmt: skip


@pytest.mark.parametrize("pad", ["none", "ones", "left"])
@pytest.mark.parametrize("family", ["Gemma4", "Gemma4Unified"])
def test_gemma4_assistants_flip_their_sliding_mask(family, pad, monkeypatch):
    """With more keys than the window, which the flip moves from the future to the past."""
    if not hasattr(transformers, f"{family}AssistantConfig"):
        pytest.skip("not in this transformers release")
    text = getattr(transformers, f"{family}TextConfig")
    # The model reads this attribute, which configs only compute for models with their own keys.
    shared = property(lambda self: ["reuse"] * self.num_hidden_layers)
    monkeypatch.setattr(text, "kv_sharing_modes", shared, raising=False)
    config = getattr(transformers, f"{family}AssistantConfig")(
        text_config=text(**GEMMA4), backbone_hidden_size=64
    )
    generator, S = torch.Generator().manual_seed(1), 20
    states = {
        kind: tuple(torch.randn(2, 2, length, 16, generator=generator) for _ in range(2))
        for kind, length in (("full_attention", S), ("sliding_attention", 12))
    }
    mask = torch.ones(2, S, dtype=torch.long)
    if pad == "left":
        mask[0, :15] = 0
    model = getattr(transformers, f"{family}AssistantForCausalLM")(config).eval()
    embeds = torch.randn(2, 1, 128, generator=generator)
    found = []
    for name in ("eager", "fa_ops"):
        switch(model, name)
        with torch.no_grad():
            out = model(
                inputs_embeds=embeds,
                attention_mask=None if pad == "none" else mask,
                shared_kv_states=states,
                position_ids=torch.full((2, 1), S - 1),
            )
        found.append(out.logits)
    torch.testing.assert_close(found[1], found[0])
