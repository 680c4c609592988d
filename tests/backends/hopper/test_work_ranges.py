"""How the decoding kernels cut tiles into work ranges and combine splits: their source as C++."""

import ctypes
import random
from types import SimpleNamespace

import numpy as np
import pytest

from fa_ops.backends.hopper.decode import SplitKvFamily
from tests.backends.hopper.cuda_as_cpp import SOURCES, built, needs_compiler

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
DECODE = """
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
LATENT = """
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
        "decode": built(folder, "decode", DECODE + decode + rest),
        "latent": built(folder, "latent", LATENT + latent + rest),
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
    return SplitKvFamily.has_short_rows(family, items, groups, Sk, whole_tiles)


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
