"""Calls of F.scaled_dot_product_attention that become the operator, on a CPU too: masks that become
compact, repeated heads, one query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, B, S, bhsd, bsc, join, randn, registry, split

CASES, case = registry()
sdpa = F.scaled_dot_product_attention


def with_padding():
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[0, :3] = 0
    return (*bhsd()(), keep)


def with_positions():
    positions = torch.cat([torch.arange(5), torch.arange(3), torch.arange(4)])
    return (*bhsd()(), torch.stack([positions, torch.arange(S)]))


def rows(s=S):
    return torch.arange(s)[:, None]


@case("fuse", bhsd())
def sdpa_causal_bool(q, k, v):
    return sdpa(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril())


@case("fuse")
def sdpa_causal_float_in_a_module_style(q, k, v):
    hidden = torch.full((S, S), -INF).triu(1)
    out = sdpa(split(q), split(k), split(v), hidden, scale=0.2)
    return join(out)


@case("fuse", bhsd())
def sdpa_window(q, k, v):
    distance = rows() - torch.arange(S)
    return sdpa(q, k, v, (distance >= 0) & (distance < 4))


@case("fuse", bhsd())
def sdpa_symmetric_window_and_prefix(q, k, v):
    j = torch.arange(S)
    return sdpa(q, k, v, (rows() - j).abs() <= 2) + sdpa(q, k, v, (j <= rows()) | (j < 3))


CASES["sdpa_symmetric_window_and_prefix"].cores = 2


@case("fuse", bhsd())
def sdpa_chunks(q, k, v):
    j = torch.arange(S)
    return sdpa(q, k, v, (j // 4 == rows() // 4) & (j <= rows()))


@case("fuse", with_padding)
def sdpa_padding_and_causality(q, k, v, keep):
    causal = torch.arange(S) <= rows()
    return sdpa(q, k, v, causal & keep.bool()[:, None, None, :])


@case("fuse", with_padding)
def sdpa_padding_by_indexing(q, k, v, keep):
    batch = torch.arange(B)[:, None, None, None]
    j = torch.arange(S)
    mask = (j <= rows()) & (j > rows() - 5) & keep.bool()[batch, j]
    return sdpa(q, k, v, mask)


@case("fuse", with_padding)
def sdpa_lengths(q, k, v, keep):
    lengths = keep.sum(-1)
    return sdpa(q, k, v, (torch.arange(S) < lengths[:, None])[:, None, None])


@case("fuse", with_positions)
def sdpa_packed_by_positions(q, k, v, positions):
    """As transformers recognises packed texts."""
    start = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    text = start.cumsum(-1)
    same = text[:, :, None] == text[:, None, :]
    causal = positions[:, None, :] <= positions[:, :, None]
    return sdpa(q, k, v, (same & causal)[:, None])


@case("fuse", bhsd(hkv=2))
def sdpa_grouped(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


@case("fuse", bhsd(hkv=2))
def sdpa_repeated_heads(q, k, v):
    k, v = (x[:, :, None].expand(B, 2, 2, S, -1).reshape(q.shape) for x in (k, v))
    return sdpa(q, k, v)


@case("fuse", bhsd(s=5, hkv=2))
def sdpa_fewer_queries_than_keys(q, k, v):
    k, v = (torch.cat([x, x], 2) for x in (k, v))
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


@case("fuse", bhsd(s=12, t=5, hkv=2))
def sdpa_more_queries_than_keys(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


@case("fuse", bhsd(s=1, t=9), tags="infer")
def sdpa_one_query(q, k, v):
    return sdpa(q, k, v)


@case("fuse", lambda: tuple(randn(4, S, 8) for _ in range(3)))
def sdpa_without_batch(q, k, v):
    mask = torch.arange(S) <= rows()
    return sdpa(q, k, v, mask) + sdpa(q[0], k[0], v[0], mask)


CASES["sdpa_without_batch"].cores = 2


@case("fuse", bhsd())
def sdpa_operator(q, k, v):
    mask = torch.arange(S) <= rows()
    return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, mask)


@case("fuse", lambda: (*bhsd()(), randn(4, S, S)))
def sdpa_bias_in_a_window(q, k, v, bias):
    hidden = torch.zeros(S, S).masked_fill((rows() - torch.arange(S)).abs() > 3, -INF)
    return sdpa(q, k, v, bias.tanh() + hidden)


@case("fuse", bsc)
def sdpa_key_rows_without_keys(q, k, v):
    """Rows without keys are 0 there too."""
    j = torch.arange(S)
    return sdpa(split(q), split(k), split(v), (j > rows()) & (j < 9))


@case("no_fuse", bhsd())
def sdpa_without_a_mask(q, k, v):
    return sdpa(q, k, v) + sdpa(q, k, v, is_causal=True)


@case("no_fuse", with_padding)
def sdpa_padding_alone(q, k, v, keep):
    return sdpa(q, k, v, keep.bool()[:, None, None])
