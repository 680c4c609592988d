// Rows of the backward pass that one warp computes: their statistics before the products, and gradients that
// are not finite behind them.
//
// Compile-time: what backward_tiles.cuh has, HEAD_DIM VALUE_DIM HAS_KV_LENS HAS_SOFTCAP HAS_DROPOUT
#pragma once
#include "backward_tiles.cuh"

// The statistics: delta, and the LSE in log2 units.

// Scores beyond this are larger than float32 can resolve to 1.
constexpr float UNRESOLVED = 1 << 24;

// The LSE as the kernels read it. Rounding errors of scores beyond UNRESOLVED could make weights overflow, so
// their LSE is increased and their weights vanish instead.
DEVICE float lse_of(float lse) {
  if (lse == -INFINITE) return INFINITE;
#if BIAS_BITS  // differences are exact
  return lse;
#else
  const float x = lse * LOG2E;
  return fabsf(x) < UNRESOLVED ? x : x + fabsf(x) * (1.f / (1 << 21));
#endif
}

constexpr int ROW_LANES = VALUE_DIM == 64 ? 8 : VALUE_DIM == 128 ? 16 : 32;  // with eight features each

// Writes delta = rowsum(dO * O) - dlse and the LSE (+inf for rows without keys) of ROWS rows of a head from
// `first` on, as the preprocess kernel of FlashAttention-2. Executed by one warp. No load is inside a branch,
// so that all loads are in flight at once; a lane reads and writes the statistics of one row.
template <int ROWS> DEVICE void write_row_sums(const BackwardParams& p, int b, int h, int first) {
  constexpr int STEP_ROWS = 32 / ROW_LANES, STEPS = ROWS / STEP_ROWS;
  static_assert(STEPS <= ROW_LANES, "a lane for each row");
  const int lane = threadIdx.x & 31, place = lane % ROW_LANES, feature = place * 8,
            there = feature < p.Dv ? feature : 0;
  const long long head = b * p.Hq + h;
  first += lane / ROW_LANES;
  const int own = first + place * STEP_ROWS;
  const long long at = head * p.Sq + min(own, p.Sq - 1);
  const float lse = own < p.Sq ? p.saved_lse[at] : -INFINITE, grad_lse = p.grad_lse ? p.grad_lse[at] : 0.f;
  const Element* x = row_at(p.out, p.out_strides, b, h, 0) + there;
  const Element* y = row_at(p.tensors[GRAD_OUT], p.strides[GRAD_OUT], b, h, 0) + there;
  float sum[STEPS];  // one for each row of these lanes
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int row = min(first + i * STEP_ROWS, p.Sq - 1);
    const float found = dot8(x + row * p.out_strides.s, y + row * p.strides[GRAD_OUT].s);
    sum[i] = feature < p.Dv ? found : 0.f;
#if VALUE_DIM > 256
    if (feature + 256 < p.Dv)
      sum[i] += dot8(x + row * p.out_strides.s + 256, y + row * p.strides[GRAD_OUT].s + 256);
#endif
  }
  float own_sum = 0.f;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int w = ROW_LANES / 2; w; w >>= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], w);
    if (place == i) own_sum = sum[i];
  }
  if (place >= STEPS) return;
  const long long to = head * (p.m_blocks * BLOCK_M) + own;
#if HAS_PROGRAM && PROGRAM_HAS_OFFSET  // of the scores that the kernels compute
  p.lse[to] = lse == -INFINITE ? INFINITE : lse_of(lse - program_offset(p.program.inputs, b, h, own));
#else
  p.lse[to] = lse_of(lse);
#endif
  p.delta[to] = lse == -INFINITE ? 0.f : own_sum - grad_lse;
}

// Rows of gradients that are not finite are recomputed one at a time and without multiplying by weights of 0,
// since a NaN or Inf may have reached rows that do not attend it.

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
#if HAS_PROGRAM
  if (PROGRAM_HAS_MASK && keep) {
    const ProgramTile t = program_tile(p.program.inputs, b, h);
    keep = program_keeps(t, program_row(t, i), program_column(t, j), program_block(t, i, j), 0, 0);
  }
#endif
  return keep;
}

// The factor of one pair in a gradient: for dV the weight, which multiplies dO; for dQ and dK the gradient of
// the score product, which multiplies K or Q.
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
#if HAS_PROGRAM
  if (PROGRAM_HAS_SCORE) {
    const ProgramTile t = program_tile(p.program.inputs, b, h);
    const ProgramBlock x = program_block(t, i, j);
    tanh_grad = program_slope(t, program_row(t, i), program_column(t, j), x, 0, 0, s);
    s = program_score(t, program_row(t, i), program_column(t, j), x, 0, 0, s);
  }
#endif
#if HAS_ALIBI
  const Alibi alibi = alibi_of(p, h, b, keys - p.Sq, p.positions, i);
  s -= alibi.slope * fabsf((float)(i + alibi.shift - j));
#endif
#if BIAS_BITS
  const float2 pair = to_floats(bias_pair(bias_row(p.bias, b, h, i), p.bias, j & ~1, 0));
  const float bias = j & 1 ? pair.y : pair.x;
  if (bias == -INFINITE) return 0.f;  // masked out even if its score is NaN
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

// Inlined with WHOLE_HEADS, where it is called once: a function call would reserve registers that the
// kernel's loops need.
#if WHOLE_HEADS
#define RECOMPUTES DEVICE
#else
#define RECOMPUTES __device__ __noinline__
#endif

// Recomputes columns [FIRST, FIRST + 256) of a row of a gradient if they are not finite; `h` is a head of
// that gradient. Executed by one warp: each lane computes the factor of one pair and sums eight columns.
template <int FIRST>
RECOMPUTES void recompute_row(const BackwardParams& p, int tensor, int row, int h, int b) {
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
      u32 left = __ballot_sync(~0u, factor != 0.f);  // true for NaN
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

// Recomputes the existing rows among `count` rows from `first` on. Executed by eight warps.
DEVICE void recompute_rows(const BackwardParams& p, int tensor, int first, int count, int h, int b) {
  const int end = min(first + count, tensor == DQ ? p.Sq : p.Sk);
#pragma unroll 1
  for (int row = first + threadIdx.x / 32 % 8; row < end; row += 8) {
    recompute_row<0>(p, tensor, row, h, b);
    if constexpr (HEAD_DIM > 256) recompute_row<256>(p, tensor, row, h, b);
  }
}
