"""Sinks, logits in the denominator: after the keys or before them, and other added columns."""

import pytest
import torch
import torch.nn.functional as F

from tests.compile_passes.helpers import assert_same, check, fuse, qkv

S = 12
HIDDEN = -float("inf")


def column(sinks):
    return sinks[None, :, None, None].expand(2, 4, S, 1)


def after_the_keys(q, k, v, sinks):
    return torch.cat([q @ k.mT, column(sinks)], -1).softmax(-1)[..., :-1] @ v


def after_the_keys_by_length(q, k, v, sinks):
    return torch.cat([q @ k.mT, column(sinks)], -1).softmax(-1)[:, :, :, : k.shape[2]] @ v


def before_the_keys(q, k, v, sinks):
    return torch.cat([column(sinks), q @ k.mT], -1).softmax(-1)[..., 1:] @ v


def before_masked_scores(q, k, v, sinks):
    scores = (q @ k.mT).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), HIDDEN)
    return torch.cat([column(sinks), scores], -1).softmax(-1)[..., 1:] @ v


def padded_after_the_keys(q, k, v, sinks):
    return F.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1] @ v * sinks.sum()


def padded_before_the_keys(q, k, v, sinks):
    return F.pad(q @ k.mT, (1, 0), value=0.7).softmax(-1)[..., 1:] @ v * sinks.sum()


def zeros_after_the_keys(q, k, v, sinks):
    scores = q @ k.mT
    scores = torch.cat([scores, scores.new_zeros(2, 4, S, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v * sinks.sum()


SINKS = (
    after_the_keys, after_the_keys_by_length, before_the_keys, before_masked_scores, padded_after_the_keys, padded_before_the_keys,
    zeros_after_the_keys,
)  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", SINKS, ids=lambda f: f.__name__)
def test_sinks_become_an_argument(function, dynamic):
    fusion = check(function, (*qkv(), torch.randn(4)), dynamic=dynamic)
    assert "sinks = " in fusion.code


def scaled_with_it(q, k, v, sinks):
    return (torch.cat([q @ k.mT, column(sinks)], -1) * 0.3).softmax(-1)[..., :-1] @ v


def capped_with_it(q, k, v, sinks):
    return torch.cat([q @ k.mT, column(sinks)], -1).tanh().softmax(-1)[..., :-1] @ v


def masked_with_it(q, k, v, sinks):
    rows = torch.arange(S)[:, None] > 5
    scores = torch.cat([q @ k.mT, column(sinks)], -1).masked_fill(rows, -1e9)
    return scores.softmax(-1)[..., :-1] @ v


def biased_with_it(q, k, v, sinks):
    scores = torch.cat([q @ k.mT, column(sinks)], -1) + torch.arange(S)[:, None]
    return scores.softmax(-1)[..., :-1] @ v


def kept_instead_of_a_key(q, k, v, sinks):
    return torch.cat([column(sinks), q @ k.mT], -1).softmax(-1)[..., :-1] @ v


def first_key_dropped_instead(q, k, v, sinks):
    return torch.cat([q @ k.mT, column(sinks)], -1).softmax(-1)[..., 1:] @ v


def padded_with_two(q, k, v, sinks):
    return F.pad(q @ k.mT, (0, 2)).softmax(-1)[..., :-2] @ v * sinks.sum()


def padded_queries(q, k, v, sinks):
    return F.pad(q @ k.mT, (0, 1, 0, 1)).softmax(-1)[..., :-1, :-1] @ v * sinks.sum()


OTHERS = (
    scaled_with_it, capped_with_it, masked_with_it, biased_with_it, kept_instead_of_a_key,
    first_key_dropped_instead, padded_with_two, padded_queries,
)  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_other_columns_are_not_fused(function):
    fusion = fuse(function)
    assert_same(function, (*qkv(), torch.randn(4)), fusion)
    assert not fusion.fused
