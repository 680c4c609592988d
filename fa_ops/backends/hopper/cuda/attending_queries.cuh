// The queries of a block that attend a thread's keys, for transposed scores, whose rows are keys.
#pragma once
#include "backward_tiles.cuh"

// From the lengths and the window, for two keys that are 8 apart: the distance of `query` from the first
// query that attends a key, and the number of queries that attend it.
DEVICE void attending_queries(const BackwardParams& p, const KeyTile& t, int query, int key,
                              int (&distance)[2], u32 (&count)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int j = t.n0 + key + 8 * r;
    distance[r] = 0, count[r] = j < t.keys ? ~0u : 0;
#if HAS_WINDOW
    distance[r] = query + t.keys - p.Sq - j + p.window_right,
    count[r] = min(count[r], (u32)p.window_left + (u32)p.window_right + 1);
#endif
  }
}

// Whether score element `i` of this thread is attended.
DEVICE bool is_attended(int i, const int (&distance)[2], const u32 (&count)[2]) {
  const int r = i >> 1 & 1;
  return (u32)(distance[r] + column_offset(i)) < count[r];
}
