"""Inputs whose attention is computed to measure errors: a few queries and many keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FACTOR = 20.0  # of outliers


class Inputs(NamedTuple):
    """query (1, H, queries, D), key and value (1, H, S, D) in bfloat16, attended in full."""

    query: Tensor
    key: Tensor
    value: Tensor


def gaussian(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Leave normally distributed numbers as they are."""


def outlier_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One token in 500 is FACTOR times as large, in query, key and value."""
    for x in (q, k, v):
        x[:, :, 7::500] *= FACTOR


def outlier_channels(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Two channels of the keys are FACTOR times as large."""
    D = k.shape[-1]
    k[..., [3 % D, 17 % D]] *= FACTOR
    q *= 4.0 / FACTOR


def key_mean(q: Tensor, k: Tensor, v: Tensor) -> None:
    """All keys share a vector that is eight times as large as what differs."""
    k += 8.0 * torch.randn_like(k[:, :, :1])


def needle(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Each query has a key of its own among all, whose weight is about 0.9."""
    queries, S, D = q.shape[2], k.shape[2], q.shape[3]
    at = torch.arange(queries, device=q.device) * (S // queries)
    score = math.log(S) + 0.5 + math.log(9.0)
    k[:, :, at] = q * (score * D**0.5 / q.square().sum(-1, keepdim=True))


DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "gaussian": gaussian,
    "outlier tokens": outlier_tokens,
    "outlier channels": outlier_channels,
    "key mean": key_mean,
    "needle": needle,
}


def draw(name: str, length: int, queries: int, heads: int, head_dim: int, device: str) -> Inputs:
    """The inputs of a distribution, always the same."""
    g = torch.Generator(device).manual_seed(0)
    shapes = ((1, heads, n, head_dim) for n in (min(queries, length), length, length))
    q, k, v = (torch.randn(shape, device=device, generator=g) for shape in shapes)
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []):
        torch.manual_seed(0)
        DISTRIBUTIONS[name](q, k, v)
    return Inputs(*(x.bfloat16() for x in (q, k, v)))


def exact(inputs: Inputs) -> Tensor:
    """The output in float64, by the head and by blocks of queries."""
    q, k, v = inputs
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for h in range(q.shape[1]):
        keys, values = k[0, h].double(), v[0, h].double()
        for rows in torch.arange(q.shape[2], device=q.device).split(64):
            scores = q[0, h, rows].double() @ keys.T * q.shape[3] ** -0.5
            out[0, h, rows] = torch.softmax(scores, -1) @ values
    return out
