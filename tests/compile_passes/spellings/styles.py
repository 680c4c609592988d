"""Attention in various coding styles."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, B, C, D, H, S, bhsd, randn, registry, split

CASES, case = registry()


@case("fuse")
def whisper_split_scale(q, k, v):
    scale = D**-0.25
    q, k, v = split(q) * scale, split(k).transpose(2, 3) * scale, split(v)
    mask = torch.empty(64, 64).fill_(-INF).triu_(1)
    qk = (q @ k + mask[:S, :S]).float()
    return (F.softmax(qk, dim=-1).to(q.dtype) @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


@case("fuse", bhsd())
def x_transformers(q, k, v):
    dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
    mask = torch.ones((S, S), dtype=torch.bool).triu(1)
    dots = dots.masked_fill(mask, -torch.finfo(dots.dtype).max)
    attn = F.softmax(dots, dim=-1, dtype=torch.float32).type(dots.dtype)
    return torch.einsum("b h i j, b h j d -> b h i d", attn, v)


@case("fuse", lambda: (*bhsd()(), randn(H, 2, D), randn(H, 2, D)))
def memory_keys(q, k, v, mk, mv):
    k, v = (torch.cat((m[None].expand(B, -1, -1, -1), x), -2) for m, x in ((mk, k), (mv, v)))
    return ((q @ k.mT) * D**-0.5).softmax(-1) @ v


@case("fuse", bhsd())
def exponentials_twice(q, k, v):
    s = q @ k.mT * 0.3
    return (torch.exp(s) / torch.exp(s).sum(-1, keepdim=True)) @ v


@case("fuse", bhsd())
def shifted_by_max(q, k, v):
    s = q @ k.mT * 0.3
    e = torch.exp(s - torch.max(s, dim=-1, keepdim=True)[0])
    return (e / torch.sum(e, dim=-1, keepdim=True)) @ v


@case("fuse", lambda: (randn(S, D), randn(S, D), randn(S, D)))
def no_batch(q, k, v):
    return torch.mm(F.softmax(torch.mm(q, k.t()) / D**0.5, dim=1), v)


@case("fuse", cores=H)
def head_by_head(q, k, v):
    outs = []
    for i in range(H):
        a, b, c = (x[..., i * D : (i + 1) * D] for x in (q, k, v))
        outs.append(torch.softmax(a @ b.transpose(-2, -1) / math.sqrt(D), dim=-1) @ c)
    return torch.cat(outs, dim=-1)


@case("fuse", bhsd(), cores=3)
def query_chunks(q, k, v):
    outs = [((c @ k.mT) * 0.3).softmax(-1) @ v for c in q.split(4, dim=2)]
    return torch.cat(outs, 2)


@case("fuse", lambda: (*bhsd()(), torch.tensor(0.7)))
def learned_temperature(q, k, v, t):
    return torch.softmax(q @ k.transpose(-2, -1) * t.exp(), -1) @ v


@case("fuse", bhsd())
def negative_scale(q, k, v):
    return torch.softmax(-(q @ k.transpose(-2, -1)) / 3.0, -1) @ v


@case("fuse", lambda: (randn(S, B, C), randn(S, B, C), randn(S, B, C)))
def sequence_first(q, k, v):
    q, k, v = (x.view(S, B * H, D).transpose(0, 1) for x in (q, k, v))
    w = torch.baddbmm(torch.full((S, S), -INF).triu(1), q * D**-0.5, k.transpose(-2, -1))
    return torch.bmm(F.softmax(w, dim=-1), v).transpose(0, 1).reshape(S, B, C)


@case("fuse", bhsd())
def prefix_or_chunk(q, k, v):
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    keep = (j <= i) & (torch.div(i, 4, rounding_mode="floor") == j // 4)
    return torch.where(keep, q @ k.mT * 0.3, -INF).softmax(-1) @ v


@case("fuse", bhsd())
def powers_of_two(q, k, v):
    s = q @ k.mT * (D**-0.5 / math.log(2))
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def powers_of_two_and_of_e(q, k, v):
    s = q @ k.mT * 0.3
    return (s.exp2() @ v) / s.exp().sum(-1, keepdim=True)


@case("fuse", bhsd())
def squared_distances(q, k, v):
    lengths = q.square().sum(-1, keepdim=True) + k.square().sum(-1).unsqueeze(2)
    return (-(lengths - 2 * q @ k.mT) * 0.1).softmax(-1) @ v


@case("fuse", bhsd())
def subtracted_from_a_bias(q, k, v):
    return torch.sub(torch.linspace(-1, 1, S), q @ k.mT, alpha=0.3).softmax(-1) @ v


@case("no_fuse", bhsd())
def subtracted_from_their_maximum(q, k, v):
    s = q @ k.mT
    return (s.amax(-1, keepdim=True) - s).softmax(-1) @ v
