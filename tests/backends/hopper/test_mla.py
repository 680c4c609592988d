"""Partial results of latent caches as float16 numbers: their source as C++."""

import ctypes

import numpy as np
import pytest

from tests.backends.hopper.cuda_as_cpp import SOURCES, built, needs_compiler

pytestmark = needs_compiler

# Lane l has accumulator rows l / 4 and l / 4 + 8, of 256 columns, which are written one after the
# other.
CALL = """
#define ROWS 64
#define VALUE_DIM 512
#define RESCALE_THRESHOLD 8
#define IS_BF16 1
#include "split_keys.cuh"
struct MlaParams {};
PARTIAL_COLUMN
static const float* rows;
static u32* to;
static int* exponents;
static void write_rows() {
  const int lane = threadIdx.x & 31, row = lane >> 2;
  float o[128];
  for (int i = 0; i < 128; i++)
    o[i] = rows[(row + (i & 2) * 4) * 256 + column_offset(i) + (lane & 3) * 2];
  exponents[row] = partial_exponent<0>(o), exponents[row + 8] = partial_exponent<1>(o);
  write_halves<0>(o, power_of_two(-exponents[row]), to + row * 128 + (lane & 3) * 4);
  write_halves<1>(o, power_of_two(-exponents[row + 8]), to + (row + 8) * 128 + (lane & 3) * 4);
}
extern "C" void run(const float* from, u32* halves, int* found) {
  rows = from, to = halves, exponents = found;
  run_warp(write_rows);
}
extern "C" int column_of(int pair) { return partial_column(MlaParams(), pair); }
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    text = (SOURCES / "mla.cu").read_text()
    begin = text.index("DEVICE int partial_column(")
    column = text[begin : text.index("\n}\n", begin) + 3]
    folder = tmp_path_factory.mktemp("partial_halves")
    return built(folder, "partial_halves", CALL.replace("PARTIAL_COLUMN", column))


def written(kernel, rows):
    """The numbers of 16 rows as they are read again, and the exponents."""
    halves = np.full((16, 256), np.nan, np.float16)
    exponents = np.zeros(16, np.int32)
    kernel.run(*(ctypes.c_void_p(x.ctypes.data) for x in (rows, halves, exponents)))
    columns = [kernel.column_of(i) + at for i in range(32) for at in range(2)]
    assert sorted(columns) == list(range(64))
    read = np.empty((16, 4, 64))
    read[:, :, columns] = halves.reshape(16, 4, 64)
    return np.ldexp(read.reshape(16, 256), exponents[:, None]), exponents


@pytest.mark.parametrize("largest", [3e38, 1e30, 1.0, 1e-20])
def test_numbers_keep_eleven_bits(kernel, largest):
    g = np.random.default_rng(0)
    sizes = np.logspace(-8, 0, 256) * largest
    rows = (g.uniform(0.5, 1.0, (16, 256)) * g.choice((-1, 1), (16, 256)) * sizes).astype(
        np.float32
    )
    found, _ = written(kernel, rows)
    np.testing.assert_allclose(found, rows.astype(np.float64), rtol=2**-11)


def test_numbers_that_are_not_finite_leave_others_as_they_are(kernel):
    g = np.random.default_rng(1)
    rows = g.standard_normal((16, 256)).astype(np.float32)
    expected, _ = written(kernel, rows)
    rows[3, 17], rows[12, 200], rows[12, 5] = np.nan, np.inf, -np.inf
    found, _ = written(kernel, rows)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(rows))
    usable = np.isfinite(rows)
    np.testing.assert_allclose(found[usable], expected[usable], rtol=2**-10)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30])
def test_sums_of_weights_stay_finite(kernel, value):
    """They are scaled like the numbers, and 132 parts have up to 2^27 weights of 2^8 each."""
    found, exponents = written(kernel, np.full((16, 256), value, np.float32))
    assert np.isfinite(np.ldexp(np.float32(2.0**35 * 132), -exponents)).all()
    np.testing.assert_allclose(found, value, rtol=2**-9, atol=1e-32)
