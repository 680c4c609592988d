"""Attention as vision and diffusion models write it."""

from __future__ import annotations

import math

import torch
import torch.nn as nn

from tests.compile_passes.cases import B, C, D, H, S, bsc, join, padded, randn, registry, split

CASES, case = registry()


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
