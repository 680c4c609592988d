// Before the products of the backward pass: delta, the LSE in log2 units, and the key ranges intersected with
// all other masks.
#include "backward_rows.cuh"

#if ENTRY_preprocess
// Also zeroes the tile counter and the sums. A CTA handles 64 rows of a head.
extern "C" __global__ void __launch_bounds__(256) preprocess(const __grid_constant__ BackwardParams p) {
  launch_dependent_grids();
  if (p.counter && blockIdx.x + blockIdx.y + threadIdx.x == 0) *p.counter = 0;
  const long long threads = (long long)gridDim.x * gridDim.y * 256;
#pragma unroll 4
  for (long long i = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x; i < p.zeros;
       i += threads)
    ((float4*)p.sums)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  const int b = blockIdx.x / p.Hq, h = blockIdx.x - b * p.Hq;
  write_row_sums<8>(p, b, h, blockIdx.y * 64 + threadIdx.x / 32 * 8);
}
#endif

// The keys that each query attends after every mask and, for each block of queries, the bounds of the keys
// that some (x, y) and all (z, w) of them attend. One thread per query. Padding queries attend nothing and do
// not affect the bounds.
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
