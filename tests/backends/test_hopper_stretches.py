"""How the decoding kernels share tiles among CTAs: their own source, as C++ on the CPU."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from fa_ops.backends import hopper

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SOURCES = Path(hopper.__file__).parent / "cuda"
# What the source takes from CUDA. The lanes of a warp are coroutines; one that tells the others
# something goes on when all have.
CUDA = """
#include <algorithm>
#include <cmath>
#include <ucontext.h>
using std::min, std::max;
typedef unsigned int u32;
struct int4 { int x, y, z, w; };
struct Index { int x; };
static Index blockIdx, blockDim, gridDim, threadIdx;
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static void store_shared(u32, int4) {}
static void fence_async_smem() {}
static int4 load_shared(u32) { return {}; }

static ucontext_t scheduler, lanes[32];
static char stacks[32][1 << 16];
static int said[32], heard[32];
static bool ended[32];
static void (*body)();
static void lane_main() { body(), ended[threadIdx.x] = true; }
static const int* tell(int x) {
  const int lane = threadIdx.x;
  said[lane] = x, swapcontext(&lanes[lane], &scheduler);
  return heard;
}
static void run_warp(void (*f)()) {
  body = f;
  for (int i = 0; i < 32; i++) {
    ended[i] = false, getcontext(&lanes[i]);
    lanes[i].uc_stack.ss_sp = stacks[i], lanes[i].uc_stack.ss_size = sizeof stacks[i];
    lanes[i].uc_link = &scheduler, makecontext(&lanes[i], lane_main, 0);
  }
  while (!ended[31]) {
    for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++)
      if (!ended[threadIdx.x]) swapcontext(&scheduler, &lanes[threadIdx.x]);
    std::copy(said, said + 32, heard);
  }
}
static int __shfl_sync(u32, int x, int from) { return tell(x)[from & 31]; }
static int __shfl_up_sync(u32, int x, int by) {
  const int lane = threadIdx.x, *all = tell(x);
  return lane < by ? x : all[lane - by];
}
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
DECODE = """
#define HAS_RANGES 1
constexpr int BLOCK_N = 64;
struct Params { const int *kv_lens, *ranges; int B, Hkv, Sq, Sk, ranges_b, window_left, idle, group; };
"""
LATENT = """
constexpr int BLOCK_N = 64;
struct Params { const int *kv_lens; int B, units, width, Sk, tokens, heads; float merge_cost; };
"""
Int, P, F = ctypes.c_int, ctypes.c_void_p, ctypes.c_float


class DecodeParams(ctypes.Structure):
    _fields_ = [(n, P) for n in ("lens", "ranges")] + [
        (n, Int) for n in ("B", "Hkv", "Sq", "Sk", "ranges_b", "window_left", "idle", "group")
    ]


class LatentParams(ctypes.Structure):
    _fields_ = [
        ("lens", P),
        *((name, Int) for name in ("B", "units", "width", "Sk", "tokens", "heads")),
        ("cost", F),
    ]


def built(folder, name, text):
    (folder / f"{name}.cpp").write_text(CUDA + text)
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unused"]
    library = folder / f"{name}.so"
    subprocess.run([*command, folder / f"{name}.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library)).run


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stretches")
    stretches, decode, latent = (
        (SOURCES / name).read_text() for name in ("stretches.cuh", "decode.cu", "mla.cu")
    )
    decode = decode[decode.index("DEVICE int keys_of(") : decode.index("// tma_load_once by a map")]
    latent = latent[latent.index("DEVICE Row row_of(") : latent.index("struct Smem {")]
    return {
        "decode": built(folder, "decode", stretches + DECODE + decode + RUN),
        "latent": built(folder, "latent", stretches + LATENT + latent + RUN),
    }


def tasks_of(run, params, ctas, most):
    """By CTA."""
    found = (Int * (7 * most))()
    result = []
    for cta in range(ctas):
        count = run(cta, ctas, found, ctypes.byref(params))
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
    params = DecodeParams(*addresses, B, Hkv, 1, Sk, 2, window, -(B * Hkv) % ctas, 1)
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
    params = DecodeParams(*addresses, B, 8, 1, keys, 0, 1 << 29, -(B * 8) % 132, 1)
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
    params = LatentParams(
        ctypes.addressof(array), B, units, width, Sk, 1, 1, g.choice((0.0, 0.6, 3.0))
    )
    by_cta = tasks_of(kernels["latent"], params, ctas, B * units + 1)
    teams = by_cta[: ctas // width * width]
    assert all(teams[i] == teams[i - i % width] for i in range(len(teams)))
    assert not any(by_cta[len(teams) :])
    check(teams[::width], units, expected)
