// A backward consumer with transposed scores, whose rows are keys: masks, dropout, and weights.
#pragma once
#include "backward.cuh"
#include "wgmma.cuh"

// 64 keys of the block.
struct KeyConsumerBase {
  const BackwardParams& p;
  const BackwardShared& sm;
  KeyTile t;
  const int first, tid, lane, key;  // key: this thread's first row of the block; the second is key + 8
  PipelineState<STAGES> ring;
  PipelineState<1> bias;
#if HAS_ALIBI
  AlibiRows alibi;
#endif
#if HAS_PROGRAM
  // Addresses and values of a head, in registers unless factors take these.
  static constexpr bool HOLDS_TILE = PROGRAM_FACTORS < 2 && PROGRAM_KEPT_FACTOR < 0;
  ProgramTile tile_of_head;
#endif
  bool is_full;  // with SKIPS_TILES: the mask keeps all of this step's block
#if PROGRAM_DISTANCE_SUMS
  // The gradient of the term of distances, of one distance: that of query `diagonal` from this consumer's
  // first key. `diagonals`: the first query of the last step.
  float diagonal_sum;
  int diagonal, diagonals;
#endif
#if PROGRAM_KEY_SUMS
  float term_sums[PROGRAM_KEY_SUMS][2];  // gradients of terms of this thread's keys
#endif
#if HAS_MASK
  u64 kept[2];  // one bit for each query of a block, for this thread's two rows
#endif
#if HAS_DROPOUT
  u32 dropped;  // one bit for each of this thread's scores
#endif

  DEVICE KeyConsumerBase(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, int first)
      : p(p),
        sm(sm),
        t(t),
        first(first),
        tid(threadIdx.x & 127),
        lane(threadIdx.x & 31),
        key(first + (tid >> 5) * 16 + (lane >> 2)) {}

  // Issues the product keys x queries, of these rows of K or V with a block of Q or dO.
  template <int FEATURES> DEVICE void score_product(float (&d)[SCORES], u32 rows, u32 queries) {
    const u32 from_rows = descriptor_base(rows + first * 128, 16),
              from_queries = descriptor_base(queries, 16);
    wgmma_fence();
    if (FEATURES == HEAD_FEATURES) wgmma_scores_start(d, from_rows, from_queries);
    else wgmma_value_scores_start(d, from_rows, from_queries);
    wgmma_commit();
  }

  // Loads the mask early, so that it arrives from the L2 while scores are computed.
  DEVICE void read_mask(int h, int m) {
#if HAS_MASK
    const unsigned char* from = p.by_key.bits + t.b * p.by_key.b + h * p.by_key.h + m * p.mask_block;
#pragma unroll
    for (int r = 0; r < 2; r++)
      kept[r] = SKIPS_TILES && is_full
                    ? ~0ull
                    : *(const u64*)(from + min(t.n0 + key + 8 * r, p.Sk - 1) * p.by_key.row);
#endif
  }

  // Computes hashes while the products of the scores run. `arrived` is a barrier whose phase is already
  // complete: a wait ends a basic block, and without one ptxas places the hashes between the products, or
  // after them.
  DEVICE void find_dropped([[maybe_unused]] u32 row_seeds, [[maybe_unused]] u32 arrived) {
#if HAS_DROPOUT
    static_assert(SCORES == 32, "a bit each");
    mbar_wait(arrived, ring.phase);
    const u32 columns[2] = {(t.n0 + key) * COLUMN_STEP, (t.n0 + key + 8) * COLUMN_STEP};
    u32 found[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const int2 rows = load_shared<int2>(row_seeds + (i * 2 + (lane & 3) * 2) * 4);
#pragma unroll
      for (int e = 0; e < 4; e++)
        note_dropped(found[e], i + e, (e & 1 ? rows.y : rows.x) + columns[e >> 1], p.dropout.threshold);
    }
    dropped = found[0] | found[1] | found[2] | found[3];
    asm volatile("" : "+r"(dropped)::"memory");
    mbar_wait(arrived, ring.phase);
#endif
  }

  // The deltas of two queries; with dropout multiplied by 1 - p, since dP lacks the dropout scale.
  DEVICE float2 deltas(u32 at) const {
    float2 d = load_shared<float2>(at);
#if HAS_DROPOUT
    d.x *= p.dropout.kept, d.y *= p.dropout.kept;
#endif
    return d;
  }

  // Applies the softcap to the scores and computes its derivative.
  DEVICE void apply_softcap([[maybe_unused]] float (&s)[SCORES],
                            [[maybe_unused]] float (&tanh_grad)[SCORES]) const {
#if HAS_SOFTCAP
    softcap_scores(s, p.tanh_scale);
#pragma unroll
    for (int i = 0; i < SCORES; i++) tanh_grad[i] = 1.f - s[i] * s[i];
#endif
  }

  // Multiplies gradients of the scores, or weights to which these are proportional, by the derivative of the
  // softcap.
  DEVICE void multiply_by_softcap_grad([[maybe_unused]] float (&x)[SCORES],
                                       [[maybe_unused]] const float (&tanh_grad)[SCORES]) const {
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < SCORES; i++) x[i] *= tanh_grad[i];
#endif
  }

#if HAS_PROGRAM
  typedef BlockProgram<true, SCORES> Program;
  static constexpr bool SUMS_TERMS = PROGRAM_KEY_SUMS || SUMS_DISTANCES;
  static constexpr int DIAGONALS = SCORES / 2 + 2;  // of a thread's scores

  DEVICE void read_terms(Program& x, int h, int m) const {
    const ProgramTile tile = HOLDS_TILE ? tile_of_head : program_tile(p.program.inputs, t.b, h);
    x.read(tile, m * BLOCK_M + (lane & 3) * 2, t.n0 + key);
  }

  // Whether the program's mask may exclude keys of this step's block.
  DEVICE bool masks() const { return PROGRAM_HAS_MASK && !(SKIPS_TILES && is_full); }

  // Applies the program to the scores. `factors`: the derivatives by them, and `of_term` by a term, where
  // these are kept.
  DEVICE void apply_program(Program& x, float (&s)[SCORES], ProgramFactors<SCORES>& factors,
                            TermFactors<SCORES>& of_term, int h, int m) const {
    if (PROGRAM_HAS_SCORE) {
#pragma unroll
      for (int i = 0; i < SCORES; i += 2) {
        constexpr int KEPT = PROGRAM_KEPT_FACTOR;
        if (of_term.KEPT) of_term.keep(i, x.factor(KEPT, s[i], i), x.factor(KEPT, s[i + 1], i + 1));
        if (factors.KEPT) factors.keep(i, x.slope(s[i], i), x.slope(s[i + 1], i + 1));
        s[i] = x.score(s[i], i), s[i + 1] = x.score(s[i + 1], i + 1);
      }
      if ((m + 1) * BLOCK_M > p.Sq) {  // the score of no query may be NaN
#pragma unroll
        for (int i = 0; i < SCORES; i++)
          if (x.query(i) >= p.Sq) s[i] = 0.f;
      }
    }
    if (masks()) {
      if (!PROGRAM_HAS_SCORE) read_terms(x, h, m);
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!x.keeps(i)) s[i] = -INFINITE;
    }
  }

  // The gradients of the products in place of dP, of the weights `s`. Those of the changed scores are added
  // to those of terms, on the way: of keys, of all scores, and along the diagonals of this thread's scores.
  // Those of masked keys, whose values may be NaN, are left out with HAS_MASKED.
  template <bool HAS_MASKED>
  DEVICE void program_gradients(const Program& x, const float (&s)[SCORES], float (&dp)[SCORES], u32 delta,
                                [[maybe_unused]] const ProgramFactors<SCORES>& factors,
                                [[maybe_unused]] const TermFactors<SCORES>& of_term,
                                [[maybe_unused]] float (&diagonals)[DIAGONALS]) {
    const u32 row = opaque(delta + (lane & 3) * 8);
#pragma unroll
    for (int i = 0; i < SUMS_DISTANCES * DIAGONALS; i++) diagonals[i] = 0.f;
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 d = deltas(row + i * 8);
#pragma unroll
      for (int e = i; e < i + 4; e++) {
        const float y = score_gradient(s[e], dp[e], e & 1 ? d.y : d.x);
        const bool has_weight = s[e] != 0.f;
        dp[e] = y;
#if PROGRAM_KEY_SUMS
#pragma unroll
        for (int n = 0; n < PROGRAM_KEY_SUMS; n++) {
          const int grad = PROGRAM_SUM_FACTORS[n];
          const bool is_kept = grad == PROGRAM_KEPT_FACTOR;
          const float z = y * (is_kept ? of_term.get(e) : x.factor(grad, 0.f, e));
          // beside any derivative
          term_sums[n][e >> 1 & 1] += has_weight || !(HAS_MASKED || (is_kept && PROGRAM_HAS_POLES)) ? z : 0.f;
        }
#endif
#if PROGRAM_DISTANCE_SUMS
        const float z = y * x.factor(PROGRAM_DISTANCE_FACTOR, 0.f, e);
        diagonals[(e / 4 + 1 - (e >> 1 & 1)) * 2 + (e & 1)] += has_weight || !HAS_MASKED ? z : 0.f;
#endif
#if PROGRAM_FACTORS == 1
        dp[e] *= x.slope(0.f, e);
#elif PROGRAM_FACTORS
        dp[e] *= factors.get(e);
        if (PROGRAM_FACTORS == 3 && !has_weight) dp[e] = 0.f;  // beside any derivative
#endif
      }
    }
  }

#if PROGRAM_DISTANCE_SUMS
  static_assert(BLOCK_M == 64, "a distance of each thread");

  DEVICE u32 own_diagonals() const { return sm.diagonals + first / 16 * WARP_DIAGONALS * 4; }

  DEVICE void clear_diagonals() {
    for (int i = tid; i < WARP_DIAGONALS; i += 128)
      store_shared(own_diagonals() + i * 16, make_int4(0, 0, 0, 0));
  }

  // Moves on to the block of queries from `query` on, and writes the distances that are complete.
  DEVICE void move_diagonals(int h, int query) {
    for (; diagonals < query;) {
      diagonals += 64;
      const int next = diagonals - 64 + (tid - diagonals + 64 & 127);
      if (next == diagonal) continue;
      distance_sums_of(p, t.b, h, (t.n0 + first) / 64)[diagonal + 64] = diagonal_sum;
      diagonal = next, diagonal_sum = 0.f;
    }
  }

  // Before the first block of queries, number `m`.
  DEVICE void begin_diagonals(int m) {
    diagonals = m * 64, diagonal_sum = 0.f;
    diagonal = diagonals - 64 + (tid - diagonals + 64 & 127);
  }

  // Adds the sums of this consumer's threads: each thread those of one distance, in a fixed order.
  DEVICE void share_diagonals(const float (&sums)[DIAGONALS], int h, int m) {
    const int warp = tid >> 5, row = lane >> 2;
    const u32 own = own_diagonals();
    named_barrier_sync(Barrier::WARPGROUP + first / 64, 128);  // those of the last step are read
    const u32 to = own + (warp * WARP_DIAGONALS + row * DIAGONAL_ROW + 8 + (lane & 3) * 2) * 4;
#pragma unroll
    for (int i = 0; i < DIAGONALS; i += 2) store_shared(to + i * 16, make_float2(sums[i], sums[i + 1]));
    named_barrier_sync(Barrier::WARPGROUP + first / 64, 128);
    move_diagonals(h, m * 64);
    const int from = diagonal - diagonals;  // the column of the first warp's first row
    float found[4];  // of each warp, without branches, so that all loads are in flight at once
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const int column = max(-15, min(from + 16 * w, 63));
      const u32 at = own + (w * WARP_DIAGONALS + column + 16) * 4;
      float x[8];
#pragma unroll
      for (int b = 0; b < 8; b++) x[b] = load_shared<float>(at + b * (DIAGONAL_ROW + 1) * 4);
      found[w] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
#pragma unroll
    for (int w = 0; w < 4; w++)
      if (from + 16 * w >= -15 && from + 16 * w <= 63) diagonal_sum += found[w];
  }
#endif

  // Writes the sums of terms and begins new ones; BY_HEAD those that differ by head, else the others.
  template <bool BY_HEAD> DEVICE void write_term_sums([[maybe_unused]] int h) {
#if PROGRAM_KEY_SUMS
#pragma unroll
    for (int n = 0; n < PROGRAM_KEY_SUMS; n++)
      if ((PROGRAM_SUMS_BY_HEAD >> n & 1) == BY_HEAD) {
        float* const to = term_sums_of(p, n, t.b, BY_HEAD ? h : t.part) + t.n0 + key;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float x = term_sums[n][r];
          x += __shfl_xor_sync(~0u, x, 1), x += __shfl_xor_sync(~0u, x, 2);
          if ((lane & 3) == 0) to[8 * r] = x;
          term_sums[n][r] = 0.f;
        }
      }
#endif
  }
#endif

  // Turns scores into weights, in place.
  DEVICE void scores_to_weights(float (&s)[SCORES], int m, bool edge, u32 lse, u32 ranges) {
    [[maybe_unused]] const int i0 = m * BLOCK_M + (lane & 3) * 2;
#if HAS_ALIBI
    const AlibiBlock x = alibi.block(i0);
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = x.lowered(s[i], i);
#endif
#if BIAS_BITS
    if (SKIPS_TILES && is_full) {
#pragma unroll
      for (int i = 0; i < SCORES; i++) s[i] *= p.bias.unit;
    } else {
      mbar_wait(sm.bias_full, bias.phase);
      add_bias_tile<true>(s, sm.bias, first, p.bias.unit);
      fence_async_shared();  // as in forward.cu
      mbar_arrive(sm.bias_empty);
      bias.next();
    }
#endif
    if (edge) {
#if !HAS_RANGES
      int distance[2];
      u32 count[2];
      attending_queries(p, t, i0, key, distance, count);
#endif
#pragma unroll
      for (int i = 0; i < SCORES; i++) {
#if HAS_RANGES
        const int j = t.n0 + key + row_offset(i);
        const int2 range = load_shared<int2>(ranges + (column_offset(i) + (lane & 3) * 2) * 8);
        const bool keep = j >= range.x && j < range.y;
#else
        const bool keep = is_attended(i, distance, count);
#endif
        if (!keep) s[i] = -INFINITE;
      }
    }
#if HAS_MASK
    if (!__all_sync(~0u, (kept[0] & kept[1]) == ~0ull)) {
      const u64 rows[2] = {kept[0] >> first_bit(), kept[1] >> first_bit()};
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!bit_of(rows[i >> 1 & 1], i)) s[i] = -INFINITE;
    }
#endif
    const u32 row = opaque(lse + (lane & 3) * 8);
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 l = load_shared<float2>(row + i * 8);
      s[i] = exp2_fast(exponent(p, s[i], l.x)), s[i + 1] = exp2_fast(exponent(p, s[i + 1], l.y));
      s[i + 2] = exp2_fast(exponent(p, s[i + 2], l.x)), s[i + 3] = exp2_fast(exponent(p, s[i + 3], l.y));
    }
#if HAS_DROPOUT
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      s[i] = __int_as_float(__float_as_int(s[i]) | (dropped << (31 - i) & 0x80000000));
#endif
  }

  DEVICE float value_factor() const { return HAS_DROPOUT ? p.dropout.scale : 1.f; }

  // Calls `self.step` for every block of queries that attends some key, in the order in which the producer
  // copies them.
  template <class Self> DEVICE void for_each_query_block(Self& self) {
    for (int h = first_head(p, t); h < first_head(p, t) + p.part_heads; h++) {
#if PROGRAM_KEY_SUMS
      if (h == first_head(p, t))
#pragma unroll
        for (int n = 0; n < PROGRAM_KEY_SUMS; n++) term_sums[n][0] = term_sums[n][1] = 0.f;
#endif
#if HAS_ALIBI
#pragma unroll
      for (int r = 0; r < ALIBI_ROWS; r++) {
        const int j = t.n0 + key + 8 * r;
        const Alibi x = alibi_of(p, h, t.b, t.keys - p.Sq, p.positions + p.Sq, min(j, p.Sk - 1));
        alibi.slope[r] = x.slope, alibi.column[r] = j - x.shift;
      }
#endif
#if HAS_PROGRAM
      if (HOLDS_TILE) tile_of_head = program_tile(p.program.inputs, t.b, h);
#endif
#if PROGRAM_DISTANCE_SUMS
      begin_diagonals(t.first);
#endif
      for (int base = t.first; base < t.last; base += 32) {
        QueryBlocks n = query_blocks(p, t, h, base);
#pragma unroll 1
        for (; n.some; n.some &= n.some - 1) {
          const int bit = __ffs(n.some) - 1;
          if (SKIPS_TILES) is_full = n.full >> bit & 1;
          self.step(h, base + bit, n.edge >> bit & 1);
        }
      }
#if PROGRAM_DISTANCE_SUMS
      if (t.first < t.last) move_diagonals(h, (t.last + 1) * 64);
#endif
#if HAS_PROGRAM
      write_term_sums<true>(h);
#endif
    }
#if HAS_PROGRAM
    write_term_sums<false>(0);
#endif
  }
};
