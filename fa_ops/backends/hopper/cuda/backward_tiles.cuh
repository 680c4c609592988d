// The blocks of queries that attend a block of keys in the backward pass, and the exponent of a weight.
//
// Compile-time: BLOCK_M BLOCK_N SPLITS_GROUP WHOLE_HEADS HAS_WINDOW HAS_RANGES HAS_MASK BIAS_BITS SKIPS_TILES
#pragma once
#include "backward_params.cuh"
#include "seqlen_info.cuh"

// A block of keys and one part of a group of query heads (`part` counts the parts of all groups), and the
// range [first, last) of the query blocks that attend some of it.
struct KeyTile {
  int n0, part, b, keys, first, last;
  int stored, complete;  // with WHOLE_HEADS: query blocks below these have dQ sums, have final dQ
};

DEVICE int key_head(const BackwardParams& p, const KeyTile& t) {
  return SPLITS_GROUP ? t.part / p.parts : t.part;
}
DEVICE int first_head(const BackwardParams& p, const KeyTile& t) { return t.part * p.part_heads; }

// The range [x, y) of queries that may attend some of the BLOCK_N keys from `n0` on; empty if y <= x.
DEVICE int2 queries_of(const BackwardParams& p, int n0, int keys) {
#if HAS_WINDOW
  const int shift = keys - p.Sq;
  return make_int2(max(0, n0 - shift - p.window_right),
                   min(p.Sq, min(n0 + BLOCK_N, keys) - shift + p.window_left));
#else
  return make_int2(0, p.Sq);
#endif
}

DEVICE KeyTile tile_at(const BackwardParams& p, int i) {
  const int parts = p.Hkv * p.parts;
#if WHOLE_HEADS
  const int part = i / p.n_blocks, n = i - part * p.n_blocks;
#else
  const int all = p.B * parts, per = p.section * p.n_blocks;
  const int sec = i / per, r = i - sec * per;
  const int inside = min(p.section, all - sec * p.section);
  const int part = sec * p.section + r % inside, n = r / inside;
#endif
  KeyTile t;
  t.n0 = n * BLOCK_N;
  t.b = part / parts;
  t.part = part - t.b * parts;
  t.keys = keys_of(p, t.b);
  const int2 queries = queries_of(p, t.n0, t.keys);
  int lo = queries.x, hi = queries.y;
  if (t.n0 >= t.keys || lo >= hi) lo = hi = 0;
  t.first = lo / BLOCK_M;
  t.last = (hi + BLOCK_M - 1) / BLOCK_M;
#if WHOLE_HEADS
  const int2 later = queries_of(p, t.n0 + BLOCK_N, t.keys);
  t.stored = n == 0 ? 0 : (queries_of(p, t.n0 - BLOCK_N, t.keys).y + BLOCK_M - 1) / BLOCK_M;
  t.complete = t.n0 + BLOCK_N >= t.keys || later.x >= later.y ? UNBOUNDED : later.x / BLOCK_M;
#endif
  return t;
}

DEVICE long long range_row(const BackwardParams& p, int h, int b) {
  return b * p.range_heads + (p.range_heads > 1 ? h : 0);
}

// The range from the first to the last column that a mask keeps in any of COUNT rows. Executed by one warp.
template <int COUNT> DEVICE int2 kept_range(const MaskBits& bits, int b, int h, int row, int rows) {
  const unsigned char* from = bits.bits + b * bits.b + h * bits.h + bits.range;
  int lo = UNBOUNDED, hi = 0;
  for (int i = threadIdx.x & 31; i < COUNT; i += 32) {
    const int2 range = *(const int2*)(from + min(row + i, rows - 1) * bits.row);
    lo = min(lo, range.x), hi = max(hi, range.y);
  }
  return make_int2(__reduce_min_sync(~0u, lo), __reduce_max_sync(~0u, hi));
}

// One bit for each of the 32 query blocks starting at `base`. some: the block attends a key of the tile.
// edge: some query of the block does not attend the whole tile. full, with SKIPS_TILES: the mask keeps
// everything.
struct QueryBlocks {
  u32 some, edge, full;
};

DEVICE QueryBlocks query_blocks(const BackwardParams& p, const KeyTile& t, int h, int base) {
  const int m = base + (threadIdx.x & 31);
  bool some = m < t.last;
  bool edge = t.n0 + BLOCK_N > t.keys;
#if HAS_WINDOW
  const int diagonal = m * BLOCK_M + t.keys - p.Sq;
  edge =
      edge || t.n0 + BLOCK_N - 1 > diagonal + p.window_right || t.n0 < diagonal + BLOCK_M - 1 - p.window_left;
#endif
#if HAS_RANGES
  if (some) {
    const int4 b = p.bounds[range_row(p, h, t.b) * p.m_blocks + m];
    some = b.x < t.n0 + BLOCK_N && b.y > t.n0;
    edge = edge || b.z > t.n0 || b.w < t.n0 + BLOCK_N;
  }
#endif
#if HAS_MASK
  const int2 kept = kept_range<BLOCK_N>(p.by_key, t.b, h, t.n0, p.Sk);
  const int first = p.mask_block ? m * BLOCK_M : 0;
  some = some && kept.x < first + BLOCK_M && kept.y > first;
#endif
  QueryBlocks n = {__ballot_sync(~0u, some), __ballot_sync(~0u, edge), 0};
#if SKIPS_TILES
  const ListedBlocks listed =
      listed_blocks<BLOCK_M>(tile_list<false>(p.bias.blocks, t.b, h, t.n0), base);
  n.some &= listed.some, n.full = listed.full;
#endif
  return n;
}

// The base-2 exponent of a weight.
DEVICE float exponent(const BackwardParams& p, float s, float lse) {
#if BIAS_BITS  // exact for large scores, whose product with the scale is rounded
  return (s - lse) * p.scale_log2;
#else
  return fmaf(s, p.scale_log2, -lse);
#endif
}
