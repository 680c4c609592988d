"""Calls of FlexAttention: which become the operator, and why others stay."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import compile_passes
from compile_passes.fuse import CallCase
from fa_ops.testing import assert_within_budget
from tests.compile_passes.block_masks import kept_elements, masked, random_block_mask
from tests.compile_passes.helpers import assert_same, fuse, qkv, results

INF = float("inf")
S = 128
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = torch.randn(4, S, S, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(4, 2 * S, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([40, 90])
DOCUMENTS = torch.arange(S) // 30


def inputs(Hkv=4):
    return qkv(Hkv=Hkv, Sq=S, Sk=S, D=16, Dv=16)


def with_score_mod(score_mod):
    return lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod)


SCORE_MODS = {
    "causal": (lambda s, b, h, i, j: torch.where(i >= j, s, -INF), "is_causal"),
    "softcap": (
        lambda s, b, h, i, j: torch.where(i >= j, torch.tanh(s / 5) * 5, -INF),
        "is_causal",
    ),
    "window": (
        lambda s, b, h, i, j: torch.where((i >= j) & (i - j < 20), s, -INF),
        "is_causal, window=(19, 0)",
    ),
    "prefix": (
        lambda s, b, h, i, j: torch.where((i >= j) | (j < 7), s, -INF),
        "a key range for each query",
    ),
    "chunks": (
        lambda s, b, h, i, j: torch.where(i // 16 == j // 16, s, -INF),
        "a key range for each query",
    ),
    "lengths": (
        lambda s, b, h, i, j: torch.where(j < LENGTHS[b], s, -INF),
        "a key range for each query",
    ),
    "bias": (
        lambda s, b, h, i, j: torch.where(i >= j, s * 0.5 + BIAS[h, i, j], -INF),
        "is_causal, dense attn_mask",
    ),
    "bias of the keys": (
        lambda s, b, h, i, j: torch.where(i >= j, s + TABLE[h, j], -INF),
        "is_causal, dense attn_mask",
    ),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_become_arguments(name):
    score_mod, masks = SCORE_MODS[name]
    fusion = fuse(with_score_mod(score_mod))
    # FlexAttention has no backward pass on a CPU
    assert_same(with_score_mod(score_mod), inputs(), fusion, train=False)
    (finding,) = fusion.findings
    assert (finding.operation, finding.masks) == ("flex_attention", masks), finding
    assert "softcap=5" in finding.call or name != "softcap"


@pytest.mark.parametrize("name", ["causal", "window", "lengths"])
def test_score_mods_become_arguments_with_dynamic_shapes(name):
    """A call without a BlockMask has one block, however long it is."""
    score_mod, masks = SCORE_MODS[name]
    fusion = fuse(with_score_mod(score_mod), dynamic=True)
    assert_same(with_score_mod(score_mod), inputs(), fusion, train=False)
    assert [f.masks for f in fusion.findings] == [masks], fusion.reasons
    longer = qkv(Sq=2 * S, Sk=2 * S, D=16, Dv=16)
    assert_same(with_score_mod(score_mod), longer, fusion, train=False)
    assert len(fusion.graphs) == 1, "lengths recompile"


def mask_of_one_block(mask_mod):
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    zeros = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        ones, zeros, BLOCK_SIZE=S, mask_mod=mask_mod, seq_lengths=(S, S)
    )


def test_a_mask_mod_alone_decides_within_one_block():
    def function(q, k, v):
        block_mask = mask_of_one_block(lambda b, h, i, j: (i >= j) & (i - j <= 5))
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, scale=0.5)

    fusion = fuse(function)
    assert_same(function, inputs(Hkv=2), fusion, train=False)
    assert [f.masks for f in fusion.findings] == ["is_causal, window=(5, 0)"]
    assert "repeat_interleave" not in fusion.code


CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, "cpu")
DROPPED = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, "cpu", BLOCK_SIZE=32)
DROPPED.kv_num_blocks[..., 2] = 0
FULL = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, "cpu", BLOCK_SIZE=32)
FULL.full_kv_num_blocks += FULL.kv_num_blocks  # mask_mod is not applied anywhere
FULL.full_kv_indices.copy_(torch.arange(FULL.full_kv_indices.shape[-1]))
FULL.kv_num_blocks.zero_()


def made_inside(mask_mod, changed=False, **sizes):
    """A call whose BlockMask is made in the same graph."""

    def function(q, k, v):
        block_mask = create_block_mask(
            mask_mod, sizes.get("B"), sizes.get("H"), S, S, "cpu", sizes.get("block", 32)
        )
        if changed:
            block_mask.kv_num_blocks[..., 2] = 0
        return flex_attention(q, k, v, block_mask=block_mask)

    return function


MADE = {
    "causal": (made_inside(lambda b, h, i, j: i >= j), "is_causal"),
    "window": (
        made_inside(lambda b, h, i, j: (i >= j) & (i - j < 40), block=(16, 64)),
        "is_causal, window=(39, 0)",
    ),
    "lengths": (
        made_inside(lambda b, h, i, j: j < LENGTHS[b], B=2),
        "a key range for each query",
    ),
    "beyond the last block": (
        made_inside(lambda b, h, i, j: (j <= i) | (j < 7), block=48),
        "a key range for each query",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_block_masks_made_of_the_mask_mod_are_left_out(name):
    function, masks = MADE[name]
    fusion = fuse(function)
    actual, expected = fusion.run(*inputs()), function(*inputs())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert [f.masks for f in fusion.findings] == [masks], fusion.findings


STORED = "its scores or mask would be stored for every query and key"


LEFT = {
    "a given BlockMask": (lambda q, k, v: flex_attention(q, k, v, block_mask=CAUSAL), STORED),
    "blocks dropped": (lambda q, k, v: flex_attention(q, k, v, block_mask=DROPPED), STORED),
    "blocks listed as full": (lambda q, k, v: flex_attention(q, k, v, block_mask=FULL), STORED),
    "made inside of the first text": (
        made_inside(lambda b, h, i, j: j < LENGTHS[b]),  # B is 1
        STORED,
    ),
    "changed inside": (made_inside(lambda b, h, i, j: i >= j, changed=True), STORED),
    "lse": (
        lambda q, k, v: flex_attention(q, k, v, return_lse=True),
        "its log-sum-exp or maximum is read",
    ),
    "relu": (
        with_score_mod(lambda s, b, h, i, j: torch.relu(s)),
        "score_mod or mask_mod calls relu",
    ),
    "a row": (
        with_score_mod(lambda s, b, h, i, j: s + TABLE[h][i - j + S]),
        "score_mod or mask_mod reads a part of a tensor that is not an element",
    ),
    "relative": (with_score_mod(lambda s, b, h, i, j: s + TABLE[h, i - j + S]), STORED),
    "documents": (
        with_score_mod(lambda s, b, h, i, j: torch.where(DOCUMENTS[i] == DOCUMENTS[j], s, -INF)),
        STORED,
    ),
    "nothing": (lambda q, k, v: flex_attention(q, k, v), "torch computes it as fast"),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name):
    function, reason = LEFT[name]
    fusion = fuse(function)
    actual, expected = fusion.run(*inputs()), function(*inputs())
    torch.testing.assert_close(actual, expected)
    assert fusion.reasons == [reason]


def in_documents(b, h, i, j):
    return (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])


def of_texts(b, h, i, j):
    return (i >= j) & (TEXTS[b, i] == TEXTS[b, j])


TEXTS = torch.stack([torch.arange(S) // 30, torch.arange(S) % 3])  # the second is not sorted
GIVEN = {
    "documents": lambda: create_block_mask(in_documents, None, None, S, S, "cpu", BLOCK_SIZE=32),
    "unsorted": lambda: create_block_mask(of_texts, 2, None, S, S, "cpu", BLOCK_SIZE=32),
    "heads": lambda: create_block_mask(of_texts, 2, 4, S, S, "cpu", BLOCK_SIZE=(16, 64)),
    "one block": lambda: create_block_mask(in_documents, None, None, S, S, "cpu", BLOCK_SIZE=256),
    "short last block": lambda: create_block_mask(
        in_documents, None, None, S, S, "cpu", BLOCK_SIZE=48
    ),
    "blocks dropped": lambda: DROPPED,
    "blocks listed as full": lambda: FULL,
    "random": lambda: random_block_mask(in_documents, S),
    "random, of texts and heads": lambda: random_block_mask(of_texts, S, (64, 16), 2, 4),
    "random, none full": lambda: random_block_mask(in_documents, S, 48, full=False),
}


@pytest.fixture
def on_hopper(monkeypatch):
    """The rules decide as on Hopper, and gradients are permitted on the CPU."""
    device = property(lambda case: torch.device("cuda:0"))
    monkeypatch.setattr(CallCase, "device", device)
    monkeypatch.setattr(CallCase, "capability", (9, 0))
    module = sys.modules[flex_attention.__module__]
    monkeypatch.setattr(module, "_validate_device", lambda query, key, value: None)


def attend_given(q, k, v, block_mask):
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)


@pytest.mark.parametrize("name", GIVEN)
def test_given_block_masks_are_exact(name, on_hopper):
    """Outputs and gradients, whatever the lists are: not those of torch's eager mode, which does
    not read them.
    """
    block_mask = GIVEN[name]()
    keep = kept_elements(block_mask)
    fusion = fuse(attend_given)
    given = qkv(torch.bfloat16, Hkv=2, Sq=S, Sk=S, D=64, Dv=16)

    def run(q, k, v):
        return fusion.run(q, k, v, block_mask)

    def oracle(q, k, v):
        return masked(q, k, v, keep)

    actual = results(run, given, True)
    for n, (a, o, b) in enumerate(
        zip(
            actual,
            results(oracle, given, True, torch.float64),
            results(oracle, given, True),
            strict=True,
        )
    ):
        assert_within_budget(f"result {n}", a, o, b)
    (finding,) = fusion.findings
    assert finding.fused and "dense attn_mask" in finding.masks, finding


def test_layers_share_lists_that_are_made_inside():
    """FlexAttention writes to nothing, so that the lists are those of the later layers too, which share their ranges."""

    def layers(q, k, v):
        block_mask = create_block_mask(
            lambda b, h, i, j: (i >= j) | (j < 7), None, None, S, S, "cpu"
        )
        for _ in range(3):
            q = flex_attention(q, k, v, block_mask=block_mask)
        return q

    fusion, ranges = fuse(layers), "a key range for each query"
    torch.testing.assert_close(fusion.run(*inputs()), layers(*inputs()), atol=1e-5, rtol=1e-4)
    assert [f.masks for f in fusion.findings] == [ranges] * 3, fusion.reasons
    calls = [n for n in fusion.graphs[-1].nodes if n.target is torch.ops.fa.attention.default]
    assert len({call.kwargs["key_ranges"] for call in calls}) == 1


def test_layers_share_the_mask_of_given_lists(on_hopper):
    """The mask is made once, also where blocks of a mask are of no use; again after a write."""
    block_mask = GIVEN["documents"]()

    def layers(q, k, v, numbers):
        for _ in range(3):
            q = attend_given(q, k, v, block_mask)
        numbers.add_(1)
        return attend_given(q, k, v, block_mask)

    fusion = fuse(layers)
    fusion.run(*qkv(torch.bfloat16, Hkv=2, Sq=S, Sk=S, D=32, Dv=32), torch.zeros(3))
    calls = [n for n in fusion.graphs[-1].nodes if n.target is torch.ops.fa.attention.default]
    masks = [call.args[3] for call in calls]
    assert fusion.fused == len(calls) == 4 and len(set(masks[:3])) == 1 and masks[3] != masks[0]


def test_explain_finds_the_functions_of_a_call():
    score_mod, _ = SCORE_MODS["window"]
    report = compile_passes.explain(with_score_mod(score_mod), *inputs())
    assert str(report).startswith("1 of 1 calls of flex_attention fused")
    assert "flex_attention is replaced: its mask becomes compact" in str(report)
