// After the products: sums in accumulator order and fp32 become rows of the input type, one CTA per block:
// those of dQ with ADDS_DQ, and of dK and dV with SPLITS_GROUP. Rows that are not finite are computed again,
// one at a time and without products by a weight of 0, as a NaN or Inf may have reached rows that do not
// attend it.
#include "backward_results.cuh"

// Whether a query attends a key.
DEVICE bool attends(const BackwardParams& p, int i, int j, int h, int b, int keys) {
  bool keep = j < keys;
#if HAS_RANGES
  const int2 range = p.ranges[range_row(p, h, b) * p.m_blocks * BLOCK_M + i];
  keep = keep && j >= range.x && j < range.y;
#elif HAS_WINDOW
  const int diagonal = i + keys - p.Sq;
  keep = keep && j >= diagonal - p.window_left && j <= diagonal + p.window_right;
#endif
#if HAS_MASK
  const unsigned char* bits = p.by_key.bits + b * p.by_key.b + h * p.by_key.h +
                              min(j, p.Sk - 1) * p.by_key.row + i / 64 * p.mask_block;
  keep = keep && bits[i % 64 / 8] >> i % 8 & 1;
#endif
  return keep;
}

// The factor of a row in a gradient: for dV the weight, of dO; for dQ and dK the gradient of the product, of
// K or Q.
DEVICE float factor_of(const BackwardParams& p, int tensor, int i, int j, int h, int b, int keys) {
  auto row = [&](int of, int head, int token) {
    return row_at(p.tensors[of], p.strides[of], b, head, token);
  };
  const long long at = (long long)(b * p.Hq + h) * p.m_blocks * BLOCK_M + i;
  const int of_keys = h / p.group;
  float s = dot(row(Q, h, i), row(K, of_keys, j), p.D), tanh_grad = 1.f;
#if HAS_SOFTCAP
  s = softcap_tanh(s * p.tanh_scale), tanh_grad = 1.f - s * s;
#endif
#if HAS_ALIBI
  s -= p.alibi[b * p.alibi_b + h] * p.alibi_unit * fabsf((float)(i + keys - p.Sq - j));
#endif
#if BIAS_BITS
  const float2 pair = to_floats(bias_pair(bias_row(p.bias, b, h, i), p.bias, j & ~1, 0));
  const float bias = j & 1 ? pair.y : pair.x;
  if (bias == -INFINITE) return 0.f;  // left out even if its score is NaN
  s = fmaf(s, p.bias.unit, bias);
#endif
  const float weight = exp2_fast(exponent(p, s, p.lse[at]));
  if (weight == 0.f) return 0.f;
  bool is_dropped = false;
  float delta = p.delta[at];
#if HAS_DROPOUT
  is_dropped =
      comparable_hash(p.dropout.row_seeds[at] + j * COLUMN_STEP, p.dropout.threshold) < p.dropout.threshold;
  delta *= p.dropout.kept;
#endif
  if (tensor == DV) return is_dropped ? 0.f : weight;
  const float dp = is_dropped ? 0.f : dot(row(GRAD_OUT, h, i), row(V, of_keys, j), p.Dv);
  return weight * (dp - delta) * tanh_grad;
}

// Executed by one warp: computes columns [FIRST, FIRST + 256) of a row of a gradient again if they are not
// finite; `h` is a head of that gradient. Each lane computes the factor of a pair and sums eight columns.
template <int FIRST>
__device__ __noinline__ void recompute_row(const BackwardParams& p, int tensor, int row, int h, int b) {
  const int lane = threadIdx.x & 31, column = FIRST + lane * 8, keys = keys_of(p, b);
  const bool has_columns = column < (tensor == DV ? p.Dv : p.D);
  uint4* const to = (uint4*)(row_at(p.tensors[tensor], p.strides[tensor], b, h, row) + column);
  float sum[8];
  auto read = [&](const uint4* from) {
    const uint4 x = *from;
    const float2 y[4] = {unpack(x.x), unpack(x.y), unpack(x.z), unpack(x.w)};
#pragma unroll
    for (int e = 0; e < 4; e++) sum[2 * e] = y[e].x, sum[2 * e + 1] = y[e].y;
  };
  auto is_nonfinite = [&] { return __any_sync(~0u, has_columns && probe(sum) != 0.f); };
  read(has_columns ? to : (const uint4*)row_at(p.tensors[tensor], p.strides[tensor], b, h, row));
  if (!is_nonfinite()) return;
#pragma unroll
  for (int e = 0; e < 8; e++) sum[e] = 0.f;
  const int others = tensor == DQ   ? K
                     : tensor == DK ? Q
                                    : GRAD_OUT,
            count = tensor == DQ ? keys : p.Sq, group = tensor == DQ ? 1 : p.group;
#pragma unroll 1
  for (int head = h * group; head < (h + 1) * group; head++) {
    const int others_head = tensor == DQ ? h / p.group : head;
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
      const int other = base + lane, i = tensor == DQ ? row : other, j = tensor == DQ ? other : row;
      const bool counts = other < count && attends(p, i, j, head, b, keys);
      const float factor = counts ? factor_of(p, tensor, i, j, head, b, keys) : 0.f;
      u32 left = __ballot_sync(~0u, factor != 0.f);  // true of a NaN
      if (left == 0) continue;
#pragma unroll 1
      for (; left; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const float f = __shfl_sync(~0u, factor, from);
        if (!has_columns) continue;
        const uint4 x = *(
            const uint4*)(row_at(p.tensors[others], p.strides[others], b, others_head, base + from) + column);
        const float2 y[4] = {unpack(x.x), unpack(x.y), unpack(x.z), unpack(x.w)};
#pragma unroll
        for (int e = 0; e < 4; e++) sum[2 * e] += f * y[e].x, sum[2 * e + 1] += f * y[e].y;
      }
      if (is_nonfinite()) return;
    }
  }
  const float unit = tensor != DV ? p.scale : HAS_DROPOUT ? p.dropout.scale : 1.f;
  if (has_columns)
    *to = make_uint4(pack(sum[0] * unit, sum[1] * unit), pack(sum[2] * unit, sum[3] * unit),
                     pack(sum[4] * unit, sum[5] * unit), pack(sum[6] * unit, sum[7] * unit));
}

// Executed by a CTA: the rows from `first` on, at most `count`, that exist.
DEVICE void recompute_rows(const BackwardParams& p, int tensor, int first, int count, int h, int b) {
  const int end = min(first + count, tensor == DQ ? p.Sq : p.Sk);
#pragma unroll 1
  for (int row = first + threadIdx.x / 32; row < end; row += 8) {
    recompute_row<0>(p, tensor, row, h, b);
    if constexpr (HEAD_DIM > 256) recompute_row<256>(p, tensor, row, h, b);
  }
}

// The rows of a word of `nonfinite`.
DEVICE void recompute_noted_rows(const BackwardParams& p, int note) {
  const int of_keys = key_notes(p), tensor = note < of_keys ? DK : note < 2 * of_keys ? DV : DQ;
  const int heads = tensor == DQ ? p.Hq : p.Hkv,
            rows = tensor == DQ ? p.m_blocks * BLOCK_M : p.n_blocks * BLOCK_N;
  const int at = (note - (tensor == DK   ? 0
                          : tensor == DV ? of_keys
                                         : 2 * of_keys)) *
                 ROWS_PER_NOTE,
            head = at / rows;
  recompute_rows(p, tensor, at - head * rows, ROWS_PER_NOTE, head % heads, head / heads);
}

// Converts ROWS x COLUMNS sums in accumulator order, of which each consumer has 64 rows, or all columns, or
// unless BY_ROWS half of them. Those of `parts` are added in order. A thread has eight columns of two rows,
// which four lanes of the consumer held. Returns whether a sum is not finite.
template <int ROWS, int COLUMNS, bool BY_ROWS>
DEVICE bool convert_sums(const float* sums, int parts, long long step, Element* to, long long row_step,
                         int rows, int columns, float scale) {
  constexpr int EIGHTS = BY_ROWS ? COLUMNS / 8 : COLUMNS / 16;  // of a consumer's columns
  constexpr int UNROLLED = ADDS_DQ ? 2 : 1;                     // enough loads in flight, little code
  const float4* const block = (const float4*)sums;
  float found = 0.f;
  constexpr int ALL = ROWS * COLUMNS / 16;
#pragma unroll UNROLLED
  for (int first = 0; first < ALL; first += 256) {
    if (ALL % 256 && first + (int)threadIdx.x >= ALL) break;
    const int e = first + threadIdx.x, c = e / (EIGHTS * 32), i = e % EIGHTS, four = e / EIGHTS % 32;
    const float4* const from = block + (c * EIGHTS + i) * 128 + four * 4;
    float4 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = from[j];
#pragma unroll 1
    for (int part = 1; part < parts; part++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 y = from[part * (step / 4) + j];
        x[j].x += y.x, x[j].y += y.y, x[j].z += y.z, x[j].w += y.w;
      }
#pragma unroll
    for (int j = 0; j < 4; j++) found += probe({x[j].x, x[j].y, x[j].z, x[j].w});
    const int row = (BY_ROWS ? c * 64 : 0) + four / 8 * 16 + four % 8,
              column = ((BY_ROWS ? 0 : c * EIGHTS) + i) * 8;
    uint4 low, high;
    low.x = pack(x[0].x * scale, x[0].y * scale), low.y = pack(x[1].x * scale, x[1].y * scale);
    low.z = pack(x[2].x * scale, x[2].y * scale), low.w = pack(x[3].x * scale, x[3].y * scale);
    high.x = pack(x[0].z * scale, x[0].w * scale), high.y = pack(x[1].z * scale, x[1].w * scale);
    high.z = pack(x[2].z * scale, x[2].w * scale), high.w = pack(x[3].z * scale, x[3].w * scale);
    if (column < columns && row < rows) *(uint4*)(to + row * row_step + column) = low;
    if (column < columns && row + 8 < rows) *(uint4*)(to + (row + 8) * row_step + column) = high;
  }
  return found != 0.f;
}

extern "C" __global__ void __launch_bounds__(256) postprocess(const __grid_constant__ BackwardParams p) {
  wait_for_prior_grid();
  // This CTA's words of `nonfinite`. The first are read now, beside the sums.
  const int notes = 2 * key_notes(p) + (SUMS_DQ ? 0 : p.B * p.Hq * p.m_blocks * (BLOCK_M / ROWS_PER_NOTE));
  const int each = (notes + gridDim.x - 1) / gridDim.x, end = min(notes, (int)(blockIdx.x + 1) * each);
  int note = blockIdx.x * each;
  bool is_noted = note + (int)threadIdx.x < end && p.nonfinite[note + threadIdx.x];

  bool is_nonfinite = false;
  [[maybe_unused]] int tensor = DQ, first = 0, h = 0, b = 0;
  [[maybe_unused]] int block = blockIdx.x;
  auto begin = [&](int blocks, int heads, int rows) {
    const int bh = block / blocks;
    first = (block - bh * blocks) * rows, b = bh / heads, h = bh - b * heads;
    return (Element*)row_at(p.tensors[tensor], p.strides[tensor], b, h, first);
  };
#if ADDS_DQ && !WHOLE_HEADS
  const int query_blocks = p.m_blocks * p.B * p.Hq;
  if (block < query_blocks) {
    Element* const to = begin(p.m_blocks, p.Hq, BLOCK_M);
    const float* const sums = p.sums + (long long)block * (BLOCK_M * SUM_FEATURES);
    constexpr bool BY_ROWS = ALTERNATES || BLOCK_M == 128;
    is_nonfinite = convert_sums<BLOCK_M, SUM_FEATURES, BY_ROWS>(sums, 1, 0, to, p.strides[DQ].s,
                                                                p.Sq - first, p.D, p.scale);
  }
  block -= query_blocks;
#endif
#if SPLITS_GROUP
  if (block >= 0) {
    tensor = block & 1 ? DV : DK, block /= 2;
    Element* const to = begin(p.n_blocks, p.Hkv, BLOCK_N);
    const int parts = ADDS_DQ ? 1 : p.parts;
    const long long step = (long long)p.n_blocks * KEY_SUMS;
    const float* const sums =
        p.key_sums + (b * p.Hkv + h) * parts * step + (long long)(first / BLOCK_N) * KEY_SUMS;
    if (tensor == DK)
      is_nonfinite = convert_sums<BLOCK_N, HEAD_FEATURES, true>(sums, parts, step, to, p.strides[DK].s,
                                                                p.Sk - first, p.D, p.scale);
    else
      is_nonfinite = convert_sums<BLOCK_N, VALUE_FEATURES, true>(sums + BLOCK_N * HEAD_FEATURES, parts, step,
                                                                 to, p.strides[DV].s, p.Sk - first, p.Dv,
                                                                 HAS_DROPOUT ? p.dropout.scale : 1.f);
  }
#endif
  if (!__syncthreads_or(is_nonfinite || is_noted || note + 256 < end)) return;
  if (__syncthreads_or(is_nonfinite))
    recompute_rows(p, tensor, first, tensor == DQ ? BLOCK_M : BLOCK_N, h, b);
  __shared__ u32 found[8];  // a bit for each word
#pragma unroll 1
  for (; note < end; note += 256) {
    is_noted = note + (int)threadIdx.x < end && p.nonfinite[note + threadIdx.x];
    const u32 bits = __ballot_sync(~0u, is_noted);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 8; i++)
#pragma unroll 1
      for (u32 x = found[i]; x; x &= x - 1) recompute_noted_rows(p, note + i * 32 + __ffs(x) - 1);
    __syncthreads();
  }
}
