"""Bounds of key intervals that are read from tensors: at which index, and how large."""

import pytest
import torch

from tests.compile_passes.helpers import assert_same, check, fuse, qkv

INF = float("inf")
S = 12


def first(n):
    return torch.arange(S) < n[0]


def second(n):
    return torch.arange(S) < n[1]


def first_of_each(n):
    return torch.arange(S) < torch.stack([n[:2], n[1:3]], 1)[:, 0][:, None, None, None]


def slice_of_two(n):
    return torch.arange(S) < n[1:3][:, None, None, None]


def for_each_query(n):
    return torch.arange(S) < n[:S, None] + 3


def for_later_queries(n):
    return torch.arange(S) < n[2 : 2 + S, None] + 3


PER_SEQUENCE = (first, second, first_of_each, slice_of_two)


@pytest.mark.parametrize(
    "keep, Sq, size",
    [(keep, Sq, size) for keep in PER_SEQUENCE for Sq in (1, S) for size in (3, 4, 20)]
    + [(for_each_query, S, 20), (for_later_queries, S, 20)],
)
def test_bounds_are_read_at_the_right_index(keep, Sq, size):
    def attend(q, k, v, n):
        return (q @ k.mT).masked_fill(~keep(n), -INF).softmax(-1) @ v

    fusion = check(attend, (*qkv(B=2, Sq=Sq), torch.arange(size) % 7 + 2))
    assert ("kv_lens" if keep in PER_SEQUENCE else "key_ranges") in fusion.code


def up_to(n):
    return torch.arange(S) <= n


def later_than(n):
    return torch.arange(S) > torch.arange(S)[:, None] - n


@pytest.mark.parametrize("number, dtype", [
    (255, torch.uint8), (127, torch.int8), (2**31 - 1, torch.int32), (2**31, torch.int64),
    (2**40, torch.int64), (2**63 - 1, torch.int64),
])  # fmt: skip
@pytest.mark.parametrize("fill", [-INF, -1e9])
@pytest.mark.parametrize("keep", [up_to, later_than])
def test_bounds_far_beyond_the_keys_match_eager(keep, fill, number, dtype):
    def attend(q, k, v, n):
        return (q @ k.mT).masked_fill(~keep(n), fill).softmax(-1) @ v

    fusion = fuse(attend)
    assert_same(attend, (*qkv(), torch.tensor(number, dtype=dtype)), fusion)
    assert fusion.fused == 1


def test_comparisons_of_two_distances_match_eager():
    def attend(q, k, v):
        i = torch.arange(S)
        near = (i - 3).abs() <= (i[:, None] - 5).abs()
        return (q @ k.mT).masked_fill(~near & (i > i[:, None]), -INF).softmax(-1) @ v

    check(attend, qkv())


@pytest.mark.parametrize("sizes", [{"D": 0}, {"Dv": 0}])
def test_empty_head_dimensions_are_not_fused(sizes):
    sizes = {"D": 8, "Dv": 8} | sizes
    q, k, v = (torch.randn(2, 4, S, sizes[d]) for d in ("D", "D", "Dv"))
    fusion = fuse(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    assert fusion.run(q, k, v).shape == v.shape
    assert fusion.reasons == ["a head dimension is 0"]
