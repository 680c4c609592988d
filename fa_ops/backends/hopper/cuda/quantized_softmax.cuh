// Online softmax whose weights are rounded to e4m3 relative to a power of two. A thread holds two rows of
// scores, elements 4i and 4i + 1 of the first and 4i + 2 and 4i + 3 of the second.
#pragma once
#include "quantized_shared.cuh"
#include "softmax.cuh"

// The bits of the float 1.5 * 2^23 are added to int8 products: read as a float, the sum is that number plus
// the product, so that no integer is converted. After a softcap the scores are plain floats in either case.
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
constexpr float ZERO = HAS_SOFTCAP ? 0.f : FIRST;  // the representation of the score 0
constexpr bool SCORES_ARE_POSITIVE = ZERO > 0.f;  // in this representation, except masked ones
// A weight of 1 is rounded as 2^WEIGHT_BITS; the largest e4m3 number is 448.
constexpr float WEIGHT_BITS = 8.f, UNIT_WEIGHT = 256.f;
// When an accumulation starts, the running max may fall to this many bits above the largest score, as long as
// no sum of weights exceeds 2^MAX_SUM_BITS.
constexpr float SLACK_BITS = 4.f, MAX_SUM_BITS = 60.f;

// 64 keys share a scale, or with HEAD_SCALES all keys of a head: a thread holds KEY_SCORES scores of them.
constexpr int KEY_SCALES = HEAD_SCALES ? 1 : BLOCK_N / 64, KEY_SCORES = SCORES / KEY_SCALES;
struct alignas(4 * KEY_SCALES) KeyScales {
  float scales[KEY_SCALES];
};
typedef Accumulator Scores[SCORES];
typedef u32 Weights[SCORES / 4];  // four e4m3 numbers each

DEVICE int larger(int a, int b) { return max(a, b); }

// The maximum over a row's four lanes.
DEVICE float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

struct QuantizedSoftmax {
  float max[2];        // the running max in units of log2, rounded up to an integer
  bool max_moved;      // in some row of this warp, in the last block
  bool has_negative_max;  // in some row of this warp
  float rescale[2];    // if so, the factors for everything accumulated before
  float row_scale[2];  // query scales, times the scale of the scores, and with HEAD_SCALES that of the keys
  float key_scale[KEY_SCALES];  // one per 64 keys of the block; 1 with HEAD_SCALES

  DEVICE void reset() {
    max[0] = max[1] = UNINITIALISED_MAX, has_negative_max = true;
  }

  static DEVICE float unit_of(float scale) { return fmaxf(fabsf(scale), 1e-37f); }

  // The log2 of a weight, from a product with the sign of the score.
  DEVICE float unit(const QuantizedParams& p, int row, int part) const {
    if (HAS_SOFTCAP) return p.scale_log2;
    return HEAD_SCALES ? row_scale[row] : unit_of(row_scale[row] * key_scale[part]);
  }

  // The largest score of a row in one part of this thread's keys. The bits of floats are compared as
  // integers, for which Hopper has a three-way maximum; this is correct if at least one is not negative.
  template <int ROW, int PART, bool AS_BITS>
  DEVICE float largest_in_part(const QuantizedParams& p, const Scores& s) const {
    constexpr int CHAINS = KEY_SCALES == 1 ? 4 : 2;
    float x[4];  // several maxima, so that comparisons do not form one chain
    int bits[CHAINS];
#pragma unroll
    for (int i = 0; i < KEY_SCORES / 4; i++) {
      const int at = PART * KEY_SCORES + 4 * i + 2 * ROW;
      if (AS_BITS) {
        const int pair = larger(as_bits(s[at]), as_bits(s[at + 1]));
        bits[i % CHAINS] = i < CHAINS ? pair : larger(pair, bits[i % CHAINS]);
      } else {
        const float pair = fmaxf(as_float(s[at]), as_float(s[at + 1]));
        x[i % 4] = i < 4 ? pair : fmaxf(x[i % 4], pair);
      }
    }
    const float factor = unit(p, ROW, PART);
    int largest_bits = AS_BITS ? bits[0] : 0;
#pragma unroll
    for (int i = 1; i < CHAINS; i++)
      if (AS_BITS) largest_bits = larger(largest_bits, bits[i]);
    const float largest = AS_BITS ? __int_as_float(largest_bits)
                                  : fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    return ZERO > 0.f ? fmaf(largest, factor, -ZERO * factor) : largest * factor;
  }

  template <bool AS_BITS, int ROW>
  DEVICE float largest_score(const QuantizedParams& p, const Scores& s) const {
    const float first = largest_in_part<ROW, 0, AS_BITS>(p, s);
    return KEY_SCALES == 1 ? first : fmaxf(first, largest_in_part<ROW, KEY_SCALES - 1, AS_BITS>(p, s));
  }

  // Moves the running maxima if necessary. Each of a row's four lanes tests its own scores, and they exchange
  // maxima only if a lane of the warp found a larger one. If no running max is negative, a thread without
  // positive scores may return a wrong maximum, which has no effect.
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

  // The same at the start of an accumulation, where the maxima may also fall: if the scores of all its keys
  // were far below the row's largest, their weights would otherwise round to 0. `sums` are the sums of the
  // rows' earlier weights, which grow when a max falls.
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

  // Replaces the scores of a row by weights.
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

  // Rounds a row's weights. Returns this thread's part of the sum of the rounded weights, or 0 if that sum is
  // computed by a product.
  template <int ROW> DEVICE float round(const Scores& s, Weights& weights) const {
#pragma unroll
    for (int i = ROW; i < SCORES / 4; i += 2) weights[i] = pack_weights(s, i);
    return SUMS_BY_PRODUCT ? 0.f : sum_of<ROW>(weights);
  }

  // This thread's part of the sum of a row's rounded weights.
  template <int ROW> static DEVICE float sum_of(const Weights& weights) {
    u32 sums[4];  // float16 pairs: sums of 32 weights are at most 2^13, rounded to 11 bits
#pragma unroll
    for (int i = ROW; i < SCORES / 4; i += 2) {
      u32 low, high;
      unpack_e4m3(weights[i], low, high);
      const u32 sum = add_halves(low, high);
      sums[i / 2 % 4] = i < 8 ? sum : add_halves(sums[i / 2 % 4], sum);
    }
    return sum_of_halves(add_halves(add_halves(sums[0], sums[1]), add_halves(sums[2], sums[3])));
  }

  // One operand register of the product with the values. Of 32 keys, a thread's fragment holds positions 16a
  // + 4t + 2b + c, but its scores belong to keys 8(2a + b) + 2t + c: quantize.cu stores the values in this
  // order.
  static DEVICE u32 pack_weights(const Scores& w, int i) {
    const int at = i / 4 * 16 + (i & 2) * 4 + (i & 1) * 2;
    return pack_e4m3(as_float(w[at]), as_float(w[at + 1]), as_float(w[at + 4]), as_float(w[at + 5]));
  }
};
