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
DEVICE int as_bits(u32 x) { return x; }
#else
typedef float Accumulator;
constexpr float FIRST = 0.f;
DEVICE float as_float(float x) { return x; }
DEVICE int as_bits(float x) { return __float_as_int(x); }
#endif
constexpr float ZERO = HAS_SOFTCAP ? 0.f : FIRST;  // the score 0, as products have it when weights are made
constexpr bool SCORES_ARE_POSITIVE = ZERO > 0.f;  // as products have them, apart from masked ones
// A weight of 1 is rounded as 2^WEIGHT_BITS, where the largest e4m3 number is 448.
constexpr float WEIGHT_BITS = 8.f, UNIT_WEIGHT = 256.f;
// Where a sum of products begins, the running max may fall to this many bits above the largest score, and as
// far as no sum of weights exceeds 2^MAX_SUM_BITS.
constexpr float SLACK_BITS = 4.f, MAX_SUM_BITS = 60.f;

// 64 keys share a scale: a thread has KEY_SCORES products with them.
constexpr int KEY_SCALES = BLOCK_N / 64, KEY_SCORES = SCORES / KEY_SCALES;
struct alignas(4 * KEY_SCALES) KeyScales {
  float scales[KEY_SCALES];
};
typedef Accumulator Scores[SCORES];
typedef u32 Weights[SCORES / 4];  // four e4m3 numbers each

DEVICE int larger(int a, int b) { return max(a, b); }

// The largest of a row's four lanes.
DEVICE float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

struct QuantizedSoftmax {
  float max[2];        // the running max in units of log2, rounded up to an integer
  bool max_moved;      // in a row of this warp, by the last block
  bool has_negative_max;  // in a row of this warp
  float rescale[2];    // if so, factors of what was accumulated before
  float row_scale[2];  // of the queries, times the factor of all scores
  float key_scale[KEY_SCALES];  // of each 64 keys of the block

  DEVICE void reset() {
    max[0] = max[1] = UNINITIALISED_MAX, has_negative_max = true;
  }

  // The log2 of a weight by a product, whose sign is the score's.
  DEVICE float unit(const QuantizedParams& p, int row, int part) const {
    return HAS_SOFTCAP ? p.scale_log2 : fmaxf(fabsf(row_scale[row] * key_scale[part]), 1e-37f);
  }

  // The largest score of a row in one part of this thread's keys. Bits of floats are compared as integers,
  // of which Hopper compares three at once: that is right if one is not negative.
  template <int ROW, int PART, bool AS_BITS>
  DEVICE float largest_in_part(const QuantizedParams& p, const Scores& s) const {
    float x[4];  // maxima, so that comparisons do not form one chain
    int bits[2];
#pragma unroll
    for (int i = 0; i < KEY_SCORES / 4; i++) {
      const int at = PART * KEY_SCORES + 4 * i + 2 * ROW;
      if (AS_BITS) {
        const int pair = larger(as_bits(s[at]), as_bits(s[at + 1]));
        bits[i % 2] = i < 2 ? pair : larger(pair, bits[i % 2]);
      } else {
        const float pair = fmaxf(as_float(s[at]), as_float(s[at + 1]));
        x[i % 4] = i < 4 ? pair : fmaxf(x[i % 4], pair);
      }
    }
    const float factor = unit(p, ROW, PART);
    const float largest = AS_BITS ? __int_as_float(larger(bits[0], bits[1]))
                                  : fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    return ZERO > 0.f ? fmaf(largest, factor, -ZERO * factor) : largest * factor;
  }

  template <bool AS_BITS, int ROW>
  DEVICE float largest_score(const QuantizedParams& p, const Scores& s) const {
    return fmaxf(largest_in_part<ROW, 0, AS_BITS>(p, s), largest_in_part<ROW, 1, AS_BITS>(p, s));
  }

  // Moves the running maxima where necessary. Each of a row's four lanes tests its own scores, and they
  // compare only if one in their warp found a larger one. Where no maximum is negative, a thread without
  // positive scores may take a wrong one for the largest.
  DEVICE void update_max(const QuantizedParams& p, const Scores& s) {
    float found[2];
    if (SCORES_ARE_POSITIVE || !has_negative_max) {
      found[0] = largest_score<true, 0>(p, s), found[1] = largest_score<true, 1>(p, s);
    } else {
      found[0] = largest_score<false, 0>(p, s), found[1] = largest_score<false, 1>(p, s);
    }
    max_moved = __any_sync(~0u, found[0] > max[0] || found[1] > max[1]);
    if (!max_moved) return;
#pragma unroll
    for (int r = 0; r < 2; r++) move_max(r, fmaxf(max[r], ceilf(largest_of_row(found[r]))));
    has_negative_max = __any_sync(~0u, fminf(max[0], max[1]) < 0.f);
  }

  // The same where a sum of products begins: the maxima may also fall. If the scores of all its keys are far
  // below the largest of the row, their weights would become 0 otherwise. `sums` are those of the rows'
  // weights before, which a fall makes larger.
  DEVICE void update_max_of_sum(const QuantizedParams& p, const Scores& s, const float (&sums)[2]) {
    const float found[2] = {largest_score<SCORES_ARE_POSITIVE, 0>(p, s),
                            largest_score<SCORES_ARE_POSITIVE, 1>(p, s)};
    max_moved = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float largest = ceilf(largest_of_row(found[r]));
      const float sum_bits = ceilf(log2_fast(fmaxf(largest_of_row(sums[r]), 1.f)));
      const float lowest = max[r] + fminf(sum_bits - MAX_SUM_BITS, 0.f);
      const float fallen = largest == -INFINITE ? max[r] : fmaxf(largest + SLACK_BITS, lowest);
      const float x = fmaxf(fminf(fallen, max[r]), largest);
      max_moved |= x != max[r];
      move_max(r, x);
    }
    max_moved = __any_sync(~0u, max_moved);
    if (max_moved) has_negative_max = __any_sync(~0u, fminf(max[0], max[1]) < 0.f);
  }

  DEVICE void move_max(int r, float x) { rescale[r] = exp2_fast(max[r] - x), max[r] = x; }

  // Turns a row's scores into weights.
  template <int ROW> DEVICE void exponentiate(const QuantizedParams& p, Scores& s) const {
#pragma unroll
    for (int part = 0; part < KEY_SCALES; part++) {
      const float factor = unit(p, ROW, part), base = WEIGHT_BITS - max[ROW],
                  shift = ZERO > 0.f ? fmaf(-ZERO, factor, base) : base;
#pragma unroll
      for (int i = part * KEY_SCORES + 2 * ROW; i < (part + 1) * KEY_SCORES; i += 4) {
        set(s[i], exp2_fast(fmaf(as_float(s[i]), factor, shift)));
        set(s[i + 1], exp2_fast(fmaf(as_float(s[i + 1]), factor, shift)));
      }
    }
  }

  // Rounds a row's weights. Returns this thread's part of the sum of what they are rounded to, or 0 if that
  // is a product.
  template <int ROW> DEVICE float round(const Scores& s, Weights& weights) const {
#pragma unroll
    for (int i = ROW; i < SCORES / 4; i += 2) weights[i] = pack_weights(s, i);
    return SUMS_BY_PRODUCT ? 0.f : sum_of<ROW>(weights);
  }

  // This thread's part of the sum of a row's rounded weights.
  template <int ROW> static DEVICE float sum_of(const Weights& weights) {
    u32 sums[4];  // of halves: sums of 32 weights do not exceed 2^13, and are rounded to 11 bits
#pragma unroll
    for (int i = ROW; i < SCORES / 4; i += 2) {
      u32 low, high;
      unpack_e4m3(weights[i], low, high);
      const u32 sum = add_halves(low, high);
      sums[i / 2 % 4] = i < 8 ? sum : add_halves(sums[i / 2 % 4], sum);
    }
    return sum_of_halves(add_halves(add_halves(sums[0], sums[1]), add_halves(sums[2], sums[3])));
  }

  // One operand register of the product with the values. Of 32 keys a thread's fragment holds positions
  // 16a + 4t + 2b + c, but its scores are those of keys 8(2a + b) + 2t + c: quantize.cu stores the values in
  // this order.
  static DEVICE u32 pack_weights(const Scores& w, int i) {
    const int at = i / 4 * 16 + (i & 2) * 4 + (i & 1) * 2;
    return pack_e4m3(as_float(w[at]), as_float(w[at + 1]), as_float(w[at + 4]), as_float(w[at + 5]));
  }
};
