"""Sums of several attentions: differences of weights, and one softmax over two sets of keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, MIN, B, D, H, S, bhsd, padded, randn, registry, triangle

CASES, case = registry()


def two_heads():
    """Two queries and keys, a value, and how much of the second weights is subtracted."""
    return (*(randn(B, H, S, D) for _ in range(5)), randn(H, 1, 1))


def two_sets():
    """A query, keys and values of two sets, and a padding mask of the first."""
    first = (randn(B, H, S, D), randn(B, H, S, D))
    second = (randn(B, H, 5, D), randn(B, H, 5, D))
    return (randn(B, H, S, D), *first, *second, padded())


def hidden(keep):
    return keep[:, None, None, :] == 0


@case("fuse", two_heads, cores=2)
def differential(q1, k1, q2, k2, v, share):
    a, b = (F.softmax(q @ k.mT * 0.35, -1) for q, k in ((q1, k1), (q2, k2)))
    return (a - share * b) @ v


@case("fuse", two_heads, cores=2)
def differential_causal_by_einsum(q1, k1, q2, k2, v, share):
    weights = []
    for q, k in ((q1, k1), (q2, k2)):
        scores = torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(~triangle(), -INF)
        weights.append(scores.softmax(-1))
    return torch.einsum("bhij,bhjd->bhid", weights[0] - weights[1] * 0.8, v)


@case("fuse", two_heads, cores=3)
def three_weights_are_added(q1, k1, q2, k2, v, share):
    a, b, c = ((x @ y.mT).softmax(-1) for x, y in ((q1, k1), (q2, k2), (q1, k2)))
    return (a + b * share.sigmoid() + c / 3) @ v


@case("fuse", two_heads)
def weights_and_positions_are_added(q1, k1, q2, k2, v, share):
    """As in ConViT, without its normalisation: the second weights are no product."""
    positions = (torch.arange(S)[:, None] - torch.arange(S)).abs()
    near = (-positions * share.exp()).softmax(-1).expand(B, -1, -1, -1)
    gate = share.sigmoid()
    return ((1 - gate) * (q1 @ k1.mT).softmax(-1) + gate * near) @ v


@case("fuse", two_sets, cores=2)
def joined_keys(q, k1, v1, k2, v2, keep):
    scores = torch.cat([q @ k1.mT * 0.3, q @ k2.mT * 0.3], -1)
    w = scores.softmax(-1)
    return w[..., :S] @ v1 + w[..., S:] @ v2


@case("fuse", two_sets, cores=2)
def joined_keys_with_masks(q, k1, v1, k2, v2, keep):
    """As in DALL-E."""
    texts = (q @ k1.mT).masked_fill(hidden(keep), MIN)
    images = (q @ k2.mT).masked_fill(~torch.ones(S, 5, dtype=torch.bool).tril(), MIN)
    w = torch.cat((texts, images), dim=-1).softmax(dim=-1)
    of_texts, of_images = w[..., :S], w[..., S:]
    out = torch.einsum("bhij,bhjd->bhid", of_images, v2)
    return out + torch.einsum("bhij,bhjd->bhid", of_texts, v1)


@case("fuse", two_sets, cores=2)
def joined_keys_of_blocks(q, k1, v1, k2, v2, keep):
    """As in PEGASUS-X: local keys in blocks, and global ones."""
    q, k1, v1 = (x.view(B, H, 3, 4, D) for x in (q, k1, v1))
    local = torch.einsum("bhKLF,bhKRF->bhKLR", q, k1)
    to_all = torch.einsum("BHKLF,BHXF->BHKLX", q, k2)
    mask = F.pad(torch.where(hidden(keep), MIN, 0.0).view(B, 3, 4), (5, 0))
    w = (torch.cat([to_all, local], dim=-1) + mask[:, None, :, None, :]).softmax(-1)
    to_all, local = w[:, :, :, :, :5], w[:, :, :, :, 5:]
    local = torch.einsum("bhKLR,bhKRF->bhKLF", local, v1)
    return torch.einsum("BHKLX,BHXF->BHKLF", to_all, v2) + local


@case("no_fuse", two_sets)
def joined_keys_are_returned(q, k1, v1, k2, v2, keep):
    w = torch.cat([q @ k1.mT, q @ k2.mT], -1).softmax(-1)
    return w[..., :S] @ v1 + w[..., S:] @ v2, w


@case("no_fuse", two_sets)
def joined_keys_overlap(q, k1, v1, k2, v2, keep):
    w = torch.cat([q @ k1.mT, q @ k2.mT], -1).softmax(-1)
    return w[..., : S + 1] @ torch.cat([v1, v1[:, :, :1]], 2) + w[..., S:] @ v2


@case("no_fuse", two_heads)
def differential_is_returned(q1, k1, q2, k2, v, share):
    a, b = (F.softmax(q @ k.mT, -1) for q, k in ((q1, k1), (q2, k2)))
    total = a - share * b
    return total @ v, total


@case("fuse", lambda: tuple(randn(B, 3, S, H, D) for _ in range(3)))
def tied_rows(q, k, v):
    """As in ESM's MSA transformer: all rows of an alignment share their weights."""
    scores = torch.einsum("brihd,brjhd->bhij", q * 0.2, k)
    return torch.einsum("bhij,brjhd->brihd", scores.softmax(-1), v)


@case("fuse", bhsd())
def tied_rows_with_padding(q, k, v):
    scores = torch.einsum("rhid,rhjd->hij", q, k) * 0.1
    scores = scores.masked_fill(~triangle(), -1e4)
    return torch.einsum("hij,rhjd->rhid", scores.softmax(-1), v)


@case("no_fuse", two_heads)
def weights_over_the_queries_are_added(q1, k1, q2, k2, v, share):
    a, b = ((q @ k.mT).softmax(-2) for q, k in ((q1, k1), (q2, k2)))
    return (a + b) @ v


@case("no_fuse", two_sets)
def joined_rows_of_tables(q, k1, v1, k2, v2, keep):
    tables = torch.ones(B, H, S, S).cumsum(-1), torch.zeros(B, H, S, 5)
    w = torch.cat(tables, -1).softmax(-1)
    return w[..., :S] @ v1 + w[..., S:] @ v2
