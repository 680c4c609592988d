"""Masks that are padded for memory keys or class tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile_passes.cases import INF, MIN, B, S, bhsd, registry, triangle

CASES, case = registry()


def attend(q, k, v, keep, fill=-INF):
    return (q @ k.mT * 0.3).masked_fill(~keep, fill).softmax(-1) @ v


@case("fuse", bhsd(s=9, t=12))
def memory_before(q, k, v):
    return attend(q, k, v, F.pad(triangle(9), (3, 0), value=True))


@case("fuse", bhsd(s=9, t=12))
def memory_after(q, k, v):
    return attend(q, k, v, F.pad(triangle(9), (0, 3), value=True), MIN)


@case("fuse", bhsd(s=9, t=12))
def hidden_after(q, k, v):
    return attend(q, k, v, F.pad(triangle(9), (0, 3)), MIN)


@case("fuse", bhsd())
def class_token_in_front(q, k, v):
    hidden = F.pad(torch.zeros(S - 1, S - 1).masked_fill(~triangle(S - 1), -INF), (1, 0, 1, 0))
    return (q @ k.mT * 0.3 + hidden).softmax(-1) @ v


@case("fuse", bhsd())
def padded_twice(q, k, v):
    inner = F.pad(triangle(S - 4), (2, 2), value=True)
    return attend(q, k, v, F.pad(inner, (0, 0, 1, 3), value=True))


@case("fuse", bhsd())
def cropped(q, k, v):
    return attend(q, k, v, F.pad(triangle(S + 3), (0, -3, -3, 0), value=True))


@case("fuse", bhsd())
def circular_positions(q, k, v):
    p = F.pad(torch.arange(S - 3.0)[None], (3, 0), mode="circular")[0]
    return attend(q, k, v, p <= p[:, None])


@case("fuse", bhsd())
def positions_in_bytes(q, k, v):
    p = F.pad(torch.arange(S - 3, dtype=torch.uint8), (3, 0), value=7)
    return attend(q, k, v, p <= p[:, None])


@case("fuse", lambda: (*bhsd()(), torch.tensor([3, 8])))
def padded_lengths(q, k, v, n):
    keep = F.pad(torch.arange(S - 2) < n[:, None], (2, 0), value=True)
    return attend(q, k, v, keep[:, None, None])


@case("fuse", lambda: (*bhsd()(), torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3]] * B)))
def padded_documents(q, k, v, documents):
    d = F.pad(documents, (2, 0), value=-1)
    return attend(q, k, v, (d[:, :, None] == d[:, None])[:, None], -1e9)
