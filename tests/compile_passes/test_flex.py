"""Calls of FlexAttention: which become the operator, and why others stay."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils._pytree import tree_leaves

import compile_passes
from compile_passes.fuse import CallCase
from fa_ops.functions import tile_cache
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
TEXTS = torch.stack([torch.arange(S) // 30, torch.arange(S) % 3])  # the second is not sorted


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


NOTHING = "torch computes it as fast"
LEFT = {
    "nothing": (lambda q, k, v: flex_attention(q, k, v), NOTHING),
    "lse of nothing": (lambda q, k, v: flex_attention(q, k, v, return_lse=True), NOTHING),
    "a function of pairs": (
        with_score_mod(lambda s, b, h, i, j: torch.tanh(s + BIAS[h, i, j])),
        r"score_mod '<lambda>' \(test_flex.py, line \d+\) .*reads a tensor by query and key, "
        r"load0\(h, q, k\), inside a function of the score",
    ),
    "no such operation": (
        with_score_mod(lambda s, b, h, i, j: torch.special.bessel_j0(s)),
        r"score_mod '<lambda>' \(test_flex.py, line \d+\) calls special_bessel_j0, which programs",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name):
    function, reason = LEFT[name]
    fusion = fuse(function)
    actual, expected = fusion.run(*inputs()), function(*inputs())
    torch.testing.assert_close(actual, expected)
    (found,) = fusion.reasons
    assert re.match(reason, found), found


# Functions that become programs.

N = 45
GATES = torch.randn(2, 4, N, generator=torch.Generator().manual_seed(2)).requires_grad_()
DISTANCES = torch.randn(4, 2 * N, generator=torch.Generator().manual_seed(3)).requires_grad_()
PAIRS = torch.randn(4, N, N, generator=torch.Generator().manual_seed(4)).requires_grad_()
TRAINED = GATES, DISTANCES, PAIRS


def in_windows(b, h, i, j):
    """Documents of each text, and windows that differ by head."""
    return (TEXTS[b, i] == TEXTS[b, j]) & (i - j < 9 + h) & (i >= j)


WINDOWS = create_block_mask(in_windows, 2, 4, N, N, "cpu", BLOCK_SIZE=16)


def attend_windows(q, k, v):
    aux = AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(q, k, v, block_mask=WINDOWS, return_aux=aux)
    return out, aux.lse, aux.max_scores.detach()


def grouped(q, k, v):
    score_mod = lambda s, b, h, i, j: torch.relu(s) + GATES[b, h, i] * GATES[b, h, j]  # noqa: E731
    return flex_attention(q, k[:, :2], v[:, :2], score_mod, scale=0.3, enable_gqa=True)


def of_lengths(q, k, v):
    """Sizes are captured, and some queries have no keys."""
    n = q.shape[2]
    score_mod = lambda s, b, h, i, j: torch.where(  # noqa: E731
        (i % 7 > 0) & (j < n - 3), torch.tanh(s) + DISTANCES[h, i - j + n], -INF
    )
    return flex_attention(q, k, v, score_mod, return_lse=True)


PROGRAMS = {
    "relative": (
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + DISTANCES[h, i - j + N]),
        "a program of the score",
    ),
    "pairs": (
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s * s + PAIRS[h, i, j]),
        "dense attn_mask, a program of the score",
    ),
    "windows": (attend_windows, "a program of the mask"),
    "grouped": (grouped, "a program of the score"),
    "lengths": (of_lengths, "a key range for each query, a program of the score"),
    "options": (
        lambda q, k, v: flex_attention(
            q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -INF), return_lse=True
        ),
        "is_causal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, dynamic", [*((name, name == "lengths") for name in PROGRAMS)])
def test_functions_become_programs(name, dynamic, monkeypatch):
    """With the results, and the gradients of captured tensors, of torch's own operations."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda query, key, value: None)
    options_of = flex_module._apply_kernel_options  # which refuses largest scores on a CPU
    permitted = lambda *args: options_of(*args[:5]) | {"OUTPUT_MAX": True}  # noqa: E731
    monkeypatch.setattr(flex_module, "_apply_kernel_options", permitted)
    function, masks = PROGRAMS[name]
    fusion = fuse(function, dynamic, aot=True)
    dtype = torch.float64 if name == "grouped" else torch.float32
    given = [x.to(dtype).requires_grad_() for x in qkv(Sq=N, Sk=N, D=16, Dv=16)]
    expected = torch.compile(function, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    found = []
    for run in (fusion.run, expected):
        outputs = [x for x in tree_leaves(run(*given)) if isinstance(x, torch.Tensor)]
        finite = [x.nan_to_num(neginf=0.0) for x in outputs]
        grads = torch.autograd.grad(
            sum((x * x.detach().cos()).sum() for x in finite), [*given, *TRAINED],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        found.append([*outputs, *grads])
    for actual, wanted in zip(*found, strict=True):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-4)
    (finding,) = fusion.findings
    assert finding.fused and finding.masks == masks, finding
    assert "program=fa1; " in finding.call or name == "options"


def changed_inside(q, k, v):
    return made_inside(lambda b, h, i, j: i >= j, changed=True)(q, k, v)


def of_first_text(q, k, v):
    return made_inside(lambda b, h, i, j: j < LENGTHS[b])(q, k, v)


LISTED = {
    "full": (lambda q, k, v: flex_attention(q, k, v, block_mask=FULL), lambda: FULL),
    "changed inside": (changed_inside, lambda: DROPPED),
    "made of the first text": (
        of_first_text,
        lambda: create_block_mask(lambda b, h, i, j: j < LENGTHS[b], None, None, S, S, "cpu", 32),
    ),
}


@pytest.mark.parametrize("name", LISTED)
def test_lists_become_a_part_of_programs(name):
    """As compiled kernels read them; torch's eager mode does not."""
    function, block_mask = LISTED[name]
    fusion = fuse(function)
    q, k, v = inputs()
    keep = kept_elements(block_mask())
    if name == "made of the first text":  # of whose last block mask_mod keeps all for the second
        keep = torch.arange(S) < torch.tensor([40, 64])[:, None, None, None]
    torch.testing.assert_close(fusion.run(q, k, v), masked(q, k, v, keep), atol=1e-5, rtol=1e-4)
    (finding,) = fusion.findings
    assert finding.masks == "a program of the mask" and "tile_runs" in finding.call


def test_programs_for_gpus_find_their_tiles(monkeypatch):
    """By an operator, here on the CPU, of which the backend would find them."""
    monkeypatch.setattr(tile_cache, "FIND_TILES", ())
    monkeypatch.setattr(tile_cache, "_OF_DEVICE", 1e-12)
    texts = torch.arange(2 * S) // 128
    function = with_score_mod(
        lambda s, b, h, i, j: torch.where((texts[i] == texts[j]) & (i != j + 1), s.sin(), -INF)
    )
    q, k, v = qkv(Sq=2 * S, Sk=2 * S, D=16, Dv=16)
    fusion = fuse(function)
    assert_same(function, (q, k, v), fusion, train=False)
    (finding,) = fusion.findings
    assert "tile_runs" in finding.call and "fa.program_tiles" in fusion.code


def in_documents(b, h, i, j):
    return (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])


def of_texts(b, h, i, j):
    return (i >= j) & (TEXTS[b, i] == TEXTS[b, j])


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
    monkeypatch.setattr(flex_module, "_validate_device", lambda query, key, value: None)


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
