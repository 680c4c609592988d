"""The tiling of a forward pass: heads of a group that share a tile, and splits of the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from fa_ops.backends.hopper.configs import Config, WideConfig, short_config
from fa_ops.geometry import heads_of_tile

MAX_SPLITS = 32  # parts of the keys: a lane of the merging warp has one
_MAX_PART_BYTES = 256 << 20  # of the results of all parts

# Times on an H200, in keys that a tile attends meanwhile (with 128 features, 128 keys take 1.3 us):
# a tile's own, a merge's own, one for each part, and one by the numbers that parts write and a
# merge reads. Tiles together attend no more keys than memory brings, 4.3 TB/s.
_TILE_KEYS, _MERGE_KEYS, _PART_KEYS, _NUMBERS_PER_KEY = 128, 320, 24, 2500
_BYTES_PER_KEY = 43_000

# Of a full tile's time, where a consumer of 64 rows has none. On an H200 0.82 of two, 0.55 of four.
_PARTIAL_TILE = 0.8
# Of the time of tiles of one head with all keys, what others must stay below.
_WORTHWHILE = 0.9


class Tiling(NamedTuple):
    """A configuration, and into how many parts the keys of each tile are cut."""

    config: Config | WideConfig
    splits: int


class Shape(NamedTuple):
    """The sizes that decide the tiling; `keys` is the number of keys of a row, if known."""

    B: int
    Hq: int
    Hkv: int
    Sq: int
    keys: int
    Dv: int


def tiling_of(
    config: Config | WideConfig,
    shape: Shape,
    processors: int,
    can_pack: bool = True,
    can_split: bool = True,
) -> Tiling:
    """The tiling of a call with tiles of `config`: the least divided of those about as fast.

    `can_pack`, `can_split`: whether the kernel has the call's options for packed heads, and for
    parts of the keys. How many heads share a tile depends on the group alone, so that lengths have
    two kernels at most, and parts two more. Parts are for queries that are few beside the keys;
    other calls have enough tiles, or are short.
    """
    if isinstance(config, WideConfig):
        return Tiling(config, 1)
    if can_pack and shape.Hq == shape.Hkv and shape.B * shape.Hq > processors:
        config = short_config(config, shape.Sq, shape.keys)
    packed = config
    if can_pack and not config.packs_queries:
        packed = dataclasses.replace(config, packed_heads=heads_of_tile(shape.Hq // shape.Hkv))
    configs = [config] if packed == config else [config, packed]
    can_split = can_split and 4 * shape.Sq <= shape.keys and config.ctas == 1
    ways = [way for c in configs for way in _ways(c, shape, processors, can_split)]
    best_time, best = min(ways, key=lambda way: way[0])
    return best if best_time <= _WORTHWHILE * ways[0][0] else ways[0][1]


def packed_queries(
    config: Config, shape: Shape, sequences: int, can_pack: bool
) -> tuple[Config, Shape]:
    """The configuration of a packed batch over pages, and its tiles as rows of a batch.

    They are as many as there may be: those that `shape.Sq` tokens fill, and one for what is left in
    each sequence, before the first and after the last. Heads share tiles wherever they can, as
    sequences may have a single query.
    """
    heads = heads_of_tile(shape.Hq // shape.Hkv) if can_pack else 1
    config = dataclasses.replace(config, packs_queries=True, packed_heads=heads)
    rows = shape.Sq // config.tile_queries + sequences + 2
    return config, shape._replace(B=rows, Sq=config.tile_queries)


def _ways(
    config: Config, shape: Shape, processors: int, can_split: bool
) -> Iterator[tuple[float, Tiling]]:
    """The times of tiles of one configuration with more and more parts of the keys."""
    B, Hq, Hkv, Sq, keys, Dv = shape
    tiles = B * Hq // config.packed_heads * -(-Sq // config.tile_queries)
    is_partial = Sq <= config.tile_queries - config.consumer_queries
    key_time = _PARTIAL_TILE if is_partial else 1.0
    numbers = B * Hq * Sq * Dv
    least = B * Hkv * keys * 4 * max(Dv, 1) / _BYTES_PER_KEY  # for keys and values, of 2 bytes
    splits = 1
    while True:
        rounds = -(-tiles * splits // processors)
        blocks = -(-keys // (config.block_n * splits))
        time = max(rounds * (blocks * config.block_n * key_time + _TILE_KEYS), least)
        if splits > 1:
            time += _MERGE_KEYS + splits * (_PART_KEYS + numbers / _NUMBERS_PER_KEY)
        yield time, Tiling(config, splits)
        splits += 1
        fits = blocks > 1 and splits <= MAX_SPLITS and 4 * numbers * splits <= _MAX_PART_BYTES
        if not (can_split and fits and tiles < 4 * processors):
            return
