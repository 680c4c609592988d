"""Attention problems, their numbers of floating-point operations, and the grids of benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

BACKWARD_OVER_FORWARD = 2.5  # five matmuls against two


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: B sequences of S tokens, Hq query heads and Hkv key heads of dimension D.

    For cross attention, `cross` is the number of keys. `biases` is the number of (H, S, Sk) float
    biases: 0, 1 for all sequences, or B.
    """

    B: int
    Hq: int
    Hkv: int
    S: int
    D: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    cross: int | None = None
    biases: int = 0

    @property
    def Sk(self) -> int:
        """The number of keys."""
        return self.cross or self.S

    @property
    def lengths(self) -> str:
        """The numbers of queries and keys in words."""
        return f"{self.S}x{self.cross}" if self.cross else str(self.S)

    def __str__(self) -> str:
        heads = str(self.Hq) if self.Hq == self.Hkv else f"{self.Hq}/{self.Hkv}"
        mask = "causal" if self.causal else "full"
        bias = f" biases {self.biases}" if self.biases else ""
        return f"D{self.D} {mask} S{self.lengths} B{self.B} H{heads}{bias}"

    def flops(self, backward: bool = False) -> float:
        """The usual count: two matmuls of 2 S Sk D, halved if causal, times 2.5 for backward."""
        forward = 4 * self.B * self.Hq * self.S * self.Sk * self.D / (2 if self.causal else 1)
        return forward * (BACKWARD_OVER_FORWARD if backward else 1)

    def inputs(self, device: str, layout: str, requires_grad: bool = False) -> tuple[Tensor, ...]:
        """q (B, Hq, S, D), k and v (B, Hkv, Sk, D), with equal values in both memory orders."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(H: int, S: int) -> Tensor:
            shape = (self.B, H, S, self.D)
            x = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
            if layout == "bshd":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            return x.requires_grad_(requires_grad)

        return draw(self.Hq, self.S), draw(self.Hkv, self.Sk), draw(self.Hkv, self.Sk)

    def bias(self, device: str, requires_grad: bool = False) -> Tensor | None:
        """The float bias (biases, Hq, S, Sk), or None."""
        if not self.biases:
            return None
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.biases, self.Hq, self.S, self.Sk)
        bias = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
        return bias.requires_grad_(requires_grad)


def _grid(tokens: int, width: int, dims: tuple, lengths: tuple, group: int = 1, **fixed) -> list:
    """Problems with a constant number of tokens and a constant total width of all heads."""
    return [
        Problem(max(1, tokens // S), width // D, width // D // group, S, D, causal, **fixed)
        for D in dims
        for causal in (False, True)
        for S in lengths
    ]


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_ODD = (77, 197, 577, 1500, 1920, 3000)  # lengths in text, image and speech encoders
# (B, H, S, D, keys): images of 1024 and 512 pixels with a short text, video with a long text, and
# text with half a minute of speech
_CROSS = (
    (8, 10, 4096, 64, 77),
    (8, 10, 4096, 64, 512),
    (16, 20, 1024, 64, 77),
    (1, 40, 32760, 128, 512),
    (32, 20, 448, 64, 1500),
)


def _cross() -> list[Problem]:
    return [Problem(B, H, H, S, D, causal=False, cross=Sk) for B, H, S, D, Sk in _CROSS]


# (B, Hq, Hkv, S, D, causal) in training: Llama-3 with all heads and with a share of them under
# tensor parallelism; other language models, image transformers and image encoders
_MODELS = (
    (1, 8, 1, 8192, 128, True),
    (2, 8, 1, 4096, 128, True),
    (1, 16, 2, 8192, 128, True),
    (2, 16, 2, 4096, 128, True),
    (1, 32, 8, 8192, 128, True),
    (2, 32, 8, 4096, 128, True),
    (1, 64, 8, 8192, 64, True),
    (1, 8, 4, 8192, 256, True),
    (1, 24, 24, 4608, 128, False),
    (32, 16, 16, 729, 72, False),  # SigLIP so400m
    (8, 8, 8, 4096, 40, False),  # Stable Diffusion 1.5, the widest feature map
    (8, 8, 8, 256, 160, False),  # the same, the deepest one
    (1, 16, 16, 4096, 80, False),  # ViT-H
    (2, 32, 32, 4096, 96, True),  # Phi-3 mini
)


def _models() -> list[Problem]:
    return [Problem(B, Hq, Hkv, S, D, causal) for B, Hq, Hkv, S, D, causal in _MODELS]


def _quantized() -> list[Problem]:
    """Prompts, image and video models, whose attention has 8-bit kernels."""
    shapes = (
        (2, 16, 16, 8192, 128, False),
        (2, 16, 16, 8192, 128, True),
        (1, 16, 16, 16384, 128, False),
        (1, 32, 8, 16384, 128, True),
        (1, 24, 24, 16384, 128, False),  # Flux and Wan
        (1, 40, 40, 32768, 128, False),
        (2, 32, 32, 8192, 64, False),
        (2, 32, 32, 8192, 64, True),
        (2, 8, 8, 8192, 256, False),
        (2, 8, 8, 8192, 256, True),
    )
    return [Problem(*shape) for shape in shapes]


PRESETS: dict[str, Callable[[], list[Problem]]] = {
    "standard": lambda: _grid(16384, 2048, (64, 128, 256), (2048, 8192)),
    "lengths": lambda: _grid(16384, 2048, (64, 128, 256), _LENGTHS),
    "gqa": lambda: _grid(16384, 4096, (128,), _LENGTHS, group=4),
    "odd": lambda: _grid(16384, 2048, (64, 128), _ODD),
    "short": lambda: _grid(16384, 2048, (64,), (50, 64, 77, 100, 128)),
    "cross": _cross,
    "models": _models,
    "dims": lambda: _grid(16384, 2048, (72, 80, 88, 96, 104, 112), (1024, 4096)),
    "wide": lambda: _grid(16384, 2048, (512,), (1024, 2048, 8192, 16384)),
    "float32": lambda: _grid(
        16384, 2048, (32, 64, 128), (128, 256, 512, 1024, 2048, 4096), dtype=torch.float32
    ),
    "quantized": _quantized,
    "quantized-cpu": lambda: _grid(1024, 256, (64, 128), (512,), dtype=torch.float32),
    "quick": lambda: _grid(16384, 2048, (64, 128), (2048,)),
    "cpu": lambda: _grid(2048, 512, (64, 128), (512, 2048), dtype=torch.float32),
    "tiny": lambda: _grid(128, 64, (16,), (64,), dtype=torch.float32),
}

# (B, H, tokens, D, biases): windows of Swin with 7x7 and 8x8 tokens, whose batch shares a position
# bias, or whose bias holds the mask of shifted windows too; of short sequences with relative
# positions; and few windows
_WINDOWS = (
    (2048, 8, 49, 32, 1),
    (2048, 8, 64, 32, 1),
    (512, 8, 49, 32, 512),
    (1024, 8, 64, 64, 1),
    (512, 12, 144, 32, 1),
    (256, 12, 128, 64, 1),
    (256, 8, 256, 32, 1),
    (64, 12, 196, 64, 64),
    (16, 8, 49, 32, 1),
    (16, 12, 128, 64, 1),
)


def _windows() -> list[Problem]:
    return [Problem(B, H, H, S, D, causal=False, biases=n) for B, H, S, D, n in _WINDOWS]


# grids that `bench forward` and `bench backward` measure beside PRESETS
BIASED: dict[str, Callable[[], list[Problem]]] = {
    "windows": _windows,
    "tiny-windows": lambda: [Problem(3, 2, 2, 9, 16, False, torch.float32, biases=1)],
}


# The problems of the decoding benchmark, and their caches on the device.

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


class DecodeData:
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


def _decode_grid() -> list[DecodeProblem]:
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


DECODE_PRESETS: dict[str, Callable[[], list[DecodeProblem]]] = {
    "standard": _decode_grid,
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
