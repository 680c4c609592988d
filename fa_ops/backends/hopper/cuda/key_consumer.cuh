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
  bool is_full;  // with SKIPS_TILES: the mask keeps all of this step's block
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
#if HAS_ALIBI
#pragma unroll
      for (int r = 0; r < ALIBI_ROWS; r++) {
        const int j = t.n0 + key + 8 * r;
        const Alibi x = alibi_of(p, h, t.b, t.keys - p.Sq, p.positions + p.Sq, min(j, p.Sk - 1));
        alibi.slope[r] = x.slope, alibi.column[r] = j - x.shift;
      }
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
    }
  }
};
