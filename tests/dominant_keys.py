"""Attention of e4m3 numbers in which one key has most of the weight of every row."""

from __future__ import annotations

import math

import torch

from fa_ops.call.call import attention_call
from fa_ops.testing.budget import by_operator
from fa_ops.testing.quantized import exact

E4M3 = torch.float8_e4m3fn
POSITIONS = ("first", "middle", "last")


def relative_error(
    backend: str, Sk: int, position: str, share: float = 0.85, D: int = 16, Sq: int = 16,
    device: str = "cpu",
) -> float:  # fmt: skip
    """The error of `out` against exact weights of the same numbers, relative to its size.

    The dominant key has about the weight `share`. Its score grows by 1 in units of log2 with twice
    as many keys, which does not change how its own weight is rounded.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, D, generator=g) for n in (Sq, Sk, Sk))
    # The dominant key alone has the first three features, in which queries are 1. Other scores have
    # a standard deviation of about 1: their exponentials are exp(0.5) on average.
    score = math.log(share / (1 - share) * Sk) + 0.5
    at = {"first": 0, "middle": Sk // 2, "last": Sk - 1}[position]
    q[..., :3], k[..., :3], k[..., at, :] = 1.0, 0.0, 0.0
    rest = torch.tensor(score * math.sqrt(D))
    for feature in range(3):  # e4m3 numbers that add up to the product
        k[..., at, feature] = rest.to(E4M3).float()
        rest -= k[0, 0, at, feature]
    q, k, v = (t.to(device, E4M3) for t in (q, k, v))
    one = torch.ones((), device=device)
    call = attention_call(
        q, k, v, q_scale=one, k_scale=one, v_scale=one, smooth_key=False, eight_bits=True,
        backend=backend,
    )  # fmt: skip
    wanted, _ = exact(call)
    error = by_operator(call)[0].double() - wanted
    return (error.norm() / wanted.norm()).item()
