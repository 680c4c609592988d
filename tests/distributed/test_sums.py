"""Sums of gradients over tokens: rounded once, in the layout of the input."""

from __future__ import annotations

import pytest
import torch

from fa_ops.distributed.ring_steps import TokenSum
from fa_ops.distributed.schedule import parts_of

PLACES = {
    "all tokens, then some": [(0, 12), (4, 9)],
    "some tokens, then all": [(4, 9), (0, 12)],
    "pieces side by side": [(8, 12), (0, 5)],
    "three of some tokens": [(0, 6), (0, 12), (2, 6), (10, 12)],
    "one piece": [(3, 7)],
    "nothing": [],
}


def test_parts_count_the_ranges_of_each_token():
    assert parts_of([(0, 4), (2, 6)], 8) == ((0, 2, 1), (2, 4, 2), (4, 6, 1), (6, 8, 0))
    assert parts_of([(0, 4), (4, 8)], 8) == ((0, 8, 1),)
    assert parts_of([], 3) == ((0, 3, 0),)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_sum_is_rounded_once(name, bshd):
    g = torch.Generator().manual_seed(0)
    like = torch.empty(2, 3, 12, 4, dtype=torch.bfloat16)
    if bshd:
        like = like.transpose(1, 2).contiguous().transpose(1, 2)
    total = TokenSum(like, parts_of(PLACES[name], 12))
    expected = torch.zeros(like.shape)
    for start, stop in PLACES[name]:
        x = torch.randn(2, 3, stop - start, 4, generator=g).bfloat16()
        expected[:, :, start:stop] += x
        total.add((slice(None), slice(start, stop)), x)
    found = total.result()
    assert torch.equal(found, expected.bfloat16())
    assert found.stride() == torch.empty_like(like).stride()


def test_rows_of_the_batch_are_summed_apart():
    like = torch.empty(2, 1, 4, 1)
    total = TokenSum(like, parts_of([(0, 4)] * 3, 4))
    ones = torch.ones(1, 1, 4, 1)
    total.add((slice(0, 1), slice(0, 4)), ones.clone())
    total.add((slice(1, 2), slice(0, 4)), 2 * ones)
    total.add((slice(0, 1), slice(0, 4)), 4 * ones)
    assert total.result().flatten().tolist() == [5.0] * 4 + [2.0] * 4
