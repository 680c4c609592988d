"""How the decoding kernels cut tiles into work ranges and combine splits: their source as C++."""

import ctypes
import random

import numpy as np
import pytest

from tests.backends.cuda_as_cpp import SOURCES, built, needs_compiler

pytestmark = needs_compiler

# Each split of a CTA as (batch row, item, first tile, tiles, first group, splits, flags).
RUN = """
static Params params;
static int* tasks;
static int count;
static void walk() {
  for (WorkIterator<Params> iterator(params); iterator.at < iterator.stop;) {
    Split t = iterator.split();
    iterator.find_splits(t);
    if (threadIdx.x == 0) {
      const int found[] = {t.b, t.item, t.tile, t.count, t.first_group, t.splits, t.flags};
      std::copy(found, found + 7, tasks + 7 * count++);
    }
    iterator.next(t.count);
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
static int finish_packed_row(const Params& p, const Split& t, int row, float m2, float n, bool writes_lse, float& inverse) {
  inverse = n > 0.f ? 1.f / n : 0.f;
  if (writes_lse) closed[rows_closed++] = {t.b, t.item, row, blockIdx.x % group_width(p), m2, n};
  return (t.b * 64 + t.item) * 64 + row;
}
static void write_columns(const Params&, int place, int column, float2 x, float inverse) {
  merged[count++] = {blockIdx.x, place / 4096, place / 64 % 64, place % 64, column, x.x, x.y, inverse};
}
static void replace_columns(const Params& p, const Split& t, int row, int column) {
  write_columns(p, (t.b * 64 + t.item) * 64 + row, column, make_float2(-1.f, -1.f), 1.f);
}
static void slice() { combine_splits(params); }
extern "C" int run_merge(int ctas, int warps, Merged* to, Closed* rows, int* ended, Params* p) {
  gridDim.x = ctas, blockDim.x = warps * 32, params = *p, merged = to, closed = rows, count = rows_closed = 0;
  for (blockIdx.x = 0; blockIdx.x < ctas; blockIdx.x++)
    for (int warp = 0; warp < warps; warp++) run_warp(slice, warp);
  *ended = rows_closed;
  return count;
}
"""  # noqa: E501
DECODE = """
#define HAS_KV_LENS 1
#define HAS_RANGES 1
#define ROWS 8
#define VALUE_DIM 192
#define RESCALE_THRESHOLD 8
#define IS_BF16 1
constexpr int BLOCK_N = 64;
struct DecodeParams {
  const int *kv_lens, *ranges;
  float* partial;
  float2* partial_stats;
  int B, Hkv, Sq, Sk, ranges_b, window_left, idle, group;
};
using Params = DecodeParams;
#include "work_ranges.cuh"
"""
LATENT = """
#define HAS_KV_LENS 1
#define ROWS 64
#define VALUE_DIM 128
#define RESCALE_THRESHOLD 8
#define IS_BF16 1
constexpr int BLOCK_N = 64;
struct MlaParams {
  const int* kv_lens;
  float* partial;
  float2* partial_stats;
  int B, items, width, Sk, tokens, heads;
};
using Params = MlaParams;
#include "work_ranges.cuh"
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


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work_ranges")
    texts = ((SOURCES / f"{name}_params.cuh").read_text() for name in ("decode", "mla"))
    decode, latent = (text[text.index("DEVICE BatchRow batch_row(") :] for text in texts)
    rest = '#include "combine.cuh"\n' + RUN + MERGE
    return {
        "decode": built(folder, "decode", DECODE + decode + rest),
        "latent": built(folder, "latent", LATENT + latent + rest),
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
