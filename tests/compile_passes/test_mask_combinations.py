"""Random combinations of masks are fused or refused, and never change the result."""

from __future__ import annotations

import random

import pytest
import torch

from tests.compile_passes.helpers import assert_same, fuse, qkv

INF = float("inf")
LOWEST = torch.finfo(torch.float32).min
SIZE = 8
FILLS = [LOWEST, LOWEST, -1e9, -1e30, -1e4, -INF]
KINDS = ["fill", "fill", "bias", "bias", "learned", "number", "bound"]
MASKS = ["causal", "window", "opaque", "padding"]


def random_function(rng: random.Random):
    """A function of query, key, value, an opaque mask, a padding mask and a learned bias."""
    terms = [
        (rng.choice(KINDS), rng.choice(MASKS), rng.choice(FILLS)) for _ in range(rng.randint(1, 4))
    ]
    cap, scale = rng.choice([0.0, 0.0, 5.0]), rng.choice([0.35, -0.35])
    end = rng.choice(["plain", "plain", "lse", "sink", "again", "normalised"])
    sums = rng.choice(["one by one", "one by one", "summed", "merged"])

    def function(q, k, v, opaque, padding, bias):
        i, j = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None]
        masks = {"causal": j <= i, "window": (i - j).abs() <= 2, "opaque": opaque}
        masks["padding"] = padding
        scores = q @ k.mT * scale
        scores = torch.tanh(scores / cap) * cap if cap else scores
        total = None
        for kind, name, fill in [*terms, ("end", "", 0.0)]:
            if kind in ("bias", "learned"):
                term = bias if kind == "learned" else torch.where(masks[name], 0.0, fill)
                total = term if total is None else total + term
            if total is not None and (sums == "one by one" or kind in ("fill", "end")):
                scores = scores + (merged(total) if sums == "merged" else total)
                total = None
            if kind == "fill":
                scores = scores.masked_fill(~masks[name], fill)
            elif kind == "number":
                scores = scores + 0.5
            elif kind == "bound":
                scores = torch.max(scores, torch.tensor(max(fill, LOWEST)))
        if end == "sink":
            column = bias[..., :1].expand(2, 2, SIZE, 1)
            return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
        if end == "normalised":
            return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v
        weights = scores.softmax(-1)
        if end == "again":
            weights = weights.masked_fill(~masks[terms[-1][1]], 0.0)
        out = weights @ v
        return out * (scores.logsumexp(-1) - 0.3).sigmoid()[..., None] if end == "lse" else out

    return function


def merged(mask):
    """The mask after a view that merges batch and heads, and back."""
    whole = mask.expand(2, 2, SIZE, SIZE).reshape(4, SIZE, SIZE)
    return whole.view(2, 2, SIZE, SIZE)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("start", range(0, 60, 20))
def test_random_combinations_match_eager(start, train):
    fused = 0
    for seed in range(start, start + 20):
        rng = random.Random(seed)
        function = random_function(rng)
        generator = torch.Generator().manual_seed(seed)
        opaque = torch.rand(SIZE, SIZE, generator=generator) > 0.5
        opaque[rng.randrange(SIZE)] = False
        padding = torch.ones(2, 1, 1, SIZE, dtype=torch.bool)
        padding[0, ..., : rng.choice([0, 3, SIZE])] = False
        bias = torch.randn(2, SIZE, SIZE, generator=generator)
        fusion = fuse(function)
        inputs = (*qkv(Hq=2, Hkv=2, Sq=SIZE, Sk=SIZE), opaque, padding, bias)
        if function(*inputs).isfinite().all():
            assert_same(function, inputs, fusion, train)
            fused += fusion.fused
    assert fused > 3  # the rest is refused


def summed(q, k, v, bias, merged):
    """A triangle and padding of -inf in one sum, and a bias."""
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    triangle = torch.zeros(12, 12).masked_fill_(hidden, -INF)
    gone = torch.arange(12) >= torch.tensor([9, 12])[:, None]
    padding = torch.zeros(2, 12).masked_fill_(gone, -INF).view(2, 1, 1, 12)
    if not merged:
        return (q @ k.mT + (triangle + bias + padding)).softmax(-1) @ v
    padding = padding.expand(2, 4, 1, 12).reshape(8, 1, 12)
    total = (triangle + bias + padding).view(2, 4, 12, 12)
    return (q @ k.mT + total).softmax(-1) @ v


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_sums_that_hide_keys_are_split(merged, train):
    """With or without gradients, and as nn.MultiheadAttention merges batch and heads."""
    inputs = (*qkv(), torch.randn(12, 12))
    fusion = fuse(lambda *given: summed(*given, merged))
    assert_same(lambda *given: summed(*given, merged), inputs, fusion, train=train)
    assert all(f.masks.startswith("is_causal") for f in fusion.findings) and fusion.fused == 1
