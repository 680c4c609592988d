// The tiles of a forward pass: which queries they have, the keys that a query attends, the blocks of keys
// that a tile visits, and the work item in which the producer publishes a tile and its blocks.
#pragma once
#include "sequences.cuh"
#if BIAS_BITS || SKIPS_TILES
#include "masks.cuh"
#endif

// Persistent CTAs process tiles of BLOCK_M rows. The rows are the queries of one head, or each query of
// PACKED_HEADS heads in turn (pack_gqa of FlashAttention-3). With SPLITS_KEYS a tile attends one of several
// splits of the keys, and forward_combine.cu merges the results. With PACKED_QUERIES a tile contains queries
// of one sequence of a packed batch; each sequence has a row of the page table.
struct Tile {
  int m0, h, b;  // m0: the first row, h: the first head
#if SPLITS_KEYS
  int split;
  KeyRange part;  // the keys of this split
#endif
#if PACKED_QUERIES
  int first, queries;  // the first token of the sequence, and its number of tokens
#endif
};

constexpr int NO_WORK = -1;  // value of m0 if no tiles are left

// The number of queries of a tile's batch row.
template <class Params> DEVICE int queries_of(const Params& p, [[maybe_unused]] const Tile& t) {
#if PACKED_QUERIES
  return t.queries;
#else
  return p.Sq;
#endif
}

// Each consumer holds whole queries; the rest of its 64 rows is unused.
constexpr int CONSUMER_QUERIES = 64 / PACKED_HEADS, CONSUMER_ROWS = CONSUMER_QUERIES * PACKED_HEADS;

DEVICE int query_of(int row) {
  return CONSUMER_ROWS == 64 ? (u32)row / PACKED_HEADS
                             : (u32)row / 64 * CONSUMER_QUERIES + (u32)row % 64 / PACKED_HEADS;
}

// The head of a row, counted from the tile's first head.
DEVICE int packed_head(int row) { return (u32)row % 64 % PACKED_HEADS; }

// The tile after `t`. Where tiles differ in length they are claimed dynamically from a counter, so that no
// CTA is left with a long one at the end.
template <class Params> DEVICE int next_tile(const Params& p, int t) {
  return gridDim.x + (p.tile_counter ? atomicAdd(p.tile_counter, 1) : t);
}

#if SPLITS_KEYS
// One split of the keys that a batch row attends: whole blocks, about as many as in its other splits.
template <class Params>
DEVICE KeyRange part_of(const Params& p, const Tile& t, int split, int splits, int keys) {
  const int first = HAS_LEFT ? max(0, keys - queries_of(p, t) - p.window_left) / BLOCK_N : 0;
  const long long blocks = (keys + BLOCK_N - 1) / BLOCK_N - first;
  return {(first + (int)(blocks * split / splits)) * BLOCK_N,
          (first + (int)(blocks * (split + 1) / splits)) * BLOCK_N};
}
#endif

// The position at which a CTA found its last tile; its tiles are in ascending order.
struct Cursor {
  int base = 0, begin = 0, tiles = 0;  // 32 sequences: the first, its token, and the tiles before it
};

#if PACKED_QUERIES
// Tiles in the order of the sequences, each for all heads. An entry of cu_seqlens that is less than its
// predecessor is treated as equal to it. Executed by one warp, whose lanes examine 32 sequences at a time.
// The tokens before the first sequence and after the last form one more sequence each, without keys.
template <class Params> DEVICE Tile tile_at(const Params& p, int t, Cursor& at) {
  constexpr int QUERIES = BLOCK_M / 64 * CONSUMER_QUERIES;
  const int row_heads = p.Hq / PACKED_HEADS, lane = threadIdx.x & 31;
#if SPLITS_KEYS
  const int splits = p.section, split = t % splits;
  t /= splits;
#endif
  Tile tile;
  tile.m0 = NO_WORK, tile.b = -1, tile.first = tile.queries = 0;
  tile.h = t % row_heads * PACKED_HEADS;
  t /= row_heads;
  for (; at.base < p.B + 2; at.base += 32) {
    const int i = at.base + lane;
    int end = i <= p.B ? max(at.begin, min(p.pages.cu_seqlens_q[i], p.Sq)) : p.Sq;
#pragma unroll
    for (int w = 1; w < 32; w <<= 1) {
      const int other = __shfl_up_sync(~0u, end, w);
      if (lane >= w) end = max(end, other);
    }
    const int before = __shfl_up_sync(~0u, end, 1), from = lane ? before : at.begin,
              own = (end - from + QUERIES - 1) / QUERIES;
    int sum = own;
#pragma unroll
    for (int w = 1; w < 32; w <<= 1) {
      const int other = __shfl_up_sync(~0u, sum, w);
      if (lane >= w) sum += other;
    }
    const u32 after = __ballot_sync(~0u, at.tiles + sum > t);
    if (after) {
      const int found = __ffs(after) - 1;
      tile.b = at.base + found - 1;
      tile.first = __shfl_sync(~0u, from, found), tile.queries = __shfl_sync(~0u, end - from, found);
      tile.m0 = (t - at.tiles - __shfl_sync(~0u, sum - own, found)) * BLOCK_M;
#if LONGEST_FIRST && HAS_WINDOW  // most windows are causal
      tile.m0 = (__shfl_sync(~0u, own, found) - 1) * BLOCK_M - tile.m0;
#endif
      break;
    }
    at.begin = __shfl_sync(~0u, end, 31), at.tiles += __shfl_sync(~0u, sum, 31);
  }
#if SPLITS_KEYS
  tile.split = split, tile.part = part_of(p, tile, split, splits, keys_of(p, tile.b));
#endif
  return tile;
}
#else
// Tiles in the order of sections of heads whose K and V share the L2. Within a section of a causal call the
// longest tiles of all heads come first.
template <class Params> DEVICE Tile tile_at(const Params& p, int t, Cursor&) {
  const int row_heads = p.Hq / PACKED_HEADS, heads = p.B * row_heads, per = p.section * p.m_blocks;
#if SPLITS_KEYS
  const int splits = p.tiles / (heads * p.m_blocks), split = t % splits;
  t /= splits;
#endif
  const int sec = t / per, r = t - sec * per;
  const int inside = min(p.section, heads - sec * p.section);
#if HAS_WINDOW || HAS_RANGES || HAS_MASK || BIAS_BITS || SKIPS_TILES  // most masks are causal
  const int m = p.m_blocks - 1 - r / inside, head = sec * p.section + r % inside;
#else
  const int m = r % p.m_blocks, head = sec * p.section + r / p.m_blocks;
#endif
  Tile tile;
  tile.b = head / row_heads;
  tile.h = (head - tile.b * row_heads) * PACKED_HEADS;
  tile.m0 = m * BLOCK_M;
#if SPLITS_KEYS
  tile.split = split, tile.part = part_of(p, tile, split, splits, keys_of(p, tile.b));
#endif
  return tile;
}
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
  // The iteration over listed tiles, used by the producer alone; not published.
#if HAS_PROGRAM
  RunWalk<BLOCK_N> walk;
#else
  TileWalk<BLOCK_N> walk;
#endif
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
#if HAS_PROGRAM
  item.walk.start(line_of_runs<true>(p.program.runs, item.tile.b, item.tile.h, item.tile.m0));
#else
  const TileList list = tile_list<true>(mask_blocks_of(p), item.tile.b, item.tile.h, item.tile.m0);
  item.walk.template start<HAS_WINDOW || HAS_KV_LENS || HAS_RANGES>(list, n.end - 1);
#endif
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
