"""Attention as encoders write it."""

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
    bsc,
    join,
    padded,
    randn,
    registry,
    split,
    triangle,
)

CASES, case = registry()


@case("fuse", lambda: (*bsc(), padded()))
def bert_extended_mask(q, k, v, mask):
    mask = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    w = torch.matmul(split(q), split(k).transpose(-1, -2)) / math.sqrt(D) + mask
    p = nn.functional.softmax(w, dim=-1)
    out = torch.matmul(p, split(v)).permute(0, 2, 1, 3).contiguous()
    return out.view(out.size()[:-2] + (C,))


@case("fuse", lambda: (*bsc(), padded()))
def keras_minus_billion(q, k, v, mask):
    w = torch.einsum("bqhd,bkhd->bhqk", q.view(B, S, H, D), k.view(B, S, H, D)) / D**0.5
    w = w - 1e9 * (1 - mask)[:, None, None]
    return torch.einsum("bhqk,bkhd->bqhd", w.softmax(-1), v.view(B, S, H, D)).flatten(2)


@case("fuse", lambda: (*bsc(), padded()))
def fairseq_key_padding(q, k, v, mask):
    q, k, v = (
        x.transpose(0, 1).contiguous().view(S, B * H, D).transpose(0, 1)
        for x in (q * D**-0.5, k, v)
    )
    w = torch.bmm(q, k.transpose(1, 2)).view(B, H, S, S)
    w = w.masked_fill((mask == 0).unsqueeze(1).unsqueeze(2).to(torch.bool), -INF)
    p = F.softmax(w.view(B * H, S, S), dim=-1, dtype=torch.float32)
    attn = torch.bmm(F.dropout(p.type_as(w), 0.0), v)
    return attn.transpose(0, 1).contiguous().view(S, B, C)


@case("fuse", lambda: (*bsc(), padded()))
def masked_in_place(q, k, v, mask):
    w = split(q) @ split(k).transpose(-2, -1)
    w.mul_(D**-0.5)
    w.masked_fill_(mask[:, None, None] == 0, -INF)
    return join(w.softmax(-1) @ split(v))


@case("fuse")
class t5_log_buckets(nn.Module):
    def __init__(self):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(8, H)

    def forward(self, q, k, v):
        i, j = torch.arange(S)[:, None], torch.arange(S)[None]
        n = -torch.min(j - i, torch.zeros_like(j - i))
        large = 4 + (torch.log(n.float() / 4 + 1e-6) / math.log(16 / 4) * 4).to(torch.long)
        large = torch.min(large, torch.full_like(large, 7))
        bias = self.relative_attention_bias(torch.where(n < 4, n, large.clamp(min=0)))
        bias = bias.permute([2, 0, 1]).unsqueeze(0)
        bias = bias + torch.zeros(1, 1, S, S).masked_fill(~triangle(), MIN)
        scores = torch.matmul(split(q), split(k).transpose(3, 2))
        scores += bias
        p = F.softmax(scores.float(), dim=-1).type_as(scores)
        return join(torch.matmul(p, split(v)))


@case("fuse", lambda: (*bsc(), randn(2 * S - 1, D)))
def shaw_relative(q, k, v, table):
    q, k, v = split(q), split(k), split(v)
    place = torch.arange(S)[:, None] - torch.arange(S)[None] + S - 1
    w = torch.matmul(q, k.transpose(-1, -2))
    w = (w + torch.einsum("bhld,lrd->bhlr", q, table[place])) / math.sqrt(D)
    return join(torch.matmul(w.softmax(-1), v))


@case("fuse", lambda: (*bsc(), padded()))
def deberta_like_zeroed(q, k, v, mask):
    w = torch.matmul(split(q), split(k).transpose(-1, -2) / math.sqrt(D))
    drop = ~(mask[:, None, None].bool())
    p = torch.softmax(w.masked_fill(drop, MIN), -1).masked_fill(drop, 0)
    return join(torch.matmul(p, split(v)))


@case("fuse", lambda: (*bsc(), padded()))
def nan_rows_to_zero(q, k, v, mask):
    w = (split(q) @ split(k).mT * 0.3).masked_fill(mask[:, None, None] == 0, -INF)
    return join(torch.nan_to_num(w.softmax(-1)) @ split(v))
