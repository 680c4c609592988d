"""Attention as models spell it, for `python -m compile_passes.corpus` and the tests: CASES maps
names to cases with a verdict, "fuse" or "no_fuse".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

B, H, S, D = 2, 4, 12, 8
C = H * D
INF = float("inf")
MIN = torch.finfo(torch.float32).min


@dataclasses.dataclass
class Case:
    fn: Callable
    make_inputs: Callable[[], tuple]
    expected: str
    cores: int = 1
    tags: tuple = ()


CASES: dict[str, Case] = {}


def randn(*shape: int) -> torch.Tensor:
    randn.seed += 1
    return torch.randn(*shape, generator=torch.Generator().manual_seed(randn.seed))


randn.seed = 0


def bhsd(s: int = S, t: int | None = None, hkv: int = H):
    return lambda: (randn(B, H, s, D), randn(B, hkv, t or s, D), randn(B, hkv, t or s, D))


def bsc():
    return tuple(randn(B, S, C) for _ in range(3))


def padded():
    """1 where a token stands: the first text lacks its last four."""
    mask = torch.ones(B, S)
    mask[0, -4:] = 0
    return mask


def case(expected: str, inputs: Callable = bsc, cores: int = 1, tags: str = ""):
    def register(f):
        made = f() if isinstance(f, type) else f
        CASES[f.__name__] = Case(made, inputs, expected, cores, tuple(tags.split()))
        return f

    return register


def split(x, h=H):
    return x.view(x.shape[0], x.shape[1], h, -1).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def triangle(s=S):
    return torch.ones(s, s, dtype=torch.bool).tril()


# ---- decoders


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


# ---- encoders


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


# ---- vision


@case("fuse", lambda: (randn(B, S, C),))
class timm_vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.drop = nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Dropout(0.0)
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, H, D).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q) * D**-0.5, self.k_norm(k)
        attn = self.drop((q @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


@case("fuse", lambda: (randn(B, 16, C), randn(7, D), randn(7, D)))
def sam_decomposed(x, rel_h, rel_w):
    q = k = v = x.view(B, 16, H, D).permute(0, 2, 1, 3).reshape(B * H, 16, D)
    attn = (q * D**-0.5) @ k.transpose(-2, -1)
    place = torch.arange(4)[:, None] - torch.arange(4)[None] + 3
    r = q.reshape(B * H, 4, 4, D)
    h = torch.einsum("bhwc,hkc->bhwk", r, rel_h[place])
    w = torch.einsum("bhwc,wkc->bhwk", r, rel_w[place])
    attn = attn.view(B * H, 4, 4, 4, 4) + h[:, :, :, :, None] + w[:, :, :, None, :]
    attn = attn.view(B * H, 16, 16).softmax(dim=-1)
    return (attn @ v).view(B, H, 16, D).permute(0, 2, 1, 3).reshape(B, 16, C)


@case("fuse", lambda: (*bsc(), padded()))
def stable_diffusion_cross(q, k, v, mask):
    q, k, v = (x.view(B, S, H, D).permute(0, 2, 1, 3).reshape(B * H, S, D) for x in (q, k, v))
    sim = torch.einsum("b i d, b j d -> b i j", q, k) * D**-0.5
    keep = mask.bool()[:, None].expand(B, H, S).reshape(B * H, 1, S)
    sim.masked_fill_(~keep, -torch.finfo(sim.dtype).max)
    out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
    return out.view(B, H, S, D).permute(0, 2, 1, 3).reshape(B, S, C)


@case("fuse", lambda: tuple(x.to(torch.bfloat16) for x in bsc()))
def diffusers_upcast(q, k, v):
    q, k, v = (x.view(B, S, H, D).permute(0, 2, 1, 3).reshape(B * H, S, D) for x in (q, k, v))
    empty = torch.zeros(B * H, S, S, dtype=torch.float32)
    scores = torch.baddbmm(empty, q.float(), k.float().transpose(-1, -2), beta=0, alpha=D**-0.5)
    return torch.bmm(scores.softmax(dim=-1).to(v.dtype), v)


@case("fuse", lambda: (randn(B, C, 16), randn(B, C, 16), randn(B, C, 16)))
def unet_channels_first(q, k, v):
    q, k, v = (x.view(B, H, D, 16) for x in (q, k, v))
    sim = torch.einsum("b h d i, b h d j -> b h i j", q * D**-0.5, k)
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    out = torch.einsum("b h i j, b h d j -> b h i d", sim.softmax(dim=-1), v)
    return out.transpose(2, 3).reshape(B, C, 16)


@case("fuse", lambda: (randn(B, C, 16), randn(B, C, 16), randn(B, C, 16)))
def adm_float_weights(q, k, v):
    q, k, v = (x.reshape(B * H, D, 16) for x in (q, k, v))
    scale = 1 / math.sqrt(math.sqrt(D))
    w = torch.einsum("bct,bcs->bts", q * scale, k * scale)
    w = torch.softmax(w.float(), dim=-1).type(w.dtype)
    return torch.einsum("bts,bcs->bct", w, v).reshape(B, C, 16)


@case("fuse", lambda: (randn(4, S, C), randn(2, 1, S, S)))
def windows_with_mask(x, mask):
    q = k = v = split(x)
    attn = (q @ k.transpose(-2, -1)) * D**-0.5
    attn = attn.view(2, 2, H, S, S) + mask.unsqueeze(0)
    return join(attn.view(-1, H, S, S).softmax(-1) @ v)


# ---- whatever the house style


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


# ---- not attention, or not to be fused


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
    """A router's weights."""
    return torch.einsum("bhse,bhed->bhsd", q.softmax(-1), k[:, :, :D])


@case("no_fuse", bhsd())
def one_exponential_of_another(q, k, v):
    s, t = q @ k.mT, q @ v.mT
    return (s.exp() / t.exp().sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def normalised_with_epsilon(q, k, v):
    e = (q @ k.mT * 0.3).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


# ---- rows without keys: the first text is padded on the left, so its first queries see nothing


def left_padded():
    mask = torch.ones(B, S)
    mask[0, :4] = 0
    return mask


@case("fuse", lambda: (*bsc(), left_padded(), randn(1, H, S, S)))
def learned_bias_beside_mask(q, k, v, mask, bias):
    keep = triangle() & mask.bool()[:, None, None]
    w = split(q) @ split(k).mT * 0.3 + bias
    w = w + torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
    return join(w.softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded(), randn(1, H, S, S)))
def learned_bias_with_mask_in_it(q, k, v, mask, bias):
    keep = triangle() & mask.bool()[:, None, None]
    bias = bias + torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
    return join((split(q) @ split(k).mT * 0.3 + bias).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()), tags="infer")
def causal_infinite_padding_finite(q, k, v, mask):
    bias = torch.zeros(B, 1, S, S).masked_fill(mask[:, None, None] == 0, MIN)
    bias = bias.masked_fill(~triangle(), -INF)
    return join((split(q) @ split(k).mT * 0.3 + bias).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()), tags="infer")
def two_finite_masks_added(q, k, v, mask):
    causal = torch.full((S, S), MIN).triu(1)
    padding = (1 - mask[:, None, None]) * MIN
    return join((split(q) @ split(k).mT * 0.3 + (causal + padding)).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()), tags="infer")
def filled_then_added(q, k, v, mask):
    w = torch.where(triangle(), split(q) @ split(k).mT * 0.3, MIN)
    return join((w + (1 - mask[:, None, None]) * MIN).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()))
def opt_with_rows_without_keys(q, k, v, mask):
    keep = triangle() & mask.bool()[:, None, None]
    w = split(q) @ split(k).mT * 0.3 + torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
    return join(torch.max(w, torch.tensor(MIN)).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()))
def minus_ten_thousand(q, k, v, mask):
    keep = triangle() & mask.bool()[:, None, None]
    w = split(q) @ split(k).mT * 0.3 + (~keep) * -10000.0
    return join(w.softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()))
class mask_from_another_graph(nn.Module):
    """A float mask of unknown content with rows that are finfo.min throughout."""

    def forward(self, q, k, v, mask):
        mask = mask.detach()  # as an attention mask, it learns nothing
        keep = triangle() & mask.bool()[:, None, None]
        bias = self.outside(keep)
        return join((split(q) @ split(k).mT * 0.3 + bias).softmax(-1) @ split(v))

    @torch.compiler.disable
    def outside(self, keep):
        return torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
