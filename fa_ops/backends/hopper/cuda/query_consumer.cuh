// The backward consumer that computes dQ for 64 queries. Scores and their gradients are recomputed with one
// row per query, and the gradients are the register operand of the product for dQ.
#pragma once
#include "backward.cuh"
#include "wgmma.cuh"

constexpr int ROW_SCORES = QUERY_BLOCK_N / 2;
constexpr u32 CONSUMER_Q_BYTES = ROWS * HEAD_DIM * 2, CONSUMER_DO_BYTES = ROWS * VALUE_DIM * 2;
constexpr u32 KEYS_BYTES = QUERY_BLOCK_N * HEAD_DIM * 2;
static_assert(VALUE_DIM <= HEAD_DIM, "a slot holds either");
static_assert(QUERY_BLOCK_N % 64 == 0, "whole words of a mask's bits, and of those that are dropped");

// Offsets in shared memory, in order.
struct QueryShared {
  u32 q, grad_out, slots, queries_full, full, empty, end;

  DEVICE constexpr explicit QueryShared(u32 base)
      : q(base),
        grad_out(q + CONSUMERS * CONSUMER_Q_BYTES),
        slots(grad_out + CONSUMERS * CONSUMER_DO_BYTES),
        queries_full(slots + QUERY_STAGES * KEYS_BYTES),
        full(queries_full + 8 * CONSUMERS),
        empty(full + 8 * QUERY_STAGES),
        end(empty + 8 * QUERY_STAGES) {}
};
constexpr QueryShared QUERY_LAYOUT(0);

// The range of blocks that any consumer visits; `t` is the CTA's first block of queries.
DEVICE KeyBlocks all_keys_of(const BackwardParams& p, QueryBlock t) {
  KeyBlocks all = {0, 0};
  for (int c = 0; c < CONSUMERS; c++, t.m++) {
    const KeyBlocks n = keys_of(keys_of_block(p, t));
    if (n.first == n.end) continue;
    all.first = all.first == all.end ? n.first : min(all.first, n.first), all.end = max(all.end, n.end);
  }
  return all;
}

struct QueryConsumer {
  const BackwardParams& p;
  const QueryShared& sm;
  const QueryBlock t;
  const QueryBlockKeys span;
  const int c, tid, lane;
  PipelineState<QUERY_STAGES> ring;
  u32 operand_barrier = 0;  // the barrier that releases the operands of the product in flight
  float s[ROW_SCORES], dp[ROW_SCORES], dq[HEAD_FEATURES / 2];
  u32 ds[ROW_SCORES / 2];
  float lse[2], delta[2];
  int2 range[2];  // keys that this thread's two rows attend
#if HAS_ALIBI
  AlibiRows alibi;
#endif
  bool is_full = false;  // with SKIPS_TILES: the mask keeps all of this step's block
#if HAS_MASK
  u64 kept[2][QUERY_BLOCK_N / 64];  // one bit for each key of a block
#endif
#if HAS_DROPOUT
  u32 row_seeds[2], dropped[ROW_SCORES / 32];  // one bit for each of this thread's scores
#endif
#if BIAS_BITS
  static constexpr bool EARLY_BIAS = HEAD_DIM < 256;
  BiasPair bias[ROW_SCORES / 2];
#endif

  DEVICE QueryConsumer(const BackwardParams& p, const QueryShared& sm, const QueryBlock& first, int c)
      : p(p),
        sm(sm),
        t({first.m + c, first.h, first.b, first.keys}),
        span(keys_of_block(p, t)),
        c(c),
        tid(threadIdx.x & 127),
        lane(threadIdx.x & 31) {}

  // The index of this thread's first or second query.
  DEVICE int row(int r) const { return t.m * ROWS + (tid >> 5) * 16 + (lane >> 2) + 8 * r; }

  // Loads the LSE, delta and key range of this thread's rows. Padding rows get weights of 0.
  DEVICE void read_rows() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row(r);
      const long long at = (long long)(t.b * p.Hq + t.h) * p.m_blocks * ROWS + i;
      const bool exists = t.m < p.m_blocks;
      lse[r] = exists ? p.lse[at] : INFINITE;
      delta[r] = exists ? p.delta[at] : 0.f;
#if HAS_DROPOUT
      delta[r] *= p.dropout.kept;
      row_seeds[r] = exists ? p.dropout.row_seeds[at] : 0;
#endif
      [[maybe_unused]] const int diagonal = i + t.keys - p.Sq;
      range[r] = make_int2(0, t.keys);
#if HAS_RANGES
      if (exists) range[r] = p.ranges[range_row(p, t.h, t.b) * p.m_blocks * ROWS + i];
#elif HAS_WINDOW
      range[r] = make_int2(diagonal - p.window_left, min(t.keys, diagonal + p.window_right + 1));
#endif
#if HAS_ALIBI
      if (r < ALIBI_ROWS) {
        const Alibi x = alibi_of(p, t.h, t.b, t.keys - p.Sq, p.positions, min(i, p.Sq - 1));
        alibi.slope[r] = x.slope, alibi.column[r] = i + x.shift;
      }
#endif
    }
  }

  // Issues the product queries x keys, of this consumer's rows of Q or dO with a slot.
  template <int FEATURES> DEVICE void score_product(float (&d)[ROW_SCORES], u32 rows, u32 slot) {
    const u32 from_rows = descriptor_base(rows, 16), from_keys = descriptor_base(slot, 16);
    wgmma_fence();
    if (FEATURES == HEAD_FEATURES) wgmma_row_scores_start(d, from_rows, from_keys);
    else wgmma_row_value_scores_start(d, from_rows, from_keys);
    wgmma_commit();
  }

  // Loads the mask early, so that it arrives from the L2 while scores are computed.
  DEVICE void read_mask(int n0) {
#if HAS_MASK
    const unsigned char* from = p.by_query.bits + t.b * p.by_query.b + t.h * p.by_query.h + n0 / 8;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int w = 0; w < QUERY_BLOCK_N / 64; w++)
        kept[r][w] = SKIPS_TILES && is_full
                         ? ~0ull
                         : *(const u64*)(from + min(row(r), p.Sq - 1) * p.by_query.row + w * 8);
#endif
  }

  // Computes hashes while the products of the scores run. Returns 0, because `rows` is a multiple of 64,
  // which ptxas does not know: without a dependence on the hashes it would move them to their use, after the
  // products.
  DEVICE u32 find_dropped([[maybe_unused]] int n0) {
    u32 any = 0;
#if HAS_DROPOUT
    const u32 column = (n0 + (lane & 3) * 2) * COLUMN_STEP,
              first[2] = {row_seeds[0] + column, row_seeds[1] + column};
#pragma unroll
    for (int w = 0; w < ROW_SCORES / 32; w++) {
      u32 found[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 32; i++)
        note_dropped(found[i & 3], i, first[i >> 1 & 1] + (w * 64 + column_offset(i)) * p.dropout.column_step,
                     p.dropout.threshold);
      dropped[w] = found[0] | found[1] | found[2] | found[3];
      any |= dropped[w];
    }
    any &= p.dropout.rows & 1;
#endif
    return any;
  }

  // Loads the bias; early, for the same reason, if there are registers for it.
  DEVICE void read_bias(int n0) {
#if BIAS_BITS
    const char* from = p.bias.data + t.b * p.bias.b + t.h * p.bias.h;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const char* at = from + min(row(r), p.Sq - 1) * p.bias.row;
#pragma unroll
      for (int i = r; i < ROW_SCORES / 2; i += 2)
        bias[i] = SKIPS_TILES && is_full ? BiasPair()
                                         : bias_pair(at, p.bias, n0, (i >> 1) * 8 + (lane & 3) * 2);
    }
#endif
  }

  // Computes the gradients of the scores in place of dP; with OF_PRODUCTS and a softcap, those of the
  // products. With dropout they lack the dropout scale.
  template <bool EDGE, bool OF_PRODUCTS = true> DEVICE void score_gradients(int n0) {
#if BIAS_BITS
    if (!EARLY_BIAS) read_bias(n0);
#endif
#if HAS_MASK
    u64 rows[2][QUERY_BLOCK_N / 64];
#pragma unroll
    for (int w = 0; w < QUERY_BLOCK_N / 64; w++)
      rows[0][w] = kept[0][w] >> first_bit(), rows[1][w] = kept[1][w] >> first_bit();
#endif
#if HAS_SOFTCAP
    softcap_scores(s, p.tanh_scale);
#endif
#if HAS_ALIBI
    const AlibiBlock at = alibi.block(n0 + (lane & 3) * 2);
#endif
#if HAS_PROGRAM
    BlockProgram<false, ROW_SCORES> program;
    program.read(program_tile(p.program.inputs, t.b, t.h), row(0), n0 + (lane & 3) * 2);
    const bool is_masked = PROGRAM_HAS_MASK && !(SKIPS_TILES && is_full);
#else
    constexpr bool is_masked = false;
#endif
#pragma unroll
    for (int i = 0; i < ROW_SCORES; i++) {
      const int r = i >> 1 & 1, j = n0 + column_offset(i) + (lane & 3) * 2;
      float x = s[i];
#if HAS_SOFTCAP
      const float tanh_grad = 1.f - x * x;
#endif
#if HAS_PROGRAM
      const float slope = program.slope(x, i);
      if (PROGRAM_HAS_SCORE) x = program.score(x, i);
      if (PROGRAM_HAS_SCORE && program.query(i) >= p.Sq) x = 0.f;  // the score of no query may be NaN
      if (is_masked && !program.keeps(i)) x = -INFINITE;
#endif
#if HAS_ALIBI
      x = at.lowered(x, i);
#endif
#if BIAS_BITS
      const float2 y = to_floats(bias[i / 2]);
      x = fmaf(x, p.bias.unit, i & 1 ? y.y : y.x);
#endif
#if HAS_MASK
      if (!bit_of(rows[r][i / 32], i)) x = -INFINITE;
#endif
      if (EDGE && (j < range[r].x || j >= range[r].y)) x = -INFINITE;
#if HAS_DROPOUT
      if (dropped[i / 32] >> i % 32 & 1) dp[i] = 0.f;
#endif
      const float weight = exp2_fast(exponent(p, x, lse[r]));
      dp[i] = weight * (dp[i] - delta[r]);
#if HAS_SOFTCAP
      if (OF_PRODUCTS) dp[i] *= tanh_grad;
#endif
#if HAS_PROGRAM
      if (OF_PRODUCTS && PROGRAM_SLOPE) dp[i] *= slope;
      if (OF_PRODUCTS && PROGRAM_FACTORS == 3 && weight == 0.f) dp[i] = 0.f;  // beside any derivative
#endif
      if ((EDGE || is_masked) && x == -INFINITE) dp[i] = 0.f;  // values of masked keys may be NaN
    }
  }

  DEVICE u32 wait_for_slot() const {
    mbar_wait(barrier(sm.full, ring.stage), ring.phase);
    return slot_at<KEYS_BYTES>(sm.slots, ring.stage);
  }

  DEVICE void step(int n0) {
    read_mask(n0);
#if BIAS_BITS
    if (EARLY_BIAS) read_bias(n0);
#endif
    const u32 values = wait_for_slot(), values_empty = barrier(sm.empty, ring.stage);
    score_product<VALUE_FEATURES>(dp, slot_at<CONSUMER_DO_BYTES>(sm.grad_out, c), values);
    wgmma_wait<1>();
    if (operand_barrier) mbar_arrive(operand_barrier);
    ring.next();
    const u32 keys = wait_for_slot();
    score_product<HEAD_FEATURES>(s, slot_at<CONSUMER_Q_BYTES>(sm.q, c), keys);
    const u32 nothing = find_dropped(n0);
    wgmma_wait<1>();
    mbar_arrive(values_empty + nothing);
    wgmma_wait<0>();
    fence_operand(dp);
    fence_operand(s);
    if (n0 < span.all_lo || n0 + QUERY_BLOCK_N > span.all_hi) score_gradients<true>(n0);
    else score_gradients<false>(n0);
#pragma unroll
    for (int i = 0; i < ROW_SCORES / 2; i++) ds[i] = pack(dp[2 * i], dp[2 * i + 1]);
#if HAS_KV_LENS
    if (n0 + QUERY_BLOCK_N > t.keys)
      clear_rows<QUERY_BLOCK_N, HEAD_DIM>(keys, t.keys - n0, QUERY_BLOCK_N, Barrier::WARPGROUP + c);
#endif
    wgmma_fence();
    wgmma_query_grads(dq, ds, descriptor_base(keys, QUERY_BLOCK_N * 128));
    wgmma_commit();
    operand_barrier = barrier(sm.empty, ring.stage);
    ring.next();
  }

  // Skips blocks of keys that only the other consumer visits.
  DEVICE void skip_blocks(int blocks) {
#if SKIPS_TILES  // steps may follow, and the slot of the last one's operand is needed before them
    if (operand_barrier) wgmma_wait<0>(), mbar_arrive(operand_barrier), operand_barrier = 0;
#endif
    for (int i = 0; i < 2 * blocks; i++, ring.next())
      wait_for_slot(), mbar_arrive(barrier(sm.empty, ring.stage));
  }

  DEVICE void run(const KeyBlocks& all) {
#pragma unroll
    for (int i = 0; i < HEAD_FEATURES / 2; i++) dq[i] = 0.f;
    read_rows();
    KeyBlocks n = keys_of(span);
    n.first = max(n.first, all.first), n.end = min(n.end, all.end);
    if (n.first >= n.end) n = {all.end, all.end};
    if (all.first < all.end) mbar_wait(barrier(sm.queries_full, c), 0);
#if SKIPS_TILES
    for_each_listed_block(p, t, all, [&](int j, bool keeps_all) {
      is_full = keeps_all;
      if (j >= n.first && j < n.end) step(j * QUERY_BLOCK_N);
      else skip_blocks(1);
    });
#else
    skip_blocks(n.first - all.first);
#pragma unroll 1
    for (int j = n.first; j < n.end; j++) step(j * QUERY_BLOCK_N);
#endif
    wgmma_wait<0>();
    fence_operand(dq);
    if (operand_barrier) mbar_arrive(operand_barrier);
#if !SKIPS_TILES
    skip_blocks(all.end - n.end);
#endif
    if (t.m >= p.m_blocks) return;
    named_barrier_sync(Barrier::WARPGROUP + c, 128);  // all warps have read their rows of Q
    const Note note = note_at(p, DQ, t.b * p.Hq + t.h, p.m_blocks * ROWS, t.m * ROWS);
    store_gradients(dq, p.scale, slot_at<CONSUMER_Q_BYTES>(sm.q, c), ROWS * 128, Barrier::WARPGROUP + c, p.dq,
                    t.m * ROWS, t.h, t.b, note);
    if (tid == 0) tma_store_wait();
  }
};
