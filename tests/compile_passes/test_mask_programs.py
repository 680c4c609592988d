"""Random masks over positions, with every dtype, casts, arithmetic, comparisons and logic, near the
last integers that are exact. Fused or not, the result is that of eager mode.

FA_OPS_MASK_PROGRAMS=5000 runs that many instead of the default 80.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compile_passes.helpers import Fusion, fuse, qkv

INF = float("inf")
SIZE = 9
PROGRAMS = int(os.environ.get("FA_OPS_MASK_PROGRAMS", "80"))
CHUNK = 40
POWERS = (3, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63)
INTEGERS = (*[torch.int64, torch.int32] * 3, torch.int16, torch.int8, torch.uint8)
FLOATS = (*[torch.float32] * 4, torch.float64, torch.float16, torch.bfloat16)
Program = Callable[[int, Tensor, Tensor], Tensor]  # (size, number, row of numbers) -> tensor


def offset(rng: random.Random) -> int:
    near = 2 ** rng.choice(POWERS) + rng.randint(-SIZE, 2)
    return rng.choice((0, 0, 0, rng.randint(-5, 5), near, -near))


def dtype(rng: random.Random) -> torch.dtype:
    return rng.choice((*INTEGERS, *FLOATS))


def limit(to: torch.dtype) -> int:
    return round(2 / torch.finfo(to).eps) if to.is_floating_point else torch.iinfo(to).max


def position(rng: random.Random) -> Program:
    """One number for each token, often near the last that its dtype holds exactly."""
    to, step = dtype(rng), rng.choice((1, 1, 2, -1, 0.5))
    start = rng.choice((offset(rng), 0, limit(to) - rng.randint(1, 2 * SIZE)))
    kind = rng.choice("add add start cast cast cast typed step row cumsum triangle".split())

    def program(size: int, number: Tensor, row: Tensor) -> Tensor:
        if kind == "add":
            return torch.arange(size) + start
        if kind == "start":
            return torch.arange(start, start + size)
        if kind == "cast":
            return (torch.arange(size) + start).to(to)
        if kind == "typed":
            return torch.arange(size, dtype=to) + start
        if kind == "step":
            return torch.arange(0, size * step, step) + start
        if kind == "row":
            return row[:size].to(to)
        if kind == "cumsum":
            return torch.full((size,), start).cumsum(0, dtype=to)
        return torch.ones(size, size).tril().sum(-1).to(to) + start

    return program


def transformed(rng: random.Random, x: Program) -> Program:
    kinds = "cast add sub rsub mul neg abs floordiv floor trunc mod div shift number float".split()
    kind, to, n, c = rng.choice(kinds), dtype(rng), rng.choice((2, 3, 4, 7)), offset(rng)
    if rng.random() < 0.6:
        return x

    def program(size: int, number: Tensor, row: Tensor) -> Tensor:
        a = x(size, number, row)
        if kind in ("floordiv", "mod", "shift"):
            return a // n if kind == "floordiv" else a % n if kind == "mod" else a >> 1
        if kind in ("floor", "trunc"):
            return torch.div(a, n, rounding_mode=kind)
        return {
            "cast": lambda: a.to(to),
            "add": lambda: a + c,
            "sub": lambda: a - c,
            "rsub": lambda: c - a,
            "mul": lambda: a * n,
            "neg": lambda: -a,
            "abs": lambda: a.abs(),
            "div": lambda: a / n,
            "number": lambda: a + number.to(to),
            "float": lambda: a + 0.5,
        }[kind]()

    return program


def condition(rng: random.Random) -> Program:
    """A condition on the positions of a query and a key."""
    if rng.random() < 0.85:  # of the same kind
        queries = keys = transformed(rng, position(rng))
        if rng.random() < 0.2:
            queries, keys = transformed(rng, queries), transformed(rng, keys)
    else:
        queries, keys = (transformed(rng, position(rng)) for _ in range(2))
    name = rng.choice("lt le le le ge gt eq ne".split())
    kind = rng.choice("direct direct direct difference distance constant triangle".split())
    bound = rng.choice((0, 1, 2, 3, 2.5, offset(rng)))

    def program(size: int, number: Tensor, row: Tensor) -> Tensor:
        i, j = queries(size, number, row)[:, None], keys(size, number, row)
        if kind == "constant":
            return getattr(j, name)(bound).expand(size, size)
        if kind == "triangle":
            return (torch.ones(size, size, dtype=i.dtype) * j).tril().to(j.dtype) < i
        if kind == "difference":
            return getattr(i - j, name)(bound)
        if kind == "distance":
            return getattr((i - j).abs(), name)(bound)
        return getattr(torch, name)(j, i)

    return program


def mask(rng: random.Random) -> Program:
    parts = [condition(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    connectives = [
        rng.choice("and and and or not xor sum product where counted".split()) for _ in parts
    ]

    def program(size: int, number: Tensor, row: Tensor) -> Tensor:
        keep = parts[0](size, number, row)
        for part, connective in zip(parts[1:], connectives):
            b = part(size, number, row)
            keep = {
                "and": lambda a, b: a & b,
                "or": lambda a, b: a | b,
                "not": lambda a, b: a & ~b,
                "xor": lambda a, b: a ^ b,
                "sum": lambda a, b: a + b,
                "product": lambda a, b: a * b,
                "where": lambda a, b: torch.where(a, b, ~b),
                "counted": lambda a, b: (a.to(torch.uint8) - b.int()) > 0,
            }[connective](keep, b)
        return keep

    return program


def attention(rng: random.Random) -> Callable:
    """A function of query, key, value, a number and a row of numbers."""
    program, fill = mask(rng), rng.choice((-INF, -INF, -1e9, torch.finfo(torch.float32).min))
    spelling = rng.choice(("filled", "where", "added", "product"))

    def function(q, k, v, number, row):
        scores, keep = q @ k.mT, program(q.shape[2], number, row)
        if spelling == "filled":
            scores = scores.masked_fill(~keep, fill)
        elif spelling == "where":
            scores = torch.where(keep, scores, fill)
        elif spelling == "added" or fill == -INF:
            scores = scores + torch.zeros(keep.shape).masked_fill(~keep, fill)
        else:
            scores = scores + (1.0 - keep.float()) * fill
        return scores.softmax(-1) @ v

    return function


def runs(function: Callable, inputs: tuple) -> bool:
    """Whether eager mode accepts it: a number may not fit into a dtype."""
    try:
        function(*inputs)
    except (RuntimeError, OverflowError, ValueError):
        return False
    return True


def compare(seed: int) -> Fusion | None:
    rng = random.Random(seed)
    function = attention(rng)
    number = torch.tensor(offset(rng) % 2**61, dtype=torch.int64)
    row = torch.randint(-3, SIZE, (SIZE,), generator=torch.Generator().manual_seed(seed))
    row = row.clamp(min=0) if rng.random() < 0.5 else row + 2 ** rng.choice(POWERS[:-1])
    inputs = (*qkv(B=1, Hq=1, Hkv=1, Sq=SIZE, Sk=SIZE), number, row)
    if not runs(function, inputs):
        return None
    fusion = fuse(function, dynamic=seed % 3 == 0 or None)
    expected, actual = function(*inputs), fusion.run(*inputs)
    rows = expected.isfinite()  # eager mode gives NaN for rows without keys
    error = torch.where(rows, actual - expected, 0).abs().max()
    assert error < 1e-5, f"{seed}: {error}, {[str(f) for f in fusion.findings]}\n{fusion.code}"
    return fusion


@pytest.mark.parametrize("start", range(0, PROGRAMS, CHUNK))
def test_random_mask_programs_match_eager(start: int) -> None:
    ran = fused = compact = 0
    for seed in range(start, start + CHUNK):
        fusion = compare(seed)
        ran += fusion is not None
        fused += fusion is not None and fusion.fused
        compact += fusion is not None and any(
            f.fused and "dense" not in f.masks for f in fusion.findings
        )
    assert ran > CHUNK * 0.8 and fused > ran * 0.9 and compact > ran * 0.07, (ran, fused, compact)
