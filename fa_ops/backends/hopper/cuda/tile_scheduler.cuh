// Tile scheduler of the forward pass: persistent CTAs process tiles of BLOCK_M rows. The rows are the queries
// of one head, or each query of PACKED_HEADS heads in turn (pack_gqa of FlashAttention-3). With SPLITS_KEYS a
// tile attends one of several splits of the keys, and forward_combine.cu merges the results. With
// PACKED_QUERIES a tile contains queries of one sequence of a packed batch; each sequence has a row of the
// page table.
#pragma once
#include "seqlen_info.cuh"

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
#if HAS_WINDOW || HAS_RANGES || HAS_MASK || BIAS_BITS  // most masks are causal
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
