"""The rules for backward passes in which one CTA processes all keys of a head, or in one kernel.

Otherwise several CTAs add to the dQ of a head in memory, and separate kernels clear and convert
these fp32 sums, in 0.06 ms for 16384 tokens with 2048 features. A CTA with all keys of a head needs
neither kernel. But then all CTAs read queries and sums of different heads, once for each block of
keys, and the L2 cache must hold them.

Time of blocks of keys over that of whole heads on an H200 with 132 multiprocessors, 16384 tokens:

    D     keys             sums of all CTAs   keys of a query   ratio
    64    128 full         none               128               1.48
    64    256 causal       9 MB               128               1.33
    64    512 causal       17 MB              256               1.17
    64    512 full         17 MB              512               1.04
    64    1024 causal      35 MB              512               0.95
    64    1024 full        35 MB              1024              0.73
    128   256 causal       17 MB              128               1.39
    128   512 causal       35 MB              256               1.06
    128   512 full         35 MB              512               0.84
    128   1024 causal      69 MB              512               0.81

Small problems take the time of their launches, which is that of a few steps: one kernel is faster
even if most multiprocessors have no work. It reads the results of the forward pass to sum rows,
which a CTA does for its own heads before its products, and another kernel does on all
multiprocessors. Microseconds on the GPU, in a CUDA graph:

    heads  D     tokens            one kernel   row sums apart   blocks of keys, three kernels
    8      64    64 full           6.8          7.1              9.4
    8      64    128 causal        7.5          7.9              9.6
    8      128   128 causal        10.4         9.9              12.2
    8      64    256 causal        15.2         15.1             12.3
    8      64    256 full          17.5         17.3             12.1
    48     64    256 full          18.2         18.3             16.0
    96     64    197 full          18.5         18.8             23.3
    32     64    4096 x 77 full    119.8        102.2            109.0
    256    64    1024 x 77 full    75.7         73.2             127.8
    1024   64    512 causal        306.6        301.4            367.8
    1024   128   256 causal        218.8        220.4            321.5

The host needs about 15 us less for one kernel than for three.
"""

from __future__ import annotations

from fa_ops.backends.hopper.pairs import attended_keys
from fa_ops.backends.hopper.problem import UNBOUNDED

_BLOCK = 128  # keys of a CTA at a time
# steps of 128 queries, 128 keys and 64 features that a CTA may have, and the least part of the
# multiprocessors that have work
_FEW_STEPS = ((2, 0.0), (4, 0.7))
_LEAST_WORK = 0.85  # of the multiprocessors' time
_MOST_BYTES = 96 << 20  # of sums that all CTAs add to in the time of a head
_OWN_BYTES = 256 << 10  # of `out` and its gradient, beyond a multiprocessor's share of all


def prefers_whole_heads(
    query: tuple[int, ...], key: tuple[int, ...], sides: tuple[int, int], processors: int
) -> bool:
    """Whether a CTA for all keys of a head is faster, in a call without masks, ranges or lengths.

    Args:
        query: shape (B, Hq, Sq, D).
        key: shape (B, Hkv, Sk, D).
        sides: keys on either side of the diagonal, see `problem.window_sides`.
        processors: multiprocessors of the device.
    """
    (B, Hq, Sq, D), (_, Hkv, Sk, _) = query, key
    if Sk < Sq and sides[1] < UNBOUNDED:  # no CTA would write the gradients of rows without keys
        return False
    if Sk <= _BLOCK and Hq == Hkv:  # the work is divided in the same way, and nothing is summed
        return True
    heads = B * Hkv
    rounds = -(-heads // processors)
    steps = Hq // Hkv * -(-Sq // _BLOCK) * -(-Sk // _BLOCK) * -(-D // 64)
    if any(steps <= few and heads >= part * rounds * processors for few, part in _FEW_STEPS):
        return True
    sums = min(heads, processors) * (Hq // Hkv) * Sq * D * 4
    added = sums * attended_keys(Sq, Sk, *sides) / _BLOCK
    return heads >= _LEAST_WORK * rounds * processors and added <= _MOST_BYTES


def prefers_own_row_sums(
    query: tuple[int, ...], key: tuple[int, ...], Dv: int, processors: int
) -> bool:
    """Whether row sums by the CTAs with whole heads are faster than by a kernel before them.

    Args:
        query: shape (B, Hq, Sq, D).
        key: shape (B, Hkv, Sk, D).
        Dv: features of values.
        processors: multiprocessors of the device.
    """
    B, Hq, Sq, _ = query
    heads = B * key[1]
    rows = (Hq // key[1] * -(-heads // processors) - B * Hq / processors) * Sq
    return rows * 2 * 2 * Dv <= _OWN_BYTES
