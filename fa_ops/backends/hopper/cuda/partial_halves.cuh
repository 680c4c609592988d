// Partial results as float16 numbers, of which each row has a common power of two as a factor. Sums of values
// have any magnitude, but float16 has 11 bits only for those between 2^-14 and 2^16.
#pragma once
#include "ptx.cuh"

DEVICE float power_of_two(int x) { return __int_as_float((x + 127) << 23); }

// The exponent by which a row of an accumulator is scaled down, so that its finite maximum is between 2^14
// and 2^15. Elements of at least 2^-28 of it then have 11 bits. A row whose elements are all below 2^-70 is
// scaled as if it had one of 2^-70, so that sums of weights stay finite. Executed by one warp.
template <int ROW, int OUTPUTS> DEVICE int partial_exponent(const float (&o)[OUTPUTS]) {
  float x = 0.f;
#pragma unroll
  for (int i = 2 * ROW; i < OUTPUTS; i += 4) {
    const float a = fmaf(o[i], 0.f, o[i]), b = fmaf(o[i + 1], 0.f, o[i + 1]);  // NaN if infinite,
    x = fmaxf(x, fmaxf(fabsf(a), fabsf(b)));                                     // which fmaxf skips
  }
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)), x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  return max(__float_as_int(x) >> 23, 127 - 70) - 127 - 14;
}

// Writes a row of an accumulator, four pairs of columns that are 8 apart at a time; `to` is where this lane's
// first ones are.
template <int ROW, int OUTPUTS> DEVICE void write_halves(const float (&o)[OUTPUTS], float scale, u32* to) {
#pragma unroll
  for (int i = 2 * ROW; i < OUTPUTS; i += 16) {
    u32 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = pack_halves(o[i + 4 * j] * scale, o[i + 4 * j + 1] * scale);
    *(uint4*)(to + i - 2 * ROW) = make_uint4(x[0], x[1], x[2], x[3]);
  }
}
