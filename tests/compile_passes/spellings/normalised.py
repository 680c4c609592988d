"""Weights that are divided by their sum over the keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, B, H, S, bhsd, randn, registry, triangle

CASES, case = registry()


def with_positions():
    """Scores of positions, and how much they count in each head."""
    return (*bhsd()(), randn(B, H, S, S), randn(H, 1, 1))


@case("fuse", with_positions)
def convit(q, k, v, positions, gate):
    gate = gate.sigmoid()
    w = (1.0 - gate) * (q @ k.mT * 0.3).softmax(-1) + gate * positions.softmax(-1)
    w /= w.sum(dim=-1).unsqueeze(-1)
    return F.dropout(w, 0.0) @ v


@case("fuse", with_positions)
def positive_numbers_are_added(q, k, v, positions, gate):
    w = positions.exp() * gate.exp() + (q @ k.mT * 0.3).softmax(-1) / 3
    w = w / (w.sum(-1, keepdim=True) + 1e-3)
    return torch.einsum("bhij,bhjd->bihd", w, v)


@case("fuse", with_positions, cores=2)
def two_attentions_are_normalised(q, k, v, positions, gate):
    a = (q @ k.mT * 0.3).softmax(-1)
    b = (k @ q.mT * 0.3).masked_fill(~triangle(), -INF).softmax(-1)
    w = a * 0.7 + b * gate.exp()
    return (w / w.sum(-1, keepdim=True)) @ v


@case("fuse", bhsd())
def normalised_again(q, k, v):
    w = (q @ k.mT * 0.3).softmax(-1)
    w = w / w.sum(-1)[..., None]
    return F.dropout(w, 0.5, training=False) @ v


@case("no_fuse", bhsd())
def normalised_over_the_queries(q, k, v):
    w = (q @ k.mT * 0.3).softmax(-1)
    return (w / w.sum(-2, keepdim=True)) @ v


@case("fuse", with_positions)
def normalised_products(q, k, v, positions, gate):
    w = (q @ k.mT * 0.3).softmax(-1) * positions.exp()
    return (w / w.sum(-1, keepdim=True)) @ v


@case("no_fuse", with_positions)
def normalised_and_returned(q, k, v, positions, gate):
    w = (q @ k.mT * 0.3).softmax(-1) + positions.softmax(-1)
    w = w / w.sum(-1, keepdim=True)
    return w @ v, w


@case("no_fuse", bhsd())
def normalised_by_another_sum(q, k, v):
    a, b = (q @ k.mT * 0.3).softmax(-1), (k @ q.mT).softmax(-1) * 0.5
    return (a / b.sum(-1, keepdim=True)) @ v + b.amax(-1, keepdim=True)


@case("no_fuse", bhsd(), tags="stochastic")
def normalised_after_dropout(q, k, v):
    w = F.dropout((q @ k.mT * 0.3).softmax(-1), 0.5)
    return (w / w.sum(-1, keepdim=True)).nan_to_num() @ v * 0
