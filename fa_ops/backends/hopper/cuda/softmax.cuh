// Online softmax on wgmma accumulators: a thread holds two rows, elements 4i, 4i+1 of the first and 4i+2, 4i+3 of the second.

// Below every score and finite, so that a row with nothing yet needs no special case.
#if BIAS_BITS
constexpr float NEVER = -3.4028235e38f;  // what masks are filled with is a score too
#else
constexpr float NEVER = -1e30f;
#endif

template <int R> struct Softmax {
  float max0, max1, sum0, sum1;      // running maximum (unscaled scores) and this thread's share of the sum
  float rescale0, rescale1;          // what the output so far must be multiplied with

  DEVICE void reset() { max0 = max1 = NEVER, sum0 = sum1 = 0.f; }

  // A row's part of a step in two halves. The first: whether its reference moves, as a weight would pass 2^SLACK, and what that makes of
  // everything so far. Its four lanes look for such a weight each among their own, and compare only if there is one in their warp.
  template <int ROW> DEVICE bool raise(const float (&s)[R], float scale_log2) {
    float& row_max = ROW ? max1 : max0;
    float& rescale = ROW ? rescale1 : rescale0;
    float found[4];  // of every fourth pair: not a chain of comparisons that wait for each other
#pragma unroll
    for (int i = 0; i < R / 4; i++) {
      const float pair = fmaxf(s[4 * i + 2 * ROW], s[4 * i + 2 * ROW + 1]);
      found[i % 4] = i < 4 ? pair : fmaxf(found[i % 4], pair);
    }
    float x = fmaxf(fmaxf(found[0], found[1]), fmaxf(found[2], found[3]));
    rescale = 1.f;
    const bool raised = __any_sync(~0u, (x - row_max) * scale_log2 > SLACK);
    if (raised) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)), x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      x = fmaxf(row_max, x);
      rescale = exp2_fast((row_max - x) * scale_log2);
      row_max = x;
    }
    return raised;
  }

  // The second: its scores become weights. Returns this thread's share of their sum.
  template <int ROW> DEVICE float weigh(float (&s)[R], float scale_log2) {
    const float n = -(ROW ? max1 : max0) * scale_log2;
    float t = 0.f;
#pragma unroll
    for (int i = 2 * ROW; i < R; i += 4) {
#if BIAS_BITS || SCALES_DIFFERENCES  // exact where scores are so far from 0 that a product with them is not
      s[i] = exp2_fast((s[i] - (ROW ? max1 : max0)) * scale_log2), s[i + 1] = exp2_fast((s[i + 1] - (ROW ? max1 : max0)) * scale_log2);
#else
      s[i] = exp2_fast(fmaf(s[i], scale_log2, n)), s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, n));
#endif
      t += s[i] + s[i + 1];
    }
    return t;
  }

  // To the sums so far.
  DEVICE void add(float share0, float share1) { sum0 += share0, sum1 += share1; }
  DEVICE void rescale_sums() { sum0 *= rescale0, sum1 *= rescale1; }

  // Whether the reference of a row of this warp is of no score yet.
  DEVICE bool is_blind() const { return __any_sync(~0u, fminf(max0, max1) == NEVER); }

  // Weights of which lanes have such shares become small: the reference moves by as much as the largest share is.
  template <int ROW> DEVICE void lower(float (&s)[R], float scale_log2, float& share) {
    float& row_max = ROW ? max1 : max0;
    float x = fmaxf(share, __shfl_xor_sync(~0u, share, 1));
    x = fmaxf(1.f, fmaxf(x, __shfl_xor_sync(~0u, x, 2)));
    const float factor = reciprocal_fast(x);
#pragma unroll
    for (int i = 2 * ROW; i < R; i += 4) s[i] *= factor, s[i + 1] *= factor;
    share *= factor, (ROW ? rescale1 : rescale0) = factor;
    row_max += log2_fast(x) / scale_log2;
  }

  DEVICE void pin() { asm volatile("" : "+f"(max0), "+f"(max1), "+f"(rescale0), "+f"(rescale1)::"memory"); }

  DEVICE void reduce() {
    sum0 += __shfl_xor_sync(~0u, sum0, 1), sum0 += __shfl_xor_sync(~0u, sum0, 2);
    sum1 += __shfl_xor_sync(~0u, sum1, 1), sum1 += __shfl_xor_sync(~0u, sum1, 2);
  }
};

// Natural-log LSE of a finished row, and in `inverse` what its output must be multiplied with. The sink joins the sum only.
DEVICE float finish_row(float row_max, float sum, float scale_log2, bool has_sink, float sink, float& inverse) {
#if BIAS_BITS
  const float m2 = fmaxf(row_max * scale_log2, NEVER);
  const float lse = sum == 0.f ? -INFINITE : row_max + log2_fast(sum) * LN2;
#else
  const float m2 = row_max * scale_log2;
  const float lse = sum == 0.f ? -INFINITE : (m2 + log2_fast(sum)) * LN2;
#endif
  inverse = sum == 0.f ? 0.f : 1.f / sum;
  if (!has_sink || sink == -INFINITE) return lse;
  const float sink2 = sink * LOG2E;  // may be infinite: then the keys have no weight
  if (sum == 0.f) return sink;
  if (sink2 > m2) {
    const float factor = exp2_fast(m2 - sink2), total = 1.f + sum * factor;
    inverse = factor / total;
    return sink + log2_fast(total) * LN2;
  }
  const float total = sum + exp2_fast(sink2 - m2);
  inverse = 1.f / total;
  return (m2 + log2_fast(total)) * LN2;
}

// Of four lanes with a word each of four runs of 8 columns, each gets one run.
DEVICE void gather(u32 (&x)[4]) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(~0u, lane & 1 ? x[i] : x[i + 1], 1);
    x[i] = lane & 1 ? got : x[i], x[i + 1] = lane & 1 ? x[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 got = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
    x[i] = lane & 2 ? got : x[i], x[i + 2] = lane & 2 ? x[i + 2] : got;
  }
}
