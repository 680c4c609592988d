// The state of a consumer of the 8-bit forward kernel, and its epilogue.
#pragma once
#include "quantized_rows.cuh"
#include "quantized_softmax.cuh"

struct QuantizedEpilogue {
  const QuantizedParams& p;
  const QuantizedShared& sm;
  const int c, tid, lane;
  PipelineState<2> work;
  float t[PRODUCTS];  // accumulators of the last blocks: weights times values, and times ones
  float sums[2];      // row sums: this thread's part, or complete with SUMS_BY_PRODUCT
  QuantizedSoftmax softmax;
#if HEAD_SCALES
  float value_scale;
#else
  float2 channel_scales[OUTPUTS / 4];  // value scales of the channels of this thread
#endif
  float offset[2];                     // the constant missing from the scores of each row

  DEVICE QuantizedEpilogue(const QuantizedParams& p, const QuantizedShared& sm, int c)
      : p(p), sm(sm), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31) {}

  // Loads the value scales and offsets from global memory while the last products run.
  DEVICE void load_factors() {
    const Tile tile = work_tile();
    const float* v_scale =
        p.v_scale + (long long)(batch_row(p, tile) * (p.Hq / p.group) + tile.h / p.group) * p.Dv;
#if HEAD_SCALES
    value_scale = *v_scale;
#else
#pragma unroll
    for (int i = 0; i < OUTPUTS / 4; i++)
      channel_scales[i] = *(const float2*)(v_scale + 8 * i + (lane & 3) * 2);
#endif
#pragma unroll
    for (int r = 0; r < 2; r++) offset[r] = p.offset ? p.offset[lse_at(tile, r)] : 0.f;
  }

  DEVICE float2 scale_of_channels([[maybe_unused]] int i) const {
#if HEAD_SCALES
    return make_float2(value_scale, value_scale);
#else
    return channel_scales[i];
#endif
  }

  DEVICE Tile work_tile() const { return load_tile(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage)); }
  DEVICE int row_of(const Tile& tile, int r) const {
    return tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2) + 8 * r;
  }
  DEVICE long long lse_at(const Tile& tile, int r) const {
    return first_row(p, tile) + min(row_of(tile, r), queries_of(p, tile) - 1);
  }

  // Writes the LSE of a row and returns the factor that normalises its output.
  DEVICE float finish_one_row(const Tile& tile, int r) const {
    float sum = sums[r], inverse;
    if (!SUMS_BY_PRODUCT) sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
    sum *= 1.f / UNIT_WEIGHT;
#if HAS_SINKS
    const bool has_sink = !PACKS_SEQUENCES || is_in_sequence(p, tile);  // others have none
    const float lse = finish_row(softmax.max[r], sum, 1.f, has_sink, p.sinks[tile.h] - offset[r], inverse);
#else
    const float lse = finish_row(softmax.max[r], sum, 1.f, false, 0.f, inverse);
#endif
    if ((lane & 3) == 0 && p.lse && row_of(tile, r) < queries_of(p, tile))
      p.lse[lse_at(tile, r)] = lse + offset[r];
    return inverse * (1.f / UNIT_WEIGHT);
  }

  // Writes the normalised output and the LSE of this consumer's rows.
  DEVICE void finish() {
    const Tile tile = work_tile();  // loaded again here to save registers until now
    mbar_arrive(barrier(sm.work_empty, work.stage));
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = row_of(tile, r);
      const float inverse = finish_one_row(tile, r);
      Element* to = p.out + ((first_token(p, tile) + row) * p.Hq + tile.h) * p.Dv;
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 16) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int at = i + 4 * j;
          x[j] = 0;
          if (at >= OUTPUTS) continue;
          const float2 scale = scale_of_channels(at / 4);
          x[j] = pack(t[at] * inverse * scale.x, t[at + 1] * inverse * scale.y);
        }
        transpose_quad(x);
        const int column = (i / 4 + (lane & 3)) * 8;
        if (row < queries_of(p, tile) && column < VALUE_FEATURES)
          *(uint4*)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
};
