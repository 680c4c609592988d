// One row of attention, computed exactly by one warp: each lane handles one key, masking is by selects
// instead of products with 0, and differences of scores are taken before they are scaled. The kernels use it
// for the few rows whose fast result is unusable: rows where a weight of 0 was multiplied with a NaN or Inf
// of a key that the row does not attend, and rows whose scores are so large that the rounding error of a
// scaled difference exceeds what an exponential tolerates.
//
// A kernel provides a Row with begin and end, its keys; scale_log2; attends(key); score(key); weight(key, x),
// which is x, or 0 if it is dropped; and value(key).
#pragma once
#include "elements.cuh"

DEVICE bool is_finite(float x) { return fabsf(x) < INFINITE; }
DEVICE bool is_finite(float2 x) { return is_finite(x.x) && is_finite(x.y); }

// One bit for each of the 16 accumulator rows of a warp, set if any of the row's four lanes votes for it:
// lane l holds rows l / 4 and l / 4 + 8.
DEVICE u32 vote_rows(bool upper, bool lower) {
  const u32 lanes[2] = {__ballot_sync(~0u, upper), __ballot_sync(~0u, lower)};
  if ((lanes[0] | lanes[1]) == 0) return 0;
  u32 rows = 0;
#pragma unroll 1
  for (int r = 0; r < 8; r++)
    rows |= (lanes[0] >> 4 * r & 15 ? 1u << r : 0) | (lanes[1] >> 4 * r & 15 ? 256u << r : 0);
  return rows;
}

struct ExactColumns {
  float max, sum;  // of the row: its maximum score, and the sum of the weights relative to it
  float2 x;        // the weighted sum of this lane's two columns
};

// Computes columns `column` and `column + 1` in each lane. Returns false, early, if the fast result is
// correct because a NaN or Inf of a key that the row does attend makes every column NaN or infinite. With
// `is_overflowed` the fast result is never kept.
template <class Row>
DEVICE bool attend_exactly(const Row& row, int column, int columns, ExactColumns& result,
                           bool is_overflowed = false) {
  const int lane = threadIdx.x & 31;
  float row_max = -INFINITE, sum = 0.f;
  float2 x = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int base = row.begin; base < row.end; base += 32) {
    const int key = base + lane;
    // no branch on lanes: the compiler would keep uniform registers out of the kernel's loops
    const int there = min(key, row.end - 1);
    const float found = row.score(there), s = key < row.end && row.attends(there) ? found : -INFINITE;
    float new_max = s;
#pragma unroll
    for (int w = 1; w < 32; w <<= 1) new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, w));
    new_max = fmaxf(new_max, row_max);
    u32 attended = __ballot_sync(~0u, s != -INFINITE);  // true for NaN
    if (!attended) continue;
    const float factor = row_max == -INFINITE ? 0.f : exp2_fast((row_max - new_max) * row.scale_log2);
    row_max = new_max, sum *= factor, x.x *= factor, x.y *= factor;
    float weight = s == -INFINITE ? 0.f : exp2_fast((s - row_max) * row.scale_log2);
    sum += weight;
    weight = row.weight(key, weight);
#pragma unroll 1
    for (; attended; attended &= attended - 1) {
      const int i = __ffs(attended) - 1;
      const float w = __shfl_sync(~0u, weight, i);
      const float2 v =
          column < columns ? load2(row.value(base + i) + column) : make_float2(0.f, 0.f);
      x.x += w * v.x, x.y += w * v.y;
    }
    if (!is_overflowed && __all_sync(~0u, column >= columns || !(is_finite(x.x) || is_finite(x.y))))
      return false;
  }
#pragma unroll
  for (int w = 1; w < 32; w <<= 1) sum += __shfl_xor_sync(~0u, sum, w);
  result = {row_max, sum, x};
  return true;
}

// The keys and values of one batch row of a KV cache, for a Row that derives from it.
template <class Params> struct ExactCacheRow {
  const Params& p;
  const int b;

#if IS_PAGED
  DEVICE int page_of(int key) const { return p.table[(long long)b * p.table_stride + key / p.page]; }
  DEVICE bool attends(int key) const { return (u32)page_of(key) < (u32)p.page_count; }
#else
  DEVICE bool attends(int) const { return true; }
#endif

  // Returns the page (or this batch row) that holds a key, and replaces `key` by its token within the page.
  // For a page that does not exist, an arbitrary valid page is returned.
  DEVICE int find(int& key) const {
    int from = b;
#if IS_PAGED
    from = min(max(page_of(key), 0), p.page_count - 1), key %= p.page;
#endif
    return from;
  }

  DEVICE float weight(int, float x) const { return x; }
};
