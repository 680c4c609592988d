"""Masks with large numbers, of known and unknown content. A log-sum-exp of this size in float32 is
too coarse for the weights that the backward pass reads from it.
"""

import pytest
import torch

from tests.compile_passes.helpers import assert_same, check, fuse, qkv

INF = float("inf")
S = 12
SIZES = [1e9, 3e38, 1e8, 1e6, 1e4, -1e6, -1e8, -1e9]
KEYS = (torch.arange(S) > 4).expand(S, S)
ROWS = ~KEYS.mT


def added(q, k, v, mask):
    return (q @ k.mT + mask).softmax(-1) @ v


def then_chunks(q, k, v, mask):
    i = torch.arange(S)
    far = i[:, None] // 4 != i // 4
    return (q @ k.mT + mask).masked_fill(far, -INF).softmax(-1) @ v


def then_causal(q, k, v, mask):
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    return (q @ k.mT + mask).masked_fill(hidden, -INF).softmax(-1) @ v


def beside_a_sink(q, k, v, mask):
    sink = torch.ones(1, 4, 1, 1).expand(2, 4, S, 1)
    return torch.cat([q @ k.mT + mask, sink], -1).softmax(-1)[..., :-1] @ v


def with_log_sums(q, k, v, mask):
    scores = q @ k.mT + mask
    return scores.softmax(-1) @ v * (scores.logsumexp(-1, keepdim=True) * 1e-3).tanh()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", [ROWS, KEYS], ids=["rows", "keys"])
@pytest.mark.parametrize("attend", [added, then_chunks, then_causal, beside_a_sink, with_log_sums])
def test_given_masks_match_eager(attend, where, size):
    check(attend, (*qkv(), torch.where(where, size, 0.0)))


@pytest.mark.parametrize("size", SIZES)
def test_masks_made_in_the_graph_match_eager(size):
    def attend(q, k, v):
        i = torch.arange(S)
        return (q @ k.mT + torch.where(i[:, None] < 4, size, 0.0)).softmax(-1) @ v

    check(attend, qkv())


@pytest.mark.parametrize("spelling", ["integers", "alpha", "divided", "multiplied"])
@pytest.mark.parametrize("size", [10**9, -(10**9)])
def test_integers_and_factors_may_be_large(spelling, size):
    """The large number is a constant of the graph, or in a tensor of integers."""

    def attend(q, k, v, mask):
        scores = q @ k.mT
        if spelling == "alpha":
            return torch.add(scores, mask, alpha=size).softmax(-1) @ v
        mask = mask / (1 / size) if spelling == "divided" else mask
        mask = mask * size if spelling == "multiplied" else mask
        return (scores + mask).softmax(-1) @ v

    mask = ROWS * size if spelling == "integers" else ROWS.to(torch.int32)
    check(attend, (*qkv(), mask))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("size", [3e38, -3e38, 1e9])
def test_numbers_that_absorb_all_scores_are_refused(size, train):
    def attend(q, k, v):
        return (q @ k.mT + size).softmax(-1) @ v

    fusion = fuse(attend)
    assert_same(attend, qkv(), fusion, train)
    assert fusion.reasons == [f"{size:g} is added to the scores, which vanish beside it"]


@pytest.mark.parametrize("size", [1e9, 1e4, -1e3])
def test_large_fills_are_refused_in_training(size):
    """In training a float32 log-sum-exp is too coarse for the weights of the other keys."""

    def attend(q, k, v):
        return (q @ k.mT).masked_fill(torch.arange(S) > 4, size).softmax(-1) @ v

    training = fuse(attend)
    assert_same(attend, qkv(), training, train=True)
    (reason,) = training.reasons
    assert reason.startswith(f"scores are filled with {size:g}")
    with torch.no_grad():
        fusion = fuse(attend)
        assert_same(attend, qkv(), fusion, train=False)
    assert fusion.fused == 1
