"""Bool masks as bits: the kernels of cuda/mask.cu, as C++ on the CPU."""

import ctypes

import pytest
import torch

from fa_ops.backends.hopper import mask as masks
from fa_ops.backends.hopper.problem import shared_strides
from tests.backends.cuda_as_cpp import built, needs_compiler

pytestmark = needs_compiler

# In place of `ptx.cuh`. Lanes run one after another, twice: what they exchange does not depend on
# what others exchanged, so that the second time all of it is known.
CUDA = """
#pragma once
#include <algorithm>
#include <vector>
using std::min, std::max;
typedef unsigned int u32;
struct uint4 { u32 x, y, z, w; };
struct int2 { int x, y; };
struct Index { int x, y; };
static Index blockIdx, gridDim, threadIdx;
static std::vector<int> told;
static u32 place;
template <class Join> int tell(int x, Join join) {
  if (place == told.size()) told.push_back(x); else told[place] = join(told[place], x);
  return told[place++];
}
static u32 __ballot_sync(u32, bool yes) {
  return tell((u32)yes << (threadIdx.x & 31), [](int a, int b) { return a | b; });
}
static int __reduce_min_sync(u32, int x) { return tell(x, [](int a, int b) { return min(a, b); }); }
static int __reduce_max_sync(u32, int x) { return tell(x, [](int a, int b) { return max(a, b); }); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
static int __clz(u32 x) { return __builtin_clz(x); }
static int2 make_int2(int x, int y) { return {x, y}; }
#define DEVICE inline
constexpr int UNBOUNDED = 1 << 29;
#define __global__
#define __launch_bounds__(threads)
"""
LAUNCH = """
#define ENTRY_pack_rows 1
#define ENTRY_pack_words 1
#define ENTRY_find_ranges 1
#include "mask.cu"
template <class Lane> void run(Index* grid, Lane lane) {
  gridDim = *grid;
  for (blockIdx.y = 0; blockIdx.y < grid->y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid->x; blockIdx.x++)
      for (int warp = 0; warp < 8; warp++) {
        told.clear();
        for (int i = 0; i < 64; i++) threadIdx.x = warp * 32 + i % 32, place = 0, lane();
      }
}
extern "C" {
void run_pack_rows(Index* g, const unsigned char* mask, unsigned char* bits, MaskStrides* s,
                   int heads, int all, int rows, int columns, int pitch) {
  run(g, [&] { pack_rows(mask, bits, *s, heads, all, rows, columns, pitch); });
}
void run_pack_words(Index* g, const unsigned char* mask, unsigned char* bits, MaskStrides* s,
                    int heads, int all, int rows, int columns, int pitch) {
  run(g, [&] { pack_words(mask, bits, *s, heads, all, rows, columns, pitch); });
}
void run_find_ranges(Index* g, unsigned char* bits, int rows, int pitch) {
  run(g, [&] { find_ranges(bits, rows, pitch); });
}
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask")
    return built(folder, "mask", LAUNCH, CUDA)


@pytest.fixture
def packed(kernels, monkeypatch):
    """The names of the kernels that ran."""
    ran = []

    def launch(device, kernel, grid, *params):
        ran.append(kernel)
        getattr(kernels, f"run_{kernel}")((ctypes.c_int * 2)(*grid), *params)

    monkeypatch.setattr(masks, "_launch", launch)
    return ran


def random(*shape):
    return torch.rand(shape) > 0.4


BYTES = torch.tensor([0, 1, 2, 128, 255, 0, 64, 0] * 8, dtype=torch.uint8)
# Each with the kernels that pack it by query and by key.
FORMS = {
    "rows of 16 bytes": (random(2, 3, 70, 144), "pack_rows", "pack_words"),
    "any rows": (random(2, 3, 70, 131), "pack_words", "pack_words"),
    "one for all": (random(200, 333), "pack_words", "pack_words"),
    "padding": (random(3, 1, 1, 301), "pack_words", "pack_words"),
    "padding, expanded": (random(3, 1, 1, 300).expand(3, 4, 65, 300), "pack_words", "pack_words"),
    "of queries": (random(2, 1, 70, 1), "pack_words", "pack_words"),
    "of queries, rows of 16 bytes": (random(2, 1, 96, 1), "pack_words", "pack_rows"),
    "one element": (random(1, 1, 1, 1), "pack_words", "pack_words"),
    "transposed": (random(2, 3, 131, 70).mT, "pack_words", "pack_words"),
    "transposed, rows of 16 bytes": (random(2, 3, 131, 80).mT, "pack_words", "pack_rows"),
    "heads before batches": (random(3, 2, 33, 48).transpose(0, 1), "pack_rows", "pack_words"),
    "aligned slice": (random(2, 64, 320)[..., :300], "pack_rows", "pack_words"),
    "odd slice": (random(2, 64, 320)[:, 1:, 3:300], "pack_words", "pack_words"),
    "causal": (torch.ones(90, 200).tril(40).bool(), "pack_words", "pack_words"),
    "none": (torch.zeros(3, 1, 5, 64).bool(), "pack_rows", "pack_words"),
    "every second": (random(2, 1, 64, 320)[..., ::2, ::2], "pack_words", "pack_words"),
    "bytes above 1": (BYTES.view(torch.bool).expand(64, 64), "pack_rows", "pack_words"),
}  # fmt: skip


def four(mask):
    return mask[(None,) * (4 - mask.dim())]


def shown(bits, columns):
    """As bool (..., columns), after a look at what follows."""
    at = masks.run_at(bits)
    found = (bits[..., :at, None] >> torch.arange(8) & 1).bool().flatten(-2)
    assert at % 16 == 8 and not found[..., columns:].any()
    kept = found[..., :columns]
    runs = bits[..., at:].contiguous().view(torch.int32)
    places = torch.arange(columns)
    first = places.where(kept, 1 << 29).amin(-1, keepdim=True)
    end = (places + 1).where(kept, 0).amax(-1, keepdim=True)
    assert torch.equal(runs, torch.cat([first, end], -1).int())
    return kept


@pytest.mark.parametrize("form", FORMS)
def test_by_query(form, packed):
    mask, kernel, _ = FORMS[form]
    Sk = 300 if mask.shape[-1] == 1 else mask.shape[-1]
    bits = masks.bits_by_query(mask, Sk)
    expected = (four(mask).view(torch.uint8) != 0).expand(*four(mask).shape[:3], Sk)
    assert torch.equal(shown(bits, Sk).expand_as(expected), expected)
    assert packed == [kernel, "find_ranges"]
    for block in (64, 80, 112, 128):  # what a block reads is in its row
        assert -(-Sk // block) * block <= 8 * masks.run_at(bits)


@pytest.mark.parametrize("form", FORMS)
def test_by_key(form, packed):
    mask, _, kernel = FORMS[form]
    expected = (four(mask).view(torch.uint8) != 0).mT
    bits = masks.bits_by_key(mask)
    Sq = expected.shape[-1]
    if masks.queries_share(mask):
        kept = shown(bits, 64)
        assert torch.equal(kept, expected[:, :1, :, :1].expand_as(kept))
    else:
        assert torch.equal(shown(bits, Sq).expand_as(expected), expected)
    assert packed == [kernel, "find_ranges"]


def test_what_is_shared_is_packed_once(packed):
    padding = random(3, 1, 1, 300).expand(3, 8, 500, 300)
    assert masks.bits_by_query(padding, 300).shape[:3] == (3, 1, 1)
    assert masks.bits_by_key(padding).shape == (3, 1, 300, 48)
    assert shared_strides(masks.bits_by_query(padding, 300)) == (80, 0, 0)
