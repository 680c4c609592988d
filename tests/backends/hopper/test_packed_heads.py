"""The rows of tiles with the queries of several heads of a group, and the parts of their keys."""

import ctypes
import random

import pytest

from tests.backends.hopper.cuda_as_cpp import built, needs_compiler

ROWS = """
#define BLOCK_M 128
#define BLOCK_N 64
static int atomicAdd(int*, int) { return 0; }
#include "tiles.cuh"
struct ForwardParams { int B, Hq, section, m_blocks, *tile_counter; };
extern "C" void run(int t, ForwardParams* p, int* to) {
  Cursor at;
  const Tile tile = tile_at(*p, t, at);
  to[0] = tile.b;
  for (int i = 0; i < BLOCK_M; i++) {
    const int row = tile.m0 + i;
    to[1 + 2 * i] = row % 64 < CONSUMER_ROWS ? query_of(row) : -1;
    to[2 + 2 * i] = tile.h + packed_head(row);
  }
}
"""


class Params(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("B", "Hq", "section", "m_blocks")] + [
        ("counter", ctypes.c_void_p)
    ]


@needs_compiler
@pytest.mark.parametrize("heads, Hq", [(1, 6), (2, 4), (4, 8), (3, 6), (7, 14), (5, 10), (16, 32)])
def test_every_query_of_every_head_has_a_row(heads, Hq, tmp_path):
    macros = f"#define PACKED_HEADS {heads}\n#define HAS_WINDOW {heads % 2}\n"
    macros += "#define HAS_RANGES 0\n#define HAS_MASK 0\n#define HAS_LEFT 0\n"
    run = built(tmp_path, "rows", macros + ROWS).run
    B, Sq, per_tile = 3, 77, 2 * (64 // heads)
    m_blocks = -(-Sq // per_tile)
    params, found = Params(B, Hq, 2, m_blocks, None), (ctypes.c_int * 257)()
    seen = []
    for t in range(B * Hq // heads * m_blocks):
        run(t, ctypes.byref(params), found)
        rows = zip(found[1::2], found[2::2])
        seen += [(found[0], query, head) for query, head in rows if 0 <= query < Sq]
    assert len(seen) == len(set(seen)) == B * Hq * Sq
    assert set(seen) == {(b, q, h) for b in range(B) for q in range(Sq) for h in range(Hq)}


PARTS = """
#define SPLITS_KEYS 1
#define HAS_WINDOW 1
#define HAS_KV_LENS 1
#define BLOCK_M 128
#define BLOCK_N 64
static int atomicAdd(int*, int) { return 0; }
#include "tiles.cuh"
struct Params { int B, Hq, Sq, Sk, section, m_blocks, tiles, window_left, window_right, *tile_counter, *kv_lens; };
extern "C" void run(int t, Params* p, int* to) {
  Cursor at;
  const WorkItem item = work_item_at(*p, t, at);
  const Tile& tile = item.tile;
  to[0] = tile.b, to[1] = tile.h, to[2] = tile.m0, to[3] = item.blocks.begin, to[4] = item.blocks.end;
  for (int i = 0; i < BLOCK_M; i++) {
    const KeyRange r = row_range(*p, tile, query_of(tile.m0 + i), item.keys);
    to[5 + 2 * i] = r.begin, to[6 + 2 * i] = r.end;
  }
}
"""  # noqa: E501


class PartParams(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in "B Hq Sq Sk section m_blocks tiles left right".split()
    ] + [("counter", ctypes.c_void_p), ("kv_lens", ctypes.c_void_p)]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("left, has_left", [(1 << 29, 0), (1 << 29, 1), (300, 1), (0, 1)])
def test_parts_have_every_key_of_a_row_once(left, has_left, tmp_path):
    macros = f"#define PACKED_HEADS 4\n#define HAS_LEFT {has_left}\n"
    run = built(tmp_path, "parts", macros + PARTS).run
    B, Hq, Sq, Sk, splits = 3, 8, 40, 1000, 5
    lens, found = (ctypes.c_int * B)(1000, 130, 0), (ctypes.c_int * 261)()
    m_blocks = -(-Sq // 32)
    tiles = B * Hq // 4 * m_blocks * splits
    at = ctypes.addressof(lens)
    params = PartParams(B, Hq, Sq, Sk, 2, m_blocks, tiles, left, 0, None, at)
    seen, blocks = {}, {}
    for t in range(tiles):  # in order, as a CTA takes them
        run(t, ctypes.byref(params), found)
        b, h, m0, first, last = found[:5]
        assert last - first <= -(-Sk // 64 // splits) + 1
        blocks[b] = blocks.get(b, 0) + last - first
        for i, (begin, end) in enumerate(zip(found[5::2], found[6::2])):
            query = m0 // 128 * 32 + i // 64 * 16 + i % 64 // 4
            if query < Sq and begin < end:
                keys = range(begin, end)
                assert first * 64 <= begin and end <= last * 64
                seen.setdefault((b, h + i % 4, query), []).extend(keys)
    for b, length in enumerate(lens):
        for h in range(Hq):
            for query in range(Sq):
                position = query + length - Sq
                expected = list(range(max(0, position - left), max(0, position + 1)))
                assert sorted(seen.get((b, h, query), [])) == expected
    assert blocks[1] <= 2 * m_blocks * 3 and blocks[2] == 0  # as many as there are keys


SEQUENCES = """
#define PACKED_QUERIES 1
#define IS_PAGED 1
#define HAS_WINDOW 1
#define HAS_LEFT 0
#define BLOCK_M 128
#define BLOCK_N 64
static int atomicAdd(int*, int) { return 0; }
#include "tiles.cuh"
struct Params {
  int B, Hq, Sq, Sk, section, tiles, window_left, window_right, *tile_counter, *kv_lens;
  struct { int* cu_seqlens_q; } pages;
};
static Params* p;
static int t, *to;
static Cursor cursors[32];
static void find() {
  const WorkItem item = work_item_at(*p, t, cursors[threadIdx.x]);
  if (threadIdx.x) return;
  const Tile& tile = item.tile;
  int found[8] = {tile.b, tile.h, tile.m0, tile.first, tile.queries, item.keys, item.blocks.begin, item.blocks.end};
  std::copy(found, found + 8, to);
}
extern "C" void run(int number, Params* params, int* result) {
  t = number, p = params, to = result;
  run_warp(find);
}
"""  # noqa: E501


class SequenceParams(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int) for name in "B Hq Sq Sk section tiles left right".split()
    ] + [(name, ctypes.c_void_p) for name in ("counter", "kv_lens", "cu_seqlens_q")]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_of_packed_sequences_has_a_tile(seed, splits, tmp_path):
    macros = f"#define PACKED_HEADS 4\n#define SPLITS_KEYS {int(splits > 1)}\n"
    run = built(tmp_path, "sequences", macros + SEQUENCES).run
    r = random.Random(seed)
    B, Hq, tokens = (3, 40, 70, 1)[seed], 8, 900
    borders = sorted(r.choice((5, 6, 40, 333, 600, 880)) for _ in range(B + 1))
    if seed == 2:  # entries that are less than the ones before, or outside
        borders = [r.randrange(-50, 1200) for _ in range(B + 1)]
    lens = [r.randrange(-3, 1100) for _ in range(B)]
    lens[borders.index(max(borders[:-1]))] = -(10**6)  # of a sequence that may have tokens
    cu, kv = (ctypes.c_int * (B + 1))(*borders), (ctypes.c_int * B)(*lens)
    per, row_heads, found = 32, Hq // 4, (ctypes.c_int * 8)()
    tiles = (tokens // per + B + 2) * row_heads * splits
    at = ctypes.addressof(kv), ctypes.addressof(cu)
    params = SequenceParams(B, Hq, tokens, 1000, splits, tiles, 1 << 29, 0, None, *at)
    expected, top = {}, 0
    for b, border in enumerate([*borders, tokens]):
        end = max(top, min(border, tokens))
        expected |= {token: (b - 1, top, end) for token in range(top, end)}
        top = end
    seen, ended = {}, False
    for t in range(tiles):  # in order, as a CTA takes them
        run(t, ctypes.byref(params), found)
        b, h, m0, first, queries, keys, begin, end = found
        ended = ended or m0 == -1
        assert ended == (m0 == -1)
        if ended:
            continue
        assert keys == (max(0, min(lens[b], 1000)) if 0 <= b < B else 0)
        assert end <= -(-keys // 64)
        for token in range(
            first + m0 // 128 * per, min(first + queries, first + (m0 // 128 + 1) * per)
        ):
            assert expected[token] == (b, first, first + queries)
            seen[token, h] = seen.get((token, h), 0) + 1
    assert seen == {(token, h): splits for token in range(tokens) for h in (0, 4)}
