"""Bool masks as bits: the kernels of cuda/mask.cu, as C++ on the CPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from fa_ops.backends.hopper import masks
from fa_ops.backends.hopper.masks import MaskLayout, MaskPacker
from fa_ops.backends.hopper.runtime import launch
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler

pytestmark = needs_compiler

# In place of `ptx.cuh`. The threads of a CTA are coroutines: one that exchanges a value continues
# when its warp has, and one at a barrier when all threads have come.
CUDA = """
#pragma once
#include <algorithm>
#include <ucontext.h>
using std::min, std::max;
typedef unsigned int u32;
typedef unsigned long long u64;
static bool is_misaligned;
struct uint4 {
  u32 x, y, z, w;
  uint4(const uint4& from) : x(from.x), y(from.y), z(from.z), w(from.w) {
    is_misaligned |= (u64)&from & 15;
  }
};
struct int2 { int x, y; };
struct Index { int x, y; };
static Index blockIdx, gridDim, threadIdx;

constexpr int CTA_THREADS = 512;
enum State { EXCHANGES, AT_BARRIER, ENDED };
static ucontext_t scheduler, threads[CTA_THREADS];
static char stacks[CTA_THREADS][1 << 14];
static State state[CTA_THREADS];
static int given[CTA_THREADS], seen[32];
static void (*body)();
static void thread_main() { body(), state[threadIdx.x] = ENDED; }
static void leave(State s) {
  const int i = threadIdx.x;
  state[i] = s, swapcontext(&threads[i], &scheduler);
}
static void __syncthreads() { leave(AT_BARRIER); }
static const int* exchange(int x) { given[threadIdx.x] = x, leave(EXCHANGES); return seen; }
static void run_cta(void (*f)()) {
  body = f;
  for (int i = 0; i < CTA_THREADS; i++) {
    getcontext(&threads[i]), state[i] = EXCHANGES;
    threads[i].uc_stack.ss_sp = stacks[i], threads[i].uc_stack.ss_size = sizeof stacks[i];
    threads[i].uc_link = &scheduler, makecontext(&threads[i], thread_main, 0);
  }
  do {  // each warp up to its next barrier
    for (int warp = 0; warp < CTA_THREADS; warp += 32) {
      do {
        std::copy(given + warp, given + warp + 32, seen);
        for (int i = warp; i < warp + 32; i++)
          if (threadIdx.x = i; state[i] != ENDED) swapcontext(&scheduler, &threads[i]);
      } while (state[warp] == EXCHANGES);
    }
  } while (state[0] == AT_BARRIER);
}
static u32 __ballot_sync(u32, bool yes) {
  const int* x = exchange(yes);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= (u32)x[i] << i;
  return bits;
}
static int __reduce_min_sync(u32, int x) {
  const int* y = exchange(x);
  return *std::min_element(y, y + 32);
}
static int __reduce_max_sync(u32, int x) {
  const int* y = exchange(x);
  return *std::max_element(y, y + 32);
}
static int warp_uniform(int x) { return x; }
static void atomicMin(int* x, int y) { *x = min(*x, y); }
static void atomicMax(int* x, int y) { *x = max(*x, y); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
static int __clz(u32 x) { return __builtin_clz(x); }
static int2 make_int2(int x, int y) { return {x, y}; }
#define DEVICE inline
constexpr int UNBOUNDED = 1 << 29;
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)
"""
LAUNCH = """
#define ENTRY_pack_rows 1
#define ENTRY_pack_columns 1
#include "mask.cu"
static_assert(THREADS == CTA_THREADS);
static MaskParams params;
static bool run(Index* grid, MaskParams* p, void (*body)()) {
  params = *p, gridDim = *grid;
  for (blockIdx.y = 0; blockIdx.y < grid->y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid->x; blockIdx.x++) run_cta(body);
  return is_misaligned;
}
extern "C" {
bool run_pack_rows(Index* grid, MaskParams* p) { return run(grid, p, [] { pack_rows(params); }); }
bool run_pack_columns(Index* grid, MaskParams* p) {
  return run(grid, p, [] { pack_columns(params); });
}
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask")
    return built(folder, "mask", LAUNCH, CUDA)


@pytest.fixture
def launched(kernels, monkeypatch):
    """The names of the kernels that ran."""
    names = []

    def kernel(kind, name, device, threads):
        assert (kind, threads) == ("mask", 512)

        def run(grid, stream, pointers):
            names.append(name)
            body = getattr(kernels, f"run_{name}")
            body.restype = ctypes.c_bool
            assert not body((ctypes.c_int * 2)(*grid), ctypes.c_void_p(pointers[0])), "misaligned"

        return SimpleNamespace(launch=run)

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype).fill_(0xAA)

    monkeypatch.setattr(masks, "kernel", kernel)
    monkeypatch.setattr(launch, "empty", empty)
    return names


def random(*shape):
    return torch.rand(shape) > 0.4


BYTES = torch.tensor([0, 1, 2, 128, 255, 0, 64, 0] * 8, dtype=torch.uint8)
# Each with the kernels that pack it by query and by key.
ROWS, COLUMNS = "pack_rows", "pack_columns"
FORMS = {
    "rows of 16 bytes": (random(2, 3, 70, 144), ROWS, COLUMNS),
    "any rows": (random(2, 3, 70, 131), ROWS, COLUMNS),
    "one for all": (random(200, 333), ROWS, COLUMNS),
    "long rows": (random(1, 2, 3, 2600), ROWS, COLUMNS),
    "long rows of 16 bytes": (random(1, 2, 3, 2608), ROWS, COLUMNS),
    "a row for each CTA": (random(1, 1, 2, 35000), ROWS, COLUMNS),
    "padding": (random(3, 1, 1, 301), ROWS, ROWS),
    "padding, expanded": (random(3, 1, 1, 300).expand(3, 4, 65, 300), ROWS, ROWS),
    "padding, every second": (random(3, 1, 1, 602)[..., ::2], ROWS, ROWS),
    "of queries": (random(2, 1, 70, 1), ROWS, ROWS),
    "of queries, rows of 16 bytes": (random(2, 1, 96, 1), ROWS, ROWS),
    "of heads": (random(2, 3, 1, 1).expand(2, 3, 40, 50), ROWS, ROWS),
    "one element": (random(1, 1, 1, 1), ROWS, ROWS),
    "transposed": (random(2, 3, 131, 70).mT, COLUMNS, ROWS),
    "transposed, rows of 16 bytes": (random(2, 3, 131, 80).mT, COLUMNS, ROWS),
    "heads before batches": (random(3, 2, 33, 48).transpose(0, 1), ROWS, COLUMNS),
    "aligned slice": (random(2, 64, 320)[..., :300], ROWS, COLUMNS),
    "odd slice": (random(2, 64, 320)[:, 1:, 3:300], ROWS, COLUMNS),
    "overlapping rows": (random(400).unfold(0, 300, 1), ROWS, ROWS),
    "causal": (torch.ones(90, 200).tril(40).bool(), ROWS, COLUMNS),
    "none": (torch.zeros(3, 1, 5, 64).bool(), ROWS, COLUMNS),
    "every second": (random(2, 1, 64, 320)[..., ::2, ::2], ROWS, COLUMNS),
    "bytes above 1": (BYTES.view(torch.bool).expand(64, 64), ROWS, ROWS),
    "rows of bytes above 1": (BYTES.repeat(2, 17).view(torch.bool), ROWS, COLUMNS),
}  # fmt: skip


def four(mask):
    return mask[(None,) * (4 - mask.dim())]


def unpacked(packer, mask, shape):
    """The bits as kernels read them, as bool of this shape, after a look at what follows a row."""
    *strides, at = packer.bits_layout
    assert at % 16 == 8
    bits = packer.run(0, mask.data_ptr())
    rows = bits.as_strided((*shape[:3], at + 8), (*strides, 1))
    found = (rows[..., :at, None] >> torch.arange(8, device=mask.device) & 1).bool().flatten(-2)
    assert not found[..., shape[3] :].any()
    kept = found[..., : shape[3]]
    ranges = rows[..., at:].contiguous().view(torch.int32)
    columns = torch.arange(shape[3], device=mask.device)
    first = columns.where(kept, 1 << 29).amin(-1, keepdim=True)
    end = (columns + 1).where(kept, 0).amax(-1, keepdim=True)
    assert torch.equal(ranges, torch.cat([first, end], -1).int())
    return kept


def by_query(mask):
    """(found, expected) keys of each query; a mask of queries alone is one of 300 keys."""
    Sk = 300 if mask.shape[-1] == 1 else mask.shape[-1]
    shape = *four(mask).shape[:3], Sk
    packer = MaskPacker.by_query(MaskLayout.of(mask), Sk, mask.device.index)
    for block in (64, 80, 112, 128):  # what a block reads is in its row
        assert -(-Sk // block) * block <= 8 * packer.bits_layout[3]
    return unpacked(packer, mask, shape), (four(mask).view(torch.uint8) != 0).expand(shape)


def by_key(mask):
    """(found, expected) queries of each key, or their one block."""
    layout, expected = MaskLayout.of(mask), (four(mask).view(torch.uint8) != 0).mT
    if layout.queries_share:
        expected = expected[..., :1].expand(*expected.shape[:3], 64)
    packer = MaskPacker.by_key(layout, mask.device.index)
    return unpacked(packer, mask, expected.shape), expected


@pytest.mark.parametrize("form", FORMS)
def test_masks_are_packed_for_queries(form, launched):
    mask, kernel, _ = FORMS[form]
    found, expected = by_query(mask)
    assert torch.equal(found, expected)
    assert launched == [kernel]


@pytest.mark.parametrize("form", FORMS)
def test_masks_are_packed_for_keys(form, launched):
    mask, _, kernel = FORMS[form]
    found, expected = by_key(mask)
    assert torch.equal(found, expected)
    assert launched == [kernel]


def test_a_cta_packs_several_heads(launched, monkeypatch):
    monkeypatch.setattr(masks, "_MAX_GRID_HEADS", 2)
    for mask in (random(3, 2, 40, 50), random(3, 2, 50, 40).mT):
        for found, expected in (by_query(mask), by_key(mask)):
            assert torch.equal(found, expected)
    assert launched == [ROWS, COLUMNS, COLUMNS, ROWS]


def test_what_is_shared_is_packed_once(launched):
    layout = MaskLayout.of(random(3, 1, 1, 300).expand(3, 8, 500, 300))
    packer = MaskPacker.by_query(layout, 300, None)
    assert packer.bits_layout == (80, 0, 0, 72) and packer.layout[0] == (3 * 80,)
    packer = MaskPacker.by_key(layout, None)
    assert packer.bits_layout == (300 * 48, 0, 48, 40) and packer.layout[0] == (3 * 300 * 48,)
