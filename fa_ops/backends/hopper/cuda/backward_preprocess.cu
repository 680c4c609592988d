// Before the products of the backward pass: delta, the LSE in log2 units, and key ranges with all other masks
// applied.
#include "backward_tiles.cuh"

// Scores beyond this are not resolved by float32 to the unit of an exponential.
constexpr float UNRESOLVED = 1 << 24;

// The LSE as the kernels read it. Rounding of unresolved scores could make weights overflow: they vanish
// instead.
DEVICE float lse_of(float lse) {
  if (lse == -INFINITE) return INFINITE;
#if BIAS_BITS  // differences are exact
  return lse;
#else
  const float x = lse * LOG2E;
  return fabsf(x) < UNRESOLVED ? x : x + fabsf(x) * (1.f / (1 << 21));
#endif
}

// delta = rowsum(dO * O) - dlse, and the LSE in log2 units with rows without keys at +inf. Zeroes the counter
// and `zeros` times 16 bytes of sums. A CTA has 64 rows. The preprocess kernel of FlashAttention-2.
constexpr int LANES = VALUE_DIM == 64 ? 8 : VALUE_DIM == 128 ? 16 : 32;  // of a row

#if ENTRY_preprocess
extern "C" __global__ void __launch_bounds__(256)
    preprocess(const Element* out, const Element* grad_out, const float* lse, const float* grad_lse,
               float* lse_log2, float* delta, float* sums, int* counter, Strides out_strides,
               Strides grad_strides, int Hq, int Sq, int Dv, int rows, long long zeros) {
  launch_dependent_grids();
  if (counter && blockIdx.x + blockIdx.y + threadIdx.x == 0) *counter = 0;
  const int bh = blockIdx.x, b = bh / Hq, h = bh - b * Hq, feature = threadIdx.x % LANES * 8,
            there = feature < Dv ? feature : 0;
  const long long base = (long long)bh * rows, threads = (long long)gridDim.x * gridDim.y * 256;
#pragma unroll 4
  for (long long i = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x; i < zeros;
       i += threads)
    ((float4*)sums)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  const Element* x = out + b * out_strides.b + h * out_strides.h + there;
  const Element* y = grad_out + b * grad_strides.b + h * grad_strides.h + there;
  float sum[LANES / 4];  // for each row of these lanes
#pragma unroll
  for (int i = 0; i < LANES / 4; i++) {
    const int row = min(blockIdx.y * 64 + (i * 256 + (int)threadIdx.x) / LANES,
                        Sq - 1);  // no branch: all loads are in flight at once
    const float found = dot8(x + row * out_strides.s, y + row * grad_strides.s);
    sum[i] = feature < Dv ? found : 0.f;
#if VALUE_DIM > 256
    if (feature + 256 < Dv) sum[i] += dot8(x + row * out_strides.s + 256, y + row * grad_strides.s + 256);
#endif
  }
#pragma unroll
  for (int i = 0; i < LANES / 4; i++) {
    const int row = blockIdx.y * 64 + (i * 256 + threadIdx.x) / LANES;
#pragma unroll
    for (int w = LANES / 2; w; w >>= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], w);
    if (feature == 0) {
      const long long at = (long long)bh * Sq + row;
      const float l = row < Sq ? lse[at] : -INFINITE;
      lse_log2[base + row] = lse_of(l);
      delta[base + row] = l == -INFINITE ? 0.f : sum[i] - (grad_lse ? grad_lse[at] : 0.f);
    }
  }
}
#endif

// The keys that each query attends after every mask, and for each block of queries the bounds of the keys
// that some (x, y) and all (z, w) of them attend. One thread per query. Queries that do not exist attend
// nothing and bound nothing.
#if ENTRY_clip_ranges
extern "C" __global__ void __launch_bounds__(BLOCK_M)
    clip_ranges(const int* ranges, const int* kv_lens, int2* clipped, int4* bounds, Strides strides,
                int heads, int Sq, int Sk, int window_left, int window_right) {
  const int i = blockIdx.y * BLOCK_M + threadIdx.x, b = blockIdx.x / heads, h = blockIdx.x - b * heads;
  int2 range = make_int2(0, 0);
  if (i < Sq) {
    const int keys = kv_lens ? max(0, min(kv_lens[b], Sk)) : Sk, diagonal = i + keys - Sq;
    const int* given = ranges + b * strides.b + h * strides.h + i * strides.s;
    range.x = max(max(0, given[0]), diagonal - window_left);
    range.y = min(min(keys, given[1]), diagonal + window_right + 1);
  }
  clipped[(long long)blockIdx.x * gridDim.y * BLOCK_M + i] = range;
  const bool any = range.y > range.x;
  int4 x =
      make_int4(any ? range.x : 1 << 30, any ? range.y : 0, i < Sq ? range.x : 0, i < Sq ? range.y : 1 << 30);
  x.x = __reduce_min_sync(~0u, x.x), x.y = __reduce_max_sync(~0u, x.y), x.z = __reduce_max_sync(~0u, x.z),
  x.w = __reduce_min_sync(~0u, x.w);
  __shared__ int4 parts[BLOCK_M / 32];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 1; i < BLOCK_M / 32; i++) {
    const int4 y = parts[i];
    x = make_int4(min(x.x, y.x), max(x.y, y.y), max(x.z, y.z), min(x.w, y.w));
  }
  if (threadIdx.x == 0) bounds[(long long)blockIdx.x * gridDim.y + blockIdx.y] = x;
}
#endif
