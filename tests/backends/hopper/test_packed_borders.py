"""Which keys a token of a packed batch attends, and where it is for ALiBi, whatever the borders
hold: the kernel's own source, as C++ on the CPU."""

import ctypes
import random

import numpy as np
import pytest

from tests.backends.hopper.cuda_as_cpp import built, needs_compiler

pytestmark = needs_compiler

CALL = """
#define __global__
#define __launch_bounds__(...)
struct int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
static bool sorted_of[2];
static int calls;
static bool __syncthreads_and(bool) { return sorted_of[calls++ % 2]; }
#include "packed_ranges.cu"
"""
RUN = """
extern "C" void run(const int* q, const int* k, const int* lens, int2* ranges, int B, int Tq, int Tk, int left, int right, int positions) {
  sorted_of[0] = std::is_sorted(q, q + B + 1), sorted_of[1] = std::is_sorted(k, k + B + 1);
  for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++) packed_ranges(q, k, lens, ranges, B, Tq, Tk, left, right, positions);
}
"""  # noqa: E501
UNBOUNDED = 1 << 29
EXTREMES = (-(2**31), -5, 2**31 - 1, 1 << 30)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return built(tmp_path_factory.mktemp("packed"), "packed", CALL + RUN).run


def counted(ends, tokens):
    """Borders as docs/semantics.md has them: clamped, and none less than the one before it."""
    return np.maximum.accumulate(np.clip(np.array(ends, np.int64), 0, tokens))


def expected(ends_q, ends_k, lens, Tq, Tk, left, right):
    """Ranges, and positions of all queries and keys."""
    q, k = counted(ends_q, Tq), counted(ends_k, Tk)
    ranges, positions = np.zeros((Tq, 2), np.int64), np.zeros((Tq + Tk, 2), np.int64)
    for b in range(len(q) - 1):
        first, end = k[b], k[b + 1]
        last = end if lens is None else first + min(max(lens[b], 0), end - first)
        positions[q[b] : q[b + 1]] = positions[Tq + first : Tq + end] = last - q[b + 1], b
        for i in range(q[b], q[b + 1]):
            diagonal = i + last - q[b + 1]
            begin, stop = max(first, diagonal - left), min(last, diagonal + right + 1)
            ranges[i] = (begin, stop) if begin < stop else (0, 0)
    return ranges, positions


@pytest.mark.parametrize("seed", range(200))
def test_ranges_of_broken_borders(kernel, seed):
    g = random.Random(seed)
    B, Tq, Tk = g.randint(1, 6), g.randint(1, 40), g.randint(0, 40)

    def borders(tokens):
        ends = sorted(g.randint(0, tokens) for _ in range(B + 1))
        for _ in range(g.randint(0, 2) if seed % 4 else 0):
            ends[g.randrange(B + 1)] = g.choice((*EXTREMES, g.randint(-9, tokens + 9)))
        return ends

    ends_q, ends_k = borders(Tq), borders(Tk)
    lens = [g.choice((*EXTREMES, g.randint(0, 20))) for _ in range(B)] if seed % 3 == 0 else None
    left, right = g.choice((UNBOUNDED, 0, 5)), g.choice((UNBOUNDED, 0, 3))
    given = [None if x is None else np.array(x, np.int32) for x in (ends_q, ends_k, lens)]
    pointers = [x if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in given]
    ranges, positions = expected(ends_q, ends_k, lens, Tq, Tk, left, right)
    for count in (0, Tq, Tq + Tk):
        written = np.full((Tq + count + 2, 2), 77, np.int32)
        to = written[1:].ctypes.data_as(ctypes.c_void_p)
        kernel(*pointers, to, B, Tq, Tk, left, right, count)
        assert (written[[0, -1]] == 77).all()
        found = np.split(written[1:-1], [Tq])
        np.testing.assert_array_equal(found[0], ranges)
        np.testing.assert_array_equal(found[1], positions[:count])
