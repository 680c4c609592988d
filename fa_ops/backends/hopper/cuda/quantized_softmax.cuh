// Online softmax whose weights are rounded to e4m3 relative to a power of two. A thread holds two rows of
// products, elements 4i and 4i + 1 of the first and 4i + 2 and 4i + 3 of the second.
#pragma once
#include "quantized_shared.cuh"
#include "softmax.cuh"

// int8 products accumulate from the bits of the float 1.5 * 2^23: as a float, the sum is that number plus the
// product, and no integer is converted. A softcap leaves floats of either kind.
#if IS_INT8
typedef u32 Accumulator;
constexpr u32 FIRST_BITS = 0x4B400000;
constexpr float FIRST = 12582912.f;
DEVICE float as_float(u32 x) { return __int_as_float(x); }
DEVICE void set(u32& x, float value) { x = __float_as_int(value); }
#else
typedef float Accumulator;
constexpr float FIRST = 0.f;
DEVICE float as_float(float x) { return x; }
DEVICE void set(float& x, float value) { x = value; }
#endif
constexpr float ZERO = HAS_SOFTCAP ? 0.f : FIRST;  // the score 0, as products have it when weights are made
constexpr float WEIGHT_BITS = 8.f;                 // a weight of 1 is rounded as 2^8

// Of a block of keys, a thread has HALF_SCORES products with the first and as many with the last 64 keys.
constexpr int HALF_SCORES = SCORES / 2;
typedef Accumulator HalfScores[HALF_SCORES];

struct QuantizedSoftmax {
  float max[2];        // the running max in units of log2, rounded up to an integer
  bool max_moved;      // in a row of this warp, by the last block
  float rescale[2];    // if so, factors of what was accumulated before
  float row_scale[2];  // of the queries, times the factor of all scores
  float key_scale[2];  // of the first and of the last 64 keys of the block
  float found[2];      // the largest score in this block of this thread's part of a row

  DEVICE void reset() {
    max[0] = max[1] = UNINITIALISED_MAX;
  }

  // The log2 of a weight by a product, whose sign is the score's.
  template <int ROW, int HALF> DEVICE float unit(const QuantizedParams& p) const {
    return HAS_SOFTCAP ? p.scale_log2 : fmaxf(fabsf(row_scale[ROW] * key_scale[HALF]), 1e-37f);
  }

  // Finds the largest score of a row among one half of the keys.
  template <int ROW, int HALF> DEVICE void find_max(const QuantizedParams& p, const HalfScores& s) {
    float largest[4];  // four maxima, so that comparisons do not form one chain
#pragma unroll
    for (int i = 0; i < HALF_SCORES / 4; i++) {
      const float pair = fmaxf(as_float(s[4 * i + 2 * ROW]), as_float(s[4 * i + 2 * ROW + 1]));
      largest[i % 4] = i < 4 ? pair : fmaxf(largest[i % 4], pair);
    }
    const float factor = unit<ROW, HALF>(p);
    const float x = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    const float score = fmaf(x, factor, -ZERO * factor);
    found[ROW] = HALF == 0 ? score : fmaxf(found[ROW], score);
  }

  // Moves the running maxima where necessary. Each of a row's four lanes tests its own scores, and they
  // compare only if one in their warp found a larger one.
  DEVICE void update_max() {
    max_moved = __any_sync(~0u, found[0] > max[0] || found[1] > max[1]);
    if (!max_moved) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float x = fmaxf(found[r], __shfl_xor_sync(~0u, found[r], 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      x = fmaxf(max[r], ceilf(x));
      rescale[r] = exp2_fast(max[r] - x);
      max[r] = x;
    }
  }

  // The weights of a row for one half of the keys, as floats.
  template <int ROW, int HALF>
  DEVICE void exponentiate(const QuantizedParams& p, const HalfScores& s, float (&w)[HALF_SCORES]) const {
    const float factor = unit<ROW, HALF>(p), shift = fmaf(-ZERO, factor, WEIGHT_BITS - max[ROW]);
#pragma unroll
    for (int i = 2 * ROW; i < HALF_SCORES; i += 4) {
      w[i] = exp2_fast(fmaf(as_float(s[i]), factor, shift));
      w[i + 1] = exp2_fast(fmaf(as_float(s[i + 1]), factor, shift));
    }
  }
};

// Weights as operands of the product with the values. Of 32 keys a thread's fragment holds positions
// 16a + 4t + 2b + c, but its scores are those of keys 8(2a + b) + 2t + c: quantize.cu stores the values in
// this order.
DEVICE void pack_weights(u32 (&weights)[HALF_SCORES / 4], const float (&w)[HALF_SCORES]) {
#pragma unroll
  for (int i = 0; i < HALF_SCORES / 4; i++) {
    const int at = i / 4 * 16 + (i & 2) * 4 + (i & 1) * 2;
    weights[i] = pack_e4m3(w[at], w[at + 1], w[at + 4], w[at + 5]);
  }
}
