"""How the decoding kernels share tiles among CTAs and merge what several did: their own source, as
C++ on the CPU."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fa_ops.backends import hopper

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SOURCES = Path(hopper.__file__).parent / "cuda"
# What the source takes from CUDA. The lanes of a warp are coroutines; one that tells the others
# something goes on when all have.
CUDA = """
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ucontext.h>
using std::min, std::max;
typedef unsigned int u32;
typedef unsigned long long u64;
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct Index { int x; };
static Index blockIdx, blockDim, gridDim, threadIdx;
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
template <class T> static T __ldcg(const T* x) { return *x; }
static float exp2_fast(float x) { return exp2f(x); }
static void next_grid_may_start() {}
static void wait_for_last_grid() {}
static void store_shared(u32, int4) {}
static void fence_async_smem() {}
template <class T> static T load_shared(u32) { return {}; }

static ucontext_t scheduler, lanes[32];
static char stacks[32][1 << 16];
static int said[32], heard[32];
static bool ended[32];
static void (*body)();
static void lane_main() { body(), ended[threadIdx.x & 31] = true; }
static const int* tell(int x) {
  const int lane = threadIdx.x & 31;
  said[lane] = x, swapcontext(&lanes[lane], &scheduler);
  return heard;
}
static void run_warp(void (*f)(), int warp = 0) {
  body = f;
  for (int i = 0; i < 32; i++) {
    ended[i] = false, getcontext(&lanes[i]);
    lanes[i].uc_stack.ss_sp = stacks[i], lanes[i].uc_stack.ss_size = sizeof stacks[i];
    lanes[i].uc_link = &scheduler, makecontext(&lanes[i], lane_main, 0);
  }
  while (!ended[31]) {
    for (int i = 0; i < 32; i++)
      if (threadIdx.x = warp * 32 + i; !ended[i]) swapcontext(&scheduler, &lanes[i]);
    std::copy(said, said + 32, heard);
  }
}
template <class T> static T heard_by(T x, int from) {
  int bits;
  T y;
  std::memcpy(&bits, &x, 4), std::memcpy(&y, tell(bits) + (from & 31), 4);
  return y;
}
template <class T> static T __shfl_sync(u32, T x, int from) { return heard_by(x, from); }
static float __shfl_xor_sync(u32, float x, int by) { return heard_by(x, threadIdx.x ^ by); }
static int __shfl_up_sync(u32, int x, int by) {
  const int lane = threadIdx.x & 31;
  return heard_by(x, lane < by ? lane : lane - by);
}
static int uniform(int x) { return heard_by(x, 0); }
static int __reduce_min_sync(u32, int x) { const int* y = tell(x); return *std::min_element(y, y + 32); }
static int __reduce_max_sync(u32, int x) { const int* y = tell(x); return *std::max_element(y, y + 32); }
static u32 __ballot_sync(u32, bool x) {
  const int* y = tell(x);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= (u32)y[i] << i;
  return bits;
}
static int __ffs(u32 x) { return __builtin_ffs(x); }
#define DEVICE inline
#define HAS_KV_LENS 1
constexpr int FAR = 1 << 29;
constexpr float NEVER = -1e30f;
"""  # noqa: E501
# Each of a CTA's tasks as (row, unit, first tile, tiles, first team, parts, flags).
RUN = """
static Params params;
static int* tasks;
static int count;
static void walk() {
  for (Walk<Params> walk(params); walk.at < walk.stop;) {
    Task t = walk.task();
    walk.share(t);
    if (threadIdx.x == 0) {
      const int found[] = {t.b, t.unit, t.tile, t.count, t.first_team, t.parts, t.flags};
      std::copy(found, found + 7, tasks + 7 * count++);
    }
    walk.next(t.count);
  }
}
extern "C" int run(int cta, int ctas, int* to, Params* p) {
  blockIdx.x = cta, gridDim.x = ctas, params = *p, tasks = to, count = 0;
  run_warp(walk);
  return count;
}
"""
# What merges say of each row's end, and of each two columns: where they belong, the sum, and what
# it is multiplied with.
MERGE = """
struct Merged { int cta, b, unit, row, column; float x, y, inverse; };
struct Closed { int b, unit, row, side; float m2, total; };
static Merged* merged;
static Closed* closed;
static int rows_closed;
static int close_row(const Params& p, const Task& t, int row, float m2, float n, bool writes_lse, float& inverse) {
  inverse = n > 0.f ? 1.f / n : 0.f;
  if (writes_lse) closed[rows_closed++] = {t.b, t.unit, row, blockIdx.x % width_of(p), m2, n};
  return (t.b * 64 + t.unit) * 64 + row;
}
static void put(const Params&, int place, int column, float2 x, float inverse) {
  merged[count++] = {blockIdx.x, place / 4096, place / 64 % 64, place % 64, column, x.x, x.y, inverse};
}
static void slice() { merge(params); }
extern "C" int run_merge(int ctas, int warps, Merged* to, Closed* rows, int* ended, Params* p) {
  gridDim.x = ctas, blockDim.x = warps * 32, params = *p, merged = to, closed = rows, count = rows_closed = 0;
  for (blockIdx.x = 0; blockIdx.x < ctas; blockIdx.x++)
    for (int warp = 0; warp < warps; warp++) run_warp(slice, warp);
  *ended = rows_closed;
  return count;
}
"""  # noqa: E501
DECODE = """
#define HAS_RANGES 1
#define ROWS 8
#define VALUE_DIM 192
constexpr int BLOCK_N = 64;
struct Params {
  const int *kv_lens, *ranges;
  float* partial;
  float2* partial_stats;
  int B, Hkv, Sq, Sk, ranges_b, window_left, idle, group;
};
"""
LATENT = """
#define ROWS 64
#define VALUE_DIM 128
constexpr int BLOCK_N = 64;
struct Params {
  const int* kv_lens;
  float* partial;
  float2* partial_stats;
  int B, units, width, Sk, tokens, heads;
};
"""
Int, P = ctypes.c_int, ctypes.c_void_p


class DecodeParams(ctypes.Structure):
    _fields_ = [(n, P) for n in ("lens", "ranges", "partial", "stats")] + [
        (n, Int) for n in ("B", "Hkv", "Sq", "Sk", "ranges_b", "window_left", "idle", "group")
    ]


class LatentParams(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("lens", "partial", "stats")),
        *((name, Int) for name in ("B", "units", "width", "Sk", "tokens", "heads")),
    ]


MERGED = np.dtype(
    [(n, "i4") for n in ("cta", "b", "unit", "row", "column")]
    + [(n, "f4") for n in ("x", "y", "inverse")]
)
CLOSED = np.dtype(
    [(n, "i4") for n in ("b", "unit", "row", "side")] + [(n, "f4") for n in ("m2", "total")]
)


def built(folder, name, text):
    (folder / f"{name}.cpp").write_text(CUDA + text)
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unused"]
    library = folder / f"{name}.so"
    subprocess.run([*command, folder / f"{name}.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stretches")
    stretches, merge, decode, latent = (
        (SOURCES / name).read_text()
        for name in ("stretches.cuh", "merge.cuh", "decode.cu", "mla.cu")
    )
    decode = decode[decode.index("DEVICE Row row_of(") : decode.index("// tma_load_once by a map")]
    latent = latent[latent.index("DEVICE Row row_of(") : latent.index("struct Smem {")]
    rest = merge + RUN + MERGE
    return {
        "decode": built(folder, "decode", DECODE + stretches + decode + rest),
        "latent": built(folder, "latent", LATENT + stretches + latent + rest),
    }


def tasks_of(kernel, params, ctas, most):
    """By CTA."""
    found = (Int * (7 * most))()
    result = []
    for cta in range(ctas):
        count = kernel.run(cta, ctas, found, ctypes.byref(params))
        result.append([tuple(found[7 * i : 7 * i + 7]) for i in range(count)])
    return result


def check(by_team, units, expected):
    """Every unit's tiles once and in order; its parts are where the others look for them.

    `expected`: of each row of the batch, its first tile and how many there are.
    """
    parts, slots = {}, set()
    for team, tasks in enumerate(by_team):
        for i, (b, unit, tile, count, first, number, flags) in enumerate(tasks):
            assert bool(flags & 1) == (i > 0)
            parts.setdefault((b, unit), []).append((team, tile, count, first, number, flags))
    assert sorted(parts) == [(b, u) for b in range(len(expected)) for u in range(units)]
    for (b, _), found in parts.items():
        at, count = expected[b]
        start = at
        first = found[0][0]
        second = found[0][5] & 1
        for place, (team, tile, tiles, first_team, number, flags) in enumerate(found):
            assert (tile, first_team, number) == (at, first, len(found)) and team == first + place
            assert bool(flags & 2) == bool(second)
            if number > 1:  # a slot of its own
                slot = team * 2 + (second if place == 0 else 0)
                assert slot not in slots and (place == 0 or not flags & 1)
                slots.add(slot)
            at += tiles
        assert at == start + count


def random_lens(g, B, Sk):
    kind = g.randrange(4)
    if kind == 0:
        return [g.randrange(Sk + 1)] * B
    if kind == 1:
        return [g.choice((0, 1, Sk, Sk + 9, -3)) for _ in range(B)]
    return [g.randrange(Sk + 1) if kind == 2 or g.random() < 0.1 else 64 for _ in range(B)]


@pytest.mark.parametrize("seed", range(60))
def test_decode(kernels, seed):
    g = random.Random(seed)
    B, Hkv = g.choice((1, 2, 31, 33, 70, 256)), g.choice((1, 2, 8))
    Sk, ctas = g.choice((64, 500, 3000)), g.choice((132, 7, 114))
    lens = random_lens(g, B, Sk)
    ranges = [sorted((g.randrange(Sk + 1), g.randrange(Sk + 1))) for _ in range(B)]
    if seed % 2:
        ranges = [(0, Sk)] * B
    window = g.choice((1 << 29, 100))
    expected = []
    for n, (first, end) in zip(lens, ranges):
        keys = max(0, min(n, Sk))
        lo, hi = max(0, keys - 1 - window, first), min(keys, end)
        lo = min(lo, hi)
        expected.append((lo // 64, max(1, -(-hi // 64) - lo // 64)))
    flat = [x for run in ranges for x in run]
    arrays = (Int * B)(*lens), (Int * (2 * B))(*flat)
    addresses = map(ctypes.addressof, arrays)
    params = DecodeParams(*addresses, None, None, B, Hkv, 1, Sk, 2, window, -(B * Hkv) % ctas, 1)
    by_cta = tasks_of(kernels["decode"], params, ctas, B * Hkv + 1)
    check(by_cta, Hkv, expected)
    sizes = [sum(task[3] for task in tasks) for tasks in by_cta]
    total = sum(sizes)
    assert max(sizes) - total / ctas <= 2  # a tile more than others, or a unit's one


@pytest.mark.parametrize(
    "B, keys, parts", [(64, 512, {1}), (64, 500, {1}), (64, 4096, {1, 2}), (16, 9000, {2, 3})]
)
def test_units_alike_are_not_shared(kernels, B, keys, parts):
    """Unless a CTA would have more than a tile beyond its share."""
    lens, run = (Int * B)(*[keys] * B), (Int * 2)(0, keys)
    addresses = map(ctypes.addressof, (lens, run))
    params = DecodeParams(*addresses, None, None, B, 8, 1, keys, 0, 1 << 29, -(B * 8) % 132, 1)
    by_cta = tasks_of(kernels["decode"], params, 132, B * 8 + 1)
    assert {task[5] for tasks in by_cta for task in tasks} == parts


@pytest.mark.parametrize("seed", range(40))
def test_latent(kernels, seed):
    g = random.Random(seed)
    B, units, width = g.choice((1, 2, 33, 70)), g.choice((1, 2, 3)), g.choice((1, 2, 4))
    Sk, ctas = g.choice((64, 500, 9000)), g.choice((132, 114))
    lens = random_lens(g, B, Sk)
    expected = [(0, max(1, -(-max(0, min(n, Sk)) // 64))) for n in lens]
    array = (Int * B)(*lens)
    params = LatentParams(ctypes.addressof(array), None, None, B, units, width, Sk, 1, 1)
    by_cta = tasks_of(kernels["latent"], params, ctas, B * units + 1)
    teams = by_cta[: ctas // width * width]
    assert all(teams[i] == teams[i - i % width] for i in range(len(teams)))
    assert not any(by_cta[len(teams) :])
    check(teams[::width], units, expected)


def merge_checked(kernel, params, by_cta, rows, dim, warps, width, seed):
    """Each shared unit's rows and columns once, from all of its parts and nothing else."""
    ctas, held = len(by_cta), params.held
    g = np.random.default_rng(seed)
    partial = np.full((2 * ctas, held, dim), np.nan, np.float32)
    stats = np.full((2 * ctas, held, 2), np.nan, np.float32)
    slots = {}
    for cta, tasks in enumerate(by_cta):
        for i, (b, unit, *_, number, _) in enumerate(tasks):
            if number > 1:
                slot = 2 * cta + (i > 0)
                slots.setdefault((b, unit, cta % width), []).append(slot)
                partial[slot] = g.standard_normal((held, dim))
                stats[slot, :, 0], stats[slot, :, 1] = g.normal(0, 20, held), g.random(held) + 0.1
                nothing = g.random(held) < 0.2
                stats[slot, nothing], partial[slot, nothing] = (-1e30, 0.0), 0.0
    assert slots
    found = np.zeros(len(slots) * rows * dim // 2 + 1, MERGED)
    params.partial, params.stats = partial.ctypes.data, stats.ctypes.data
    ends, ended = np.zeros(len(slots) * rows + 1, CLOSED), Int()
    found = found[
        : kernel.run_merge(
            *(ctas, warps, P(found.ctypes.data), P(ends.ctypes.data)),
            *(ctypes.byref(ended), ctypes.byref(params)),
        )
    ]
    ends = ends[: ended.value]
    places = set(zip(*(found[n] for n in ("b", "unit", "row", "column")), found["cta"] % width))
    assert len(found) == len(places) == len(slots) * rows * dim // 2
    assert len(ends) == len(set(zip(*(ends[n] for n in CLOSED.names[:4])))) == len(slots) * rows
    for (b, unit, side), parts in slots.items():
        mine = found[(found["b"] == b) & (found["unit"] == unit) & (found["cta"] % width == side)]
        m, n = (stats[parts, :, i].astype(np.float64) for i in (0, 1))
        top = np.where(n > 0, m, -1e30).max(0)
        factors = np.where(n > 0, np.exp2(m - top), 0.0)
        expected = np.einsum("pr,prd->rd", factors, partial[parts].astype(np.float64))
        row, column = mine["row"], mine["column"]
        scale = 1e-5 * len(parts)
        np.testing.assert_allclose(mine["x"], expected[row, column], atol=scale)
        np.testing.assert_allclose(mine["y"], expected[row, column + 1], atol=scale)
        total = (factors * n).sum(0)
        inverse = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
        np.testing.assert_allclose(mine["inverse"], inverse[row], rtol=1e-5)
        own = ends[(ends["b"] == b) & (ends["unit"] == unit) & (ends["side"] == side)]
        np.testing.assert_allclose(own["total"], total[own["row"]], rtol=1e-5)
        assert (own["m2"] == top.astype(np.float32)[own["row"]]).all()
        runs = np.bincount(mine["cta"]) // 32  # of 64 columns of a row, by each CTA
        assert runs.max() == -(-rows * (dim // 64) // (len(parts) - 1))


@pytest.mark.parametrize("seed", range(24))
def test_merging_in_a_kernel_of_its_own(kernels, seed):
    g = random.Random(seed)
    B, units, width = g.choice((1, 1, 2, 33)), g.choice((1, 2, 3)), g.choice((1, 2))
    Sk, ctas = g.choice((3000, 9000)), g.choice((132, 31))
    lens = (Int * B)(Sk, *random_lens(g, B, Sk)[1:])
    if seed % 2:
        rows = g.choice((1, 3, 16, 64))
        addresses = ctypes.addressof(lens), None, None
        params = LatentParams(*addresses, B, units, width, Sk, 1, rows)
        kernel, dim, params.held = kernels["latent"], 128, 64
    else:
        rows, width, run = g.choice((1, 5, 8)), 1, (Int * 2)(0, Sk)
        addresses = ctypes.addressof(lens), ctypes.addressof(run), None, None
        params = DecodeParams(*addresses, B, units, 1, Sk, 0, 1 << 29, -(B * units) % ctas, rows)
        kernel, dim, params.held = kernels["decode"], 192, 8
    by_cta = tasks_of(kernel, params, ctas, B * units + 1)
    merge_checked(kernel, params, by_cta, rows, dim, g.choice((4, 8, 16)), width, seed)
