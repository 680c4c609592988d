// Epilogue of the forward kernel: normalises a consumer's rows, writes output and LSE, and recomputes the
// rows whose fast result is unusable.
#pragma once
#include "forward_scores.cuh"

struct EpilogueConsumer : ScoreConsumer {
  using ScoreConsumer::ScoreConsumer;

  // Recomputes rows that have overflowed or contain values that are not finite; a probe is nonzero if this
  // thread's part of the row does. Executed by one warp, whose first row is `top`.
  DEVICE void replace_unusable_rows(const Tile& tile, int top, const u32 (&probes)[2]) const {
    const bool overflowed0 = has_overflowed(p, softmax.max0, softmax.sum0);
    const bool overflowed1 = has_overflowed(p, softmax.max1, softmax.sum1);
    const u32 unusable = vote_rows(overflowed0 || probes[0], overflowed1 || probes[1]);
    const u32 existing = (1u << warp_uniform(max(0, min(16, existing_rows(p, tile, top))))) - 1;
    if (unusable & existing)
      replace_rows(p, tile, top, unusable & existing, vote_rows(overflowed0, overflowed1));
  }

  // Writes the normalised output and the LSE of this consumer's rows.
  DEVICE void finish() {
    const Tile packed = load_tile(slot_at<WORK_ITEM_BYTES>(
        sm.work, work.stage));  // loaded again here to save registers until now
    mbar_arrive(barrier(sm.work_empty, work.stage));
    softmax.reduce_sums();
    const int first = packed.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
    u32 probes[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = query_of(first + 8 * r);
      const Tile tile = tile_of_row(packed, first + 8 * r);
      float inverse;
      const float row_max = r ? softmax.max1 : softmax.max0, sum = r ? softmax.sum1 : softmax.sum0;
      const float lse = finish_row(p, tile, row_max, sum, inverse);
      if ((lane & 3) == 0 && p.lse && row_exists(p, packed, first + 8 * r)) write_lse(p, tile, row, lse);
      Output* to = output_row(p, tile, row);
#if SPLITS_KEYS
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 4) {
        const int column = i / 4 * 8 + (lane & 3) * 2;
        const float x = o[i] * inverse, y = o[i + 1] * inverse;
        add_times_zero(probes[r], pack(x, y));
        if (row_exists(p, packed, first + 8 * r) && column < p.Dv) write_columns(to, column, x, y);
      }
#else
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 16) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          x[j] = 0;
          if (i + 4 * j >= OUTPUTS) continue;
          x[j] = pack(o[i + 4 * j] * inverse, o[i + 4 * j + 1] * inverse);
          add_times_zero(probes[r], x[j]);
        }
        transpose_quad(x);
        const int column = (i / 4 + (lane & 3)) * 8;
        if (row_exists(p, packed, first + 8 * r) && column < p.Dv)
          *(uint4*)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
#endif
    }
    bool is_usual = fminf(softmax.sum0, softmax.sum1) > 0.f && fmaxf(softmax.sum0, softmax.sum1) < INFINITE;
    if (!BIAS_BITS)
      is_usual =
          is_usual && fmaxf(fabsf(softmax.max0), fabsf(softmax.max1)) * p.scale_log2 <= MAX_EXACT_SCORE;
    if (__any_sync(~0u, (probes[0] | probes[1]) != 0 || !is_usual))
      replace_unusable_rows(packed, first - (lane >> 2), probes);
  }
};
