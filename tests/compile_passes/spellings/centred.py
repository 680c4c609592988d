"""The maximum of each row is subtracted from the scores before they are masked."""

from __future__ import annotations

import torch

from tests.compile_passes.cases import INF, MIN, B, H, S, bhsd, randn, registry, triangle

CASES, case = registry()


def centred(q, k, dim=-1):
    s = q @ k.mT * 0.3
    return s - s.amax(dim, keepdim=True)


def with_padding():
    """The first text is padded by all but two keys, the second entirely."""
    padded = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    padded[0, ..., 2:] = padded[1] = True
    return (*bhsd()(), padded)


@case("fuse", bhsd())
def masked_after_the_maximum(q, k, v):
    return centred(q, k).masked_fill(~triangle(), -INF).softmax(-1) @ v


@case("fuse", bhsd())
def chosen_after_the_detached_maximum(q, k, v):
    s = q @ k.mT * 0.3
    s = s - s.max(-1, keepdim=True).values.detach()
    return torch.where(triangle(), s, -1e9).softmax(-1) @ v


@case("fuse", bhsd())
def added_after_the_maximum(q, k, v):
    return (centred(q, k) + torch.full((S, S), -INF).triu(1)).softmax(-1) @ v


@case("fuse", bhsd())
def exponentials_masked_after_the_maximum(q, k, v):
    e = centred(q, k).masked_fill(~triangle(), -INF).exp()
    return e / e.sum(-1, keepdim=True) @ v


@case("fuse", with_padding)
def all_keys_masked_after_the_maximum(q, k, v, padded):
    """A row without keys averages all values."""
    return centred(q, k).masked_fill(padded, MIN).softmax(-1) @ v


@case("fuse", with_padding)
def scaled_after_a_late_mask(q, k, v, padded):
    return (centred(q, k).masked_fill(padded, -1e9) * 0.5).softmax(-1) @ v


@case("fuse", with_padding)
def excluded_after_a_mask_and_the_maximum(q, k, v, padded):
    """A row that is padded entirely is 0 after the subtraction, and averages earlier keys."""
    s = (q @ k.mT * 0.3).masked_fill(padded, -1e9)
    s = s - s.amax(-1, keepdim=True)
    return s.masked_fill(~triangle(), -INF).softmax(-1) @ v


@case("no_fuse", with_padding)
def filled_after_a_mask_and_the_maximum(q, k, v, padded):
    """A row that is padded entirely is 0 after the subtraction, and averages earlier keys alone."""
    s = (q @ k.mT * 0.3).masked_fill(padded, -1e9)
    s = s - s.amax(-1, keepdim=True)
    return s.masked_fill(~triangle(), -1e9).softmax(-1) @ v


@case("no_fuse", bhsd())
def masked_after_the_maximum_of_queries(q, k, v):
    return centred(q, k, -2).masked_fill(~triangle(), -INF).softmax(-1) @ v


@case("no_fuse", lambda: (*bhsd()(), randn(B, H, S, S)))
def masked_after_the_maximum_of_other_scores(q, k, v, other):
    s = q @ k.mT * 0.3
    s = s - torch.maximum(s.amax(-1, keepdim=True), other)
    return s.masked_fill(~triangle(), -INF).softmax(-1) @ v


@case("no_fuse", lambda: (*bhsd()(), randn(B, H, S, 8)))
def masked_after_the_maximum_of_another_product(q, k, v, q2):
    s, other = q @ k.mT * 0.3, q2 @ k.mT
    s = s - other.amax(-1, keepdim=True)
    return s.masked_fill(~triangle(), -INF).softmax(-1) @ v
