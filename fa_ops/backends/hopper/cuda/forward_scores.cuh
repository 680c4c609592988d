// The state of a forward consumer, and the operations on its scores between the two products: softcap, ALiBi,
// masks, bias and dropout.
#pragma once
#include "forward_shared.cuh"
#include "forward_rows.cuh"
#include "query_slots.cuh"

struct ScoreConsumer {
  const ForwardParams& p;
  const ForwardShared& sm;
  const int c, tid, lane;
  PipelineState<2> work;
  u32 queries;  // the descriptor of this work item's queries
  PipelineState<STAGES> k, v;
  PipelineState<1> helper;  // the pipeline of the mask or the bias
  float s[SCORES], o[OUTPUTS];
  u32 weights[SCORES / 2];
  Softmax<SCORES> softmax;
  KeyRange range0, range1;    // the keys of this thread's two rows
  u32 existing_copies;        // one bit for each copy of the block, set if its page exists
  u32 current;                // with SKIPS_TILES: the word that the producer published for this step
  bool max_is_uninitialised;  // in some row of this warp; then the next step must not speculate
#if HAS_ALIBI
  AlibiRows alibi;
#endif

  DEVICE ScoreConsumer(const ForwardParams& p, const ForwardShared& sm, int c)
      : p(p), sm(sm), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31) {}

  DEVICE int column(int block, int i) const {
    return block * BLOCK_N + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
  }

  // Whether the mask keeps all of this step's block, so that no helper warp loads it.
  DEVICE bool mask_is_full() const { return SKIPS_TILES && step_is_full(current); }

#if HAS_MASK
  // Applies a mask whose rows have 128 bits; this thread uses two of every eight.
  DEVICE void apply_mask() {
    if (mask_is_full()) return;
    const u32 at = slot_at<MASK_BYTES>(sm.mask, c) + ((tid >> 5) * 16 + (lane >> 2)) * 16;
    mbar_wait(barrier(sm.helper_full, c), helper.phase);
    int4 x[2] = {load_shared<int4>(at), load_shared<int4>(at + 8 * 16)};
    mbar_arrive(barrier(sm.helper_empty, c));
    helper.next();
    const u32 words[2][4] = {{(u32)x[0].x, (u32)x[0].y, (u32)x[0].z, (u32)x[0].w},
                             {(u32)x[1].x, (u32)x[1].y, (u32)x[1].z, (u32)x[1].w}};
    constexpr int WORDS = (BLOCK_N + 31) / 32;
    bool all = true;
#pragma unroll
    for (int w = 0; w < WORDS; w++)
      all = all && (words[0][w] & words[1][w]) == (w * 32 + 32 <= BLOCK_N ? ~0u : (1u << BLOCK_N % 32) - 1);
    if (__all_sync(~0u, all)) return;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const u32 bits = words[i >> 1 & 1][i >> 4] >> (lane & 3) * 2;
      if (!(bits & 1u << ((i >> 2 & 3) * 8 + (i & 1)))) s[i] = -INFINITE;
    }
  }
#endif

#if BIAS_BITS
  // Converts the scores from accumulator units to those of the bias, and adds it.
  DEVICE void add_bias() {
    if (mask_is_full()) {
#pragma unroll
      for (int i = 0; i < SCORES; i++) s[i] *= p.bias.unit;
      return;
    }
    mbar_wait(barrier(sm.helper_full, c), helper.phase);
    add_bias_tile<false>(s, slot_at<BIAS_BYTES>(sm.bias, c), 0, p.bias.unit);
    // Reads may still be in flight, and where products keep shared memory busy the next copy would overtake
    // them.
    fence_async_shared();
    mbar_arrive(barrier(sm.helper_empty, c));
    helper.next();
  }
#endif

  // All operations between the product of the scores and the softmax.
  DEVICE void modify_scores(int block, const BlockRange& n) {
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = softcap_tanh(s[i] * p.tanh_scale);
#endif
#if HAS_ALIBI
    const AlibiBlock x = alibi.block(column(block, 0));
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = x.lowered(s[i], i);
#endif
#if HAS_MASK
    apply_mask();
#endif
#if BIAS_BITS
    add_bias();
#endif
#if IS_PAGED
    if (existing_copies != (1u << BLOCK_N / COPY_KEYS) - 1)
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!(existing_copies & 1u << (i >> 2) * 8 / COPY_KEYS)) s[i] = -INFINITE;
#endif
    if (block >= n.full_end || block < n.full_begin)
      mask_by_position(s, column(block, 0), range0, range1);
  }

#if HAS_DROPOUT
  static constexpr int EARLY_ROWS = 1;  // of a thread's two rows, those hashed early by `find_dropped`
  u32 row_seeds[2], dropped[2];         // dropped: one bit for each weight of a row

  DEVICE void read_row_seeds(const Tile& tile, int row) {
    const u32* seeds = p.dropout.row_seeds + (long long)(tile.b * p.Hq + tile.h) * p.dropout.rows;
#pragma unroll
    for (int r = 0; r < 2; r++) row_seeds[r] = seeds[min(row + 8 * r, p.Sq - 1)];
  }

  // The hash input of the `i`-th weight of a row.
  DEVICE u32 hash_input(int row, int block, int i) const {
    return row_seeds[row] + column(block, 0) * COLUMN_STEP + ((i >> 1) * 8 + (i & 1)) * p.dropout.column_step;
  }
#endif

  // Computes hashes while the product of the scores runs: only as many as it hides, since keeping more
  // results costs more than computing them at their use. `arrived` is a barrier whose phase is already
  // complete: ptxas keeps code between two waits in place if the second wait depends on it. `rows` is a
  // multiple of 64, so the amount added to the barrier's address is 0.
  DEVICE void find_dropped([[maybe_unused]] int block, [[maybe_unused]] u32 arrived,
                           [[maybe_unused]] u32 phase) {
#if HAS_DROPOUT
    mbar_wait(arrived, phase);
    asm volatile("" : "+r"(row_seeds[0]), "+r"(row_seeds[1])::"memory");
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < EARLY_ROWS; r++) {
      u32 found[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < SCORES / 2; i++)
        note_dropped(found[i & 1], i, hash_input(r, block, i), p.dropout.threshold);
      dropped[r] = found[0] | found[1];
      any |= dropped[r];
    }
    mbar_wait(arrived + (any & p.dropout.rows & 1), phase);
#endif
  }

  // Zeroes the dropped weights of a row, after the row has been summed, by multiplication, whose pipe is less
  // busy than that of selects.
  template <int ROW> DEVICE void drop([[maybe_unused]] int block) {
#if HAS_DROPOUT
    const u32 threshold = p.dropout.threshold;
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
      float& weight = s[(i >> 1) * 4 + ROW * 2 + (i & 1)];
      if (ROW < EARLY_ROWS)
        asm("{ .reg .pred q; .reg .b32 bit; and.b32 bit, %1, %2; setp.ne.u32 q, bit, 0; "
            "@q mul.f32 %0, %0, 0f00000000; }"
            : "+f"(weight)
            : "r"(dropped[ROW]), "r"(1u << i));
      else
        asm("{ .reg .pred q; setp.lo.u32 q, %1, %2; @q mul.f32 %0, %0, 0f00000000; }"
            : "+f"(weight)
            : "r"(comparable_hash(hash_input(ROW, block, i), threshold)), "r"(threshold));
    }
#endif
  }
};
