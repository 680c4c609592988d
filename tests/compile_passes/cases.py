"""Helpers for files of attention spellings, which `python -m tests.evaluation.fusion_corpus` runs.

A case has an expected verdict, "fuse" or "no_fuse", and a number of attentions.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable

import torch

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


def randn(*shape: int) -> torch.Tensor:
    randn.seed += 1
    return torch.randn(*shape, generator=torch.Generator().manual_seed(randn.seed))


randn.seed = 0


def bhsd(s: int = S, t: int | None = None, hkv: int = H):
    return lambda: (randn(B, H, s, D), randn(B, hkv, t or s, D), randn(B, hkv, t or s, D))


def bsc():
    return tuple(randn(B, S, C) for _ in range(3))


def padded():
    """A padding mask, 1 for tokens; the first text is padded by four at the end."""
    mask = torch.ones(B, S)
    mask[0, -4:] = 0
    return mask


def _inputs_of(name: str, inputs: Callable) -> tuple:
    """The same inputs in every run, whichever cases ran before."""
    randn.seed = zlib.crc32(name.encode())
    return inputs()


def registry() -> tuple[dict[str, Case], Callable]:
    """A file's CASES, and the decorator that adds a function or module class to them."""
    cases: dict[str, Case] = {}

    def case(expected: str, inputs: Callable = bsc, cores: int = 1, tags: str = ""):
        def register(f):
            function = f() if isinstance(f, type) else f
            make = functools.partial(_inputs_of, f.__name__, inputs)
            cases[f.__name__] = Case(function, make, expected, cores, tuple(tags.split()))
            return f

        return register

    return cases, case


def split(x, h=H):
    return x.view(x.shape[0], x.shape[1], h, -1).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def triangle(s=S):
    return torch.ones(s, s, dtype=torch.bool).tril()
