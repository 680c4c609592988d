// Merges the partial results of forward.cu with SPLITS_KEYS, one warp per row. It is launched together with
// that kernel and waits for its end.
//
// Compile-time: IS_BF16 HAS_SINKS MAX_SPLITS (at most one split per lane)
#define RESCALE_THRESHOLD 0
#include "elements.cuh"
#include "softmax.cuh"

static_assert(MAX_SPLITS <= 32, "a lane for each part");

extern "C" __global__ void __launch_bounds__(256)
    forward_combine(const float* parts, const float* part_lse, const float* sinks, Element* out, float* lse,
                    int splits, int rows, int Sq, int Hq, int Dv) {
  wait_for_prior_grid();
  const int lane = threadIdx.x & 31, row = blockIdx.x * 8 + warp_uniform(threadIdx.x / 32);
  if (row >= rows) return;
  const float own = lane < splits ? __ldcg(part_lse + (long long)lane * rows + row) : -INFINITE;
  float most = own == -INFINITE ? UNINITIALISED_MAX : own;
#pragma unroll
  for (int w = 1; w < 32; w <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, w));
  const float weight = own == -INFINITE ? 0.f : exp2_fast((own - most) * LOG2E);
  float sum = weight, inverse;
#pragma unroll
  for (int w = 1; w < 32; w <<= 1) sum += __shfl_xor_sync(~0u, sum, w);
  const int h = row % Hq, s = row / Hq % Sq, b = row / Hq / Sq;
  const float found = finish_row(most * LOG2E, sum, 1.f, HAS_SINKS, HAS_SINKS ? sinks[h] : 0.f, inverse);
  if (lse && lane == 0) lse[((long long)b * Hq + h) * Sq + s] = found;
#pragma unroll 1
  for (int base = 0; base < Dv; base += 128) {
    const int column = base + lane * 4;
    const bool exists = column < Dv;
    float x[4] = {};
#pragma unroll 8
    for (int split = 0; split < splits; split++) {
      const float factor = __shfl_sync(~0u, weight, split);
      float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
      if (exists) part = __ldcg((const float4*)(parts + ((long long)split * rows + row) * Dv + column));
      x[0] += part.x * factor, x[1] += part.y * factor, x[2] += part.z * factor, x[3] += part.w * factor;
    }
    if (exists)
      *(uint2*)(out + (long long)row * Dv + column) =
          make_uint2(pack(x[0] * inverse, x[1] * inverse), pack(x[2] * inverse, x[3] * inverse));
  }
}
