// Row statistics for the products of the backward pass: delta, and the LSE in log2 units.
//
// Compile-time: VALUE_DIM BLOCK_M BIAS_BITS
#pragma once
#include "backward_params.cuh"

// Scores beyond this are larger than float32 can resolve to 1.
constexpr float UNRESOLVED = 1 << 24;

// The LSE as the kernels read it. Rounding errors of scores beyond UNRESOLVED could make weights overflow, so
// their LSE is increased and their weights vanish instead.
DEVICE float lse_of(float lse) {
  if (lse == -INFINITE) return INFINITE;
#if BIAS_BITS  // differences are exact
  return lse;
#else
  const float x = lse * LOG2E;
  return fabsf(x) < UNRESOLVED ? x : x + fabsf(x) * (1.f / (1 << 21));
#endif
}

constexpr int ROW_LANES = VALUE_DIM == 64 ? 8 : VALUE_DIM == 128 ? 16 : 32;  // with eight features each

// Writes delta = rowsum(dO * O) - dlse and the LSE (+inf for rows without keys) of ROWS rows of a head from
// `first` on, as the preprocess kernel of FlashAttention-2. Executed by one warp. No load is inside a branch,
// so that all loads are in flight at once; a lane reads and writes the statistics of one row.
template <int ROWS> DEVICE void write_row_sums(const BackwardParams& p, int b, int h, int first) {
  constexpr int STEP_ROWS = 32 / ROW_LANES, STEPS = ROWS / STEP_ROWS;
  static_assert(STEPS <= ROW_LANES, "a lane for each row");
  const int lane = threadIdx.x & 31, place = lane % ROW_LANES, feature = place * 8,
            there = feature < p.Dv ? feature : 0;
  const long long head = b * p.Hq + h;
  first += lane / ROW_LANES;
  const int own = first + place * STEP_ROWS;
  const long long at = head * p.Sq + min(own, p.Sq - 1);
  const float lse = own < p.Sq ? p.saved_lse[at] : -INFINITE, grad_lse = p.grad_lse ? p.grad_lse[at] : 0.f;
  const Element* x = row_at(p.out, p.out_strides, b, h, 0) + there;
  const Element* y = row_at(p.tensors[GRAD_OUT], p.strides[GRAD_OUT], b, h, 0) + there;
  float sum[STEPS];  // one for each row of these lanes
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int row = min(first + i * STEP_ROWS, p.Sq - 1);
    const float found = dot8(x + row * p.out_strides.s, y + row * p.strides[GRAD_OUT].s);
    sum[i] = feature < p.Dv ? found : 0.f;
#if VALUE_DIM > 256
    if (feature + 256 < p.Dv)
      sum[i] += dot8(x + row * p.out_strides.s + 256, y + row * p.strides[GRAD_OUT].s + 256);
#endif
  }
  float own_sum = 0.f;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int w = ROW_LANES / 2; w; w >>= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], w);
    if (place == i) own_sum = sum[i];
  }
  if (place >= STEPS) return;
  const long long to = head * (p.m_blocks * BLOCK_M) + own;
  p.lse[to] = lse_of(lse);
  p.delta[to] = lse == -INFINITE ? 0.f : own_sum - grad_lse;
}
