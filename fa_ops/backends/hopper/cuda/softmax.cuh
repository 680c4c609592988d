// Online softmax on wgmma accumulators: a thread holds two rows, elements 4i, 4i+1 of the first and 4i+2, 4i+3 of the second.

constexpr float NEVER = -1e30f;  // below every score and finite, so that a row with nothing yet needs no special case

template <int R> struct Softmax {
  float max0, max1, sum0, sum1;      // running maximum (unscaled scores) and this thread's share of the sum
  float rescale0, rescale1;          // what the output so far must be multiplied with

  DEVICE void reset() { max0 = max1 = NEVER, sum0 = sum1 = 0.f; }

  // Replaces scores by weights.
  DEVICE void update(float (&s)[R], float scale_log2) {
    float x0 = s[0], x1 = s[2];
#pragma unroll
    for (int i = 0; i < R; i += 4) x0 = fmaxf(x0, fmaxf(s[i], s[i + 1])), x1 = fmaxf(x1, fmaxf(s[i + 2], s[i + 3]));
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)), x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2));
    x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
    x0 = fmaxf(max0, x0), x1 = fmaxf(max1, x1);
    rescale0 = exp2_fast((max0 - x0) * scale_log2), rescale1 = exp2_fast((max1 - x1) * scale_log2);
    max0 = x0, max1 = x1;
    const float n0 = -x0 * scale_log2, n1 = -x1 * scale_log2;
    float t0 = 0.f, t1 = 0.f;
#pragma unroll
    for (int i = 0; i < R; i += 4) {
      s[i] = exp2_fast(fmaf(s[i], scale_log2, n0)), s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, n0));
      s[i + 2] = exp2_fast(fmaf(s[i + 2], scale_log2, n1)), s[i + 3] = exp2_fast(fmaf(s[i + 3], scale_log2, n1));
      t0 += s[i] + s[i + 1], t1 += s[i + 2] + s[i + 3];
    }
    sum0 = sum0 * rescale0 + t0, sum1 = sum1 * rescale1 + t1;
  }

  DEVICE void reduce() {
    sum0 += __shfl_xor_sync(~0u, sum0, 1), sum0 += __shfl_xor_sync(~0u, sum0, 2);
    sum1 += __shfl_xor_sync(~0u, sum1, 1), sum1 += __shfl_xor_sync(~0u, sum1, 2);
  }
};

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// Natural-log LSE of a finished row, and in `inverse` what its output must be multiplied with. The sink joins the sum only.
DEVICE float finish_row(float row_max, float sum, float scale_log2, bool has_sink, float sink, float& inverse) {
  const float m2 = row_max * scale_log2;
  if (has_sink) {
    const float sink2 = sink * LOG2E, top = sum > 0.f ? fmaxf(m2, sink2) : sink2;
    const float total = (sum > 0.f ? sum * exp2_fast(m2 - top) : 0.f) + exp2_fast(sink2 - top);
    inverse = sum > 0.f ? exp2_fast(m2 - top) / total : 0.f;
    return (top + log2_fast(total)) * LN2;
  }
  inverse = sum == 0.f ? 0.f : 1.f / sum;
  return sum == 0.f ? -__int_as_float(0x7f800000) : (m2 + log2_fast(sum)) * LN2;
}
