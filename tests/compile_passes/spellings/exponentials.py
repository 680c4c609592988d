"""Softmax by exponentials that are divided by their sum in other ways than `e / e.sum()`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, MIN, S, bhsd, randn, registry, triangle

CASES, case = registry()


def shifted(s):
    return (s - s.amax(-1, keepdim=True)).exp()


def with_bias():
    return (*bhsd()(), randn(S, S))


def with_hidden_keys():
    """Query, key, value, and a mask in which a row has no keys."""
    hidden = ~triangle()
    hidden[2] = True
    return (*bhsd()(), hidden)


@case("fuse", bhsd())
def times_the_reciprocal(q, k, v):
    e = (q @ k.mT * 0.3).masked_fill(~triangle(), -INF).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


@case("fuse", with_hidden_keys)
def times_one_over_the_sum(q, k, v, hidden):
    e = shifted((q @ k.mT * 0.3).masked_fill(hidden, MIN))
    return ((1.0 / e.sum(-1)[..., None]) * e) @ v


@case("fuse", bhsd())
def product_times_the_power(q, k, v):
    e = shifted(q @ k.mT * 0.3)
    return (e @ v) * e.sum(-1, keepdim=True) ** -1


@case("fuse", bhsd())
def softmax_one_by_a_reciprocal(q, k, v):
    e = (q @ k.mT * 0.3).exp()
    return (e * (e.sum(-1, keepdim=True) + 1).reciprocal()) @ v


@case("fuse", bhsd())
def normalised_by_torch(q, k, v):
    return F.normalize(shifted(q @ k.mT * 0.3), p=1, dim=-1) @ v


@case("fuse", bhsd())
def divided_by_the_norm(q, k, v):
    e = (q @ k.mT * 0.3).exp()
    return (e / torch.linalg.vector_norm(e, ord=1, dim=-1, keepdim=True)) @ v


@case("fuse", with_hidden_keys)
def sum_with_a_lower_bound(q, k, v, hidden):
    e = shifted((q @ k.mT * 0.3).masked_fill(hidden, -1e9))
    return (e / e.sum(-1, keepdim=True).clamp(min=1e-6)) @ v


@case("fuse", bhsd())
def logarithm_of_the_sum(q, k, v):
    s = q @ k.mT * 0.3
    s = s - s.amax(-1, keepdim=True)
    return (s - s.exp().sum(-1, keepdim=True).log()).exp() @ v


@case("fuse", with_hidden_keys)
def logarithm_of_the_sum_of_hidden_keys(q, k, v, hidden):
    """Relative to the maximum, the logarithm of the number of keys is not lost beside the fill."""
    s = (q @ k.mT * 0.3).masked_fill(hidden, MIN)
    s = s - s.amax(-1, keepdim=True)
    return (s - s.exp().sum(-1, keepdim=True).log()).exp() @ v


@case("no_fuse", with_hidden_keys)
def logarithm_relative_to_a_clamped_maximum(q, k, v, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -1e9)
    s = s - s.amax(-1, keepdim=True).clamp(max=-1e9)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@case("fuse", bhsd())
def powers_of_two(q, k, v):
    s = q @ k.mT * (0.3 * math.log2(math.e))
    e = 2 ** (s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@case("fuse", bhsd())
def powers_of_a_half(q, k, v):
    e = torch.pow(0.5, q @ k.mT * 0.3)
    return (e / e.sum(-1, keepdim=True)) @ v


@case("fuse", bhsd())
def softmin_of_negated_scores(q, k, v):
    return F.softmin(-(q @ k.mT) * 0.3, dim=-1) @ v


@case("no_fuse", bhsd())
def softmin_of_masked_scores(q, k, v):
    return F.softmin((q @ k.mT).masked_fill(~triangle(), INF), dim=-1) @ v


@case("no_fuse", bhsd())
def small_sums_with_a_lower_bound(q, k, v):
    e = (q @ k.mT - 40).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=1e-6)) @ v


@case("no_fuse", bhsd())
def sum_with_a_high_lower_bound(q, k, v):
    e = shifted(q @ k.mT * 0.3)
    return (e / e.sum(-1, keepdim=True).clamp(min=4.0)) @ v


@case("no_fuse", with_bias)
def sum_of_numbers_lowered_after_the_maximum(q, k, v, bias):
    s = q @ k.mT * 0.3
    e = (s - s.amax(-1, keepdim=True) + (bias - 40)).exp()
    return F.normalize(e, p=1, dim=-1, eps=1e-6) @ v


@case("no_fuse", with_bias)
def lower_bound_of_a_clamped_maximum(q, k, v, bias):
    s = q @ k.mT * 0.3
    e = (s - torch.maximum(s.amax(-1, keepdim=True), 20 + bias[:, :1])).exp()
    return (e / e.sum(-1, keepdim=True).clamp_min(1e-3)) @ v


@case("no_fuse", bhsd())
def small_sums_normalised_by_torch(q, k, v):
    return F.normalize((q @ k.mT - 40).exp(), p=1, dim=-1) @ v


@case("no_fuse", bhsd())
def normalised_to_length_one(q, k, v):
    return F.normalize(shifted(q @ k.mT), dim=-1) @ v


@case("no_fuse", bhsd())
def normalised_over_the_heads(q, k, v):
    return F.normalize(shifted(q @ k.mT), p=1, dim=1) @ v


@case("no_fuse", bhsd())
def times_the_sum(q, k, v):
    e = shifted(q @ k.mT)
    return (e * e.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def times_two_over_the_sum(q, k, v):
    e = shifted(q @ k.mT)
    return (e * (2 / e.sum(-1, keepdim=True))) @ v


@case("no_fuse", bhsd())
def times_the_square_of_the_reciprocal(q, k, v):
    e = shifted(q @ k.mT)
    return (e * e.sum(-1, keepdim=True) ** -2) @ v


@case("no_fuse", bhsd())
def reciprocal_of_another_sum(q, k, v):
    e, f = shifted(q @ k.mT), shifted(q @ v.mT)
    return (e * f.sum(-1, keepdim=True).reciprocal()) @ v


@case("no_fuse", bhsd())
def logarithm_of_another_sum(q, k, v):
    s, t = q @ k.mT * 0.3, q @ v.mT
    return (s - t.exp().sum(-1, keepdim=True).log()).exp() @ v


@case("no_fuse", with_hidden_keys)
def logarithm_of_a_sum_of_hidden_keys(q, k, v, hidden):
    """Beside -1e9 the logarithm of the number of keys is lost."""
    s = (q @ k.mT * 0.3).masked_fill(hidden, -1e9)
    m = s.amax(-1, keepdim=True)
    return (s - (m + (s - m).exp().sum(-1, keepdim=True).log())).exp() @ v


@case("fuse", bhsd())
def expanded_maximum_and_sum(q, k, v):
    s = q @ k.mT * 0.3
    e = (s - s.amax(-1, keepdim=True).expand_as(s)).exp()
    return (e / e.sum(-1, keepdim=True).expand(-1, -1, -1, S)) @ v


@case("no_fuse", bhsd())
def sums_of_queries_expanded_for_keys(q, k, v):
    e = (q @ k.mT * 0.3).exp()
    return (e / e.sum(-1)[:, :, None].expand_as(e)) @ v
