// After the products: converts fp32 sums in accumulator order to rows of the input type, one CTA per block:
// dQ with ADDS_DQ, dK and dV with SPLITS_GROUP. Recomputes rows that are not finite.
#include "backward_rows.cuh"

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
  constexpr int UNROLLED = ADDS_DQ ? 2 : 1;                     // enough loads in flight without much code
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
  const int notes = 2 * key_notes(p) + (ADDS_DQ ? 0 : p.B * p.Hq * p.m_blocks * (BLOCK_M / ROWS_PER_NOTE));
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
#if ADDS_DQ
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
  __shared__ u32 found[8];  // one bit for each word
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
