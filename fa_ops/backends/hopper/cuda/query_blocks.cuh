// The keys that a block of 64 queries attends in the backward pass, in blocks of QUERY_BLOCK_N.
#pragma once
#include "backward_tiles.cuh"

constexpr int ROWS = 64;

// The keys that some query of a block of 64 attends, and those that all of them attend.
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

DEVICE KeyBlocks keys_of(const QueryBlockKeys& s) {
  return {s.lo / QUERY_BLOCK_N, (s.hi + QUERY_BLOCK_N - 1) / QUERY_BLOCK_N};
}
