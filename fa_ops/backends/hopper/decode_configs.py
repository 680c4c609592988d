"""Tile sizes and shared memory of the Hopper kernels that decode."""

from __future__ import annotations

import dataclasses

from fa_ops.backends.hopper.configs import padded
from fa_ops.backends.hopper.problem import copy_keys
from fa_ops.types import PAGE_SCALES, TOKEN_SCALES


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """One CTA on a multiprocessor, and a ring of tiles of 16 keys for each attending warp."""

    head_dim: int
    value_dim: int
    rows: int  # queries of a kv head, padded
    copy_keys: int  # that one copy brings; 1: keys are gathered by 16-byte copies
    warps: int  # that attend
    whole_rows: bool  # a copy brings keys with all their features
    is_e4m3: bool = False  # keys and values, of one byte
    scales: int = 0  # one of the constants of `types`

    merge_threads = 256
    # bytes of an element of a partial result, and statistics of a row, as in the kernel
    partial_bytes, stats_per_row = 4, 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.warps + (2 if self.copy_keys == 1 else 1))

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return 16 * self.warps

    @property
    def stages(self) -> int:
        """About 100 KB in flight."""
        return max(2, (96 << 10) // self._tile_bytes)

    @property
    def whole_tiles(self) -> int:
        """Tiles that one CTA attends as fast as several CTAs attend parts and others merge these.

        Where few CTAs read memory, a tile of 64 KB takes about 0.8 us and one of 32 KB 0.43 us, and
        a second kernel 2.4 us.
        """
        return 1 + (192 << 10) // self._tile_bytes

    def row_bytes(self, dim: int) -> int:
        """Bytes of a key or value in a column of shared memory."""
        return 64 if self.is_e4m3 and dim <= 64 else 128

    @property
    def _tile_bytes(self) -> int:
        size = 1 if self.is_e4m3 else 2
        rows = ((dim * size, self.row_bytes(dim)) for dim in (self.head_dim, self.value_dim))
        return self.block_n * sum(-(-width // column) * column for width, column in rows)

    @property
    def _scales_bytes(self) -> int:
        """Bytes of a tile's scales: a key's and a value's for each copy, or for each token."""
        copies = self.block_n // self.copy_keys if self.copy_keys >= 16 else self.block_n
        count = {PAGE_SCALES: copies, TOKEN_SCALES: self.block_n}
        return 8 * count.get(self.scales, 0)

    @property
    def _pages_bytes(self) -> int:
        """Bytes of the bits that tell which copies, or gathered keys, have a page."""
        return -(-self.stages * 4 * _words(self.block_n // self.copy_keys) // 8) * 8

    @property
    def _fixed_bytes(self) -> int:
        queries = 2 * (self.rows * self.head_dim * 2 + 48)
        return queries + self.warps * self.rows * (self.value_dim * 4 + 8)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        tiles = self.stages * (self._tile_bytes + self._scales_bytes)
        barriers = 8 * (4 + 3 * self.stages)
        return tiles + self._fixed_bytes + self._pages_bytes + barriers

    def defines(self) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim, "ROWS": self.rows,
            "WARPS": self.warps, "STAGES": self.stages, "COPY_KEYS": self.copy_keys,
            "WHOLE_ROWS": int(self.whole_rows), "SHARED_BYTES": self.shared_bytes,
            "WHOLE_TILES": self.whole_tiles, "IS_E4M3": int(self.is_e4m3),
            "HAS_SCALES": self.scales,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Two warpgroups attend 64 rows, in two buffers of 64 keys that hold their values too."""

    copy_keys: int  # that one copy brings; 1: keys are gathered by 16-byte copies
    head_dim: int = 576
    value_dim: int = 512
    rescale_threshold: int = 8  # as the forward's

    threads, merge_threads = 384, 512
    rows = 64
    block_n = 64
    partial_bytes, stats_per_row = 2, 2  # as in DecodeConfig

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        tiles = (self.rows + 2 * self.block_n) * self.head_dim * 2
        barriers = 2 + 2 * self.head_dim // 64 + 4 + 2
        staged = 8 * 16 * 64  # of each warp 32 columns of its rows
        pages = 2 * 4 * _words(self.block_n // self.copy_keys)
        return tiles + staged + 6 * self.rows * 4 + 2 * 32 + pages + 8 * barriers

    def defines(self) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim, "BLOCK_N": self.block_n,
            "COPY_KEYS": self.copy_keys, "RESCALE_THRESHOLD": self.rescale_threshold,
            "ROWS": self.rows, "SCALES_DIFFERENCES": 1, "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip


def _words(bits: int) -> int:
    """Words of 32 bits."""
    return -(-bits // 32)


def decode_config(
    D: int, Dv: int, rows: int, page: int, is_e4m3: bool = False, scales: int = 0
) -> DecodeConfig:
    """The decoding kernel's configuration; `rows`: queries of a KV head."""
    head_dim, value_dim = padded(D), padded(Dv)
    warps = 8 if max(head_dim, value_dim) <= 128 else 4  # what shared memory holds
    keys, rows = copy_keys(page), 8 if rows <= 8 else 16
    # of other dims a copy would bring features of the next row; 128 of e4m3 are one column
    whole_rows = D == Dv == 128 and not is_e4m3 and keys > 1
    return DecodeConfig(head_dim, value_dim, rows, keys, warps, whole_rows, is_e4m3, scales)


def mla_config(page: int) -> MlaConfig:
    """The configuration of decoding over a latent cache."""
    keys = copy_keys(page)
    return MlaConfig(keys if keys >= 8 else 1)


def has_latent_dims(D: int, Dv: int) -> bool:
    """Whether head dimensions are those of the kernel for latent caches."""
    return (D, Dv) == (MlaConfig.head_dim, MlaConfig.value_dim)
