// One row of attention computed exactly, by a warp: a key for each lane, selects instead of products with 0, and differences of scores before they are
// scaled. The kernels fall back to it for the few rows whose fast result is unusable: where a weight of 0 met a NaN or Inf of a key that the row does
// not attend, or where scores are so large that their scaled difference rounds to more than an exponential can hold.
// A kernel provides a Row: first, last (its keys); scale_log2; attends(key); score(key); weight(key, x), which is x or 0 under dropout; value(key).

DEVICE bool is_finite(float x) { return fabsf(x) < INFINITE; }
DEVICE bool is_finite(float2 x) { return is_finite(x.x) && is_finite(x.y); }

// Of a warp's 16 rows of accumulators, a bit for each that one of its four lanes names: lane l holds rows l / 4 and l / 4 + 8.
DEVICE u32 rows_of_lanes(bool upper, bool lower) {
  const u32 lanes[2] = {__ballot_sync(~0u, upper), __ballot_sync(~0u, lower)};
  if ((lanes[0] | lanes[1]) == 0) return 0;
  u32 rows = 0;
#pragma unroll 1
  for (int r = 0; r < 8; r++) rows |= (lanes[0] >> 4 * r & 15 ? 1u << r : 0) | (lanes[1] >> 4 * r & 15 ? 256u << r : 0);
  return rows;
}

struct ExactColumns {
  float top, sum;  // of the row: its maximum, and the sum of its weights relative to that
  float2 x;        // the weighted sum of this lane's two columns
};

// Columns `column` and `column + 1` for each lane. Returns false, early, where the fast result stands: where a key that the row does attend makes each
// column NaN or infinite. `is_lost`: nothing of the fast result stands.
template <class Row> DEVICE bool attend_exactly(const Row& row, int column, int columns, ExactColumns& result, bool is_lost = false) {
  const int lane = threadIdx.x & 31;
  float top = -INFINITE, sum = 0.f;
  float2 x = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int base = row.first; base < row.last; base += 32) {
    const int key = base + lane;
    const int there = min(key, row.last - 1);  // no branch that lanes take apart: the compiler would keep uniform registers out of the kernel's loops
    const float found = row.score(there), s = key < row.last && row.attends(there) ? found : -INFINITE;
    float most = s;
#pragma unroll
    for (int w = 1; w < 32; w <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, w));
    most = fmaxf(most, top);
    u32 attended = __ballot_sync(~0u, s != -INFINITE);  // true of a NaN
    if (!attended) continue;
    const float factor = top == -INFINITE ? 0.f : exp2_fast((top - most) * row.scale_log2);
    top = most, sum *= factor, x.x *= factor, x.y *= factor;
    float own = s == -INFINITE ? 0.f : exp2_fast((s - top) * row.scale_log2);
    sum += own;
    own = row.weight(key, own);
#pragma unroll 1
    for (; attended; attended &= attended - 1) {
      const int i = __ffs(attended) - 1;
      const float w = __shfl_sync(~0u, own, i);
      const float2 v = column < columns ? unpack(*(const u32*)(row.value(base + i) + column)) : make_float2(0.f, 0.f);
      x.x += w * v.x, x.y += w * v.y;
    }
    if (!is_lost && __all_sync(~0u, column >= columns || !(is_finite(x.x) || is_finite(x.y)))) return false;
  }
#pragma unroll
  for (int w = 1; w < 32; w <<= 1) sum += __shfl_xor_sync(~0u, sum, w);
  result = {top, sum, x};
  return true;
}
