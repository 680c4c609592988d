"""Weights that are multiplied with a gate of each key, and divided by their sum or not; triangles
of which a slice is the mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, MIN, B, D, H, S, randn, registry, triangle

CASES, case = registry()
T = 9


def gated(*shape, heads=H):
    def inputs():
        q, k, v = (randn(B, h, S, D) for h in (H, heads, heads))
        return q, k, v, randn(*shape)

    return inputs


def with_a_past():
    return randn(B, H, 5, D), randn(B, H, T, D), randn(B, H, T, D)


def weights(q, k):
    return (q @ k.mT * 0.3).softmax(-1)


def over_sum(w):
    return w / w.sum(-1, keepdim=True)


@case("fuse", gated(S))
def gate_of_keys(q, k, v, g):
    return (weights(q, k) * g) @ v


@case("fuse", gated(B, H, S))
def gate_of_heads(q, k, v, g):
    return (weights(q, k) * g[:, :, None]) @ v


@case("fuse", gated(H, 1, S))
def gate_before_an_einsum(q, k, v, g):
    return torch.einsum("bhij,bhjd->bihd", weights(q, k) * g, v)


@case("fuse", gated(B, S))
def divided_by_numbers_of_keys(q, k, v, g):
    return (weights(q, k) / (g[:, None, None].abs() + 1)) @ v


@case("fuse", gated(S))
def gate_under_a_triangle(q, k, v, g):
    scores = (q @ k.mT * 0.3).masked_fill(~triangle(), -INF)
    return (scores.softmax(-1) * g) @ v


@case("fuse", gated(B, S))
def gate_of_bools(q, k, v, g):
    return (weights(q, k) * (g > 0)[:, None, None]) @ v


@case("fuse", gated(B, H, S, heads=2))
def gate_of_heads_that_share_keys(q, k, v, g):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return (weights(q, k) * g[:, :, None]) @ v


@case("fuse", gated(B, 1, S, heads=2))
def gate_of_shared_keys(q, k, v, g):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return (weights(q, k) * g[:, :, None]) @ v


@case("fuse", gated(H, 1, S))
def gate_beside_the_log_sum_exp(q, k, v, g):
    s = q @ k.mT * 0.3
    return (s.softmax(-1) * g) @ v, s.logsumexp(-1)


@case("fuse", gated(S))
def two_gates(q, k, v, g):
    return (weights(q, k) * g * g.sigmoid().flip(-1)) @ v


@case("no_fuse", gated(S, S))
def gate_of_pairs(q, k, v, g):
    return (weights(q, k) * g) @ v


@case("fuse", gated(B, S))
def gate_over_a_sum_and_a_number(q, k, v, g):
    w = weights(q, k) * g[:, None, None].abs()
    return (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v


@case("fuse", gated(B, S))
def gate_over_a_bounded_sum(q, k, v, g):
    w = weights(q, k) * g[:, None, None].abs()
    w = w / w.sum(-1, keepdim=True).clamp(min=1e-6)
    return torch.einsum("bhij,bhjd->bihd", w, v)


@case("fuse", gated(B, H, S))
def sigmoid_over_its_sum(q, k, v, g):
    return over_sum(weights(q, k) * g.sigmoid()[:, :, None]) @ v


@case("fuse", gated(B, S))
def exponential_over_its_sum(q, k, v, g):
    return over_sum(g.exp()[:, None, None] * weights(q, k)) @ v


@case("fuse", gated(S))
def sigmoid_over_its_sum_under_a_triangle(q, k, v, g):
    scores = (q @ k.mT * 0.3).masked_fill(~triangle(), -INF)
    return over_sum(scores.softmax(-1) * g.sigmoid()) @ v


@case("fuse", gated(B, H, S, heads=2))
def gate_over_its_sum_of_heads_that_share_keys(q, k, v, g):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return over_sum(weights(q, k) * g[:, :, None].abs()) @ v


@case("fuse", gated(S))
def gate_with_zeros_over_its_sum(q, k, v, g):
    return over_sum(weights(q, k) * g.relu()) @ v


@case("fuse", gated(S))
def negative_gate_over_its_sum(q, k, v, g):
    """All gates are negative, which no logarithm has."""
    return over_sum(weights(q, k) * (-1 - g.abs())) @ v


@case("fuse", gated(B, S))
def bools_over_their_sum(q, k, v, g):
    return over_sum(weights(q, k) * (g > -1.5)[:, None, None]) @ v


@case("no_fuse", gated(S, S))
def gate_of_pairs_over_its_sum(q, k, v, g):
    return over_sum(weights(q, k) * g.abs()) @ v


@case("no_fuse", gated(S))
def gate_by_the_norm(q, k, v, g):
    return F.normalize(weights(q, k) * g.sigmoid(), p=1, dim=-1) @ v


@case("no_fuse", gated(S))
def gate_over_the_sum_of_exponentials(q, k, v, g):
    e = (q @ k.mT * 0.3).exp()
    return (e * g / e.sum(-1, keepdim=True)) @ v


@case("fuse", with_a_past)
def slice_of_a_triangle(q, k, v):
    n, t = q.shape[2], k.shape[2]
    keep = torch.ones(64, 64, dtype=torch.bool).tril().view(1, 1, 64, 64)[:, :, t - n : t, :t]
    return torch.where(keep, q @ k.mT * 0.3, MIN).softmax(-1) @ v


@case("fuse", with_a_past)
def last_rows_of_a_triangle(q, k, v):
    n, t = q.shape[2], k.shape[2]
    hidden = torch.ones(t, t).tril()[-n:] == 0
    return (q @ k.mT).masked_fill(hidden, -INF).softmax(-1) @ v


@case("fuse", with_a_past)
def narrowed_triangle(q, k, v):
    n, t = q.shape[2], k.shape[2]
    bias = torch.full((64, 64), -INF).triu(1).narrow(0, t - n, n)[:, :t]
    return (q @ k.mT + bias).softmax(-1) @ v
