"""What is measured: attention problems, the floating-point operations that count, and the grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

BACKWARD_OVER_FORWARD = 2.5  # five matmuls against two


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: B sequences of S tokens, Hq query heads and Hkv key heads of dimension D."""

    B: int
    Hq: int
    Hkv: int
    S: int
    D: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        heads = str(self.Hq) if self.Hq == self.Hkv else f"{self.Hq}/{self.Hkv}"
        return f"D{self.D} {'causal' if self.causal else 'full'} S{self.S} B{self.B} H{heads}"

    def flops(self, backward: bool = False) -> float:
        """The usual count: two matmuls of 2 S S D, half if causal, 2.5 times that for backward."""
        forward = 4 * self.B * self.Hq * self.S * self.S * self.D / (2 if self.causal else 1)
        return forward * (BACKWARD_OVER_FORWARD if backward else 1)

    def inputs(self, device: str, layout: str, requires_grad: bool = False) -> tuple[Tensor, ...]:
        """q, k, v (B, H, S, D): the same numbers in either memory order, "bhsd" or "bshd"."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(H: int) -> Tensor:
            shape = (self.B, H, self.S, self.D)
            x = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
            if layout == "bshd":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            return x.requires_grad_(requires_grad)

        return draw(self.Hq), draw(self.Hkv), draw(self.Hkv)


def _grid(tokens: int, width: int, dims: tuple, lengths: tuple, group: int = 1, **fixed) -> list:
    """`tokens` in all and heads of total width `width`, so that every cell of a row costs alike."""
    return [
        Problem(max(1, tokens // S), width // D, width // D // group, S, D, causal, **fixed)
        for D in dims
        for causal in (False, True)
        for S in lengths
    ]


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PRESETS: dict[str, Callable[[], list[Problem]]] = {
    "issue": lambda: _grid(16384, 2048, (64, 128, 256), (2048, 8192)),
    "lengths": lambda: _grid(16384, 2048, (64, 128, 256), _LENGTHS),
    "gqa": lambda: _grid(16384, 4096, (128,), _LENGTHS, group=4),
    "quick": lambda: _grid(16384, 2048, (64, 128), (2048,)),
    "cpu": lambda: _grid(2048, 512, (64, 128), (512, 2048), dtype=torch.float32),
    "tiny": lambda: _grid(128, 64, (16,), (64,), dtype=torch.float32),
}
