// What the kernels of the backward pass share: shared memory, which blocks of queries a block of keys meets,
// the copies of those, and how gradients are written. Every copy is a box of 64 tokens by 64 features.
//
// A NaN or Inf of a token may only reach the tokens that attend it, or that it attends. Products spread it
// further, as a weight of 0 does not hide it. So kernels note which 16 rows of a gradient hold any, and
// backward_postprocess.cu computes those rows again. Keys past a batch row's length are zeroed at once.
//
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM HEAD_FEATURES VALUE_FEATURES SUM_FEATURES STAGES
// GRAD_STAGES EXCHANGE_BYTES SHARED_BYTES IS_WIDE IS_PAIRED ADDS_DQ ALTERNATES SPLITS_GROUP
// HAS_WINDOW HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_ALIBI HAS_MASK HAS_DROPOUT BIAS_BITS
#pragma once
#include "backward_params.cuh"
#include "named_barriers.cuh"
#include "pipeline.cuh"
#include "seqlen_info.cuh"

constexpr int SCORES = BLOCK_M / 2;
constexpr int CTA_KEYS = IS_PAIRED ? BLOCK_N / 2 : BLOCK_N;  // two CTAs may share a block of keys
constexpr u32 Q_BYTES = BLOCK_M * HEAD_DIM * 2, DO_BYTES = BLOCK_M * VALUE_DIM * 2,
              K_BYTES = CTA_KEYS * HEAD_DIM * 2, V_BYTES = CTA_KEYS * VALUE_DIM * 2;
constexpr u32 ROW_BYTES = BLOCK_M * 4, RANGE_BYTES = HAS_RANGES ? BLOCK_M * 8 : 0,
              SEED_BYTES = HAS_DROPOUT ? BLOCK_M * 4 : 0;
constexpr u32 BIAS_BYTES = BLOCK_M * BLOCK_N * BIAS_BITS / 8;
constexpr int CONSUMERS = IS_PAIRED ? 3 : 2;
using Barrier = BackwardBarriers<CONSUMERS>;
static_assert(BLOCK_M == 64 || (BLOCK_M == 128 && !HAS_MASK),
              "swizzle atoms of queries; a mask's bits of 64");

// Offsets in shared memory, in order.
struct BackwardShared {
  u32 k, v, q, grad_out;
  u32 exchange;  // between consumers
  u32 bias, lse, delta, ranges, row_seeds;
  u32 tile;  // that the producer has scheduled
  u32 kv_full, q_full, q_empty, do_full, do_empty;
  u32 extra;  // barriers of one kernel alone
  u32 bias_full, bias_empty, end;

  DEVICE constexpr explicit BackwardShared(u32 base)
      : k(base),
        v(k + K_BYTES),
        q(v + V_BYTES),
        grad_out(q + STAGES * Q_BYTES),
        exchange(grad_out + GRAD_STAGES * DO_BYTES),
        bias(exchange + EXCHANGE_BYTES),
        lse(bias + BIAS_BYTES),
        delta(lse + STAGES * ROW_BYTES),
        ranges(delta + GRAD_STAGES * ROW_BYTES),
        row_seeds(ranges + STAGES * RANGE_BYTES),
        tile(row_seeds + STAGES * SEED_BYTES),
        kv_full(tile + 32),
        q_full(kv_full + 8),
        q_empty(q_full + 8 * STAGES),
        do_full(q_empty + 8 * STAGES),
        do_empty(do_full + 8 * GRAD_STAGES),
        extra(do_empty + 8 * GRAD_STAGES),
        bias_full(extra + (IS_PAIRED ? 48 : 32)),
        bias_empty(bias_full + 8),
        end(BIAS_BITS ? bias_empty + 8 : bias_full) {}

  DEVICE void init() const {
    mbar_init(kv_full, 1);
    if (BIAS_BITS) mbar_init(bias_full, 1), mbar_init(bias_empty, IS_WIDE ? 128 : 128 * CONSUMERS);
    for (int i = 0; i < STAGES; i++) {
      mbar_init(barrier(q_full, i), 1), mbar_init(barrier(do_full, i), 1);
      // every thread arrives, at the same speed: racecheck does not accept one thread's arrival for its warp
      mbar_init(barrier(q_empty, i), 128 * CONSUMERS), mbar_init(barrier(do_empty, i), 128 * CONSUMERS);
    }
  }
};

constexpr BackwardShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES, "SHARED_BYTES is the size of the largest layout");

// A block of keys with one part of a group of query heads, counted over all groups, and the blocks of queries
// [first, last) that attend some of it.
struct KeyTile {
  int n0, part, b, keys, first, last;
};

DEVICE int key_head(const BackwardParams& p, const KeyTile& t) {
  return SPLITS_GROUP ? t.part / p.parts : t.part;
}
DEVICE int first_head(const BackwardParams& p, const KeyTile& t) { return t.part * p.part_heads; }

DEVICE KeyTile tile_at(const BackwardParams& p, int i) {
  const int parts = p.Hkv * p.parts, all = p.B * parts, per = p.section * p.n_blocks;
  const int sec = i / per, r = i - sec * per;
  const int inside = min(p.section, all - sec * p.section);
  const int part = sec * p.section + r % inside;
  KeyTile t;
  t.n0 = (r / inside) * BLOCK_N;
  t.b = part / parts;
  t.part = part - t.b * parts;
  t.keys = keys_of(p, t.b);
  int lo = 0, hi = p.Sq;
#if HAS_WINDOW
  const int shift = t.keys - p.Sq;
  lo = max(0, t.n0 - shift - p.window_right);
  hi = min(p.Sq, min(t.n0 + BLOCK_N, t.keys) - shift + p.window_left);
#endif
#if BIAS_BITS
  int2 listed = make_int2(UNBOUNDED, 0);  // by the lists of some head of the part
  for (int h = first_head(p, t); h < first_head(p, t) + (p.bias.blocks_h ? p.part_heads : 1); h++) {
    const int2 own = listed_range<false>(p.bias, t.b, h, t.n0, min(t.n0 + BLOCK_N, p.Sk));
    listed.x = min(listed.x, own.x), listed.y = max(listed.y, own.y);
  }
  lo = max(lo, listed.x), hi = min(hi, listed.y);
#endif
  if (t.n0 >= t.keys || lo >= hi) lo = hi = 0;
  t.first = lo / BLOCK_M;
  t.last = (hi + BLOCK_M - 1) / BLOCK_M;
  return t;
}

DEVICE long long range_row(const BackwardParams& p, int h, int b) {
  return b * p.range_heads + (p.range_heads > 1 ? h : 0);
}

// From the first to the last column that a mask keeps in some of COUNT rows. Executed by one warp.
template <int COUNT> DEVICE int2 kept_range(const MaskBits& bits, int b, int h, int row, int rows) {
  const unsigned char* from = bits.bits + b * bits.b + h * bits.h + bits.range;
  int lo = UNBOUNDED, hi = 0;
  for (int i = threadIdx.x & 31; i < COUNT; i += 32) {
    const int2 range = *(const int2*)(from + min(row + i, rows - 1) * bits.row);
    lo = min(lo, range.x), hi = max(hi, range.y);
  }
  return make_int2(__reduce_min_sync(~0u, lo), __reduce_max_sync(~0u, hi));
}

// A bit for each of the 32 blocks of queries from `base` on: those that attend some key of the tile, and
// those of which some query does not attend all of it.
struct QueryBlocks {
  u32 some, edge;
};

DEVICE QueryBlocks query_blocks(const BackwardParams& p, const KeyTile& t, int h, int base) {
  const int m = base + (threadIdx.x & 31);
  bool some = m<t.last, edge = t.n0 + BLOCK_N> t.keys;
#if HAS_WINDOW
  const int diagonal = m * BLOCK_M + t.keys - p.Sq;
  edge =
      edge || t.n0 + BLOCK_N - 1 > diagonal + p.window_right || t.n0 < diagonal + BLOCK_M - 1 - p.window_left;
#endif
#if HAS_RANGES
  if (some) {
    const int4 b = p.bounds[range_row(p, h, t.b) * p.m_blocks + m];
    some = b.x < t.n0 + BLOCK_N && b.y > t.n0;
    edge = edge || b.z > t.n0 || b.w < t.n0 + BLOCK_N;
  }
#endif
#if HAS_MASK
  const int2 kept = kept_range<BLOCK_N>(p.by_key, t.b, h, t.n0, p.Sk);
  const int first = p.mask_block ? m * BLOCK_M : 0;
  some = some && kept.x < first + BLOCK_M && kept.y > first;
#endif
  return {__ballot_sync(~0u, some), __ballot_sync(~0u, edge)};
}

DEVICE void load_tile(u32 dst, const TensorMap& map, u32 bar, int width, int rows, int row, int h, int b) {
  for (int x = 0; x < width; x += 64)
    for (int r = 0; r < rows; r += 64) tma_load(dst + (x * rows + r * 64) * 2, map, bar, x, row + r, h, b);
}

DEVICE void load_queries(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, int h, int m,
                         const PipelineState<STAGES>& ring) {
  const u32 i = ring.stage, q_full = barrier(sm.q_full, i), do_full = barrier(sm.do_full, i);
  const long long row = ((long long)(t.b * p.Hq + h) * p.m_blocks + m) * BLOCK_M;
  mbar_wait(barrier(sm.q_empty, i), ring.phase ^ 1);
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

// The base-2 exponent of a weight.
DEVICE float exponent(const BackwardParams& p, float s, float lse) {
#if BIAS_BITS  // exact for scores so far from 0 that their product with the scale is not
  return (s - lse) * p.scale_log2;
#else
  return fmaf(s, p.scale_log2, -lse);
#endif
}

DEVICE void load_keys(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t) {
  mbar_arrive_expect(sm.kv_full, K_BYTES + V_BYTES);
  const int h = key_head(p, t);
  load_tile(sm.k, p.k, sm.kv_full, HEAD_DIM, BLOCK_N, t.n0, h, t.b);
  load_tile(sm.v, p.v, sm.kv_full, VALUE_DIM, BLOCK_N, t.n0, h, t.b);
}

// Zeroes rows [from, to) of a tile of ROWS rows. Executed by a warpgroup, before its own products: keys past
// a batch row's length may hold anything.
template <int ROWS, int FEATURES> DEVICE void clear_rows(u32 tile, int from, int to, u32 barrier) {
#pragma unroll 1
  for (int i = from * 8 + (threadIdx.x & 127); i < to * 8; i += 128)
#pragma unroll
    for (int x = 0; x < FEATURES / 64; x++)
      store_shared(tile + x * ROWS * 128 + i * 16, make_int4(0, 0, 0, 0));
  fence_async_shared();
  named_barrier_sync(barrier, 128);
}

// Executed by one warp, whose leader issues the copies of all queries that a tile meets.
DEVICE void produce_queries(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, bool leader,
                            PipelineState<STAGES>& ring, [[maybe_unused]] PipelineState<1>& bias) {
  for (int h = first_head(p, t); h < first_head(p, t) + p.part_heads; h++)
    for (int base = t.first; base < t.last; base += 32) {
      QueryBlocks n = query_blocks(p, t, h, base);
      for (; n.some; n.some &= n.some - 1, ring.next())
        if (leader) {
          load_queries(p, sm, t, h, base + __ffs(n.some) - 1, ring);
#if BIAS_BITS
          load_bias(p, sm, t, h, base + __ffs(n.some) - 1, bias);
#endif
        }
    }
}

// The bit of a thread's `i`-th accumulator element in 64 bits of a row, moved down by `first_bit`: a thread
// has two of every eight.
DEVICE int first_bit() { return (threadIdx.x & 3) * 2; }
DEVICE bool bit_of(u64 row, int i) { return row >> column_offset(i % 32) & 1; }

template <int COUNT> DEVICE void pack_fragments(u32 (&to)[COUNT], const float (&from)[2 * COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}

// Dropped weights have their sign set: the product with dO takes them as 0, gradients of scores need their
// values.
template <int COUNT> DEVICE void pack_weights(u32 (&to)[COUNT], const float (&from)[2 * COUNT]) {
#if HAS_DROPOUT
#pragma unroll
  for (int i = 0; i < COUNT; i++) to[i] = pack_relu(from[2 * i], from[2 * i + 1]);
#else
  pack_fragments(to, from);
#endif
}

// The gradient of a score; under dropout without its scale.
DEVICE float score_gradient(float weight, float dp, float delta) {
#if HAS_DROPOUT
  return fmaxf(weight, 0.f) * dp - fabsf(weight) * delta;
#else
  return weight * (dp - delta);
#endif
}

// Stores a warpgroup's accumulator, as 16-bit fragments, to 64 rows of 128 swizzled bytes for each column of
// a tile.
template <int COUNT> DEVICE void store_fragments(u32 at, const u32 (&x)[COUNT], u32 column_bytes) {
  const int lane = threadIdx.x & 31, r = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const int col = i * 4 + ((lane >> 4) & 1) * 8;
    const u32 to = at + (col >> 6) * column_bytes + r * 128 + ((((col & 63) >> 3) ^ (r & 7)) << 4);
    if (i + 4 <= COUNT) stmatrix_x4(to, x[i], x[i + 1], x[i + 2], x[i + 3]);
    else stmatrix_x2(to, x[i], x[i + 1]);  // eight columns, at the addresses of lanes 0 to 15
  }
}

constexpr int ROWS_PER_NOTE = 16;  // of a word of `nonfinite`: a warp's

// The number of words of dK, and of dV.
DEVICE int key_notes(const BackwardParams& p) {
  return SPLITS_GROUP ? 0 : p.B * p.Hkv * p.n_blocks * (BLOCK_N / ROWS_PER_NOTE);
}

// The word of the first 16 of 64 rows; `h` counts over all batches, and a head has `rows` rows, padded.
DEVICE u32* note_at(const BackwardParams& p, int tensor, int h, int rows, int row) {
  const int previous = tensor == DK ? 0 : tensor == DV ? key_notes(p) : 2 * key_notes(p);
  return p.nonfinite + previous + (h * (rows / ROWS_PER_NOTE) + row / ROWS_PER_NOTE);
}

// 0 if all are finite, else NaN.
template <int COUNT> DEVICE float probe(const float (&x)[COUNT]) {
  float found[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < COUNT; i++) found[i % 4] = fmaf(x[i], 0.f, found[i % 4]);
  return (found[0] + found[1]) + (found[2] + found[3]);
}

// Writes a warpgroup's gradients of 64 tokens, through shared memory.
template <int COUNT>
DEVICE void store_gradients(const float (&grads)[COUNT], float factor, u32 at, u32 column_bytes, u32 barrier,
                            const TensorMap& map, int row, int h, int b, u32* note) {
  const bool is_nonfinite = __any_sync(~0u, probe(grads) != 0.f);
  if ((threadIdx.x & 31) == 0) note[threadIdx.x >> 5 & 3] = is_nonfinite;
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

constexpr int KEY_SUMS = BLOCK_N * (HEAD_FEATURES + VALUE_FEATURES);

// The sums of a block of keys, dK and behind it dV, each consumer's in accumulator order. With ADDS_DQ all
// parts of a group add to the same sums, in no fixed order; else each part has its own.
DEVICE float* key_sums_of(const BackwardParams& p, const KeyTile& t) {
  const int of = ADDS_DQ ? t.b * p.Hkv + key_head(p, t) : t.b * p.Hkv * p.parts + t.part;
  return p.key_sums + ((long long)of * p.n_blocks + t.n0 / BLOCK_N) * KEY_SUMS;
}

// Adds elements [BEGIN, END) of a thread's accumulator to sums, of which `to` is the thread's first.
template <int BEGIN, int END, int COUNT> DEVICE void add_fragments(float* to, const float (&x)[COUNT]) {
#pragma unroll
  for (int i = BEGIN; i < END; i += 4) atomic_add(to + i * 128, x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// Adds to the group's sums, or writes those of a part.
template <int COUNT> DEVICE void write_key_sums(float* to, const float (&x)[COUNT]) {
  if (ADDS_DQ) {
    add_fragments<0, COUNT>(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4)
      *(float4*)(to + i * 128) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}
