// The keys that a query attends in the forward pass, the blocks of keys that a tile visits, and the work item
// in which the producer publishes both.
#pragma once
#include "tile_scheduler.cuh"
#if BIAS_BITS || SKIPS_TILES
#include "bias.cuh"
#endif

template <class Params>
DEVICE KeyRange row_range(const Params& p, const Tile& t, int row, int keys) {
  KeyRange r = {0, keys};
#if HAS_WINDOW
  const int diagonal = row + keys - queries_of(p, t);
  if (HAS_LEFT) r.begin = max(0, diagonal - p.window_left);
  r.end = min(keys, diagonal + p.window_right + 1);
#endif
#if HAS_RANGES
  const int i = min(row, p.Sq - 1);
  const int* range =
      p.key_ranges + (long long)t.b * p.ranges_b + (long long)t.h * p.ranges_h + (long long)i * p.ranges_q;
  // the values of a range are not trusted, and differences of columns must not overflow
  r.begin = min(max(r.begin, range[0]), UNBOUNDED);
  r.end = max(min(r.end, range[1]), 0);
#endif
#if SPLITS_KEYS
  r.begin = max(r.begin, t.part.begin), r.end = min(r.end, t.part.end);
#endif
  return r;
}

DEVICE void set(float& x, float value) { x = value; }
// The same for scores that are held as the bits of floats.
DEVICE void set(u32& x, float value) { x = __float_as_int(value); }

// Masks the scores of a thread's two rows. The first score is that of key `from`; the distances of the others
// are compile-time constants.
template <class Score, int SCORES>
DEVICE void mask_by_position(Score (&s)[SCORES], int from, const KeyRange& range0, const KeyRange& range1) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    const int j = column_offset(i);
    const KeyRange r = i & 2 ? range1 : range0;
    bool keep = j < r.end - from;
    if (HAS_LEFT) keep = keep && j >= r.begin - from;
    if (!keep) set(s[i], -INFINITE);
  }
}

#if HAS_MASK
// The range from the first to the last key that the mask keeps in any row of a tile. Executed by one warp.
template <class Params> DEVICE KeyRange mask_range(const Params& p, const Tile& t) {
  const unsigned char* from = p.mask + t.b * p.mask_b + t.h * p.mask_h + p.mask_range;
  int begin = UNBOUNDED, end = 0;
  for (int i = threadIdx.x & 31; i < BLOCK_M; i += 32) {
    const int2 range = *(const int2*)(from + min(t.m0 + i, p.Sq - 1) * p.mask_q);
    begin = min(begin, range.x), end = max(end, range.y);
  }
  return {__reduce_min_sync(~0u, begin), __reduce_max_sync(~0u, end)};
}
#endif

// The key blocks of a tile: it visits [begin, end), and every row attends all keys of the blocks [full_begin,
// full_end). No row attends keys from `key_end` on.
struct BlockRange {
  int begin, end, full_begin, full_end, key_end;
};

// Executed by one warp.
template <class Params>
DEVICE BlockRange blocks_of(const Params& p, const Tile& t, int keys, int rows = BLOCK_M) {
  KeyRange any, all;  // attended by some row, by every row
#if HAS_RANGES
  const int lane = threadIdx.x & 31;
  any = {UNBOUNDED, -UNBOUNDED}, all = {-UNBOUNDED, UNBOUNDED};
  for (int i = lane; i < rows; i += 32) {
    KeyRange r = row_range(p, t, min(t.m0 + i, p.Sq - 1), keys);
    if (r.end > r.begin) any.begin = min(any.begin, r.begin), any.end = max(any.end, r.end);
    all.begin = max(all.begin, r.begin), all.end = min(all.end, r.end);
  }
  any.begin = __reduce_min_sync(~0u, any.begin), any.end = __reduce_max_sync(~0u, any.end);
  all.begin = __reduce_max_sync(~0u, all.begin), all.end = __reduce_min_sync(~0u, all.end);
#else
  const KeyRange first = row_range(p, t, query_of(t.m0), keys),
                 last = row_range(p, t, min(query_of(t.m0 + rows), queries_of(p, t)) - 1, keys);
  any = {first.begin, last.end}, all = {last.begin, first.end};
#endif
#if HAS_MASK
  const KeyRange kept = mask_range(p, t);
  any.begin = max(any.begin, kept.begin), any.end = min(any.end, kept.end);
#endif
  BlockRange n;
  if (any.end <= any.begin) {
    n = {0, 0, 0, 0, 0};
    return n;
  }
  n.begin = any.begin / BLOCK_N;
  n.end = (any.end + BLOCK_N - 1) / BLOCK_N;
  n.full_begin = max(n.begin, (max(all.begin, 0) + BLOCK_N - 1) / BLOCK_N);
  n.full_end = min(n.end, max(all.end, 0) / BLOCK_N);
  if (n.full_end < n.full_begin) n.full_begin = n.full_end = n.begin;
  n.key_end = any.end;
  return n;
}

// A tile and its key blocks, which the producer computes once for all warps of the CTA.
struct WorkItem {
  Tile tile;
  int keys;
  BlockRange blocks;
#if SKIPS_TILES
  TileWalk<BLOCK_N> walk;  // the iteration over listed tiles, used by the producer alone; not published
#endif
};
#if PACKED_QUERIES
constexpr u32 WORK_ITEM_BYTES = 64;
#else
constexpr u32 WORK_ITEM_BYTES = 48;
#endif

#if SKIPS_TILES
static_assert(MASK_TILE % BLOCK_M == 0, "a tile's queries have one list");

// Starts the iteration over the item's blocks that overlap a listed tile of the mask, and finds the last of
// them. Executed by one warp.
template <class Params> DEVICE void find_tiles(const Params& p, WorkItem& item) {
  BlockRange& n = item.blocks;
  if (n.end <= n.begin) return;
  const TileList list = tile_list<true>(mask_blocks_of(p), item.tile.b, item.tile.h, item.tile.m0);
  item.walk.template start<HAS_WINDOW || HAS_KV_LENS || HAS_RANGES>(list, n.end - 1);
  n.end = item.walk.seek(n.end - 1) + 1;
  if (n.end <= n.begin) n.begin = n.end = 0;
}
#endif

template <class Params> DEVICE WorkItem work_item_at(const Params& p, int t, Cursor& at) {
  WorkItem item;
  item.tile = tile_at(p, t, at);
  item.keys = keys_of(p, item.tile.b);
  item.blocks = blocks_of(p, item.tile, item.keys);
#if SKIPS_TILES
  find_tiles(p, item);
#endif
  return item;
}

DEVICE void store_work_item(u32 at, const WorkItem& item) {
  store_shared(at, make_int4(item.tile.m0, item.tile.h, item.tile.b, item.keys));
  store_shared(at + 16,
               make_int4(item.blocks.begin, item.blocks.end, item.blocks.full_begin, item.blocks.full_end));
#if SPLITS_KEYS
  const Tile& t = item.tile;
  store_shared(at + 32, make_int4(item.blocks.key_end, t.split, t.part.begin, t.part.end));
#else
  store_shared(at + 32, make_int4(item.blocks.key_end, 0, 0, 0));
#endif
#if PACKED_QUERIES
  store_shared(at + 48, make_int4(item.tile.first, item.tile.queries, 0, 0));
#endif
}

// The fields of a tile besides its first row, head and batch row.
DEVICE void load_rest(Tile& tile, u32 at) {
#if SPLITS_KEYS
  const int4 y = load_shared<int4>(at + 32);
  tile.split = warp_uniform(y.y), tile.part = {warp_uniform(y.z), warp_uniform(y.w)};
#endif
#if PACKED_QUERIES
  const int4 z = load_shared<int4>(at + 48);
  tile.first = warp_uniform(z.x), tile.queries = warp_uniform(z.y);
#endif
}

DEVICE Tile load_tile(u32 at) {
  const int4 x = load_shared<int4>(at);
  Tile tile = {warp_uniform(x.x), warp_uniform(x.y), warp_uniform(x.z)};
  load_rest(tile, at);
  return tile;
}

DEVICE WorkItem load_work_item(u32 at) {
  const int4 x = load_shared<int4>(at), y = load_shared<int4>(at + 16), z = load_shared<int4>(at + 32);
  WorkItem item;
  item.tile = {warp_uniform(x.x), warp_uniform(x.y), warp_uniform(x.z)}, item.keys = warp_uniform(x.w);
  item.blocks = {warp_uniform(y.x), warp_uniform(y.y), warp_uniform(y.z), warp_uniform(y.w),
                 warp_uniform(z.x)};
  load_rest(item.tile, at);
  return item;
}
