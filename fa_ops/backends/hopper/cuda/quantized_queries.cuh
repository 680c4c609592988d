// Queries of 16 bits in shared memory, which a consumer quantises before it attends: each has a scale.
#pragma once
#include "quantized_numbers.cuh"
#include "quantized_rows.cuh"

#if QUANTISES_QUERIES
// Of a row, a lane of four has 16 consecutive features of every 64.
constexpr int ROW_PARTS = RAW_COLUMNS, ROW_NUMBERS = 16 * ROW_PARTS;
typedef float RowPart[ROW_NUMBERS];
constexpr float ROTATION = (ROTATED_BITS % 2 ? 0.70710678118654752f : 1.f) / (1 << ROTATED_BITS / 2);

DEVICE void load_row_part(RowPart& x, u32 raw, int row, int lane) {
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i += 8) {
    const int chunk = 2 * lane + i / 8 % 2;
    const int4 y = load_shared<int4>(raw + i / 16 * 64 * 128 + row * 128 + (chunk ^ row & 7) * 16);
    const u32 words[4] = {(u32)y.x, (u32)y.y, (u32)y.z, (u32)y.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 z = unpack(words[j]);
      x[i + 2 * j] = z.x, x[i + 2 * j + 1] = z.y;
    }
  }
}

// Rotates the features of a row by Hadamard's matrix in blocks, as quantize.cu does.
DEVICE void rotate_row(RowPart& x, int lane) {
#pragma unroll
  for (int bit = 0; bit < ROTATED_BITS; bit++) {
    if (bit == 4 || bit == 5) {
      const int other_lane = bit == 4 ? 1 : 2;
#pragma unroll
      for (int i = 0; i < ROW_NUMBERS; i++) {
        const float other = __shfl_xor_sync(~0u, x[i], other_lane);
        x[i] = lane & other_lane ? other - x[i] : x[i] + other;
      }
    } else {
      const int half = bit < 4 ? 1 << bit : 16 << bit - 6;
#pragma unroll
      for (int i = 0; i < ROW_NUMBERS; i++)
        if (!(i & half)) {
          const float a = x[i], b = x[(i | half) % ROW_NUMBERS];
          x[i] = a + b, x[(i | half) % ROW_NUMBERS] = a - b;
        }
    }
  }
  if (ROTATED_BITS)
#pragma unroll
    for (int i = 0; i < ROW_NUMBERS; i++) x[i] *= ROTATION;
}

// The product of a row with the mean of a head's keys.
DEVICE float product_with_mean(const RowPart& x, const float* mean, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i++) {
    const int feature = i / 16 * 64 + lane * 16 + i % 16;
    if (feature < HEAD_FEATURES) sum += x[i] * mean[feature];
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Quantises a row from `raw` to `to`; returns its scale. Executed by all lanes of a warp.
DEVICE float quantize_row(RowPart& x, u32 to, int row, int lane) {
  rotate_row(x, lane);
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i++) largest = fmaxf(largest, fabsf(x[i]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const Scale found = scale_of(largest);
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i += 16) {
    const int chunk = i / 4 + lane;
    store_shared(to + row * 128 + (chunk ^ row & 7) * 16,
                 make_int4(pack_numbers(x + i, found.inverse), pack_numbers(x + i + 4, found.inverse),
                           pack_numbers(x + i + 8, found.inverse), pack_numbers(x + i + 12, found.inverse)));
  }
  return found.scale;
}
#endif
