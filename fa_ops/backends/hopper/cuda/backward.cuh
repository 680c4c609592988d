// Common parts of the backward kernels: shared memory, the copies of query blocks, and the stores of
// gradients. Every copy is a box of 64 tokens by 64 features.
//
// A NaN or Inf of a token may only affect the tokens that attend it, or that it attends. Matrix products
// spread it further, since 0 * NaN is NaN. Kernels therefore record which groups of 16 gradient rows contain
// values that are not finite, and backward_postprocess.cu recomputes those rows. Keys past the length of a
// batch row are zeroed in shared memory.
//
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM HEAD_FEATURES VALUE_FEATURES SUM_FEATURES STAGES
// GRAD_STAGES KEY_SLOTS EXCHANGE_BYTES SHARED_BYTES IS_WIDE IS_PAIRED ADDS_DQ ALTERNATES WHOLE_HEADS
// SPLITS_GROUP HAS_WINDOW HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_ALIBI HAS_MASK HAS_DROPOUT BIAS_BITS
#pragma once
#include "backward_tiles.cuh"
#include "pipeline.cuh"

constexpr int SCORES = BLOCK_M / 2;
constexpr int CTA_KEYS = IS_PAIRED ? BLOCK_N / 2 : BLOCK_N;  // a pair of CTAs shares a block of keys
constexpr u32 Q_BYTES = BLOCK_M * HEAD_DIM * 2, DO_BYTES = BLOCK_M * VALUE_DIM * 2,
              K_BYTES = CTA_KEYS * HEAD_DIM * 2, V_BYTES = CTA_KEYS * VALUE_DIM * 2;
constexpr u32 GRAD_BYTES = IS_PAIRED ? DO_BYTES / 2 : DO_BYTES;  // per slot
constexpr u32 ROW_BYTES = BLOCK_M * 4, RANGE_BYTES = HAS_RANGES ? BLOCK_M * 8 : 0,
              SEED_BYTES = HAS_DROPOUT ? BLOCK_M * 4 : 0;
constexpr u32 BIAS_BYTES = BLOCK_M * BLOCK_N * BIAS_BITS / 8;
constexpr u32 DIAGONAL_BYTES = SUMS_DISTANCES ? BLOCK_N / 16 * WARP_DIAGONALS * 4 : 0;
constexpr int CONSUMERS = IS_PAIRED ? 3 : 2;
static_assert(BLOCK_M == 64 || (BLOCK_M == 128 && !HAS_MASK),
              "swizzle atoms of queries; a mask's bits of 64");

// The named barriers. Barrier 0 is that of __syncthreads.
struct Barrier {
  enum : u32 {
    CONSUMER_SYNC = 1,                  // for all consumers
    WARPGROUP = 2,                      // one per consumer, for its 128 threads
    DS_STORED = WARPGROUP + CONSUMERS,  // dS of each consumer and buffer is in shared memory
    ROW_SUMS = DS_STORED + 2 * CONSUMERS,  // row sums of the CTA's heads are in memory
    K_READ = CONSUMER_SYNC,             // backward_keys.cu: no product reads K any more
    V_READ = WARPGROUP + CONSUMERS,     // and none reads V
    GRAD_OUT_READ = CONSUMER_SYNC,      // backward_pair.cu: no product reads dO any more
  };
};

// Offsets in shared memory, in order.
struct BackwardShared {
  u32 k, v, q, grad_out;
  u32 exchange;  // data exchanged between consumers
  u32 bias, diagonals, lse, delta, ranges, row_seeds;
  u32 tile;  // the scheduled tile of each slot of keys
  u32 targets, nonfinite;  // with WHOLE_HEADS; nonfinite: one flag per warp
  u32 kv_full, q_full, q_empty, do_full, do_empty;
  u32 extra;  // barriers that only one kernel uses
  u32 bias_full, bias_empty, end;

  DEVICE constexpr explicit BackwardShared(u32 base)
      : k(base),
        v(k + KEY_SLOTS * K_BYTES),
        q(v + KEY_SLOTS * V_BYTES),
        grad_out(q + STAGES * Q_BYTES),
        exchange(grad_out + GRAD_STAGES * GRAD_BYTES),
        bias(exchange + EXCHANGE_BYTES),
        diagonals(bias + BIAS_BYTES),
        lse(diagonals + DIAGONAL_BYTES),
        delta(lse + STAGES * ROW_BYTES),
        ranges(delta + GRAD_STAGES * ROW_BYTES),
        row_seeds(ranges + STAGES * RANGE_BYTES),
        tile(row_seeds + STAGES * SEED_BYTES),
        targets(tile + 32 * KEY_SLOTS),
        nonfinite(targets + 4 * 16 * WHOLE_HEADS),
        kv_full(nonfinite + 32 * WHOLE_HEADS),
        q_full(kv_full + 8 * KEY_SLOTS),
        q_empty(q_full + 8 * STAGES),
        do_full(q_empty + 8 * STAGES),
        do_empty(do_full + 8 * GRAD_STAGES),
        extra(do_empty + 8 * GRAD_STAGES),
        bias_full(extra + 32),
        bias_empty(bias_full + 8),
        end(BIAS_BITS ? bias_empty + 8 : bias_full) {}

  DEVICE void init() const {
    for (int i = 0; i < KEY_SLOTS; i++) mbar_init(barrier(kv_full, i), 1);
    if (BIAS_BITS) mbar_init(bias_full, 1), mbar_init(bias_empty, IS_WIDE ? 128 : 128 * CONSUMERS);
    for (int i = 0; i < STAGES; i++) {
      mbar_init(barrier(q_full, i), 1), mbar_init(barrier(do_full, i), 1);
      // every thread arrives, which is as fast: racecheck does not accept one arrival per warp
      mbar_init(barrier(q_empty, i), 128 * CONSUMERS), mbar_init(barrier(do_empty, i), 128 * CONSUMERS);
    }
  }
};

constexpr BackwardShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES, "SHARED_BYTES is the size of the largest layout");

DEVICE void load_tile(u32 dst, const TensorMap& map, u32 bar, int width, int rows, int row, int h, int b) {
  for (int x = 0; x < width; x += 64)
    for (int r = 0; r < rows; r += 64) tma_load(dst + (x * rows + r * 64) * 2, map, bar, x, row + r, h, b);
}

#if WHOLE_HEADS
// The destination of dQ of a block of queries, for the step that computes it: the index of the block among
// the CTA's sums, its batch row, head and number. is_stored: the sums already hold dQ of earlier keys.
// is_complete: no later keys contribute.
struct QueryTarget {
  int place, b, h, m;
  bool is_stored, is_complete;
};

// dQ is written one step later, so there are twice as many entries as stages.
DEVICE u32 target_at(const BackwardShared& sm, const PipelineState<STAGES>& ring) {
  static_assert(STAGES == 2, "four places");
  return slot_at<16>(sm.targets, ring.phase * STAGES + ring.stage);
}

DEVICE void store_target(const BackwardParams& p, u32 to, const KeyTile& t, int h, int m) {
  const int place = (h - first_head(p, t)) * p.m_blocks + m, flags = (m < t.stored) + 2 * (m < t.complete);
  store_shared(to, make_int4(place, t.b, h, m * 4 + flags));
}

DEVICE QueryTarget load_target(u32 from) {
  const int4 x = load_shared<int4>(from);
  return {x.x, x.y, x.z, x.w >> 2, (x.w & 1) != 0, (x.w & 2) != 0};
}
#endif

DEVICE void load_queries(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, int h, int m,
                         const PipelineState<STAGES>& ring) {
  const u32 i = ring.stage, q_full = barrier(sm.q_full, i), do_full = barrier(sm.do_full, i);
  const long long row = ((long long)(t.b * p.Hq + h) * p.m_blocks + m) * BLOCK_M;
  mbar_wait(barrier(sm.q_empty, i), ring.phase ^ 1);
#if WHOLE_HEADS
  store_target(p, target_at(sm, ring), t, h, m);
#endif
  mbar_arrive_expect(q_full, Q_BYTES + ROW_BYTES + RANGE_BYTES + SEED_BYTES);
  load_tile(slot_at<Q_BYTES>(sm.q, i), p.q, q_full, HEAD_DIM, BLOCK_M, m * BLOCK_M, h, t.b);
  bulk_load(slot_at<ROW_BYTES>(sm.lse, i), p.lse + row, ROW_BYTES, q_full);
  if (HAS_RANGES)
    bulk_load(slot_at<RANGE_BYTES>(sm.ranges, i),
              p.ranges + (range_row(p, h, t.b) * p.m_blocks + m) * BLOCK_M, RANGE_BYTES, q_full);
  if (HAS_DROPOUT)
    bulk_load(slot_at<SEED_BYTES>(sm.row_seeds, i), p.dropout.row_seeds + row, SEED_BYTES, q_full);
  mbar_wait(barrier(sm.do_empty, i), ring.phase ^ 1);
  mbar_arrive_expect(do_full, DO_BYTES + ROW_BYTES);
  load_tile(slot_at<DO_BYTES>(sm.grad_out, i), p.grad_out, do_full, VALUE_DIM, BLOCK_M, m * BLOCK_M, h, t.b);
  bulk_load(slot_at<ROW_BYTES>(sm.delta, i), p.delta + row, ROW_BYTES, do_full);
}

#if BIAS_BITS
DEVICE void load_bias(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, int h, int m,
                      PipelineState<1>& ring) {
  mbar_wait(sm.bias_empty, ring.phase ^ 1);
  mbar_arrive_expect(sm.bias_full, BIAS_BYTES);
  load_bias_tile<BLOCK_N>(sm.bias, p.bias, sm.bias_full, m * BLOCK_M, t.n0, h, t.b);
  ring.next();
}
#endif

DEVICE void load_keys(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, int slot = 0) {
  const u32 full = barrier(sm.kv_full, slot);
  mbar_arrive_expect(full, K_BYTES + V_BYTES);
  const int h = key_head(p, t);
  load_tile(slot_at<K_BYTES>(sm.k, slot), p.k, full, HEAD_DIM, BLOCK_N, t.n0, h, t.b);
  load_tile(slot_at<V_BYTES>(sm.v, slot), p.v, full, VALUE_DIM, BLOCK_N, t.n0, h, t.b);
}

// Copies all blocks of queries that attend a tile. Executed by one warp, whose leader issues the copies.
DEVICE void produce_queries(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, bool leader,
                            PipelineState<STAGES>& ring, [[maybe_unused]] PipelineState<1>& bias) {
  for (int h = first_head(p, t); h < first_head(p, t) + p.part_heads; h++)
    for (int base = t.first; base < t.last; base += 32) {
      QueryBlocks n = query_blocks(p, t, h, base);
      for (; n.some; n.some &= n.some - 1, ring.next())
        if (leader) {
          load_queries(p, sm, t, h, base + __ffs(n.some) - 1, ring);
#if BIAS_BITS
          const int bit = __ffs(n.some) - 1;
          if (!(SKIPS_TILES && n.full >> bit & 1)) load_bias(p, sm, t, h, base + bit, bias);
#endif
        }
    }
}

// The bit of a thread's `i`-th accumulator element in 64 bits of a row that have been shifted right by
// `first_bit`: a thread holds two of every eight columns.
DEVICE int first_bit() { return (threadIdx.x & 3) * 2; }
DEVICE bool bit_of(u64 row, int i) { return row >> column_offset(i % 32) & 1; }

template <int COUNT> DEVICE void pack_fragments(u32 (&to)[COUNT], const float (&from)[2 * COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}

// Dropped weights have their sign bit set: the product with dO treats them as 0, while the gradients of
// scores need their absolute values.
template <int COUNT> DEVICE void pack_weights(u32 (&to)[COUNT], const float (&from)[2 * COUNT]) {
#if HAS_DROPOUT
#pragma unroll
  for (int i = 0; i < COUNT; i++) to[i] = pack_relu(from[2 * i], from[2 * i + 1]);
#else
  pack_fragments(to, from);
#endif
}

// The gradient of a score; with dropout, without the dropout scale.
DEVICE float score_gradient(float weight, float dp, float delta) {
#if HAS_DROPOUT
  return fmaxf(weight, 0.f) * dp - fabsf(weight) * delta;
#else
  return weight * (dp - delta);
#endif
}

// Where each warp records whether its rows contain values that are not finite: with WHOLE_HEADS one flag for
// all rows in shared memory, otherwise `nonfinite` in global memory.
#if WHOLE_HEADS
typedef u32 Note;
DEVICE void note_rows(Note note, bool is_nonfinite) {
  if (is_nonfinite && (threadIdx.x & 31) == 0) store_shared(note + (threadIdx.x >> 5 & 7) * 4, 1u);
}
#else
typedef u32* Note;
DEVICE void note_rows(Note note, bool is_nonfinite) {
  if ((threadIdx.x & 31) == 0) note[threadIdx.x >> 5 & 3] = is_nonfinite;
}
#endif

// Writes a warpgroup's gradients of 64 tokens through shared memory.
template <int COUNT>
DEVICE void store_gradients(const float (&grads)[COUNT], float factor, u32 at, u32 column_bytes, u32 barrier,
                            const TensorMap& map, int row, int h, int b, Note note) {
  note_rows(note, __any_sync(~0u, probe(grads) != 0.f));
  u32 x[COUNT / 2];
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++) x[i] = pack(grads[2 * i] * factor, grads[2 * i + 1] * factor);
  store_fragments(at, x, column_bytes);
  fence_async_shared();
  named_barrier_sync(barrier, 128);
  if ((threadIdx.x & 127) == 0) {
    for (int x = 0; x < (COUNT + 31) / 32; x++) tma_store(map, at + x * column_bytes, x * 64, row, h, b);
    tma_store_commit();
  }
}
