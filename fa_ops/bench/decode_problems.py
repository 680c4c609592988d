"""The decoding benchmark's problems, and their caches on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

COLD_BYTES = 320 * 2**20  # what a graph walks over at least: several L2s


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """One call: B rows of one query token, or the last of several, against S cached keys. Dv = 0:
    as D."""

    B: int
    S: int
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int = 0
    page: int = 0
    fp8: bool = False
    ragged: bool = False  # lengths from 1 to S
    padding: int = 0  # keys in front of every row that nobody attends
    unsplit: bool = False  # ours with a single split
    unified: bool = False  # ours with a guess of the largest scores
    queries: int = 1  # tokens of a row, which do not see each other's future
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        words = [f"B{self.B} {self.S}", self.heads]
        words += [f"{self.queries} queries"] if self.queries > 1 else []
        words += [f"page {self.page}"] if self.page else []
        words += [f"behind {self.padding}"] if self.padding else []
        words += [word for word in ("fp8", "ragged", "unsplit", "unified") if getattr(self, word)]
        return " ".join(words)

    @property
    def heads(self) -> str:
        return f"{self.Hq}/{self.Hkv} D{self.D}"

    @property
    def cached(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def shared(self) -> bool:
        """Whether the values are a view of the keys, as in MLA."""
        return self.Dv not in (0, self.D)

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.S] * self.B
        return [1 + (self.S - 1) * b // max(self.B - 1, 1) for b in range(self.B)]

    def flops(self) -> int:
        """Two matmuls, without what is causally hidden; for rows of S keys."""
        seen = self.queries * self.S - self.queries * (self.queries - 1) // 2
        return 2 * self.B * self.Hq * seen * (self.D + (self.Dv or self.D))

    def bytes(self) -> int:
        """What must be read: keys and values that are there."""
        width = self.D if self.shared else 2 * self.D
        keys = sum(self.lengths()) - self.B * self.padding
        return keys * self.Hkv * width * self.cached.itemsize


class Data:
    """Queries, several caches and what else captured graphs read, on the device."""

    def __init__(self, problem: DecodeProblem) -> None:
        p = problem
        g = torch.Generator("cuda").manual_seed(0)
        numbers = p.B * p.S * p.Hkv * p.D
        each = numbers * p.cached.itemsize * (1 if p.shared else 2)
        self.count = max(2, min(64, -(-COLD_BYTES // each))) if each < 2**33 else 1
        self.q = torch.randn(p.B, p.Hq, p.queries, p.D, device="cuda", dtype=p.dtype, generator=g)
        self.lens = torch.tensor(p.lengths(), dtype=torch.int32, device="cuda")
        self.ranges = None
        if p.padding:
            runs = [[p.padding, length] for length in p.lengths()]
            self.ranges = torch.tensor(runs, dtype=torch.int32, device="cuda")[:, None, None]
        # scores are as if drawn from a normal distribution
        self.guesses = torch.full((p.Hq,), 4.0, device="cuda") if p.unified else None
        self.caches = []
        for _ in range(self.count):
            k = self._draw(numbers, g, p)
            self.caches.append((k, k if p.shared else self._draw(numbers, g, p)))
        self.table = None
        if p.page:
            pages = p.B * (p.S // p.page)
            order = torch.randperm(pages, generator=g, device="cuda", dtype=torch.int32)
            self.table = order.view(p.B, -1)

    @staticmethod
    def _draw(numbers: int, g: torch.Generator, p: DecodeProblem) -> Tensor:
        x = torch.empty(numbers, device="cuda", dtype=p.cached)
        for part in x.split(2**28):
            part.copy_(torch.randn(part.shape, device="cuda", generator=g, dtype=p.dtype))
        return x

    def view(self, x: Tensor, p: DecodeProblem, layout: str) -> Tensor:
        """The flat memory as (B, Hkv, S, D), in either order, or as pages."""
        if p.page:
            return x.view(-1, p.page, p.Hkv, p.D)
        if layout == "bhsd":
            return x.view(p.B, p.Hkv, p.S, p.D)
        return x.view(p.B, p.S, p.Hkv, p.D).transpose(1, 2)


HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 64))


def _grid() -> list[DecodeProblem]:
    """Batches times lengths times heads, as far as one cache takes at most 36 GB."""
    cells = [
        DecodeProblem(B, S, *heads)
        for heads in HEADS
        for B in (1, 8, 64, 256)
        for S in (1024, 4096, 8192, 32768, 131072)
    ]
    return [p for p in cells if p.bytes() <= 36e9]


PRESETS: dict[str, Callable[[], list[DecodeProblem]]] = {
    "issue": _grid,
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
    "fp8": lambda: [DecodeProblem(B, 4096, fp8=fp8) for B in (8, 64) for fp8 in (False, True)],
    "mla": lambda: [
        DecodeProblem(B, 8192, Hq, 1, 576, 512, page=64) for B in (1, 32) for Hq in (16, 64, 128)
    ],
    "ragged": lambda: [DecodeProblem(64, 32768, ragged=True), DecodeProblem(64, 16384)],
    "padded": lambda: [DecodeProblem(8, 32768, padding=28672), DecodeProblem(8, 4096)],
    "unsplit": lambda: [DecodeProblem(1, 131072), DecodeProblem(1, 131072, unsplit=True)],
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
