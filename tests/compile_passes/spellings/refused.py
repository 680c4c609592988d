"""Code that resembles attention but is not, or that must not be fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, B, D, H, S, bhsd, randn, registry, triangle

CASES, case = registry()


@case("no_fuse", bhsd())
def weights_kept_on_self(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return {"out": p @ v, "attentions": (p,)}


@case("no_fuse", bhsd())
def mean_of_heads_returned(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p.mean(1)


@case("no_fuse", bhsd())
def double_softmax(q, k, v):
    return (q @ k.mT).softmax(-1).softmax(-1) @ v


@case("no_fuse", bhsd())
def over_the_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


@case("no_fuse", bhsd())
def weights_transposed(q, k, v):
    return (q @ k.mT).softmax(-1).mT @ v


@case("no_fuse", bhsd())
def weights_detached(q, k, v):
    return (q @ k.mT).softmax(-1).detach() @ v


@case("no_fuse", bhsd())
def scores_detached(q, k, v):
    return (q @ k.mT).detach().softmax(-1) @ v


@case("no_fuse", bhsd())
def scores_clamped(q, k, v):
    return (q @ k.mT).clamp(-2, 2).softmax(-1) @ v


@case("no_fuse", bhsd())
def scores_leaky(q, k, v):
    return F.leaky_relu(q @ k.mT, 0.2).softmax(-1) @ v


@case("no_fuse", bhsd())
def weights_squared(q, k, v):
    return (q @ k.mT).softmax(-1).pow(2) @ v


@case("no_fuse", bhsd())
def residual_weights(q, k, v):
    return ((q @ k.mT).softmax(-1) + torch.eye(S)) @ v


@case("no_fuse", bhsd())
def talking_heads_before(q, k, v):
    mix = torch.eye(H) + 0.1
    return torch.einsum("bhij,hg->bgij", q @ k.mT, mix).softmax(-1) @ v


@case("no_fuse", bhsd())
def top_k_kept(q, k, v):
    s = q @ k.mT
    return s.masked_fill(s < s.topk(4, -1).values[..., -1:], -INF).softmax(-1) @ v


@case("no_fuse", bhsd(), tags="infer")
def weights_written_to(q, k, v):
    p = (q @ k.mT).softmax(-1)
    p[..., 0] = 0
    return p @ v


@case("no_fuse", bhsd(), tags="infer")
def query_overwritten(q, k, v):
    q = q + 1
    p = (q @ k.mT).softmax(-1)
    q.zero_()
    return p @ v + q


@case("no_fuse", lambda: (*bhsd()(), triangle()), tags="infer")
def mask_overwritten(q, k, v, mask):
    mask = mask.clone()
    p = (q @ k.mT).masked_fill(~mask, -INF).softmax(-1)
    mask.zero_()
    return p @ v, mask


@case("no_fuse", bhsd())
def log_weights(q, k, v):
    return (q @ k.mT).log_softmax(-1) @ v


@case("no_fuse", bhsd())
def renormalised(q, k, v):
    p = (q @ k.mT).softmax(-1) * torch.ones(S, S).tril()
    return (p / p.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd(), cores=0)
def cosformer_like(q, k, v):
    q, k = F.relu(q), F.relu(k)
    return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT + 1e-6)


@case("no_fuse", bhsd(), cores=0)
def gated_mixture(q, k, v):
    """The weights of a router."""
    return torch.einsum("bhse,bhed->bhsd", q.softmax(-1), k[:, :, :D])


@case("no_fuse", bhsd())
def one_exponential_of_another(q, k, v):
    s, t = q @ k.mT, q @ v.mT
    return (s.exp() / t.exp().sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def normalised_with_epsilon(q, k, v):
    e = (q @ k.mT * 0.3).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@case("no_fuse", bhsd())
def talking_heads_before_and_after(q, k, v):
    """As in CaiT."""
    mix = torch.eye(H) + 0.1
    w = torch.einsum("bhij,hg->bgij", q @ k.mT, mix).softmax(-1)
    return torch.einsum("bhij,hg->bgij", w, mix.mT) @ v


def one_dimension_of_heads():
    """Query, key and value without a batch, and a tensor like the value."""
    return tuple(randn(B * H, S, D) for _ in range(4))


@case("no_fuse", one_dimension_of_heads)
def residual_added_by_the_value_product(q, k, v, residual):
    return torch.baddbmm(residual, (q @ k.mT * 0.3).softmax(-1), v)


@case("no_fuse", one_dimension_of_heads)
def value_product_scaled_by_alpha(q, k, v, residual):
    return torch.baddbmm(residual, (q @ k.mT * 0.3).softmax(-1), v, beta=0, alpha=2.0)


@case("no_fuse", one_dimension_of_heads)
def residual_added_before_the_division(q, k, v, residual):
    e = (q @ k.mT * 0.3).exp()
    return torch.baddbmm(residual, e, v) / e.sum(-1, keepdim=True)
