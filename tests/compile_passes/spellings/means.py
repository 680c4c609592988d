"""Exponentials that are divided by their mean, summed by a product, or masked."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import B, S, bhsd, padded, registry, triangle

CASES, case = registry()


def with_padding():
    return (*bhsd()(), padded()[:, None, None])


def exps(q, k):
    return (q @ k.mT * 0.3).exp()


@case("fuse", bhsd())
def divided_by_the_mean(q, k, v):
    e = exps(q, k)
    return (e / e.mean(-1, True) / k.shape[2]) @ v


@case("fuse", bhsd())
def divided_by_the_mean_times_a_number(q, k, v):
    e = exps(q, k)
    return (e @ v) / (e.mean(dim=-1, keepdim=True) * S / 2)


@case("fuse", bhsd())
def weights_that_sum_to_the_number_of_keys(q, k, v):
    e = exps(q, k)
    return (e / e.mean(-1, keepdim=True)) @ v


@case("fuse", bhsd())
def product_scaled_before_the_division(q, k, v):
    e = exps(q, k)
    return torch.einsum("bhij,bhjd->bhid", e, v).div(S) / e.mean(-1)[..., None]


@case("fuse", bhsd())
def summed_by_an_einsum(q, k, v):
    e = exps(q, k)
    return torch.einsum("bhij,bhjd->bhid", e, v) / torch.einsum("b h i j -> b h i", e)[..., None]


@case("fuse", bhsd())
def summed_by_an_ellipsis(q, k, v):
    e = exps(q, k)
    return (e / torch.einsum("...j->...", e).unsqueeze(-1)) @ v


@case("fuse", bhsd())
def summed_by_a_column_of_ones(q, k, v):
    e = exps(q, k)
    return (e @ v) / (e @ torch.ones_like(v[..., :1]))


@case("fuse", bhsd())
def summed_by_a_vector_of_ones(q, k, v):
    e = exps(q, k)
    return (e @ v) / (e @ torch.ones(S, dtype=v.dtype)).unsqueeze(-1)


@case("fuse", bhsd())
def summed_by_a_matrix_of_ones(q, k, v):
    e = exps(q, k)
    return (e @ v) / (e @ torch.ones_like(v))


@case("fuse", bhsd())
def exponentials_times_a_mask(q, k, v):
    e = exps(q, k) * torch.ones(S, S, dtype=q.dtype).tril()
    return (e / e.sum(-1, keepdim=True)) @ v


@case("fuse", bhsd())
def exponentials_filled_with_zero(q, k, v):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp().masked_fill(~triangle(), 0.0)
    return (e @ v) / torch.einsum("bhij->bhi", e)[..., None]


@case("fuse", bhsd())
def exponentials_chosen_by_a_mask(q, k, v):
    e = torch.where(triangle(), exps(q, k), 0.0)
    return (e / e.mean(-1, keepdim=True)) @ v / S


@case("fuse", with_padding)
def exponentials_times_padding(q, k, v, mask):
    e = exps(q, k) * (mask > 0).to(q.dtype)
    return (e / e.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def divided_by_the_mean_over_queries(q, k, v):
    e = exps(q, k)
    return (e / e.mean(-2, keepdim=True) / S) @ v


@case("no_fuse", bhsd())
def divided_by_the_mean_of_all(q, k, v):
    e = exps(q, k)
    return (e / e.mean((-1, -2), keepdim=True) / e.mean()) @ v


@case("no_fuse", bhsd())
def divided_by_the_mean_plus_one(q, k, v):
    e = exps(q, k)
    return (e / (e.mean(-1, keepdim=True) + 1)) @ v


@case("no_fuse", bhsd())
def mean_with_a_lower_bound(q, k, v):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.mean(-1, keepdim=True).clamp(min=0.5)) @ v


@case("no_fuse", bhsd())
def mean_is_returned(q, k, v):
    e = exps(q, k)
    mean = e.mean(-1, keepdim=True)
    return (e / mean) @ v, mean


@case("no_fuse", bhsd())
def divided_by_a_negative_sum(q, k, v):
    e = exps(q, k)
    return (e / (e.sum(-1, keepdim=True) * -2.0)) @ v


@case("no_fuse", bhsd())
def sum_times_a_vector(q, k, v):
    e = exps(q, k)
    return (e / (e.sum(-1, keepdim=True) * torch.linspace(1, 2, S, dtype=q.dtype))) @ v


@case("no_fuse", bhsd())
def summed_over_queries_by_an_einsum(q, k, v):
    e = exps(q, k)
    return (e / torch.einsum("bhij->bhj", e)[..., None]) @ v


@case("no_fuse", bhsd())
def summed_in_another_order(q, k, v):
    e = exps(q, k)[:, :B]
    return (e / torch.einsum("bhij->hbi", e)[..., None]) @ v[:, :B]


@case("no_fuse", bhsd())
def summed_by_a_diagonal(q, k, v):
    e = exps(q, k)
    return (e / torch.einsum("bhii->bhi", e)[..., None]) @ v


@case("no_fuse", bhsd())
def summed_by_other_numbers(q, k, v):
    e = exps(q, k)
    return (e @ v) / (e @ torch.full_like(v[..., :1], 2.0))


@case("no_fuse", bhsd())
def summed_by_ones_on_the_left(q, k, v):
    e = exps(q, k)
    return (e @ v) / (torch.ones(1, S, dtype=v.dtype) @ e).mT


@case("no_fuse", bhsd())
def masked_after_the_sum(q, k, v):
    e = exps(q, k)
    return (e * torch.ones(S, S, dtype=q.dtype).tril() / e.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def masked_in_the_sum_alone(q, k, v):
    e = exps(q, k)
    total = (e * torch.ones(S, S, dtype=q.dtype).tril()).sum(-1, keepdim=True)
    return (e / total) @ v


@case("no_fuse", bhsd())
def masked_by_two_masks(q, k, v):
    e, mask = exps(q, k), torch.ones(S, S, dtype=q.dtype).tril()
    return (e * mask / (e * mask.T).sum(-1, keepdim=True)) @ v


@case("no_fuse", with_padding)
def masked_by_numbers(q, k, v, mask):
    e = exps(q, k) * mask.add(0.5)
    return (e / e.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def exponentials_filled_with_one(q, k, v):
    e = exps(q, k).masked_fill(~triangle(), 1.0)
    return (e / e.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def masked_sum_with_a_lower_bound(q, k, v):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp() * torch.ones(S, S, dtype=q.dtype).tril()
    return F.normalize(e, p=1, dim=-1, eps=0.9) @ v
