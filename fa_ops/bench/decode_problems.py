"""The problems of the decoding benchmark, and their caches on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

COLD_BYTES = 320 * 2**20  # minimal size of all caches of a graph: several times the L2 cache


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """One call: B rows of `queries` tokens, causal, against S cached keys. Dv = 0: same as D."""

    B: int
    S: int
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int = 0
    page: int = 0
    fp8: bool = False
    scales: bool = False  # of fp8, for each row and head, or with pages for each page and head
    ragged: bool = False  # lengths from 1 to S
    padding: int = 0  # keys at the start of every row that are masked out
    unsplit: bool = False  # ours with a single split
    invariant: bool = False  # ours with results that do not depend on other rows
    unified: bool = False  # ours with an estimate of the largest scores
    queries: int = 1  # query tokens of a row, causally masked
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        words = [f"B{self.B} {self.S}", self.heads]
        words += [f"{self.queries} queries"] if self.queries > 1 else []
        words += [f"page {self.page}"] if self.page else []
        words += [f"padding {self.padding}"] if self.padding else []
        flags = "fp8", "scales", "ragged", "unsplit", "invariant", "unified"
        words += [flag for flag in flags if getattr(self, flag)]
        return " ".join(words)

    @property
    def heads(self) -> str:
        """The numbers of heads and the head dimension in words."""
        return f"{self.Hq}/{self.Hkv} D{self.D}"

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def shared(self) -> bool:
        """Whether values are a view of the keys, as in MLA."""
        return self.Dv not in (0, self.D)

    @property
    def only_ours(self) -> bool:
        """Whether peers have no such option."""
        return self.unsplit or self.invariant

    def lengths(self) -> list[int]:
        """The number of keys of each row."""
        if not self.ragged:
            return [self.S] * self.B
        return [1 + (self.S - 1) * b // max(self.B - 1, 1) for b in range(self.B)]

    def flops(self) -> int:
        """Operations of two matmuls over the causally visible scores, for rows of S keys."""
        visible = self.queries * self.S - self.queries * (self.queries - 1) // 2
        return 2 * self.B * self.Hq * visible * (self.D + (self.Dv or self.D))

    def bytes(self) -> int:
        """The size of all keys and values that must be read."""
        width = self.D if self.shared else 2 * self.D
        keys = sum(self.lengths()) - self.B * self.padding
        return keys * self.Hkv * width * self.cache_dtype.itemsize


class Data:
    """The tensors that captured graphs read, on the device: queries, caches, lengths, pages."""

    def __init__(self, problem: DecodeProblem) -> None:
        p = problem
        g = torch.Generator("cuda").manual_seed(0)
        numbers = p.B * p.S * p.Hkv * p.D
        size = numbers * p.cache_dtype.itemsize * (1 if p.shared else 2)
        self.count = max(2, min(64, -(-COLD_BYTES // size))) if size < 2**33 else 1
        self.q = torch.randn(p.B, p.Hq, p.queries, p.D, device="cuda", dtype=p.dtype, generator=g)
        self.lens = torch.tensor(p.lengths(), dtype=torch.int32, device="cuda")
        self.ranges = None
        if p.padding:
            ranges = [[p.padding, length] for length in p.lengths()]
            self.ranges = torch.tensor(ranges, dtype=torch.int32, device="cuda")[:, None, None]
        # scores of random inputs are normally distributed with unit variance
        self.estimates = torch.full((p.Hq,), 4.0, device="cuda") if p.unified else None
        self.caches = []
        for _ in range(self.count):
            k = self._draw(numbers, g, p)
            self.caches.append((k, k if p.shared else self._draw(numbers, g, p)))
        self.table = self.k_scale = self.v_scale = None
        shape: tuple[int, ...] = p.B, p.Hkv
        if p.page:
            pages = p.B * (p.S // p.page)
            order = torch.randperm(pages, generator=g, device="cuda", dtype=torch.int32)
            self.table, shape = order.view(p.B, -1), (pages, 1, p.Hkv)
        if p.scales:
            both = torch.rand(2, *shape, generator=g, device="cuda") + 0.5
            self.k_scale, self.v_scale = both

    @staticmethod
    def _draw(numbers: int, g: torch.Generator, p: DecodeProblem) -> Tensor:
        x = torch.empty(numbers, device="cuda", dtype=p.cache_dtype)
        for part in x.split(2**28):
            part.copy_(torch.randn(part.shape, device="cuda", generator=g, dtype=p.dtype))
        return x

    def view(self, x: Tensor, p: DecodeProblem, layout: str) -> Tensor:
        """View flat memory as pages, or as (B, Hkv, S, D) in the order "bhsd" or "bshd"."""
        if p.page:
            return x.view(-1, p.page, p.Hkv, p.D)
        if layout == "bhsd":
            return x.view(p.B, p.Hkv, p.S, p.D)
        return x.view(p.B, p.S, p.Hkv, p.D).transpose(1, 2)


HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 64))


def _grid() -> list[DecodeProblem]:
    """All combinations of batch size, length and heads whose cache has at most 36 GB."""
    cells = [
        DecodeProblem(B, S, *heads)
        for heads in HEADS
        for B in (1, 8, 64, 256)
        for S in (1024, 4096, 8192, 32768, 131072)
    ]
    return [p for p in cells if p.bytes() <= 36e9]


def _fp8() -> list[DecodeProblem]:
    """16-bit and e4m3 caches: without scales, with those of rows, and with those of pages."""
    kinds = ({}, {"fp8": True}, {"fp8": True, "scales": True})
    return [
        DecodeProblem(B, 4096, page=page, **kind)
        for B in (8, 64)
        for page in (0, 64, 16)
        for kind in kinds
    ]


PRESETS: dict[str, Callable[[], list[DecodeProblem]]] = {
    "standard": _grid,
    "quick": lambda: [
        DecodeProblem(1, 1024),
        DecodeProblem(1, 8192),
        DecodeProblem(8, 8192),
        DecodeProblem(64, 4096),
    ],
    "paged": lambda: [
        DecodeProblem(B, S, page=page)
        for B, S in ((8, 8192), (64, 4096))
        for page in (0, 256, 64, 16, 8, 1)
    ],
    "fp8": _fp8,
    "mla": lambda: [
        DecodeProblem(B, S, Hq, 1, 576, 512, page=64)
        for B, S, heads in (
            (1, 128, (16,)),
            (1, 8192, (16, 64, 128)),
            (32, 8192, (16, 64, 128)),
            (128, 2048, (128,)),
        )
        for Hq in heads
    ],
    "ragged": lambda: [DecodeProblem(64, 32768, ragged=True), DecodeProblem(64, 16384)],
    "padded": lambda: [DecodeProblem(8, 32768, padding=28672), DecodeProblem(8, 4096)],
    "unsplit": lambda: [DecodeProblem(1, 131072), DecodeProblem(1, 131072, unsplit=True)],
    "invariant": lambda: [
        DecodeProblem(B, S, page=page, invariant=invariant)
        for B, S, page in ((1, 8192, 0), (8, 8192, 0), (64, 4096, 0), (64, 4096, 64))
        for invariant in (False, True)
    ],
    "unified": lambda: [
        DecodeProblem(B, S, unified=unified)
        for B, S in ((1, 8192), (8, 1024), (64, 4096))
        for unified in (False, True)
    ],
    "prefill": lambda: [
        DecodeProblem(B, S, page=page, queries=queries)
        for B, S, queries in ((1, 8192, 8192), (1, 32768, 2048), (8, 8192, 512), (64, 4096, 64))
        for page in (0, 64, 16)
    ],
    "host": list,
}
