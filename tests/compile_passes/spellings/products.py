"""Products of query, key and value that are written without `@` or `bmm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, B, C, D, S, bhsd, bsc, randn, registry, triangle

CASES, case = registry()


def matrices():
    """Query, key and value of one head, (S, D)."""
    return tuple(randn(S, D) for _ in range(3))


def with_shared_keys():
    """Queries of a batch, and keys and values that all of it shares."""
    return randn(B, S, C), randn(S, C), randn(S, C)


@case("fuse", matrices)
def linear_for_both_products(q, k, v):
    weights = F.softmax(F.linear(q, k) * 0.3, dim=-1)
    return F.linear(weights, v.t())


@case("fuse", with_shared_keys)
def linear_with_shared_keys_and_a_bias(q, k, v):
    bias = torch.linspace(-1, 1, k.shape[0], dtype=k.dtype)
    return F.linear(q, k, bias).softmax(-1) @ v


@case("fuse", matrices)
def addmm_of_a_mask(q, k, v):
    mask = torch.zeros(S, S, dtype=q.dtype).masked_fill(~triangle(), -INF)
    scores = torch.addmm(mask, q, k.t(), beta=1, alpha=0.3)
    return torch.addmm(q.new_zeros(()), scores.softmax(1), v, beta=0)


@case("fuse", matrices)
def addbmm_of_one_matrix(q, k, v):
    scores = torch.addbmm(q.new_ones(S, S), q[None], k.t()[None], alpha=0.3)
    return scores.softmax(-1) @ v


@case("fuse", bhsd())
def inner_product_with_shared_keys(q, k, v):
    return torch.inner(q, k[0, 0]).mul(0.3).softmax(-1) @ v[0, 0]


@case("fuse", bhsd())
def tensordot_for_both_products(q, k, v):
    weights = torch.tensordot(q, k[0, 0], dims=([3], [1])).softmax(-1)
    return torch.tensordot(weights, v[0, 0], dims=1)


@case("fuse", bhsd())
def broadcast_and_summed(q, k, v):
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * 0.3
    weights = scores.masked_fill(~triangle(), -INF).softmax(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(dim=-2)


@case("fuse", bhsd())
def broadcast_and_summed_by_torch(q, k, v):
    scores = torch.sum(torch.mul(q[..., None, :], k[..., None, :, :]), -1, keepdim=True)
    return torch.sum(scores.softmax(-2) * v[..., None, :, :], -2)


@case("fuse", bsc)
def pooled_by_one_query(q, k, v):
    weights = F.softmax((k * q[:, :1]).sum(-1) / C**0.5, dim=1)
    return (weights.unsqueeze(-1) * v).sum(1)


@case("fuse", bsc)
def pooled_by_a_vector(q, k, v):
    return torch.einsum("bs,bsc->bc", (k @ q[0, 0]).softmax(-1), v)


@case("fuse", matrices)
def one_query_of_a_matrix(q, k, v):
    return torch.mv(k, q[0]).softmax(0) @ v


@case("fuse", bhsd())
def scores_with_keys_first(q, k, v):
    return (k @ q.mT * 0.3).softmax(-2).mT @ v


@case("no_fuse", bhsd())
def additive_scores(q, k, v):
    """As in Bahdanau et al.: every query has hidden keys of its own."""
    hidden = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))
    return (hidden @ torch.linspace(-1, 1, D, dtype=q.dtype)).softmax(-1) @ v


@case("no_fuse", bhsd())
def additive_scores_summed(q, k, v):
    hidden = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))
    return (hidden * torch.linspace(-1, 1, D, dtype=q.dtype)).sum(-1).softmax(-1) @ v


@case("no_fuse", lambda: (randn(B, S, C), randn(B, S, C)))
class weights_of_a_layer(torch.nn.Module):
    """The product with a parameter is no scores, as in routers."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(C, S)

    def forward(self, x, v):
        return self.gate(x).softmax(-1) @ v


@case("no_fuse", matrices)
def linear_softmax_over_queries(q, k, v):
    return F.linear(q, k).softmax(0) @ v


@case("no_fuse", matrices)
def linear_value_with_a_bias(q, k, v):
    return F.linear((q @ k.t()).softmax(-1), v.t(), q[0])


@case("no_fuse", matrices)
def addmm_value_with_an_addition(q, k, v):
    return torch.addmm(q, (q @ k.t()).softmax(-1), v)


@case("no_fuse", matrices)
def addmm_value_scaled(q, k, v):
    return torch.addmm(q, (q @ k.t()).softmax(-1), v, beta=0, alpha=2)


@case("no_fuse", bhsd())
def inner_product_over_all_heads(q, k, v):
    weights = torch.inner(q[:, 0], k[0]).softmax(2)
    return torch.einsum("bihj,hjd->bid", weights, v[0])


@case("no_fuse", matrices)
def tensordot_with_queries_summed(q, k, v):
    weights = torch.tensordot(q, k, dims=([1], [1])).softmax(-1)
    return torch.tensordot(weights, v, dims=([0], [0]))


@case("no_fuse", bhsd())
def broadcast_and_summed_over_keys(q, k, v):
    return (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-2).softmax(-1) * v


@case("no_fuse", bhsd())
def broadcast_product_is_read(q, k, v):
    weighted = (q @ k.mT).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)
    return weighted.sum(-2), weighted.amax()


@case("no_fuse", bhsd())
def broadcast_and_summed_over_queries(q, k, v):
    return ((q @ k.mT).softmax(-1).unsqueeze(-1) * v.unsqueeze(3)).sum(2)


@case("no_fuse", bhsd())
def summed_over_features_too(q, k, v):
    return ((q @ k.mT).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum((-2, -1))


@case("no_fuse", bhsd())
def largest_product(q, k, v):
    return (q.unsqueeze(-2) * k.unsqueeze(-3)).amax(-1).softmax(-1) @ v


@case("no_fuse", bsc)
def pooled_over_the_batch(q, k, v):
    weights = (k * q[:, :1]).sum(-1).softmax(0)
    return (weights.unsqueeze(-1) * v).sum(1)


@case("no_fuse", bsc)
def mixture_of_experts(q, k, v):
    gates = F.linear(q, k[0, :3]).softmax(-1)
    experts = torch.stack([v, v.sin(), v.cos()], 2)
    return torch.einsum("bse,bsec->bsc", gates, experts)
