"""Attention as decoders write it."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.compile_passes.cases import (
    INF,
    MIN,
    B,
    C,
    D,
    H,
    S,
    bhsd,
    bsc,
    join,
    padded,
    randn,
    registry,
    split,
    triangle,
)

CASES, case = registry()


@case("fuse")
class gpt2_buffer_and_where(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(64, 64).bool().tril().view(1, 1, 64, 64))

    def forward(self, q, k, v):
        q, k, v = split(q), split(k), split(v)
        w = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], D**0.5)
        nq, nk = q.size(-2), k.size(-2)
        keep = self.bias[:, :, nk - nq : nk, :nk]
        w = torch.where(keep, w, torch.full([], torch.finfo(w.dtype).min, dtype=w.dtype))
        w = F.dropout(F.softmax(w, dim=-1).type(v.dtype), 0.0, self.training)
        return join(torch.matmul(w, v))


@case("fuse")
def gptj_scale_buffer(q, k, v):
    q, k, v = split(q).float(), split(k).float(), split(v)
    w = torch.matmul(q, k.transpose(-1, -2))
    w = torch.where(triangle(), w, torch.tensor(torch.finfo(w.dtype).min))
    w = w / torch.sqrt(torch.tensor(D, dtype=torch.float32))
    return join(torch.matmul(F.softmax(w, dim=-1).to(v.dtype), v))


@case("fuse")
def neox_baddbmm(q, k, v):
    q, k = (split(x).reshape(B * H, S, D) for x in (q, k))
    scores = torch.zeros(B * H, S, S, dtype=q.dtype)
    scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=1.0, alpha=D**-0.5)
    scores = scores.view(B, H, S, S)
    scores = torch.where(triangle(), scores, torch.tensor(MIN))
    return join(torch.matmul(F.softmax(scores, -1).to(v.dtype), split(v)))


@case("fuse", lambda: (*bsc(), padded()))
def falcon_alibi(q, k, v, mask):
    q, k, v = split(q), split(k), split(v)
    alibi = (torch.cumsum(mask, -1) - 1)[:, None] * mask[:, None]
    alibi = torch.tensor([0.5**i for i in range(H)])[None, :, None] * alibi
    causal = torch.zeros(S, S).masked_fill(~triangle(), MIN)
    logits = q @ k.transpose(-1, -2) + alibi.view(B, H, 1, -1)
    logits *= D**-0.5
    return join(F.softmax(logits + causal, dim=-1, dtype=q.dtype) @ v)


@case("fuse", lambda: (*bsc(), padded()))
def opt_maximum(q, k, v, mask):
    q, k, v = (split(x).reshape(B * H, S, D) for x in (q * D**-0.5, k, v))
    keep = triangle()[None, None] & mask.bool()[:, None, None]
    bias = torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
    w = torch.bmm(q, k.transpose(1, 2)).view(B, H, S, S) + bias
    w = torch.max(w, torch.tensor(torch.finfo(w.dtype).min)).view(B * H, S, S)
    return torch.bmm(F.softmax(w, dim=-1), v).view(B, H, S, D).transpose(1, 2).reshape(B, S, C)


@case("fuse", lambda: (randn(B, 4, H, D), randn(B, S, 2, D), randn(B, S, 2, D)))
def meta_llama_hstack(q, k, v):
    mask = torch.triu(torch.full((4, 4), -INF), diagonal=1)
    mask = torch.hstack([torch.zeros(4, S - 4), mask]).type_as(q)
    k, v = (x[:, :, :, None].expand(B, S, 2, 2, D).reshape(B, S, H, D) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
    scores = F.softmax((scores + mask).float(), dim=-1).type_as(q)
    return torch.matmul(scores, v).transpose(1, 2).contiguous().view(B, 4, -1)


@case("fuse", bhsd(hkv=2))
def gemma_google_window(q, k, v):
    k, v = (torch.repeat_interleave(x, 2, dim=1) for x in (k, v))
    mask = torch.triu(torch.full((1, 1, S, S), -2.3819763e38), diagonal=1)
    ones = torch.ones_like(mask)
    window = torch.triu(ones, -1 * 4 + 1) * torch.tril(ones, 4 - 1)
    mask = torch.where(window == 1, mask, -2.3819763e38)
    scores = torch.matmul(q * D**-0.5, k.transpose(2, 3)) / 50.0
    scores = torch.tanh(scores) * 50.0 + mask
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)


@case("fuse", lambda: (*bhsd(hkv=2)(), randn(H)))
def gpt_oss_shifted_sinks(q, k, v, sinks):
    k, v = (x[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D) for x in (k, v))
    w = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    w = w + torch.zeros(S, S).masked_fill(~triangle(), MIN)
    w = torch.cat([w, sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
    w = w - w.max(dim=-1, keepdim=True).values
    return torch.matmul(F.softmax(w, dim=-1, dtype=w.dtype)[..., :-1], v)


@case("fuse", lambda: (randn(S, 2, 2, D), randn(S, 2, D), randn(S, 2, D), randn(4)))
def gpt_oss_reference(q, k, v, sinks):
    k, v = (x[:, :, None, :].expand(-1, -1, 2, -1) for x in (k, v))
    sinks = sinks.reshape(2, 2, 1, 1).expand(-1, -1, S, -1)
    mask = torch.triu(q.new_full((S, S), -INF), diagonal=1)
    mask += torch.tril(mask.new_full((S, S), -INF), diagonal=-5)
    qk = torch.einsum("qhmd,khmd->hmqk", q, k)
    qk *= D**-0.5
    qk += mask[None, None, :, :]
    w = torch.softmax(torch.cat([qk, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hmqk,khmd->qhmd", w, v).reshape(S, -1)


@case("fuse", bhsd(hkv=2))
def grouped_by_view(q, k, v):
    scores = torch.einsum("bkgsd,bktd->bkgst", q.view(B, 2, 2, S, D), k) / math.sqrt(D)
    scores = scores.masked_fill(~triangle(), -INF)
    return torch.einsum("bkgst,bktd->bkgsd", scores.softmax(-1), v).reshape(B, H, S, D)


@case("fuse", bhsd(hkv=2))
def grouped_by_unsqueeze(q, k, v):
    scores = q.reshape(B, 2, 2, S, D) @ k.unsqueeze(2).transpose(-1, -2) * D**-0.5
    scores = scores + torch.full((S, S), -INF).triu(1)
    return (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


@case("fuse", lambda: (randn(B, 1, C), randn(B, H, 16, D), randn(B, H, 16, D), torch.tensor(9)))
def decode_with_position(q, k, v, position):
    keep = torch.arange(16) <= position
    w = split(q) @ k.transpose(-1, -2) * D**-0.5
    return join(w.masked_fill(~keep, -INF).softmax(-1) @ v)


@case("fuse", lambda: (*bsc(), randn(1, H, S, S)))
def dropkey_style_bias(q, k, v, noise):
    w = split(q) @ split(k).mT / math.sqrt(D)
    return join((w + (noise > 1.5) * -1e12).softmax(-1) @ split(v))
