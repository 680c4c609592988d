"""Readers of scores and weights that need no values: dead ones, and those of shape and dtype."""

from __future__ import annotations

import pytest
import torch

import compile_passes
from tests.compile_passes.helpers import check, fuse, qkv


def unread_copies(q, k, v):
    """x-transformers keeps the scores before and after the softmax, for callers that want them."""
    scores = q @ k.mT
    before = scores.clone()
    weights = scores.softmax(-1)
    after = weights.to(torch.float64).clone().mean(1)
    return (weights @ v, (before, after))[0]


def type_of_scores(q, k, v, bias):
    scores = q @ k.mT + bias.type_as(q @ k.mT)
    other = bias.type_as(scores)
    return scores.softmax(-1) @ v + other.sum()


def new_from_scores(q, k, v):
    scores = q @ k.mT
    hidden = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    zeros = torch.zeros_like(scores)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v + zeros.amax() + zeros.dim()


def full_from_weights(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    scale = weights.new_full((weights.size(0), 1, 1, 1), 0.5)
    return weights @ v * scale.to(weights) * weights.new_zeros(1).add(2.0)


def size_of_scores(q, k, v):
    scores = q @ k.mT
    return scores.softmax(-1) @ v * scores.size(-1) + scores.shape[1]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "function, inputs",
    [
        (unread_copies, 0),
        (type_of_scores, 1),
        (new_from_scores, 0),
        (full_from_weights, 0),
        (size_of_scores, 0),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_readers_without_values_do_not_prevent_fusion(function, inputs, dynamic):
    given = (*qkv(), *(torch.randn(12, 12) for _ in range(inputs)))
    fusion = check(function, given, dynamic=dynamic)
    assert "softmax" not in fusion.code and "matmul" not in fusion.code.replace("mT", "")


def written_copy(q, k, v, out):
    scores = q @ k.mT
    out.copy_(scores)
    return scores.softmax(-1) @ v


def random_copy(q, k, v, out):
    weights = (q @ k.mT).softmax(-1)
    torch.nn.functional.dropout(weights, 0.5)
    return weights @ v + torch.rand_like(v)


@pytest.mark.parametrize("function", [written_copy, random_copy])
def test_nodes_with_an_effect_are_kept(function):
    """The copy is visible to the caller; an unused dropout advances the generator."""
    inputs = qkv()
    outs = [torch.zeros(2, 4, 12, 12) for _ in range(2)]
    fusion = fuse(function)
    torch.manual_seed(0)
    expected = function(*inputs, outs[0])
    torch.manual_seed(0)
    torch.testing.assert_close(fusion.run(*inputs, outs[1]), expected)
    torch.testing.assert_close(*outs)
    assert fusion.fused == 0


def test_a_size_that_only_the_scores_have_is_read_from_inputs():
    """Without fusion the graph keeps its meaning too."""

    def function(q, k, v):
        scores = q @ k.mT
        return (scores + torch.arange(scores.size(-1))).softmax(-2) @ v * scores.new_ones(())

    inputs = qkv()
    fusion = fuse(function, dynamic=True)
    torch.testing.assert_close(fusion.run(*inputs), function(*inputs))
    assert fusion.fused == 0


def test_explain_leaves_the_graph_of_the_caller():
    """`explain` drops nodes in its own copy."""
    report = compile_passes.explain(unread_copies, *qkv())
    assert report.fused == 1 and not report.missed
