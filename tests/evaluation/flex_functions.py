"""`python -m tests.evaluation.flex_functions`: functions of scores and masks, against torch's.

About a hundred functions, of the kinds that torch's tests of FlexAttention and the collection
attention-gym have, in every form in which Python writes a function. Each runs by
`fa_ops.flex_attention` on several shapes and dtypes, with the mask as a `mask_mod` and as a
`BlockMask`. Results, lse and all gradients, also of what the functions capture, are compared with
the eager implementation of torch's operator, and results of a `BlockMask` with its public function.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as torch_flex

import fa_ops
from fa_ops.bench.command import in_existing_folder


class Shape(NamedTuple):
    """Sizes of a call."""

    B: int
    Bkv: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int


SHAPES = {
    "equal": Shape(2, 2, 4, 4, 96, 96, 16, 16),
    "grouped heads": Shape(2, 2, 8, 2, 64, 64, 8, 8),
    "odd lengths": Shape(2, 2, 3, 3, 77, 131, 8, 12),
    "few queries": Shape(3, 3, 4, 1, 3, 90, 16, 8),
    "shared keys": Shape(3, 1, 4, 2, 40, 65, 16, 16),
}


class Draw:
    """Tensors that a function captures, and the sizes that they are for."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int) -> None:
        self.B, self.H, self.Sq, self.Sk = shape.B, shape.Hq, shape.Sq, shape.Sk
        self.longest = max(shape.Sq, shape.Sk)
        self.dtype, self.leaves = dtype, []
        self.generator = torch.Generator().manual_seed(seed)

    def real(self, *sizes: int, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, trained if `grad`."""
        made = torch.randn(sizes, generator=self.generator).to(dtype or self.dtype)
        if grad:
            self.leaves.append(made.requires_grad_())
        return made

    def integer(self, high: int, *sizes: int) -> Tensor:
        """Numbers from 0 to high - 1."""
        return torch.randint(0, high, sizes, generator=self.generator)

    def bool(self, *sizes: int) -> Tensor:
        """True for two of three."""
        return torch.rand(sizes, generator=self.generator) < 0.66


Maker = Callable[[Draw], Callable[..., Tensor]]
SCORES: dict[str, Maker] = {}
MASKS: dict[str, Maker] = {}


def score(maker: Maker) -> Maker:
    """List what makes a score_mod."""
    SCORES[maker.__name__.removeprefix("score_").replace("_", " ")] = maker
    return maker


def mask(maker: Maker) -> Maker:
    """List what makes a mask_mod."""
    MASKS[maker.__name__.removeprefix("mask_").replace("_", " ")] = maker
    return maker


# Scores without anything captured.

_PLAIN = {
    "identity": lambda s, b, h, i, j: s,
    "doubled": lambda s, b, h, i, j: s * 2,
    "square": lambda s, b, h, i, j: s * s,
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, float("-inf")),
    "causal upside down": lambda s, b, h, i, j: torch.where(i <= j, s, float("-inf")),
    "distance": lambda s, b, h, i, j: s + (i - j),
    "causal distance": lambda s, b, h, i, j: torch.where(i >= j, s + (i - j), -math.inf),
    "trigonometry": lambda s, b, h, i, j: torch.sin(torch.cos(s)) + torch.tan(b),
    "two branches": lambda s, b, h, i, j: torch.cos(s) * torch.sin(s) + torch.tan(b * 0.1),
    "every other key": lambda s, b, h, i, j: torch.where(j % 2 == 0, s, float("-inf")),
    "soft cap": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0),
    "sigmoid": lambda s, b, h, i, j: s * torch.sigmoid(s),
    "relu": lambda s, b, h, i, j: torch.relu(s) + torch.nn.functional.relu(-s) * 0.5,
    "gelu by erf": lambda s, b, h, i, j: 0.5 * s * (1 + torch.erf(s / math.sqrt(2))),
    "softplus": lambda s, b, h, i, j: torch.log1p(torch.exp(-s.abs())) + torch.relu(s),
    "clamped": lambda s, b, h, i, j: s.clamp(-1.0, 1.5),
    "power": lambda s, b, h, i, j: (s.abs() + 1e-2) ** 1.5,
    "polynomial": lambda s, b, h, i, j: s + 0.1 * s**2 - 0.05 * s**3,
    "root": lambda s, b, h, i, j: torch.sign(s) * torch.sqrt(s.abs() + 0.1),
    "scale of length": lambda s, b, h, i, j: s * torch.log((i + 2).float()) / math.log(64.0),
    "floor division": lambda s, b, h, i, j: s / (1 + i // 7) + (j // 5) * 0.1,
    "negative floor": lambda s, b, h, i, j: s + ((i - j) // 3) * 0.05 + ((i - j) % 4) * 0.1,
    "bits": lambda s, b, h, i, j: s + ((i & 3) ^ (j & 5)) * 0.1 + ((i >> 2) | (j << 1)) * 1e-3,
    "logic": lambda s, b, h, i, j: torch.where((i > j) & ~((i + j) % 3 == 0) | (h == 1), s, -s),
    "nested where": lambda s, b, h, i, j: torch.where(
        i >= j, torch.where(i - j < 9, s, s * 0.5), torch.where(j - i < 4, s - 1, -math.inf)
    ),
    "of batch and head": lambda s, b, h, i, j: s * (h + 1) / (b + 2),
    "maximum": lambda s, b, h, i, j: torch.maximum(s, torch.minimum(s * 2, s + 1)),
    "in place": lambda s, b, h, i, j: (s + 1).mul_(2).sub_(i * 0.01),
    "methods": lambda s, b, h, i, j: s.mul(2).add(1).exp().log().neg().tanh(),
    "casts": lambda s, b, h, i, j: s + (i >= j).to(s.dtype) + (i % 3).float() * 0.1,
    "an integer result": lambda s, b, h, i, j: (s * 4).to(torch.int32).to(s.dtype) * 0.25,
    "constants": lambda s, b, h, i, j: s + torch.full_like(s, 0.5) * torch.ones_like(s),
    "a tensor that it makes": lambda s, b, h, i, j: s * torch.tensor(0.5) + torch.pi,
    "reciprocal": lambda s, b, h, i, j: s + (i - j).abs().add(1).reciprocal() + torch.rsqrt(j + 1),
    "angles": lambda s, b, h, i, j: torch.atan2(s, j + 1) + torch.asin(0.9 * torch.tanh(s)),
    "sigmoid by tanh": lambda s, b, h, i, j: 0.5 * (1 + torch.tanh(s / 2)) + torch.sinh(s * 0.1),
    "high powers": lambda s, b, h, i, j: (s * 0.3) ** 6 + (1.5 + s.abs()) ** -5 + (j % 3) ** 5,
    "powers of two": lambda s, b, h, i, j: 2.0 ** (0.3 * s) + 2 ** (i % 4) * 0.1,
    "rounded": lambda s, b, h, i, j: s + torch.round(0.25 * (i * j)).cos() + torch.hypot(s, j + 1),
    "without gradient": lambda s, b, h, i, j: torch.where(s.detach() > 0, s, s.detach() * 0.1),
    "fractions of indices": lambda s, b, h, i, j: torch.where((i / 8 - j / 8).abs() < 3, s, -9.0),
    "quotients by keys": lambda s, b, h, i, j: s - i // (1 + j),
    "reshaped": lambda s, b, h, i, j: s.view_as(i) + j.expand_as(s).reshape_as(i) * 0.1,
    "kerple": lambda s, b, h, i, j: s - 0.7 * torch.log(1 + 0.3 * (i - j).abs()),
    "alibi by powers": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / 4)),
    "sandwich": lambda s, b, h, i, j: s + functools.reduce(
        lambda x, n: x + torch.cos((i - j) / 10000.0 ** (n / 8)), range(8), 0.0 * (h + 1)
    ),
}  # fmt: skip
SCORES.update({name: lambda draw, f=f: f for name, f in _PLAIN.items()})


# Scores with captured tensors.


@score
def factor_of_heads(draw):
    factor = draw.real(draw.H)
    return lambda s, b, h, i, j: s * factor[h]


@score
def score_all_dimensions(draw):
    of_b, of_h, of_i, of_j = (draw.real(n) for n in (draw.B, draw.H, draw.Sq, draw.Sk))
    return lambda s, b, h, i, j: s * of_h[h] + of_b[b] + of_i[i] - of_j[j]


@score
def score_alibi(draw):
    slopes = torch.exp2(-torch.arange(1, draw.H + 1) * 8.0 / draw.H)
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


@score
def score_alibi_trained(draw):
    slopes = draw.real(draw.H)
    return lambda s, b, h, i, j: s + slopes[h] * (i - j)


@score
def a_table_of_distances(draw):
    table, zero = draw.real(draw.H, draw.Sq + draw.Sk), draw.Sk
    return lambda s, b, h, i, j: s + table[h, i - j + zero]


@score
def a_table_of_clamped_distances(draw):
    table = draw.real(17)
    return lambda s, b, h, i, j: s + table[(i - j).clamp(-8, 8) + 8]


@score
def buckets_of_t5(draw):
    table = draw.real(32, draw.H)

    def score_mod(s, b, h, i, j):
        distance = j - i
        bucket = (distance > 0).to(torch.int32) * 16
        distance = distance.abs()
        far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / math.log(16) * 8).to(torch.int32)
        return s + table[bucket + torch.where(distance < 8, distance, far.clamp(max=15)), h]

    return score_mod


@score
def pairs(draw):
    bias = draw.real(draw.Sq, draw.Sk)
    return lambda s, b, h, i, j: s + bias[i, j]


@score
def pairs_in_steps(draw):
    bias = draw.real(draw.Sq, draw.Sk)
    return lambda s, b, h, i, j: s + bias[i][j]


@score
def pairs_of_heads_and_batches(draw):
    bias, gain = draw.real(draw.B, draw.H, draw.Sq, draw.Sk), draw.real(draw.H)
    return lambda s, b, h, i, j: s * gain[h] + bias[b, h, i, j]


@score
def pairs_scaled(draw):
    bias, scale = draw.real(draw.H, draw.Sq, draw.Sk), draw.real(1)
    return lambda s, b, h, i, j: s + bias[h, i, j] * scale[0]


@score
def pairs_by_other_rows(draw):
    row, bias = draw.integer(draw.Sq, draw.Sq), draw.real(draw.Sq, draw.Sk)
    return lambda s, b, h, i, j: s + bias[row[i], j]


@score
def symmetric_pairs(draw):
    bias = draw.real(draw.longest, draw.longest)
    return lambda s, b, h, i, j: s + bias[torch.minimum(i, j), torch.maximum(i, j)]


@score
def graphormer(draw):
    hops, table = draw.integer(6, draw.B, draw.Sq, draw.Sk), draw.real(6, draw.H)
    return lambda s, b, h, i, j: s + table[hops[b, i, j], h]


@score
def kinds_of_tokens(draw):
    kind, table = draw.integer(4, draw.B, draw.longest), draw.real(4, 4)
    return lambda s, b, h, i, j: s + table[kind[b, i], 0] - table[kind[b, j], 1]


@score
def forgetting(draw):
    gates = draw.real(draw.B, draw.H, draw.longest)
    return lambda s, b, h, i, j: torch.where(i >= j, s + gates[b, h, i] - gates[b, h, j], -math.inf)


@score
def sums_of_indices(draw):
    table = draw.real(draw.Sq + draw.Sk)
    return lambda s, b, h, i, j: s + table[i + j]


@score
def captured_without_gradient(draw):
    bias, pairs = draw.real(draw.H, draw.Sk), draw.real(draw.Sq, draw.Sk)
    return lambda s, b, h, i, j: s + bias.detach()[h, j] * 0.5 + pairs[i, j].detach() + bias[h, j]


@score
def temperature_of_queries(draw):
    heat = draw.real(draw.H, draw.Sq)
    return lambda s, b, h, i, j: s * torch.nn.functional.softplus(heat[h, i])


@score
def gate_of_keys(draw):
    gate = draw.real(draw.B, draw.Sk)
    return lambda s, b, h, i, j: s + torch.nn.functional.logsigmoid(gate[b, j])


@score
def gaussian_window(draw):
    width, center = draw.real(draw.H), draw.real(draw.H)
    return lambda s, b, h, i, j: s - ((i - j - center[h]) / (8 + width[h] ** 2)) ** 2


@score
def a_window_of_table(draw):
    table, zero = draw.real(draw.H, 2 * 9 + 1), 9
    return lambda s, b, h, i, j: torch.where(
        (i - j).abs() <= zero, s + table[h, (i - j).clamp(-zero, zero) + zero], -math.inf
    )


@score
def rotation_of_phases(draw):
    phase = draw.real(draw.longest, grad=False)
    return lambda s, b, h, i, j: s * torch.cos(phase[i] - phase[j])


@score
def exponential_decay(draw):
    rate = draw.real(draw.H)
    return lambda s, b, h, i, j: s + torch.exp(-rate[h].abs() * (i - j).abs())


@score
def a_cap_of_heads(draw):
    cap = draw.real(draw.H)
    return lambda s, b, h, i, j: torch.tanh(s / (2 + cap[h] ** 2)) * (2 + cap[h] ** 2)


@score
def canvas_of_two_axes(draw):
    rows, columns, n = draw.real(31), draw.real(31), 8

    def score_mod(s, b, h, i, j):
        down = (i // n - j // n).clamp(-15, 15) + 15
        return s + rows[down] + columns[i % n - j % n + 15]

    return score_mod


@score
def half_precision_captured(draw):
    table = draw.real(draw.H, draw.Sk, dtype=torch.bfloat16)
    return lambda s, b, h, i, j: s + table[h, j]


@score
def score_documents(draw):
    document = draw.integer(4, draw.longest).sort()[0]
    return lambda s, b, h, i, j: torch.where(document[i] == document[j], s, -math.inf)


@score
def padding(draw):
    length = draw.integer(draw.Sk, draw.B) + 1
    return lambda s, b, h, i, j: torch.where(j < length[b], s, float("-inf"))


@score
def latent_positions(draw):
    of_q, of_k = draw.real(draw.Sq, 4, grad=False), draw.real(draw.Sk, 4, grad=False)
    return lambda s, b, h, i, j: s + (of_q[i] * of_k[j]).sum()


# Forms of functions.


@score
def a_partial(draw):
    def score_mod(table, s, b, h, i, j, offset=0):
        return s + table[h] + offset

    return functools.partial(score_mod, draw.real(draw.H), offset=0.5)


@score
def a_composition(draw):
    parts = SCORES["alibi trained"](draw), SCORES["soft cap"](draw), SCORES["doubled"](draw)

    def score_mod(s, b, h, i, j):
        for part in parts:
            s = part(s, b, h, i, j)
        return s

    return score_mod


@score
def a_module(draw):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(draw.real(draw.H, grad=False))
            self.offset = torch.nn.Buffer(draw.real(draw.Sk, grad=False))
            self.factor = 0.5

        def forward(self, s, b, h, i, j):
            return s * self.factor + self.bias[h] + self.offset[j]

    module = Module()
    draw.leaves.append(module.bias)
    return module


@score
def a_method(draw):
    class Holder:
        tables = {"bias": [draw.real(draw.H), 3]}

        def score(self, s, b, h, i, j):
            bias, n = self.tables["bias"]
            return s + bias[h] * (i % n)

    return Holder().score


@score
def a_callable_object(draw):
    class Holder:
        def __init__(self):
            self.bias = draw.real(draw.B, draw.H)

        def __call__(self, s, b, h, i, j):
            return s + self.bias[b, h]

    return Holder()


@score
def defaults(draw):
    def score_mod(s, b, h, i, j, table=None, n=7):
        return s + table[h] * (i % n)

    score_mod.__defaults__ = draw.real(draw.H), 7
    return score_mod


@score
def tensors_without_dimensions(draw):
    gain, width = draw.real(), torch.tensor(5)
    return lambda s, b, h, i, j: s * gain + (i // width) * 0.1


@score
def a_view(draw):
    wide = draw.real(draw.Sk, 3, draw.H)
    part = wide[:, 1].T
    return lambda s, b, h, i, j: s + part[h, j]


@score
def computed_from_parameters(draw):
    weight = draw.real(draw.H, 5)
    bias = torch.softmax(weight, -1) @ torch.arange(5, dtype=weight.dtype)
    return lambda s, b, h, i, j: s + bias[h] * (j % 3)


# Masks.

_PLAIN_MASKS = {
    "causal": lambda b, h, i, j: i >= j,
    "causal upside down": lambda b, h, i, j: i <= j,
    "all": lambda b, h, i, j: b >= 0,
    "window": lambda b, h, i, j: (i >= j) & (i - j <= 13),
    "both sides": lambda b, h, i, j: (i - j).abs() <= 11,
    "sinks": lambda b, h, i, j: (i >= j) & ((i - j < 10) | (j < 4)),
    "prefix": lambda b, h, i, j: (i >= j) | (j < 17),
    "dilated": lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0) & (i - j < 40),
    "chunks": lambda b, h, i, j: (i // 16 == j // 16) & (i >= j),
    "blocks of rows": lambda b, h, i, j: i // 8 >= j // 8,
    "every other key": lambda b, h, i, j: j % 2 == 0,
    "of heads": lambda b, h, i, j: (i >= j) | (h % 2 == 0),
    "windows of heads": lambda b, h, i, j: (i - j).abs() < 4 * (h + 1),
    "rows without keys": lambda b, h, i, j: (i > 9) & (j > 2 * i - 40) & (j < i),
    "not the token itself": lambda b, h, i, j: i != j,
    "global tokens": lambda b, h, i, j: (i < 3) | (j < 3) | ((i - j).abs() < 6),
    "neighbours on a canvas": lambda b, h, i, j: (
        ((i // 8).clamp(1, 14) - j // 8).abs() <= 1
    ) & (((i % 8).clamp(1, 6) - j % 8).abs() <= 1),
    "tiles on a canvas": lambda b, h, i, j: (
        ((i // 8) // 4 - (j // 8) // 4).abs() <= 1
    ) & (((i % 8) // 4 - (j % 8) // 4).abs() <= 1),
    "bits": lambda b, h, i, j: ((i & 12) >> 2) >= ((j & 12) >> 2),
    "negated": lambda b, h, i, j: ~((i < j) | (i - j > 20)),
    "multiplied": lambda b, h, i, j: (i >= j) * (i - j < 25),
    "float comparison": lambda b, h, i, j: torch.sqrt(j.float()) * 1.5 <= i + 0.25,
    "a power of two away": lambda b, h, i, j: ((i - j) & (i - j - 1)) == 0,
}  # fmt: skip
MASKS.update({name: lambda draw, f=f: f for name, f in _PLAIN_MASKS.items()})


@mask
def documents(draw):
    document = draw.integer(4, draw.longest).sort()[0]
    return lambda b, h, i, j: document[i] == document[j]


@mask
def causal_documents_of_rows(draw):
    document = draw.integer(4, draw.B, draw.longest).sort()[0]
    return lambda b, h, i, j: (document[b, i] == document[b, j]) & (i >= j)


@mask
def documents_by_positions(draw):
    ends = (draw.integer(3, draw.longest).cumsum(0) // 7).int()
    start = torch.searchsorted(ends, ends)

    def mask_mod(b, h, i, j):
        return (ends[i] == ends[j]) & (i - start[i] >= j - start[j])

    return mask_mod


@mask
def ragged_rows(draw):
    ends = torch.tensor([0, draw.Sk // 3, draw.Sk // 2, draw.Sk])
    number = torch.searchsorted(ends, torch.arange(draw.longest), right=True).clamp(max=3)
    return lambda b, h, i, j: (j >= ends[number[i] - 1]) & (j < ends[number[i]])


@mask
def mask_padding(draw):
    length = draw.integer(draw.Sk, draw.B)
    return lambda b, h, i, j: j < length[b]


@mask
def padding_of_both(draw):
    keys, queries = draw.integer(draw.Sk, draw.B) + 1, draw.integer(draw.Sq, draw.B) + 1
    return lambda b, h, i, j: (j < keys[b]) & (i < queries[b]) & (i >= j)


@mask
def prefix_of_rows(draw):
    prefix = draw.integer(draw.Sk, draw.B)
    return lambda b, h, i, j: (i >= j) | (j < prefix[b])


@mask
def shared_prefix(draw):
    group, prefix = draw.integer(3, draw.longest).sort()[0], 9
    return lambda b, h, i, j: (i >= j) & ((j < prefix) | (group[i] == group[j]))


@mask
def dense(draw):
    kept = draw.bool(draw.Sq, draw.Sk)
    return lambda b, h, i, j: kept[i, j]


@mask
def dense_of_heads_and_causal(draw):
    kept = draw.bool(draw.B, draw.H, draw.Sq, draw.Sk)
    return lambda b, h, i, j: kept[b, h, i, j] & (i >= j)


@mask
def chosen_blocks(draw):
    kept = draw.bool(draw.H, -(-draw.Sq // 16), -(-draw.Sk // 16))
    return lambda b, h, i, j: kept[h, i // 16, j // 16] & (i >= j)


@mask
def chosen_blocks_by_tables(draw):
    of_i, of_j = draw.integer(6, draw.Sq), draw.integer(6, draw.Sk)
    kept = draw.bool(draw.H, 6, 6)
    return lambda b, h, i, j: kept[h, of_i[i], of_j[j]]


@mask
def a_tree(draw):
    parent = (torch.arange(draw.longest) - 1 - draw.integer(4, draw.longest)).clamp(min=0)
    return lambda b, h, i, j: (j == i) | (j == parent[i]) | (j == parent[parent[i]]) | (j < 5)


@mask
def a_tree_by_intervals(draw):
    enter = torch.arange(draw.longest)
    leave = enter + draw.integer(30, draw.longest)
    return lambda b, h, i, j: (enter[j] <= enter[i]) & (leave[i] <= leave[j])


@mask
def images_in_text(draw):
    image = draw.integer(3, draw.longest).cumsum(0) // 5
    return lambda b, h, i, j: (i >= j) | ((image[i] == image[j]) & (image[i] % 2 == 1))


@mask
def block_diffusion(draw):
    half = draw.longest // 2

    def mask_mod(b, h, i, j):
        clean_i, clean_j = i >= half, j >= half
        of_i, of_j = torch.where(clean_i, i - half, i) // 4, torch.where(clean_j, j - half, j) // 4
        own = (clean_i == clean_j) & (of_i == of_j)
        return own | (clean_j & torch.where(clean_i, of_i >= of_j, of_i > of_j))

    return mask_mod


@mask
def cross_attention_to_images(draw):
    shown = draw.integer(6, draw.B, draw.Sq).sort()[0]
    return lambda b, h, i, j: j // 16 <= shown[b, i]


@mask
def frames_of_video(draw):
    return lambda b, h, i, j: torch.where(
        h % 2 == 0, (i // 12 - j // 12).abs() <= 1, (i % 12 - j % 12).abs() <= 2
    )


@mask
def a_curve_of_tokens(draw):
    order = torch.randperm(draw.longest, generator=draw.generator)
    return lambda b, h, i, j: (order[i] // 8 - order[j] // 8).abs() <= 1


@mask
def times(draw):
    seen = (draw.real(draw.longest, grad=False) ** 2).cumsum(0)
    return lambda b, h, i, j: (seen[i] - seen[j] < 12.0) & (seen[i] >= seen[j])


@mask
def and_of_torch(draw):
    return torch_flex.and_masks(MASKS["causal"](draw), MASKS["documents"](draw))


@mask
def or_of_torch(draw):
    return torch_flex.or_masks(MASKS["window"](draw), MASKS["prefix of rows"](draw))


@mask
def nothing_of_torch(draw):
    return torch_flex.noop_mask


@mask
def an_offset(draw):
    offset = torch.tensor(draw.Sk - draw.Sq)
    return lambda b, h, i, j: i + offset >= j


# What is refused, and why.
REFUSED = {"latent positions": "computes with a whole tensor"}


class Outcome(NamedTuple):
    """What became of one case."""

    case: str
    status: str  # "passed", "refused", "failed", "beyond torch"
    why: str = ""


class Case(NamedTuple):
    """A score and a mask, by their names, on tensors."""

    score: str | None
    mask: str | None
    form: str  # of the mask: "mask_mod", or "BlockMask"
    shape: str
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.score or '-'} | {self.mask or '-'} ({self.form}) | {self.shape} | {dtype}"


def cases(only: str, several: int, seed: int) -> list[Case]:
    """Every score and mask on every shape, and pairs of them that are drawn."""
    rng, found = random.Random(seed), []
    named = [(s, None) for s in SCORES] + [(None, m) for m in MASKS]
    drawn = [(rng.choice([*SCORES]), rng.choice([*MASKS])) for _ in range(several)]
    for each in (named, drawn):
        for s, m in each:
            if only not in (s or "") and only not in (m or ""):
                continue
            shapes = SHAPES if each is named else [rng.choice([*SHAPES])]
            for shape in shapes:
                for dtype in (torch.float64, torch.float32):
                    forms = ("mask_mod", "BlockMask") if m is not None else ("mask_mod",)
                    found += [Case(s, m, form, shape, dtype) for form in forms]
    return found


def run(case: Case, backend: str | None = None) -> Outcome:
    """Compare one case."""
    shape, dtype = SHAPES[case.shape], case.dtype
    torch.manual_seed(0)
    draw = Draw(shape, dtype, seed=len(str(case)))
    score_mod = None if case.score is None else SCORES[case.score](draw)
    mask_mod = None if case.mask is None else MASKS[case.mask](draw)
    sizes = (shape.B, shape.Hq, shape.Sq, shape.D), (shape.Bkv, shape.Hkv, shape.Sk, shape.D)
    sizes += ((shape.Bkv, shape.Hkv, shape.Sk, shape.Dv),)
    q, k, v = (torch.randn(x, dtype=dtype, requires_grad=True) for x in sizes)
    block_mask = given_mask = None
    if case.form == "BlockMask":
        block_mask = torch_flex.create_block_mask(
            mask_mod, shape.B, shape.Hq, shape.Sq, shape.Sk, "cpu", BLOCK_SIZE=16
        )
    else:
        given_mask = mask_mod
    settings = {"enable_gqa": shape.Hq != shape.Hkv, "backend": backend}
    try:
        actual = fa_ops.flex_attention(
            q, k, v, score_mod, block_mask, mask_mod=given_mask, return_lse=True, **settings
        )
    except NotImplementedError as error:
        return Outcome(str(case), "refused", str(error))
    try:
        expected = _expected(q, k, v, score_mod, mask_mod)
        gradients = _gradients(expected, leaves := [q, k, v, *draw.leaves])
        public = actual[0]
        if block_mask is not None:
            given = (q.detach(), k.detach(), v.detach(), score_mod, block_mask)
            public = _public(given, settings["enable_gqa"])
    except Exception as error:  # whatever torch raises
        return Outcome(str(case), "beyond torch", repr(error).splitlines()[0])
    names = ["out", "lse", "torch's flex_attention", "query", "key", "value"]
    names += [f"captured tensor {i}" for i in range(len(draw.leaves))]
    found = [*actual, actual[0], *_gradients(actual, leaves)]
    return _compared(case, names, found, [*expected, public, *gradients])


def _gradients(results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Those of a random sum of out and lse."""
    generator = torch.Generator().manual_seed(1)
    live = [x.masked_fill(x == -math.inf, 0.0) for x in results]
    weights = [torch.randn(x.shape, generator=generator) for x in live]
    total = (live[0] * weights[0]).sum() + 0.1 * (live[1] * weights[1]).sum()
    return torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)


def _expected(q, k, v, score_mod, mask_mod) -> tuple[Tensor, Tensor]:
    """out and lse by the eager implementation of torch's operator."""
    blocks = (torch_flex.noop_mask if mask_mod is None else mask_mod,)
    function = torch_flex._identity if score_mod is None else score_mod
    out, lse, _ = math_attention(q, k, v, function, blocks, 1 / math.sqrt(q.shape[-1]), {})
    return out, lse * math.log(2)


def _public(given: tuple, enable_gqa: bool) -> Tensor:
    """out by torch's function, uncompiled."""
    before = torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with torch.no_grad():
            return torch_flex.flex_attention(*given, enable_gqa=enable_gqa)
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _compared(case: Case, names: list[str], actual: list, expected: list) -> Outcome:
    """Results against torch's; torch computes some functions of indices in float32."""
    tolerance = 1e-5 if case.dtype == torch.float64 else 1e-4
    for name, a, e in zip(names, actual, expected, strict=True):
        if e is None or a is None:
            a, e = (torch.zeros(1) if x is None else x for x in (a, e))
        a, e = torch.broadcast_tensors(a, e)
        finite = e.nan_to_num(0.0, 0.0, 0.0)
        limit = tolerance * (1.0 + (finite.abs().amax().item() if e.numel() else 0.0))
        close = torch.isclose(a.double(), e.double(), atol=limit, rtol=0.0)
        if not bool(close.all()):
            error = (a - e)[~close].abs().max().item()
            return Outcome(str(case), "failed", f"{name} differs by {error:.3g}")
    return Outcome(str(case), "passed")


def is_expected(case: Case, outcome: Outcome) -> bool:
    """Whether a case passed, or was refused for the reason that is known."""
    if outcome.status == "refused":
        return REFUSED.get(case.score, "?") in outcome.why
    return outcome.status in ("passed", "beyond torch")


def main(
    only: Annotated[str, typer.Option(help="a part of the names of functions")] = "",
    pairs: Annotated[int, typer.Option(min=0, help="scores with masks, drawn")] = 200,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    backend: Annotated[str, typer.Option(help="cpu or reference")] = "cpu",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="the file for results", callback=in_existing_folder),
    ] = None,
) -> None:
    """Compare functions of scores and masks with torch's flex_attention.

    Exits with 1 if one differs, or is refused for another reason than is known.
    """
    outcomes, unexpected = [], []
    for case in cases(only, pairs, seed):
        outcomes.append(run(case, backend))
        if not is_expected(case, outcomes[-1]):
            unexpected.append(outcomes[-1])
            print(f"{outcomes[-1].status}: {case}: {outcomes[-1].why}", flush=True)
    counts = Counter(outcome.status for outcome in outcomes)
    print(f"{len(SCORES)} scores, {len(MASKS)} masks, {len(outcomes)} cases: {dict(counts)}")
    if json_file is not None:
        json_file.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    raise typer.Exit(int(bool(unexpected)))


if __name__ == "__main__":
    typer.run(main)
