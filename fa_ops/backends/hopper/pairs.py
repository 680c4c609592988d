"""The rule for backward passes that are faster by pairs of CTAs than in two passes.

Pairs execute five products for each block of queries and keys, two passes execute seven. But pairs
add to fp32 sums of dQ, which are cleared, written and read once for each query, so that pairs are
faster only if queries attend many keys. If there are few tiles of queries, the pass for dQ leaves
multiprocessors idle, and fewer keys are enough. Pairs leave some idle if blocks of keys are few and
of unequal lengths.

Time of two passes over that of pairs, D 256 on an H200 with 132 multiprocessors:

    queries, heads   keys of a query   ratio
    16384 x 8        256 / 1024        0.82 / 0.94
    16384 x 8        2048 / 3072       0.99 to 1.00
    16384 x 8        4096 to 16384     1.03 to 1.08
    4096 x 8         2048              0.98; heads in one group 1.19
    2048 x 8         1024              1.20; heads in one group 1.77
    1024 x 8         512, causal       0.88: 64 pairs at once, for the time of the longest
"""

from __future__ import annotations

from fa_ops.backends.hopper.configs import BackwardConfig, group_parts
from fa_ops.backends.hopper.problem import UNBOUNDED

_TILE = 128  # queries of a CTA of the pass for dQ
_KEYS = 1024  # that a query must attend for each tile of queries of a multiprocessor
_MOST_TILES = 3.5  # beyond which more tiles ask for no more keys


def prefers_pairs(
    query: tuple[int, ...], key: tuple[int, ...], sides: tuple[int, int], processors: int,
    has_ranges: bool = False, sequences: int | None = None,
) -> bool:  # fmt: skip
    """Whether pairs of CTAs are faster.

    Args:
        query: shape (B, Hq, Sq, D); of a packed batch B is 1, and Sq counts all tokens.
        key: shape (B, Hkv, Sk, D).
        sides: keys on either side of the diagonal, see `problem.window_sides`.
        processors: multiprocessors of the device.
        has_ranges: whether key ranges say which keys queries attend. The host does not know them.
        sequences: of a packed batch. Half of their mean length is counted, as they may be causal.
    """
    if has_ranges and not sequences:
        return False
    (B, Hq, Sq, _), (_, Hkv, Sk, _) = query, key
    keys = Sk / sequences / 2 if sequences else attended_keys(Sq, Sk, *sides)
    tiles = B * Hq * -(-Sq // _TILE) / processors
    if keys < _KEYS * min(max(tiles, 1.0), _MOST_TILES):
        return False
    blocks = -(-Sk // BackwardConfig.block_n) * B * Hkv
    ctas = 2 * blocks * group_parts(Hq // Hkv, 2 * blocks, processors)
    is_even = min(sides) == UNBOUNDED and not sequences
    return is_even or ctas > processors


def attended_keys(Sq: int, Sk: int, left: int, right: int) -> float:
    """The number of keys that a query attends, averaged over 32 queries."""
    diagonals = ((2 * i + 1) * Sq // 64 + Sk - Sq for i in range(32))
    return sum(max(0, min(Sk, d + right + 1) - max(0, d - left)) for d in diagonals) / 32
