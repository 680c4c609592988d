"""Tile shapes of the Hopper tier, each with the measured reason."""

from __future__ import annotations

import dataclasses

SHARED_LIMIT = 227 * 1024  # bytes of shared memory one CTA may use on sm_90


@dataclasses.dataclass(frozen=True)
class Config:
    """The forward's tile: `block_m / 64` consumer warpgroups share the keys one producer brings."""

    head_dim: int  # of q and k, padded to columns of 64
    value_dim: int
    block_m: int
    block_n: int
    q_stages: int = 1  # 2: the next tile's queries arrive while this one's output leaves
    stages: int = 2
    turns: bool = True  # consumers alternate on the tensor cores

    @property
    def threads(self) -> int:
        return self.block_m * 2 + 128

    @property
    def shared_bytes(self) -> int:
        keys = self.stages * self.block_n * (self.head_dim + self.value_dim)
        barriers = 2 * self.q_stages * (self.block_m // 64) + 4 * self.stages + 2
        return 2 * (self.q_stages * self.block_m * self.head_dim + keys) + 8 * barriers + 8

    def defines(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim,
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n,
            "Q_STAGES": self.q_stages, "STAGES": self.stages, "TURNS": int(self.turns),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A CTA owns `block_n` keys, 64 a consumer, and passes over blocks of `block_m` queries."""

    head_dim: int
    block_m: int = 64
    block_n: int = 128
    stages: int = 2

    @property
    def threads(self) -> int:
        return self.block_n * 2 + 128

    @property
    def shared_bytes(self) -> int:
        keys = 2 * self.block_n * self.head_dim * 2
        queries = self.stages * self.block_m * (2 * self.head_dim * 2 + 2 * 4 + 8)
        exchange = 2 * self.block_m * self.block_n * 2 + self.block_m * self.head_dim * 4
        return keys + queries + exchange + 8 * (1 + 4 * self.stages)

    def defines(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
        }


def padded(dim: int) -> int:
    return -(-dim // 64) * 64


def forward_config(D: int, Dv: int) -> Config:
    """The forward's tile. Figures: TFLOP/s, one H200, bf16, 16k tokens, S = 8192, full / causal."""
    head_dim, value_dim = padded(D), padded(Dv)
    if head_dim == 64:
        # 520 / 483; without turns 495 / 450, and 128 x 176 with two consumers 452
        return Config(64, 64, 192, 128, q_stages=2)
    if head_dim == 128:
        # 620 / 613; one query buffer 619 / 591 (at S = 512: 472 against 523); 128 x 176 584
        return Config(128, value_dim, 128, 128, q_stages=2)
    if head_dim == 192:
        # what shared memory holds
        return Config(192, value_dim, 128, 128 if value_dim <= 128 else 112)
    # 691 / 639; with turns 671 / 617
    return Config(256, value_dim, 128, 80, turns=False)


def backward_config(D: int) -> BackwardConfig:
    return BackwardConfig(padded(D))
