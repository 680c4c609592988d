"""The decoding kernels' own source as C++ on the CPU: work ranges, combined splits, pages, e4m3."""

import ctypes
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fa_ops.backends.hopper.configs import DecodeConfig, decode_config, mla_config
from fa_ops.backends.hopper.decode import SplitKvTemplate
from fa_ops.backends.hopper.kernel_plan import macros
from tests.backends.hopper.cuda_as_cpp import SOURCES, built, needs_compiler
from tests.backends.hopper.cuda_decode import NO_TMA, PTX, place

# How the decoding kernels cut tiles into work ranges and combine splits: their source as C++.

pytestmark = needs_compiler

# Each split of a CTA as (batch row, item, first tile, tiles, first group, splits, flags).
RUN = """
static Params params;
static int* found_splits;
static int count;
static void walk() {
  for (WorkIterator<Params> iterator(params); iterator.at < iterator.stop;) {
    Split t = iterator.split();
    iterator.find_splits(t);
    if (threadIdx.x == 0) {
      const int found[] = {t.b, t.item, t.tile, t.count, t.first_group, t.splits, t.flags};
      std::copy(found, found + 7, found_splits + 7 * count++);
    }
    iterator.next(t.count);
  }
}
extern "C" int run(int cta, int ctas, int* to, Params* p) {
  blockIdx.x = cta, gridDim.x = ctas, params = *p, found_splits = to, count = 0;
  run_warp(walk);
  return count;
}
"""
# Notes each row that is combined, with its maximum and its sum of weights, and each pair of columns
# with its sums and the factor of the row.
COMBINE = """
struct CombinedColumns { int cta, b, item, row, column; float x, y, inverse; };
struct CombinedRow { int b, item, row, cta_in_group; float m2, total; };
static CombinedColumns* columns;
static CombinedRow* rows;
static int row_count;
static int finish_packed_row(const Params& p, const Split& t, int row, float m2, float n, bool writes_lse, float& inverse) {
  inverse = n > 0.f ? 1.f / n : 0.f;
  if (writes_lse) rows[row_count++] = {t.b, t.item, row, blockIdx.x % group_width(p), m2, n};
  return (t.b * 64 + t.item) * 64 + row;
}
static void write_columns(const Params&, int place, int column, float2 x, float inverse) {
  columns[count++] = {blockIdx.x, place / 4096, place / 64 % 64, place % 64, column, x.x, x.y, inverse};
}
static void replace_columns(const Params& p, const Split& t, int row, int column) {
  write_columns(p, (t.b * 64 + t.item) * 64 + row, column, make_float2(-1.f, -1.f), 1.f);
}
static void combine() { combine_splits(params); }
extern "C" int column_of(int pair) { return partial_column(params, pair); }
extern "C" int pair_bytes() { return sizeof *params.partial; }
extern "C" int stats_per_row() { return stats_per_row(params); }
extern "C" int run_combine(int ctas, int warps, CombinedColumns* to, CombinedRow* rows_to, int* rows_found, Params* p) {
  gridDim.x = ctas, blockDim.x = warps * 32, params = *p, columns = to, rows = rows_to, count = row_count = 0;
  for (blockIdx.x = 0; blockIdx.x < ctas; blockIdx.x++)
    for (int warp = 0; warp < warps; warp++) run_warp(combine, warp);
  *rows_found = row_count;
  return count;
}
"""  # noqa: E501
DECODE_RANGES = """
#define HAS_KV_LENS 1
#define HAS_RANGES 1
#define SHARES_TOKENS 1
#define ROWS 8
#define VALUE_DIM 192
#define WHOLE_TILES 5
#define RESCALE_THRESHOLD 8
#define IS_BF16 1
constexpr int BLOCK_N = 64;
struct DecodeParams {
  const int *kv_lens, *ranges;
  float2* partial;
  float2* partial_stats;
  int B, Hkv, Sq, Sk, ranges_b, window_left, idle, group, width;
};
using Params = DecodeParams;
#include "split_keys.cuh"
"""
LATENT_RANGES = """
#define HAS_KV_LENS 1
#define ROWS 64
#define VALUE_DIM 128
#define RESCALE_THRESHOLD 8
#define IS_BF16 1
constexpr int BLOCK_N = 64;
struct MlaParams {
  const int* kv_lens;
  u32* partial;
  float2* partial_stats;
  int B, items, width, Sk, tokens, heads;
};
using Params = MlaParams;
#include "split_keys.cuh"
"""
Int, P = ctypes.c_int, ctypes.c_void_p


class DecodeParams(ctypes.Structure):
    _fields_ = [(n, P) for n in ("lens", "ranges", "partial", "stats")] + [
        (n, Int)
        for n in ("B", "Hkv", "Sq", "Sk", "ranges_b", "window_left", "idle", "group", "width")
    ]


def idle_groups(items, width, ctas):
    """Of the last round, where each group of CTAs takes whole items of as many heads."""
    return -(items // width) % (ctas // width)


class LatentParams(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("lens", "partial", "stats")),
        *((name, Int) for name in ("B", "items", "width", "Sk", "tokens", "heads")),
    ]


COLUMNS = np.dtype(
    [(n, "i4") for n in ("cta", "b", "item", "row", "column")]
    + [(n, "f4") for n in ("x", "y", "inverse")]
)
ROWS = np.dtype(
    [(n, "i4") for n in ("b", "item", "row", "cta_in_group")] + [(n, "f4") for n in ("m2", "total")]
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work_ranges")
    decode, latent = (partition((SOURCES / f"{name}.cu").read_text()) for name in ("decode", "mla"))
    rest = RUN + COMBINE
    return {
        "decode": built(folder, "decode", DECODE_RANGES + decode + rest),
        "latent": built(folder, "latent", LATENT_RANGES + latent + rest),
    }


def partition(text):
    """How a kernel divides its work, from `capacity_tiles` to `partition_of`."""
    last = text.index("DEVICE Partition partition_of(")
    return text[text.index("DEVICE int capacity_tiles(") : text.index("\n}\n", last) + 3]


def splits_of(kernel, params, ctas, limit):
    """The splits of each CTA, `limit` at most."""
    found = (Int * (7 * limit))()
    result = []
    for cta in range(ctas):
        count = kernel.run(cta, ctas, found, ctypes.byref(params))
        result.append([tuple(found[7 * i : 7 * i + 7]) for i in range(count)])
    return result


def check(by_group, items, expected):
    """Every item has each of its tiles once and in order, and its splits have slots of their own.

    `by_group`: the splits of each group of CTAs. `expected`: of each batch row, its first tile and
    the number of its tiles.
    """
    by_item, slots = {}, set()
    for group, splits in enumerate(by_group):
        for i, (b, item, tile, count, first, number, flags) in enumerate(splits):
            assert bool(flags & 1) == (i > 0)
            by_item.setdefault((b, item), []).append((group, tile, count, first, number, flags))
    assert sorted(by_item) == [(b, item) for b in range(len(expected)) for item in range(items)]
    for (b, _), splits in by_item.items():
        at, count = expected[b]
        stop, first = at + count, splits[0][0]
        first_slot = splits[0][5] & 1
        for i, (group, tile, tiles, first_group, number, flags) in enumerate(splits):
            assert (tile, first_group, number) == (at, first, len(splits)) and group == first + i
            assert bool(flags & 2) == bool(first_slot)
            if number > 1:
                slot = group * 2 + (first_slot if i == 0 else 0)
                assert slot not in slots and (i == 0 or not flags & 1)
                slots.add(slot)
            at += tiles
        assert at == stop


def has_short_rows(items, groups, Sk, whole_tiles):
    """As the host decides, which launches one kernel then."""
    family = SimpleNamespace(block_n=64)
    return SplitKvTemplate.has_short_rows(family, items, groups, Sk, whole_tiles)


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
    Sk, ctas, width = (
        g.choice((64, 300, 500, 3000)),
        g.choice((132, 7, 114)),
        g.choice((1, 1, 2, 4)),
    )
    width = min(width, Hkv)
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
    flat = [x for both in ranges for x in both]
    arrays = (Int * B)(*lens), (Int * (2 * B))(*flat)
    addresses = map(ctypes.addressof, arrays)
    idle = idle_groups(B * Hkv, width, ctas)
    params = DecodeParams(*addresses, None, None, B, Hkv, 1, Sk, 2, window, idle, 1, width)
    by_cta = splits_of(kernels["decode"], params, ctas, B * Hkv + 1)
    used = by_cta[: ctas // width * width]  # CTAs of a group have the same splits
    assert all(used[i] == used[i - i % width] for i in range(len(used)))
    assert not any(by_cta[len(used) :])
    check(used[::width], Hkv // width, expected)
    sizes = [sum(split[3] for split in splits) for splits in used]
    total = sum(sizes)
    is_short = has_short_rows(B * Hkv // width, ctas // width, Sk, 5)
    assert all(split[5] == 1 for splits in used for split in splits) or not is_short
    if is_short and Sk > 64:
        assert max(sizes) <= 5
    else:
        assert max(sizes) - total / len(used) <= 2  # a tile more than others, or an empty item


@pytest.mark.parametrize(
    "B, keys, number", [(64, 512, {1}), (64, 500, {1}), (64, 4096, {1, 2}), (16, 9000, {2, 3})]
)
def test_items_of_one_length_are_whole(kernels, B, keys, number):
    """An item has one split, unless a CTA would have more than a tile beyond its share."""
    lens, ranges = (Int * B)(*[keys] * B), (Int * 2)(0, keys)
    addresses = map(ctypes.addressof, (lens, ranges))
    idle = idle_groups(B * 8, 1, 132)
    params = DecodeParams(*addresses, None, None, B, 8, 1, keys, 0, 1 << 29, idle, 1, 1)
    by_cta = splits_of(kernels["decode"], params, 132, B * 8 + 1)
    assert {split[5] for splits in by_cta for split in splits} == number


@pytest.mark.parametrize("seed", range(40))
def test_latent(kernels, seed):
    g = random.Random(seed)
    B, items, width = g.choice((1, 2, 33, 70)), g.choice((1, 2, 3)), g.choice((1, 2, 4))
    Sk, ctas = g.choice((64, 128, 190, 500, 9000)), g.choice((132, 114))
    lens = random_lens(g, B, Sk)
    expected = [(0, max(1, -(-max(0, min(n, Sk)) // 64))) for n in lens]
    array = (Int * B)(*lens)
    params = LatentParams(ctypes.addressof(array), None, None, B, items, width, Sk, 1, 1)
    by_cta = splits_of(kernels["latent"], params, ctas, B * items + 1)
    used = by_cta[: ctas // width * width]  # CTAs of a group have the same splits
    assert all(used[i] == used[i - i % width] for i in range(len(used)))
    assert not any(by_cta[len(used) :])
    check(used[::width], items, expected)
    if has_short_rows(B * items, ctas // width, Sk, 2):
        assert all(split[5] == 1 for splits in used for split in splits)


@pytest.mark.parametrize(
    "B, keys, rows, number",
    [
        (32, 8192, 64, {4}),  # 4 ranges of 32 tiles each, as long as the longest of 132 equal ones
        (32, 8100, 64, {4}),
        (64, 8192, 64, {2}),  # 64 tiles in place of 63
        (64, 8192, 16, {3, 4}),  # where few rows are merged, no range is longer
        (20, 8192, 64, {7, 8}),  # 22 tiles in place of 20 would take longer
        (132, 8192, 64, {1}),
        (256, 2048, 64, {1}),  # 64 tiles in place of 63, and nothing to merge
        (200, 8192, 64, {1, 2}),
    ],
)
def test_latent_items_of_one_length_are_cut_alike(kernels, B, keys, rows, number):
    array = (Int * B)(*[keys] * B)
    params = LatentParams(ctypes.addressof(array), None, None, B, 1, 1, keys, 1, rows)
    by_cta = splits_of(kernels["latent"], params, 132, B + 1)
    check(by_cta, 1, [(0, -(-keys // 64))] * B)
    assert {split[5] for splits in by_cta for split in splits} == number
    if len(number) == 1:
        assert max(map(len, by_cta)) == -(-B // 132)


def check_combined(kernel, params, by_cta, rows, dim, warps, width, seed, must_be_cut_alike=False):
    """Rows and columns of every item with several splits are combined once, from all of these."""
    ctas, slot_rows = len(by_cta), params.slot_rows
    g = np.random.default_rng(seed)
    parts = kernel.stats_per_row()  # of a row, which have statistics of their own
    dtype = {4: np.float16, 8: np.float32}[kernel.pair_bytes()]
    partial = np.full((2 * ctas, slot_rows, dim), np.nan, dtype)
    stats = np.full((2 * ctas, slot_rows, parts, 2), np.nan, np.float32)
    slots = {}
    for cta, splits in enumerate(by_cta):
        for i, (b, item, *_, number, _) in enumerate(splits):
            if number > 1:
                slot = 2 * cta + (i > 0)
                slots.setdefault((b, item, cta % width), []).append(slot)
                partial[slot] = g.standard_normal((slot_rows, dim))
                stats[slot, ..., 0] = g.normal(0, 20, (slot_rows, parts))
                stats[slot, ..., 1] = g.random((slot_rows, parts)) + 0.1
                no_keys = g.random(slot_rows) < 0.2
                stats[slot, no_keys], partial[slot, no_keys] = (-1e30, 0.0), 0.0
    assert slots
    pairs = [kernel.column_of(i) // 2 for i in range(32)]
    assert sorted(pairs) == list(range(32))
    stored = partial.reshape(-1, 32, 2)[:, pairs].copy()
    params.partial, params.stats = stored.ctypes.data, stats.ctypes.data
    columns = np.zeros(len(slots) * rows * dim // 2 + 1, COLUMNS)
    ends, row_count = np.zeros(len(slots) * rows + 1, ROWS), Int()
    count = kernel.run_combine(
        *(ctas, warps, P(columns.ctypes.data), P(ends.ctypes.data)),
        *(ctypes.byref(row_count), ctypes.byref(params)),
    )
    columns, ends = columns[:count], ends[: row_count.value]
    names = ("b", "item", "row", "column")
    places = set(zip(*(columns[n] for n in names), columns["cta"] % width))
    assert len(columns) == len(places) == len(slots) * rows * dim // 2
    assert len(ends) == len(set(zip(*(ends[n] for n in ROWS.names[:4])))) == len(slots) * rows
    are_cut_alike = len({key[:2] for key in slots}) > 1 and max(map(len, by_cta)) == 1
    assert are_cut_alike or not must_be_cut_alike
    for (b, item, cta), own_slots in slots.items():
        of_item = (columns["b"] == b) & (columns["item"] == item)
        own = columns[of_item & (columns["cta"] % width == cta)]
        m, n = (stats[own_slots, ..., i].astype(np.float64) for i in (0, 1))
        top = np.where(n > 0, m, -1e30).max(0)
        factors = np.where(n > 0, np.exp2(m - top), 0.0)
        of_columns = factors.repeat(dim // parts, -1)
        expected = (of_columns * partial[own_slots].astype(np.float64)).sum(0)
        row, column = own["row"], own["column"]
        tolerance = 1e-5 * len(own_slots)
        np.testing.assert_allclose(own["x"], expected[row, column], atol=tolerance)
        np.testing.assert_allclose(own["y"], expected[row, column + 1], atol=tolerance)
        total = (factors * n).sum(0)
        inverse = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
        np.testing.assert_allclose(own["inverse"], inverse[row, column * parts // dim], rtol=1e-5)
        of_item = (ends["b"] == b) & (ends["item"] == item)
        end = ends[of_item & (ends["cta_in_group"] == cta)]
        np.testing.assert_allclose(end["total"], total[end["row"], 0], rtol=1e-5)
        assert (end["m2"] == top.astype(np.float32)[end["row"], 0]).all()
        pieces = np.bincount(own["cta"]) // 32  # of 64 columns of a row, by each CTA
        assert pieces.max() == -(-rows * (dim // 64) // (len(own_slots) - 1 + are_cut_alike))


@pytest.mark.parametrize("B, keys, rows", [(32, 8192, 64), (33, 8192, 16), (64, 8192, 40)])
def test_items_that_are_cut_alike_are_combined_by_all_their_ctas(kernels, B, keys, rows):
    lens = (Int * B)(*[keys] * B)
    params = LatentParams(ctypes.addressof(lens), None, None, B, 1, 1, keys, 1, rows)
    params.slot_rows = 64
    by_cta = splits_of(kernels["latent"], params, 132, B + 1)
    check_combined(kernels["latent"], params, by_cta, rows, 128, 16, 1, B + rows, True)


@pytest.mark.parametrize("seed", range(24))
def test_splits_are_combined(kernels, seed):
    g = random.Random(seed)
    B, items, width = g.choice((1, 1, 2, 33)), g.choice((1, 2, 3)), g.choice((1, 2))
    Sk, ctas = g.choice((3000, 9000)), g.choice((132, 31))
    lens = (Int * B)(Sk, *random_lens(g, B, Sk)[1:])
    if seed % 2:
        rows = g.choice((1, 3, 16, 64))
        addresses = ctypes.addressof(lens), None, None
        params = LatentParams(*addresses, B, items, width, Sk, 1, rows)
        kernel, dim, params.slot_rows = kernels["latent"], 128, 64
    else:
        rows, ranges = g.choice((1, 5, 8)), (Int * 2)(0, Sk)
        addresses = ctypes.addressof(lens), ctypes.addressof(ranges), None, None
        heads = items * width
        idle = idle_groups(B * heads, width, ctas)
        params = DecodeParams(*addresses, B, heads, 1, Sk, 0, 1 << 29, idle, rows, width)
        kernel, dim, params.slot_rows = kernels["decode"], 192, 8
    by_cta = splits_of(kernel, params, ctas, B * items + 1)
    check_combined(kernel, params, by_cta, rows, dim, g.choice((4, 8, 16)), width, seed)


# How the decoding kernel gathers keys of small pages: its own source, as C++ on the CPU.

MMA = """
template <class... T> static void mma(T...) {}
"""
NO_WGMMA = """
static u32 descriptor_base(u32, u32) { return 0; }
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int N> static void wgmma_wait() {}
"""
NO_WGMMA += "".join(
    f"template <class... T> static void {name}(T&&...) {{}}\n"
    for name in (
        *("wgmma_scores_start", "wgmma_scores", "wgmma_output", "wgmma_other_output"),
        *("fence_operand", "stmatrix_x4", "named_barrier_arrive"),
    )
)
COPY = """
#include "decode.cu"
static DecodeParams p;
static DecodeSplit split;
static int tile;
static void copy() {
  PipelineState<STAGES> kv;
  kv.next();
  GatheredKeys next(threadIdx.x / 32);
  copy_tile(p, LAYOUT, split, (threadIdx.x & 31) == 0, tile, kv, next);
}
extern "C" unsigned char* memory() { return shared; }
extern "C" u32 k_at(int row, int chunk) { return CacheTile<HEAD_DIM>::at(LAYOUT.k + K_BYTES, row, chunk); }
extern "C" u32 v_at(int row, int chunk) { return CacheTile<VALUE_DIM>::at(LAYOUT.v + V_BYTES, row, chunk); }
extern "C" u32 pages_at() { return LAYOUT.pages + PAGES_BYTES; }
extern "C" u32 scales_at() { return LAYOUT.scales + SCALES_BYTES; }
extern "C" int exists(int row) {
  threadIdx.x = row % 8 / 2;
  const ExistingKeys keys(LAYOUT.pages + PAGES_BYTES, row / 16 * 16);
  return keys.has(row % 16 / 8, row % 2) + 2 * keys.all();
}
extern "C" void run(const void* k, const void* v, const long long* strides, const int* table, const float* scales,
                    const int* numbers) {
  p.k_rows = (const CacheElement*)k, p.v_rows = (const CacheElement*)v;
  p.k_strides = {strides[0], strides[1], strides[2]}, p.v_strides = {strides[3], strides[4], strides[5]};
  p.table = table, p.k_scale = scales, p.v_scale = scales;
  p.table_stride = numbers[0], p.page = numbers[1], p.page_count = numbers[2], p.D = numbers[3], p.Dv = numbers[4];
  split.b = numbers[5], split.item = numbers[6], tile = numbers[7];
  split.begin = numbers[8], split.end = numbers[9], p.Hkv = numbers[10], split.tile = tile;
  for (int warp = 0; warp < GATHERING_WARPS; warp++) run_warp(copy, warp);
}
"""  # noqa: E501
COPY_LATENT = """
#include "mla.cu"
static MlaParams p;
static Split split;
static void copy() {
  u32 phases = 0;
  GatheredKeys next(threadIdx.x / 32);
  next.find(p, split.b, split.tile + 1, {0, split.keys});
  copy_tile(p, LAYOUT, split, (threadIdx.x & 31) == 0, 1, phases, next);
}
extern "C" unsigned char* memory() { return shared; }
extern "C" u32 k_at(int row, int chunk) { return swizzled(LAYOUT.tile(1), 64, row, chunk); }
extern "C" int exists(int row) {
  threadIdx.x = row % 8 / 2;
  const ExistingKeys keys(LAYOUT.pages + PAGES_BYTES);
  return keys.has(row / 8 * 4 + row % 2) + 2 * keys.all();
}
extern "C" void run(const void* k, const int* table, const long long* strides, const int* numbers) {
  p.k_rows = (const Element*)k, p.table = table, p.k_strides = {strides[0], 0, strides[1]};
  p.table_stride = numbers[0], p.page = numbers[1], p.page_count = numbers[2], p.width = 1;
  split.b = numbers[3], split.tile = numbers[4] - 1, split.keys = numbers[5];
  for (int warp = 0; warp < GATHERING_WARPS; warp++) run_warp(copy, warp);
}
"""
Hkv, TILE = 3, 1
# head dims, keys of a page, whether of e4m3, and kind of scales
TILES = [
    *((64, 64, 1, False, 0), (128, 128, 2, False, 0), (40, 24, 3, False, 0)),
    *((192, 128, 5, False, 0), (256, 256, 12, False, 0), (104, 104, 48, False, 0)),
    *((64, 64, 1, True, 3), (128, 128, 3, True, 2), (40, 88, 2, True, 1), (192, 256, 12, True, 2)),
]


def compiled_copy(folder, D, Dv, page, is_e4m3, scales):
    config = decode_config(D, Dv, 8, page, is_e4m3, scales)
    defines = macros(config, torch.bfloat16, paged=True)
    assert defines["COPY_KEYS"] == 1 and not defines["WHOLE_ROWS"]
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + COPY
    kernel = built(folder, "gather", text, PTX + NO_TMA + MMA)
    kernel.memory.restype = ctypes.c_void_p
    return kernel, config.block_n


@pytest.mark.parametrize("D, Dv, page, is_e4m3, scales", TILES)
def test_a_tile(D, Dv, page, is_e4m3, scales, tmp_path):
    kernel, block_n = compiled_copy(tmp_path, D, Dv, page, is_e4m3, scales)
    g = torch.Generator().manual_seed(D + page)
    width = -(-2 * block_n // page) + 1
    pages, begin, end = 2 * width + 3, block_n + 7, 2 * block_n - 9
    dtype = torch.uint8 if is_e4m3 else torch.int16
    both = []
    for n in (D, Dv):  # rows are parts of others, at multiples of 16 bytes
        rows = torch.randint(1, 120, (pages, page, Hkv, -(-n // 16) * 16 + 16), generator=g)
        both.append(rows.to(dtype)[..., :n])
    k, v = both
    table = torch.randperm(pages, generator=g)[: 2 * width].view(2, width).int()
    table[:, 1::5] = torch.tensor([[-1], [10**6]])
    table[:, 2::7] = torch.tensor([[pages], [-(2**31)]])
    scale = torch.rand(pages, page, Hkv, generator=g)
    if scales == 2:
        scale = scale[:, :1].contiguous()
    numbers = [width, page, pages, D, Dv, 1, 2, TILE, begin, end, Hkv]
    strides = [x.stride(i) for x in both for i in (0, 2, 1)]
    ctypes.memset(kernel.memory(), 255, 1 << 17)
    kernel.run(
        *(ctypes.c_void_p(x.data_ptr()) for x in (k, v)), (ctypes.c_longlong * 6)(*strides),
        *(ctypes.c_void_p(x.data_ptr()) for x in (table, scale)), (ctypes.c_int * 11)(*numbers),
    )  # fmt: skip
    keys = torch.arange(TILE * block_n, (TILE + 1) * block_n)
    of = table[1, keys // page]
    exists = (of >= 0) & (of < pages) & (keys >= begin) & (keys < end)
    assert block_n // 4 < exists.sum() < block_n - 16
    found = [kernel.exists(row) for row in range(block_n)]
    assert [x & 1 for x in found] == exists.int().tolist()
    assert [x >> 1 for x in found] == exists.view(-1, 16).all(1).repeat_interleave(
        16
    ).int().tolist()
    for name, x, padded in (("k", k, kernel_dim(D)), ("v", v, kernel_dim(Dv))):
        rows = torch.where(exists, of, 0).long()
        expected = torch.zeros(block_n, padded, dtype=dtype)
        expected[:, : x.shape[3]] = x[rows, keys % page, 2]
        expected[~exists] = 0
        assert torch.equal(stored(kernel, getattr(kernel, f"{name}_at"), expected), expected), name
    if scales > 1:
        at = kernel.memory() + kernel.scales_at()
        copied = torch.tensor((ctypes.c_float * (2 * block_n)).from_address(at)).view(2, block_n)
        own = scale[torch.where(exists, of, 0).long(), keys % scale.shape[1], 2] * exists
        assert torch.equal(copied, own.expand(2, -1))


@pytest.mark.parametrize("page", [4, 8, 16, 32, 64])
def test_which_keys_exist_where_copies_bring_several(page, tmp_path):
    config = decode_config(128, 128, 8, page)
    assert config.copy_keys == page
    defines = macros(config, torch.bfloat16, paged=True)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + COPY
    kernel = built(tmp_path, "exists", text, PTX + NO_TMA + MMA)
    kernel.memory.restype = ctypes.c_void_p
    g = torch.Generator().manual_seed(page)
    for _ in range(8):
        copies = torch.rand(128 // page, generator=g) < 0.7
        bits = sum(1 << i for i, exists in enumerate(copies.tolist()) if exists)
        ctypes.memmove(kernel.memory() + kernel.pages_at(), bits.to_bytes(4, "little"), 4)
        exists = copies.repeat_interleave(page)
        found = [kernel.exists(row) for row in range(128)]
        assert [x & 1 for x in found] == exists.int().tolist()
        whole = exists.view(-1, 16).all(1).repeat_interleave(16)
        assert [x >> 1 for x in found] == whole.int().tolist()


@pytest.mark.parametrize("page", [1, 5, 48])
def test_a_tile_of_a_latent_cache(page, tmp_path):
    defines = macros(mla_config(page), torch.bfloat16, paged=True)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + COPY_LATENT
    kernel = built(tmp_path, "latent", text, PTX + NO_TMA + MMA, {"wgmma.cuh": NO_WGMMA})
    kernel.memory.restype = ctypes.c_void_p
    g = torch.Generator().manual_seed(page)
    width = -(-200 // page)
    pages, tile, length = 2 * width + 3, 1, 121
    k = torch.randint(1, 9999, (pages, page, 600), generator=g).to(torch.int16)[..., :576]
    table = torch.randperm(pages, generator=g)[: 2 * width].view(2, width).int()
    table[:, (70 // page) :: 7] = -1
    numbers = [width, page, pages, 1, tile, length]
    ctypes.memset(kernel.memory(), 255, 1 << 18)
    kernel.run(
        *(ctypes.c_void_p(x.data_ptr()) for x in (k, table)),
        *((ctypes.c_longlong * 2)(*k.stride()[:2]), (ctypes.c_int * 6)(*numbers)),
    )
    keys = torch.arange(64 * tile, 64 * (tile + 1))
    of = table[1, keys // page]
    exists = (of >= 0) & (keys < length)
    assert 8 < exists.sum() < 56
    assert [kernel.exists(row) for row in range(64)] == exists.int().tolist()
    expected = torch.where(exists[:, None], k[of.clamp(min=0).long(), keys % page], 0)
    assert torch.equal(stored(kernel, kernel.k_at, expected), expected)


def kernel_dim(width):
    return -(-width // 64) * 64


def stored(kernel, address, like):
    """The rows in shared memory."""
    size = like.element_size()
    x = torch.empty_like(like)
    for row in range(len(like)):
        for chunk in range(like.shape[1] * size // 16):
            to = x.data_ptr() + row * like.shape[1] * size + chunk * 16
            ctypes.memmove(to, kernel.memory() + address(row, chunk), 16)
    return x


# How the decoding kernel attends e4m3 keys and values: its own source, as C++ on the CPU.

MULTIPLY = """
#include "decode.cu"
constexpr u32 Q = 0, K = ROWS * HEAD_DIM * 2, V = K + CacheTile<HEAD_DIM>::BYTES,
              OUT = V + CacheTile<VALUE_DIM>::BYTES;
static float* scores;
static const u32* weights;
static u32 keep_mask;
// 16 keys of the tile's second half
static void one_warp() {
  Queries own;
  Sums sums = {};
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  float s[2][2][4] = {};
  own.load(Q);
  own.multiply(s, K, 16);
  for (int r = 0; r < ROWS / 8; r++)
    for (int j = 0; j < 2; j++)
      for (int i = 0; i < 2; i++)
        scores[(g + 8 * r) * 16 + j * 8 + t * 2 + i] = own.product(s[j][0][2 * r + i] + s[j][1][2 * r + i], r);
  u32 w[4];
  for (int i = 0; i < 4; i++) w[i] = weights[(g + i % 2 * 8) * 8 + t + i / 2 * 4];
  const u32 keep[2] = {~0u, t == 3 ? keep_mask : ~0u};
  sums.add(w, V, 16, keep);
  for (int r = 0; r < ROWS / 8; r++)
    sums.store(OUT + (g + 8 * r) * VALUE_DIM * 4, (g & 7) * 8, r);
}
extern "C" u32 k_at(int row, int chunk) { return CacheTile<HEAD_DIM>::at(K, row, chunk); }
extern "C" u32 v_at(int row, int chunk) { return CacheTile<VALUE_DIM>::at(V, row, chunk); }
extern "C" u32 q_at(int row, int chunk) { return swizzled(Q, ROWS, row, chunk); }
extern "C" unsigned char* memory() { return shared; }
extern "C" int out_at() { return OUT; }
extern "C" void run(float* s, const u32* w, u32 keep) {
  scores = s, weights = w, keep_mask = keep, run_warp(one_warp);
}
"""  # noqa: E501


def products(folder, D, Dv, rows, bf16):
    """The products of one warp with the second half of a tile of 32 keys."""
    config = DecodeConfig(D, Dv, rows, 16, 2, False, is_e4m3=True)
    dtype = torch.bfloat16 if bf16 else torch.float16
    defines = macros(config, dtype, paged=False)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + MULTIPLY
    return built(folder, "e4m3", text, PTX + NO_TMA)


PRODUCTS = [(64, 64, 8, 1), (128, 64, 16, 1), (128, 128, 8, 0), (192, 256, 16, 1)]


@pytest.mark.parametrize("D, Dv, rows, bf16", PRODUCTS)
def test_products(D, Dv, rows, bf16, tmp_path):
    kernel = products(tmp_path, D, Dv, rows, bf16)
    kernel.memory.restype = ctypes.c_void_p
    g = torch.Generator().manual_seed(D + Dv)
    dtype = torch.bfloat16 if bf16 else torch.float16
    q = torch.randn(rows, D, generator=g)
    if bf16:  # rows that float16 does not hold
        q *= 10.0 ** torch.linspace(-24, 24, rows).view(-1, 1)
    q = q.to(dtype)
    k, v = (
        torch.randn(32, width, generator=g).mul(30).to(torch.float8_e4m3fn) for width in (D, Dv)
    )
    v.view(torch.uint8)[31] = 127  # NaN, of a key that is masked out
    weights = torch.rand(16, 16, generator=g).half()
    weights[:, 15] = 0
    for name, x in (("q", q), ("k", k), ("v", v)):
        place(kernel, getattr(kernel, f"{name}_at"), x)
    scores = np.full((rows, 16), np.nan, np.float32)
    packed = weights.view(torch.int16).numpy().view(np.uint32)
    kernel.run(
        scores.ctypes.data_as(ctypes.c_void_p), packed.ctypes.data_as(ctypes.c_void_p), 0xFFFF
    )
    expected = q.double() @ k[16:].double().T
    size = expected.abs().amax(1, keepdim=True)
    error = (torch.from_numpy(scores).double() - expected) / size
    assert error.abs().max() < 1e-5
    at = kernel.memory() + kernel.out_at()
    stored = np.ctypeslib.as_array((ctypes.c_float * (rows * Dv)).from_address(at)).reshape(
        rows, -1
    )
    columns = np.arange(Dv) ^ (np.arange(rows)[:, None] % 8 * 8)
    out = torch.from_numpy(np.take_along_axis(stored, columns, 1).astype(np.float64))
    expected = weights[:rows, :15].double() @ v[16:31].double()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


# As the hardware swizzles: bits 4 to 6 of an address by bits 7 to 9, or bits 4 and 5 by 7 and 8.
@pytest.mark.parametrize("D, row_bytes, bits", [(64, 64, 3), (128, 128, 7), (256, 128, 7)])
def test_addresses_are_those_of_the_copies(D, row_bytes, bits, tmp_path):
    kernel = products(tmp_path, D, 64, 8, 1)
    base = 8 * D * 2
    assert base % 1024 == 0
    for row in range(32):
        for chunk in range(D // 16):
            column, inside = divmod(chunk * 16, row_bytes)
            plain = column * 32 * row_bytes + row * row_bytes + inside
            expected = plain ^ (plain >> 7 & bits) << 4
            assert kernel.k_at(row, chunk) - base == expected


ATTEND = """
#include "decode.cu"
static DecodeParams p;
static DecodeSplit split;
static float total[8], maximum[8];
static void one_warp() {
  DecodeConsumer consumer(p, LAYOUT, 0);
  consumer.begin_item(split, LAYOUT.q);
  for (int tile = 0; tile < split.count; tile++) consumer.attend(split, tile);
  consumer.reduce_warps();
}
extern "C" unsigned char* memory() { return shared; }
extern "C" u32 k_at(int row, int chunk) {
  return CacheTile<64>::at(LAYOUT.k + row / 16 * K_BYTES, row % 16, chunk);
}
extern "C" u32 v_at(int row, int chunk) {
  return CacheTile<64>::at(LAYOUT.v + row / 16 * V_BYTES, row % 16, chunk);
}
extern "C" u32 q_at(int row, int chunk) { return swizzled(LAYOUT.q, ROWS, row, chunk); }
extern "C" u32 scales_at(int tile) { return LAYOUT.scales + tile * SCALES_BYTES; }
extern "C" u32 pages_at(int tile) { return LAYOUT.pages + tile * 4; }
extern "C" u32 sums_at() { return LAYOUT.sums; }
extern "C" u32 stats_at() { return LAYOUT.stats; }
extern "C" void run(int keys, float scale_log2) {
  static const float any = 1.f;
  p.k_scale = p.v_scale = &any, p.Sq = 1, p.group = 8, p.scale_log2 = scale_log2;
  p.window_left = p.window_right = UNBOUNDED;
  split.count = (keys + 15) / 16, split.keys = split.end = keys;
  run_warp(one_warp);
}
"""


@pytest.mark.parametrize("scales, page", [(2, 16), (2, 4), (3, 16)])
def test_scales_of_any_size(scales, page, tmp_path):
    """Of 0, of both signs, and large ones with small weights: one warp attends 11 tiles."""
    keys, tiles = 170, 11
    config = DecodeConfig(64, 64, 8, page, 1, False, is_e4m3=True, scales=scales)
    defines = macros(config, torch.bfloat16, paged=scales == 2)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + ATTEND
    kernel = built(tmp_path, "attend", text, PTX + NO_TMA)
    kernel.memory.restype = ctypes.c_void_p
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        q = torch.randn(8, 64, generator=g).bfloat16()
        k, v = (torch.randn(16 * tiles, 64, generator=g).to(torch.float8_e4m3fn) for _ in range(2))
        k.view(torch.uint8)[keys:] = v.view(torch.uint8)[keys:] = 127
        shape = (tiles, 2, 16) if scales == 3 or page < 16 else (tiles, 2, 1)
        factors = torch.rand(shape, generator=g) + 0.5
        powers = torch.randint(-30, 31, (tiles, shape[2]), generator=g)
        factors[:, 1] *= 2.0 ** (powers - (60 if seed == 3 else 0))
        factors[:, 1] *= torch.randint(-1, 2, (tiles, shape[2]), generator=g)
        if seed == 4:
            factors[:, 1] = 0
        for name, x in (("q", q), ("k", k), ("v", v)):
            place(kernel, getattr(kernel, f"{name}_at"), x)
        for tile in range(tiles):
            write(kernel, kernel.scales_at(tile), factors[tile])
            write(kernel, kernel.pages_at(tile), torch.tensor([2 ** (16 // page) - 1]).int())
        kernel.run(keys, ctypes.c_float(0.5))
        of_keys, of_values = (
            factors[:, i].repeat_interleave(16 // shape[2], 1).flatten()[:keys, None].double()
            for i in range(2)
        )
        s = q.double() @ (k[:keys].double() * of_keys).T * 0.5
        expected = s.mul(np.log(2)).softmax(1) @ (v[:keys].double() * of_values)
        stats = read(kernel, kernel.stats_at(), 16).view(8, 2)
        lse = stats[:, 0] + stats[:, 1].log2()
        torch.testing.assert_close(lse, s.mul(np.log(2)).logsumexp(1) / np.log(2))
        columns = torch.arange(64) ^ (torch.arange(8)[:, None] * 8)
        sums = read(kernel, kernel.sums_at(), 8 * 64).view(8, 64).gather(1, columns)
        error = (sums / stats[:, 1:] - expected).abs().amax(1)
        assert (error <= 2e-3 * expected.abs().amax(1)).all()


def write(kernel, at, x):
    x = x.contiguous()
    ctypes.memmove(kernel.memory() + at, x.data_ptr(), x.numel() * x.element_size())


def read(kernel, at, count):
    data = (ctypes.c_float * count).from_address(kernel.memory() + at)
    return torch.from_numpy(np.array(data, dtype=np.float64))
