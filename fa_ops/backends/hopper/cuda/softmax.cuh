// Online softmax (FlashAttention-2) on wgmma accumulators: a thread holds two rows, elements 4i and 4i + 1 of
// the first and 4i + 2 and 4i + 3 of the second. As in FlashAttention-4, the running max moves only if a
// weight would exceed 2^RESCALE_THRESHOLD, so that the output is rarely rescaled.
#pragma once
#include "ptx.cuh"

// The running max of a row without scores. It is finite and less than every score, so that such rows need no
// special case.
#if BIAS_BITS
constexpr float UNINITIALISED_MAX = -3.4028235e38f;  // finite fill values of masks count as scores
#elif HAS_PROGRAM
// Its product with log2(e) is finite. Finite fill values may be less: a row of nothing else gets the other
// maximum, and no weight, and is attended exactly.
constexpr float UNINITIALISED_MAX = PROGRAM_HAS_SCORE ? -2.3e38f : -1e30f, FILLED_MAX = -2e38f;
#else
constexpr float UNINITIALISED_MAX = -1e30f;
#endif

template <int SCORES> struct Softmax {
  float max0, max1, sum0, sum1;  // running max (unscaled scores), and this thread's part of the row sum
  float rescale0, rescale1;      // factors for the output accumulated so far

  DEVICE void reset() { max0 = max1 = UNINITIALISED_MAX, sum0 = sum1 = 0.f; }

  // Moves the running max of a row if necessary, and sets the factor for everything accumulated so far.
  // Returns whether it moved in a row of this warp. Each of the row's four lanes tests its own scores, and
  // they exchange maxima only if a lane of the warp found a large one.
  template <int ROW> DEVICE bool update_max(const float (&s)[SCORES], float scale_log2) {
    return move_max<ROW>(largest<ROW>(s), scale_log2);
  }

  // The largest score of this thread's part of a row.
  template <int ROW> static DEVICE float largest(const float (&s)[SCORES]) {
    float found[4];  // four maxima, so that comparisons do not form one chain
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
      const float pair = fmaxf(s[4 * i + 2 * ROW], s[4 * i + 2 * ROW + 1]);
      found[i % 4] = i < 4 ? pair : fmaxf(found[i % 4], pair);
    }
    return fmaxf(fmaxf(found[0], found[1]), fmaxf(found[2], found[3]));
  }

  template <int ROW> DEVICE bool move_max(float x, float scale_log2) {
    float& row_max = ROW ? max1 : max0;
    float& rescale = ROW ? rescale1 : rescale0;
    rescale = 1.f;
#if HAS_PROGRAM
    if (PROGRAM_HAS_SCORE && x > -INFINITE) x = fmaxf(x, FILLED_MAX);
#endif
    const bool moves = __any_sync(~0u, (x - row_max) * scale_log2 > RESCALE_THRESHOLD);
    if (moves) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)), x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      x = fmaxf(row_max, x);
      rescale = exp2_fast((row_max - x) * scale_log2);
      row_max = x;
    }
    return moves;
  }

  // Replaces the scores of a row by weights. Returns this thread's part of their sum.
  template <int ROW> DEVICE float exponentiate(float (&s)[SCORES], float scale_log2) {
    const float n = -(ROW ? max1 : max0) * scale_log2;
    float sum = 0.f;
#pragma unroll
    for (int i = 2 * ROW; i < SCORES; i += 4) {
#if BIAS_BITS || \
    SCALES_DIFFERENCES  // exact for large scores, whose product with the scale is rounded
      s[i] = exp2_fast((s[i] - (ROW ? max1 : max0)) * scale_log2);
      s[i + 1] = exp2_fast((s[i + 1] - (ROW ? max1 : max0)) * scale_log2);
#else
      s[i] = exp2_fast(fmaf(s[i], scale_log2, n)), s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, n));
#endif
      sum += s[i] + s[i + 1];
    }
    return sum;
  }

#if HAS_SOFTCAP
  // The same of scores that are still products of queries and keys, all of them small.
  template <int ROW> DEVICE float exponentiate_capped(float (&s)[SCORES], const SmallTanh& capped,
                                                      float scale_log2) {
    const float n = -(ROW ? max1 : max0) * scale_log2;
    float sum = 0.f;
#pragma unroll
    for (int i = 2 * ROW; i < SCORES; i += 4) {
      s[i] = exp2_fast(fmaf(s[i], capped.factor(s[i]), n));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], capped.factor(s[i + 1]), n));
      sum += s[i] + s[i + 1];
    }
    return sum;
  }
#endif

  DEVICE void add_sums(float partial0, float partial1) { sum0 += partial0, sum1 += partial1; }
  DEVICE void rescale_sums() { sum0 *= rescale0, sum1 *= rescale1; }

  template <int OUTPUTS> DEVICE void rescale_output(float (&o)[OUTPUTS]) const {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      o[i] *= rescale0, o[i + 1] *= rescale0;
      o[i + 2] *= rescale1, o[i + 3] *= rescale1;
    }
  }

  // Converts the scores of both rows to packed weights relative to the running max, which may move. Returns
  // whether it did.
  DEVICE bool make_weights(float (&s)[SCORES], u32 (&weights)[SCORES / 2], float scale_log2) {
    bool max_moved = update_max<0>(s, scale_log2);
    max_moved |= update_max<1>(s, scale_log2);
    const float partial0 = exponentiate<0>(s, scale_log2), partial1 = exponentiate<1>(s, scale_log2);
    if (max_moved) rescale_sums();
    add_sums(partial0, partial1);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) weights[i] = pack(s[2 * i], s[2 * i + 1]);
    return max_moved;
  }

  // Whether a row of this warp has no score yet.
  DEVICE bool has_uninitialised_max() const {
    return __any_sync(~0u, fminf(max0, max1) == UNINITIALISED_MAX);
  }

  // Scales down the weights of a row after they have been computed: moves the running max by the largest
  // partial sum of its four lanes.
  template <int ROW> DEVICE void lower_weights(float (&s)[SCORES], float scale_log2, float& partial) {
    float& row_max = ROW ? max1 : max0;
    float x = fmaxf(partial, __shfl_xor_sync(~0u, partial, 1));
    x = fmaxf(1.f, fmaxf(x, __shfl_xor_sync(~0u, x, 2)));
    const float factor = reciprocal_fast(x);
#pragma unroll
    for (int i = 2 * ROW; i < SCORES; i += 4) s[i] *= factor, s[i + 1] *= factor;
    partial *= factor, (ROW ? rescale1 : rescale0) = factor;
    row_max += log2_fast(x) / scale_log2;
  }

  // Keeps the compiler from moving what follows above the maxima.
  DEVICE void fence() { asm volatile("" : "+f"(max0), "+f"(max1), "+f"(rescale0), "+f"(rescale1)::"memory"); }

  // Sums over the four lanes of each row.
  DEVICE void reduce_sums() {
    sum0 += __shfl_xor_sync(~0u, sum0, 1), sum0 += __shfl_xor_sync(~0u, sum0, 2);
    sum1 += __shfl_xor_sync(~0u, sum1, 1), sum1 += __shfl_xor_sync(~0u, sum1, 2);
  }
};

// Returns the LSE (natural logarithm) of a finished row, and sets `inverse` to the factor that normalises its
// output. A sink is added to the sum only.
DEVICE float finish_row(float row_max, float sum, float scale_log2, bool has_sink, float sink,
                        float& inverse) {
#if BIAS_BITS
  constexpr bool IS_NATURAL = true;
#elif HAS_PROGRAM
  constexpr bool IS_NATURAL = PROGRAM_HAS_SCORE;
#else
  constexpr bool IS_NATURAL = false;
#endif
  float max2 = row_max * scale_log2, lse;
  if (IS_NATURAL) {
    max2 = fmaxf(max2, -3.4028235e38f);
    lse = sum == 0.f ? -INFINITE : row_max + log2_fast(sum) * LN2;
  } else {
    lse = sum == 0.f ? -INFINITE : (max2 + log2_fast(sum)) * LN2;
  }
  inverse = sum == 0.f ? 0.f : 1.f / sum;
  if (!has_sink || sink == -INFINITE) return lse;
  const float sink2 = sink * LOG2E;  // may be infinite; then the keys have no weight
  if (sum == 0.f) return sink;
  if (sink2 > max2) {
    const float factor = exp2_fast(max2 - sink2), total = 1.f + sum * factor;
    inverse = factor / total;
    return sink + log2_fast(total) * LN2;
  }
  const float total = sum + exp2_fast(sink2 - max2);
  inverse = 1.f / total;
  return (max2 + log2_fast(total)) * LN2;
}
