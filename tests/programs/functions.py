"""score_mods and mask_mods that people use, by formulas of our own, and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

B, H, S = 2, 4, 96  # sizes for which the tensors below are made
WIDTH = 12  # of a canvas


def _draw(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=_generator).requires_grad_(grad)


_generator = torch.Generator().manual_seed(0)
_randint = lambda n: torch.randint(0, n, (S,), generator=_generator)  # noqa: E731
DOCUMENTS = torch.stack([_randint(5).sort()[0], _randint(3).sort()[0]]).int()
PREFIX = torch.tensor([30, 7])
PARENT = torch.tensor([max(0, i - 1 - i * 7919 % 5) for i in range(S)])
ENTERED, LEFT = torch.arange(S), torch.tensor([min(S - 1, i + i * 31 % 40) for i in range(S)])
IS_IMAGE = _randint(4) == 0
ANCESTORS = torch.rand(S, S, generator=_generator) < 0.2
KEPT_BLOCKS = torch.rand(H, S // 16, S // 16, generator=_generator) < 0.5
SLOPES = 2.0 ** -torch.arange(1.0, H + 1)
RELATIVE, OFFSET, FACTOR = _draw(H, 2 * S - 1), _draw(H), _draw(H)
GATE = torch.cumsum(-_draw(B, H, S, grad=False).abs() * 0.1, -1).requires_grad_()
BUCKETS, KEY_BIAS, PAIR_BIAS = _draw(32, H), _draw(B, S), _draw(H, S, S)
TEMPERATURE = torch.tensor(0.7, requires_grad=True)
TIMES = torch.rand(S, generator=_generator).sort()[0] * 10
TRAINED = [RELATIVE, OFFSET, FACTOR, GATE, BUCKETS, KEY_BIAS, PAIR_BIAS, TEMPERATURE]


def natten(b, h, i, j):
    """Neighbours on a canvas."""
    x, y = (i % WIDTH).clamp(2, WIDTH - 3), (i // WIDTH).clamp(2, S // WIDTH - 3)
    return ((x - j % WIDTH).abs() <= 2) & ((y - j // WIDTH).abs() <= 2)


def tree(b, h, i, j):
    """A token, its parent and grandparent, and a prompt."""
    parent = PARENT[i]
    return (j == i) | (j == parent) | (j == PARENT[parent]) | (j < 8)


def dilated(b, h, i, j):
    """Every third key of a window."""
    distance = i - j
    return (distance >= 0) & (distance < 50) & (distance % 3 == 0)


def block_diffusion(b, h, i, j):
    """Noisy tokens attend their own block, and clean tokens of blocks before it."""
    half, size = S // 2, 8
    clean_i, clean_j = i >= half, j >= half
    block_i, block_j = (i % half) // size, (j % half) // size
    own = (block_i == block_j) & (clean_i == clean_j)
    before = clean_j & ~clean_i & (block_j < block_i)
    return own | before | (clean_i & clean_j & (block_j <= block_i))


MASKS: dict[str, Callable] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 20),
    "both sides": lambda b, h, i, j: (i - j).abs() <= 9,
    "documents": lambda b, h, i, j: (DOCUMENTS[0, i] == DOCUMENTS[0, j]) & (i >= j),
    "documents of rows": lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j],
    "prefix": lambda b, h, i, j: (i >= j) | (j < PREFIX[b]),
    "sinks and window": lambda b, h, i, j: (i >= j) & ((i - j < 16) | (j < 4)),
    "chunks": lambda b, h, i, j: (i >= j) & (i // 24 == j // 24),
    "dilated": dilated,
    "natten": natten,
    "tree": tree,
    "tree by intervals": lambda b, h, i, j: (ENTERED[i] >= ENTERED[j]) & (ENTERED[i] <= LEFT[j]),
    "ancestors": lambda b, h, i, j: ANCESTORS[i, j] & (j <= i),
    "images": lambda b, h, i, j: (i >= j) | (IS_IMAGE[i] & IS_IMAGE[j]),
    "blocks of heads": lambda b, h, i, j: KEPT_BLOCKS[h, i // 16, j // 16] & (i >= j),
    "block diffusion": block_diffusion,
    "heads differ": lambda b, h, i, j: torch.where(h % 2 == 0, i >= j, (i - j).abs() < 10),
    "times": lambda b, h, i, j: (TIMES[i] - TIMES[j]).abs() < 1.5,
    "lengths": lambda b, h, i, j: (j < PREFIX[b]) & (i < PREFIX[b]),
    "nothing": lambda b, h, i, j: i < 0,
    "transfusion": lambda b, h, i, j: (
        (j <= i) | ((i // 32 == j // 32) & (i % 32 < 8) & (j % 32 < 8))
    ),
}


def t5(s, b, h, i, j):
    """Buckets of distances, by logarithms."""
    distance = (i - j).clamp(min=0)
    far = 16 + (torch.log(distance.clamp(min=1).float() / 16) / math.log(8.0) * 16).int()
    return s + BUCKETS[torch.where(distance < 16, distance, far.clamp(max=31)), h]


def sandwich(s, b, h, i, j):
    """A sum of cosines of the distance."""
    distance = (i - j).float()
    total = torch.cos(distance / 10.0) + torch.cos(distance / 100.0)
    return s + SLOPES[h] * total


SCORES: dict[str, Callable] = {
    "identity": lambda s, b, h, i, j: s,
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "alibi of one side": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "activations": lambda s, b, h, i, j: (
        torch.nn.functional.gelu(s)
        + torch.nn.functional.leaky_relu(s) * torch.nn.functional.logsigmoid(4 * GATE[b, h, j])
    ),
    "softcap": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
    "softcap and alibi": lambda s, b, h, i, j: torch.tanh(s / 2) * 2 - SLOPES[h] * (i - j).abs(),
    "relative": lambda s, b, h, i, j: s + RELATIVE[h, i - j + S - 1],
    "scale and offset": lambda s, b, h, i, j: s * FACTOR[h] + OFFSET[h],
    "gates": lambda s, b, h, i, j: s + GATE[b, h, i] - GATE[b, h, j],
    "t5": t5,
    "bias of keys": lambda s, b, h, i, j: s + KEY_BIAS[b, j],
    "bias of pairs": lambda s, b, h, i, j: s + PAIR_BIAS[h, i, j],
    "scaled bias of pairs": lambda s, b, h, i, j: (s - PAIR_BIAS[h, i, j]) * 0.5 * FACTOR[h],
    "temperature": lambda s, b, h, i, j: s * TEMPERATURE,
    "cubic": lambda s, b, h, i, j: s + 0.1 * s * s * s,
    "documents and alibi": lambda s, b, h, i, j: torch.where(
        DOCUMENTS[b, i] == DOCUMENTS[b, j], s - SLOPES[h] * (i - j).abs(), -float("inf")
    ),
    "sandwich": sandwich,
    "clamped": lambda s, b, h, i, j: s.clamp(-0.5, 0.5) + torch.relu(s) * KEY_BIAS[b, j],
    "sigmoid": lambda s, b, h, i, j: s * torch.sigmoid(s * FACTOR[h] + GATE[b, h, i]),
    "angles": lambda s, b, h, i, j: (
        torch.atan2(s, GATE[b, h, j])
        + torch.asin(0.9 * torch.sin(s))
        + torch.acos(0.9 * torch.cos(s))
        + torch.atan(30.0 * s)
        + torch.hypot(s, FACTOR[h])
    ),
    "hyperbolic": lambda s, b, h, i, j: (
        torch.asinh(s)
        + torch.acosh(1.5 + s * s)
        + torch.atanh(torch.tanh(s) * 0.9)
        + torch.logaddexp(s, GATE[b, h, j])
        + torch.log10(torch.cosh(s))
        + torch.sinh(0.1 * s)
    ),
    "powers and roundings": lambda s, b, h, i, j: (
        (0.2 * s) ** 6
        + (2.0 + s.abs()) ** -5
        + 2.0 ** (0.2 * s)
        + 0.1 * torch.round(0.25 * i * j).sin()
        + torch.round((i * j + 0.25) * 0.013, decimals=1).cos()
        + (2 ** (i % 5) + (j % 3) ** 5) * 1e-2
        + torch.fmax(s, KEY_BIAS[b, j.view_as(j)])
    ),
    "detached": lambda s, b, h, i, j: (
        s * torch.sigmoid(s).detach() + s * KEY_BIAS.detach()[b, j] + GATE[b, h, i] * s.detach()
    ),
    "hidden where low": lambda s, b, h, i, j: torch.where(s > -0.5, s, -float("inf")),
}


def indices(rank: int = 4) -> tuple[Tensor, ...]:
    """b, h, q and k that broadcast to all scores."""
    sizes = (B, H, S, S)
    return tuple(
        torch.arange(n, dtype=torch.int32).view(-1, *[1] * (3 - at)) for at, n in enumerate(sizes)
    )


def dense_mask(mask_mod: Callable) -> Tensor:
    """The mask of all pairs, by broadcasting in place of reading."""
    return mask_mod(*indices()).expand(B, H, S, S)


# Random functions.


def random_function(
    seed: int, score: bool, sizes: tuple[int, int, int, int] = (B, H, S, S),
    trained: list[Tensor] | None = None,
) -> Callable:  # fmt: skip
    """A random score_mod, or mask_mod, of operations that differentiate well.

    `sizes` are (B, H, Sq, Sk); float tensors that it captures are added to `trained`.
    """
    rng, (batches, heads, queries, keys) = random.Random(seed), sizes
    longest = max(queries, keys)
    tensors = {
        "row": torch.randn(longest), "rows": torch.randn(batches, heads, longest),
        "heads": torch.randn(heads), "distances": torch.randn(queries + keys - 1),
        "numbers": torch.randint(0, 6, (longest,)),
        "sorted": torch.randint(0, 9, (longest,)).sort()[0],
    }  # fmt: skip
    if trained is not None:
        trained += [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]

    def integer(depth: int) -> Callable:
        kind = rng.choice("iijjdntmpc" if depth else "ij")
        if kind in "ij":
            at = "ij".index(kind)
            return lambda s, b, h, *ij: ij[at]
        a, c = integer(depth - 1), rng.randint(1, 40)
        z = integer(depth - 1)
        return {
            "d": lambda *x: a(*x) - z(*x), "n": lambda *x: tensors["numbers"][x[3 + c % 2]],
            "t": lambda *x: tensors["sorted"][x[3 + c % 2]], "m": lambda *x: a(*x) % c,
            "p": lambda *x: a(*x) // c, "c": lambda *x: a(*x).clamp(min=-c, max=c).abs() + c,
        }[kind]  # fmt: skip

    def condition(depth: int) -> Callable:
        kind = rng.choice("<<=&|~h" if depth else "<=")
        a, z, c = integer(2), integer(2), rng.randint(-30, 60)
        if kind == "<":
            return lambda *x: a(*x) - z(*x) < c
        if kind == "=":
            return lambda *x: a(*x) == z(*x)
        if kind == "h":
            return lambda s, b, h, i, j: h % 2 == c % 2
        p, q = condition(depth - 1), condition(depth - 1)
        return {"&": lambda *x: p(*x) & q(*x), "|": lambda *x: p(*x) | q(*x),
                "~": lambda *x: ~p(*x)}[kind]  # fmt: skip

    def number(depth: int) -> Callable:
        kind = rng.choice("srkhdcitwab" if depth else "srkhd")
        leaves = {
            "s": lambda s, b, h, i, j: s, "r": lambda s, b, h, i, j: tensors["rows"][b, h, i],
            "k": lambda s, b, h, i, j: tensors["row"][j],
            "h": lambda s, b, h, i, j: tensors["heads"][h],
            "d": lambda s, b, h, i, j: tensors["distances"][i - j + keys - 1],
        }  # fmt: skip
        if kind in leaves:
            return leaves[kind]
        p, q, c = number(depth - 1), number(depth - 1), condition(1)
        n, value = integer(1), rng.uniform(-2.0, 2.0)
        return {
            "c": lambda *x: p(*x) * value, "i": lambda *x: p(*x) + n(*x).float() / 50,
            "t": lambda *x: torch.tanh(p(*x)), "w": lambda *x: torch.where(c(*x), p(*x), q(*x)),
            "a": lambda *x: p(*x) + q(*x), "b": lambda *x: torch.sigmoid(p(*x)) * q(*x),
        }[kind]  # fmt: skip

    if not score:
        mask = condition(3)
        return lambda b, h, i, j: mask(None, b, h, i, j)
    change = number(3)
    return lambda s, b, h, i, j: s + change(s, b, h, i, j)
