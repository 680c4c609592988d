// The keys that a block of 64 queries attends in the backward pass, in blocks of QUERY_BLOCK_N.
#pragma once
#include "backward_tiles.cuh"

constexpr int ROWS = 64;

// The keys that some query of a block of 64 attends, and the keys that all of them attend.
struct QueryBlockKeys {
  int lo, hi, all_lo, all_hi;
};

// A block of 64 queries of a head.
struct QueryBlock {
  int m, h, b, keys;
};

DEVICE QueryBlockKeys keys_of_block(const BackwardParams& p, const QueryBlock& t) {
  QueryBlockKeys s = {0, 0, 0, 0};
  if (t.m >= p.m_blocks) return s;
#if HAS_RANGES
  const int4 x = p.bounds[range_row(p, t.h, t.b) * p.m_blocks + t.m];
  s = {x.x, x.y, x.z, x.w};
#else
  s = {0, t.keys, 0, t.keys};
#if HAS_WINDOW
  const int first = t.m * ROWS + t.keys - p.Sq, last = min((t.m + 1) * ROWS, p.Sq) - 1 + t.keys - p.Sq;
  s.lo = max(0, first - p.window_left), s.hi = min(t.keys, last + p.window_right + 1);
  s.all_lo = max(0, last - p.window_left), s.all_hi = min(t.keys, first + p.window_right + 1);
#endif
#endif
#if HAS_MASK
  const int2 kept = kept_range<ROWS>(p.by_query, t.b, t.h, t.m * ROWS, p.Sq);
  s.lo = max(s.lo, kept.x), s.hi = min(s.hi, kept.y);
#endif
  if (s.hi <= s.lo) s.lo = s.hi = 0;
  return s;
}

// Blocks of keys [first, end).
struct KeyBlocks {
  int first, end;
};

#if SKIPS_TILES
// Calls `visit` for each block of keys that overlaps a listed tile of these queries, with whether the mask
// keeps all of it. Executed by whole warps.
template <class Visit>
DEVICE void for_each_listed_block(const BackwardParams& p, const QueryBlock& t, const KeyBlocks& n,
                                  Visit visit) {
  const TileList list = tile_list<true>(p.bias.blocks, t.b, t.h, t.m * ROWS);
  for (int base = n.first; base < n.end; base += 32) {
    ListedBlocks listed = listed_blocks<QUERY_BLOCK_N>(list, base);
    if (n.end - base < 32) listed.some &= (1u << n.end - base) - 1;
#pragma unroll 1
    for (; listed.some; listed.some &= listed.some - 1) {
      const int bit = __ffs(listed.some) - 1;
      visit(base + bit, listed.full >> bit & 1);
    }
  }
}
#endif

DEVICE KeyBlocks keys_of(const QueryBlockKeys& s) {
  return {s.lo / QUERY_BLOCK_N, (s.hi + QUERY_BLOCK_N - 1) / QUERY_BLOCK_N};
}
