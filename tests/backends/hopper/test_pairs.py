"""Which backward passes run by pairs of CTAs."""

import pytest

from fa_ops.backends.hopper.backward import attended_keys, prefers_pairs
from fa_ops.backends.hopper.problem import UNBOUNDED

FULL, CAUSAL = (UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0)


# An H200's times decided: where the two differ by 2 % and more, the faster one.
@pytest.mark.parametrize(
    "heads, lengths, sides, paired",
    [
        ((32, 8, 8), (512, 512), FULL, False),
        ((8, 8, 8), (2048, 2048), FULL, False),
        ((4, 8, 8), (4096, 4096), FULL, True),
        ((1, 8, 8), (16384, 16384), FULL, True),
        ((1, 8, 8), (1024, 1024), FULL, True),
        ((1, 8, 8), (1024, 1024), CAUSAL, False),
        ((1, 8, 8), (2048, 2048), CAUSAL, True),
        ((2, 8, 8), (2048, 2048), CAUSAL, False),
        ((4, 8, 8), (4096, 4096), CAUSAL, False),
        ((2, 8, 8), (8192, 8192), CAUSAL, True),
        ((1, 8, 1), (4096, 4096), CAUSAL, True),
        ((4, 8, 1), (4096, 4096), CAUSAL, False),
        ((1, 8, 4), (8192, 8192), CAUSAL, True),
        ((1, 8, 4), (8192, 8192), (2047, 0), False),
        ((1, 1, 1), (8192, 8192), FULL, True),
        ((1, 1, 1), (8192, 8192), CAUSAL, False),
        ((1, 8, 8), (512, 8192), CAUSAL, True),
        ((4, 8, 8), (4096, 128), FULL, False),
    ],
)
def test_the_faster_one_is_taken(heads, lengths, sides, paired):
    (B, Hq, Hkv), (Sq, Sk) = heads, lengths
    assert prefers_pairs((B, Hq, Sq, 256), (B, Hkv, Sk, 256), sides, 132) == paired


def test_packed_sequences_and_key_ranges():
    taken = (1, 8, 16384, 256), (1, 8, 16384, 256), FULL, 132
    assert prefers_pairs(*taken) and not prefers_pairs(*taken, has_ranges=True)
    assert prefers_pairs(*taken, has_ranges=True, sequences=2)
    assert not prefers_pairs(*taken, has_ranges=True, sequences=4)


@pytest.mark.parametrize(
    "Sq, Sk, left, right", [(640, 1000, 100, 7), (1000, 640, *CAUSAL), (3, 1, *FULL)]
)
def test_attended_keys(Sq, Sk, left, right):
    diagonals = (i + Sk - Sq for i in range(Sq))
    count = sum(d - left <= j <= d + right for d in diagonals for j in range(Sk))
    assert attended_keys(Sq, Sk, left, right) == pytest.approx(count / Sq, rel=0.02)
