"""The exact path of a row that the fast path cannot give: its own source, as C++ on the CPU."""

import ctypes

import numpy as np
import pytest
import torch

from tests.backends.hopper.cuda_as_cpp import built, needs_compiler

pytestmark = needs_compiler

ROW = """
#define IS_BF16 1
#include "exact_row.cuh"
"""
# A row of 64 columns of values, with a mask of its keys.
CALL = """
struct Row {
  int begin, end, D;
  float scale_log2;
  const Element *q, *k, *v;
  const unsigned char* kept;
  bool attends(int key) const { return kept[key]; }
  float score(int key) const { return dot(q, k + key * D, D); }
  float weight(int, float x) const { return x; }
  const Element* value(int key) const { return v + key * 64; }
};
static Row row;
static float* out;
static bool is_lost;
static int replaced[32];
static void one_warp() {
  ExactColumns found = {};
  const int lane = threadIdx.x & 31;
  replaced[lane] = attend_exactly(row, lane * 2, 64, found, is_lost);
  out[lane * 2] = found.x.x / found.sum, out[lane * 2 + 1] = found.x.y / found.sum;
  if (lane == 0) out[64] = found.max, out[65] = found.sum;
}
extern "C" int run(const Row* given, float* to, int lost) {
  row = *given, out = to, is_lost = lost;
  run_warp(one_warp);
  for (int lane = 1; lane < 32; lane++) if (replaced[lane] != replaced[0]) return -1;
  return replaced[0];
}
"""


class Row(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("first", "last", "D")),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "kept")),
    ]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return built(tmp_path_factory.mktemp("exact"), "row", ROW + CALL).run


def attend(kernel, q, k, v, kept, first, last, scale, lost=False):
    """Whether the row is replaced, by what, and its lse."""
    bits = np.ascontiguousarray(kept, dtype=np.uint8)
    row = Row(
        first, last, len(q), scale * np.log2(np.e), q.data_ptr(), k.data_ptr(), v.data_ptr(),
        bits.ctypes.data,
    )  # fmt: skip
    out = np.full(66, 7.0, np.float32)
    found = kernel(ctypes.byref(row), out.ctypes.data_as(ctypes.c_void_p), int(lost))
    return found, out[:64], out[64] * scale + np.log(out[65])


def inputs(seed, keys=150, D=40):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*s, generator=g) for s in ((D,), (keys, D), (keys, 64)))
    kept = torch.rand(keys, generator=g) < 0.7
    return *(x.bfloat16() for x in (q, k, v)), kept


def expected(q, k, v, kept, first, last, scale):
    keys = torch.arange(len(k))[(torch.arange(len(k)) >= first) & (torch.arange(len(k)) < last)]
    keys = keys[kept[keys]]
    s = (k[keys].double() @ q.double()) * scale
    return s.softmax(0) @ v[keys].double(), s.logsumexp(0)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_row_does_not_attend_does_not_reach_it(kernel, seed):
    q, k, v, kept = inputs(seed)
    first, last = (0, 150) if seed % 2 else (13, 101)
    want, lse = expected(q, k, v, kept, first, last, 0.2)
    v[~kept], k[~kept] = torch.nan, torch.inf
    v[:first], v[last:] = torch.inf, torch.nan
    found, out, got = attend(kernel, q, k, v, kept, first, last, 0.2)
    assert found == 1
    np.testing.assert_allclose(out, want.numpy(), rtol=1e-4, atol=1e-5)
    assert abs(got - lse.item()) < 1e-4


def test_the_fast_result_stands_where_an_attended_key_explains_it(kernel):
    q, k, v, kept = inputs(0)
    v[40], kept[40] = torch.nan, True
    assert attend(kernel, q, k, v, kept, 0, 150, 0.2)[0] == 0
    found, out, _ = attend(kernel, q, k, v, kept, 0, 150, 0.2, lost=True)
    assert found == 1 and np.isnan(out).all()


def test_one_poisoned_column_stays_in_its_column(kernel):
    q, k, v, kept = inputs(1)
    kept[60] = True
    want, _ = expected(q, k, v, kept, 0, 150, 0.2)
    v[60, 5] = torch.inf
    found, out, _ = attend(kernel, q, k, v, kept, 0, 150, 0.2)
    assert found == 1 and np.isinf(out[5])
    rest = np.arange(64) != 5
    np.testing.assert_allclose(out[rest], want.numpy()[rest], rtol=1e-4, atol=1e-5)


def test_scores_too_large_for_their_scaled_differences(kernel):
    q, k = torch.full((40,), 133120.0).bfloat16(), torch.full((150, 40), 133120.0).bfloat16()
    _, _, v, kept = inputs(2)
    found, out, _ = attend(kernel, q, k, v, kept, 0, 150, 40**-0.5, lost=True)
    assert found == 1
    np.testing.assert_allclose(out, v[kept].double().mean(0).numpy(), rtol=1e-3, atol=1e-4)


def test_a_row_without_keys(kernel):
    q, k, v, kept = inputs(3)
    found, _, lse = attend(kernel, q, k, v, np.zeros(150), 0, 150, 0.2)
    assert found == 1 and lse == -np.inf
