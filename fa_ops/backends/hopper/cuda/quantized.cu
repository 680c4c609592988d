// Attention forward with 8-bit products for sm_90a: persistent, warp-specialised CTAs as in forward.cu, on
// queries, keys and values that quantize.cu has written.
//
// The products of a step are O += P(j + 1).V(j + 1) and S(j) = Q.K(j)^T, from which the weights P(j) are
// computed. One step of a consumer's main loop, over time. With three consumers the products run one after
// the other, so that P(j + 1) and S(j) share registers, and the consumers take turns at the tensor cores:
// while one waits for its products, the others compute weights.
//
//   named barrier   wait TURN + c ............................ pass the turn to the next consumer
//   tensor cores        | O += P(j + 1).V(j + 1) | S(j)      |  (products of other consumers)
//   CUDA cores      ...... add to the totals ....^           | max | rescale O | exp2 | round P(j)
//   mbarriers       v_full(j + 1)  k_full(j)     release V(j + 1)   release K(j)
//
// With two consumers there are registers to compute the row maxima of S(j) while the product with the values
// runs, and no order is enforced.
//
//   tensor cores        | S(j)      | O += P(j + 1).V(j + 1) |
//   CUDA cores      ................| max | exp2 ............| round P(j) | add to the totals | rescale O
//   mbarriers       k_full(j)  v_full(j + 1)  release K(j)   release V(j + 1)
//
// Tensor cores accumulate 8-bit products with a precision of about 14 bits. Accumulation is therefore limited
// to SUMMED_BLOCKS blocks, after which the accumulator is added to totals in shared memory.
//
// Compile-time: IS_BF16 IS_INT8 BLOCK_M BLOCK_N HEAD_DIM HEAD_FEATURES VALUE_FEATURES STAGES QUERY_STAGES
// SHARED_BYTES SUMMED_KEYS HAS_WINDOW HAS_LEFT HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_SINKS
// SUMS_BY_PRODUCT: row sums are products with ones, in place of additions
// HAS_SIGNS: scales may be negative
// HEAD_SCALES: all keys of a head have one scale, and all of its values
// QUANTISES_QUERIES ROTATED_BITS: queries have 16 bits
// PACKED_QUERIES: of packed sequences; IS_PAGED COPY_KEYS: whose keys are in pages
#define HAS_MASK 0
#define PACKED_HEADS 1
#define BIAS_BITS 0
#define RESCALE_THRESHOLD 0
#include "eight_bit.cuh"
#include "elements.cuh"
#include "sequences.cuh"
#include "softmax.cuh"
#include "tile_producer.cuh"
#include "wgmma.cuh"

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct QuantizedParams {
  TensorMap q, k, v;      // (B, Hq, Sq, D), (B, Hkv, Sk, D), and (B, Hkv, Dv, keys) as quantize.cu writes it
  Element* out;           // (B, Sq, Hq, Dv)
  float* lse;             // (B, Hq, Sq) or null
  const float* q_scale;   // (B, Hq, Sq), unless queries are quantised here
  const float* k_scale;   // (B, Hkv, 2 blocks of keys): of each 64 keys
  const float* v_scale;   // (B, Hkv, Dv)
  float* offset;          // (B, Hq, Sq), what scores lack, or null
  const float* mean;      // (B, Hkv, D), of the keys, where offset is computed here
  const int* kv_lens;     // (B,) or null
  const int* key_ranges;  // (B|1, Hq|1, Sq|1, 2) or null, with the strides below
  const float* sinks;     // (Hq,) or null
  int* tile_counter;      // tiles claimed beyond each CTA's first, 0 at launch; or null
  int B, Hq, group, Sq, Sk, Dv;
  int window_left, window_right;  // UNBOUNDED: no limit; causal is window_right = 0
  int m_blocks, tiles, section;   // section: the number of heads whose K and V share the L2
  int ranges_b, ranges_h, ranges_q;
  float tanh_scale;  // with a softcap: scale / softcap
  float scale_log2;  // log2(e) * scale, or log2(e) * softcap
#if PACKED_QUERIES  // B sequences with Sq tokens in total; see prepare_e4m3.cu for the keys
  PageTable pages;         // without a table only cu_seqlens_q
  const int2* key_starts;  // (B,): the first key (without pages) and the first block of keys
#endif
};

// A tile of Q or K consists of columns of 128 features, each one swizzle atom of 128 bytes wide. A tile of V
// is transposed: its rows are the BLOCK_N keys of a channel, one swizzle atom wide. They are followed by ONES
// rows of ones, whose products with the weights are the row sums.
constexpr int QK_COLUMNS = HEAD_DIM / 128;
constexpr int QUERY_SLOTS = QUERY_STAGES * CONSUMERS;
constexpr int ONES = SUMS_BY_PRODUCT ? 8 : 0;
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_FEATURES / 2;  // accumulator registers of a thread
constexpr int PRODUCTS = OUTPUTS + ONES / 2;
#if QUANTISES_QUERIES
constexpr int RAW_COLUMNS = (HEAD_FEATURES + 63) / 64;  // of queries before, one swizzle atom each
#else
constexpr int RAW_COLUMNS = 0;
#endif
constexpr u32 RAW_BYTES = 64 * 128 * RAW_COLUMNS;
constexpr u32 Q_BYTES = 64 * HEAD_DIM, K_BYTES = BLOCK_N * HEAD_DIM,
              V_COPY_BYTES = BLOCK_N * VALUE_FEATURES, V_BYTES = V_COPY_BYTES + BLOCK_N * ONES;
// The totals of a consumer, accumulated over earlier blocks, in 16-byte pieces per thread.
constexpr int TOTAL_FEATURES = (VALUE_FEATURES + 15) / 16 * 16;
constexpr u32 TOTAL_BYTES = 64 * TOTAL_FEATURES * 2;
#if IS_PAGED
constexpr u32 PAGE_BYTES = 4 * STAGES;
#else
constexpr u32 PAGE_BYTES = 0;
#endif
constexpr int READERS = 128 * CONSUMERS;  // threads that read a work item

static_assert(CONSUMERS == 2 || CONSUMERS == 3, "as registers are divided");
static_assert(BLOCK_M % 64 == 0 && BLOCK_N == 128, "whole products, and keys of V in one swizzle atom");
static_assert(VALUE_FEATURES % 8 == 0, "whole swizzle atoms");
static_assert(!QUANTISES_QUERIES || (QUERY_STAGES == 1 && HEAD_DIM == 128), "a slot that is filled here");
static_assert(QUERY_STAGES <= 2, "a slot for each of two work items");

// Offsets in shared memory, in order. Barriers have one mbarrier for each slot.
struct QuantizedShared {
  u32 q, raw, k, v, totals;  // raw: queries of 16 bits
  u32 q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty;
  u32 work, pages, end;  // pages: per slot of keys, one bit for each copy, set if its page exists

  DEVICE constexpr explicit QuantizedShared(u32 base)
      : q(base),
        raw(q + QUERY_SLOTS * Q_BYTES),
        k(raw + CONSUMERS * RAW_BYTES),
        v(k + STAGES * K_BYTES),
        totals(v + STAGES * V_BYTES),
        q_full(totals + CONSUMERS * TOTAL_BYTES),
        q_empty(q_full + 8 * QUERY_SLOTS),
        k_full(q_empty + 8 * QUERY_SLOTS),
        k_empty(k_full + 8 * STAGES),
        v_full(k_empty + 8 * STAGES),
        v_empty(v_full + 8 * STAGES),
        work_full(v_empty + 8 * STAGES),
        work_empty(work_full + 8 * 2),
        work((work_empty + 8 * 2 + 15) & ~15),
        pages(work + 2 * WORK_ITEM_BYTES),
        end(pages + PAGE_BYTES) {}
};
constexpr QuantizedShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");

// The named barriers. Barrier 0 is that of __syncthreads.
struct Barrier {
  enum : u32 {
    TURN = 1,       // consumer c waits at TURN + c until it may issue products
    WARPGROUP = 4,  // one per consumer (up to three), for its 128 threads
  };
};

// The offsets of a tile's data in global memory.

#if PACKED_QUERIES
constexpr bool PACKS_SEQUENCES = true;
// Whether the tile's tokens belong to a sequence; tokens outside every sequence attend nothing.
DEVICE bool is_in_sequence(const QuantizedParams& p, const Tile& tile) { return (u32)tile.b < (u32)p.B; }

// The tile's sequence, clamped to an existing one.
DEVICE int batch_row(const QuantizedParams& p, const Tile& tile) { return max(0, min(tile.b, p.B - 1)); }

// The first key of the sequence, and its first block of keys.
DEVICE int2 key_start(const QuantizedParams& p, const Tile& tile) { return p.key_starts[batch_row(p, tile)]; }

// The first token of the tile's batch row in `out`.
DEVICE long long first_token(const QuantizedParams&, const Tile& tile) { return tile.first; }

// The same in arrays of shape (Hq, tokens).
DEVICE long long first_row(const QuantizedParams& p, const Tile& tile) {
  return (long long)tile.h * p.Sq + tile.first;
}

DEVICE long long first_key_scale(const QuantizedParams& p, const Tile& tile) {
  const long long head = tile.h / p.group;
  return head * ((p.Sk + 127) / 128 * 2) + 2 * key_start(p, tile).y;
}
#else
constexpr bool PACKS_SEQUENCES = false;
DEVICE bool is_in_sequence(const QuantizedParams&, const Tile&) { return true; }
DEVICE int batch_row(const QuantizedParams&, const Tile& tile) { return tile.b; }
DEVICE long long first_token(const QuantizedParams& p, const Tile& tile) { return (long long)tile.b * p.Sq; }
DEVICE long long first_row(const QuantizedParams& p, const Tile& tile) {
  return (long long)(tile.b * p.Hq + tile.h) * p.Sq;
}
DEVICE long long first_key_scale(const QuantizedParams& p, const Tile& tile) {
  const long long head = tile.b * (p.Hq / p.group) + tile.h / p.group;
  return head * ((p.Sk + 127) / 128 * 2);
}
#endif

// The producer: one warp schedules tiles and copies Q, K and V.

// A block of keys, counted from key `first` of the tensor.
DEVICE void load_keys(const QuantizedParams& p, const QuantizedShared& sm, PipelineState<STAGES>& k,
                      int block, int h, int b, int first = 0) {
  const u32 bar = barrier(sm.k_full, k.stage), at = slot_at<K_BYTES>(sm.k, k.stage);
  mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
  mbar_arrive_expect(bar, K_BYTES);
#pragma unroll
  for (int x = 0; x < QK_COLUMNS; x++)
    tma_load(at + x * BLOCK_N * 128, p.k, bar, x * 128, first + block * BLOCK_N, h, b);
  k.next();
}

DEVICE void load_values(const QuantizedParams& p, const QuantizedShared& sm, PipelineState<STAGES>& v,
                        int block, int h, int b) {
  const u32 bar = barrier(sm.v_full, v.stage);
  mbar_wait(barrier(sm.v_empty, v.stage), v.phase ^ 1);
  mbar_arrive_expect(bar, V_COPY_BYTES);
  tma_load(slot_at<V_BYTES>(sm.v, v.stage), p.v, bar, block * BLOCK_N, 0, h, b);
  v.next();
}

DEVICE void load_queries(const QuantizedParams& p, const QuantizedShared& sm, const Tile& tile,
                         const PipelineState<2>& work) {
#pragma unroll
  for (int c = 0; c < CONSUMERS; c++) {
    const int slot = query_slot(work, c);
    const u32 bar = barrier(sm.q_full, slot);
    mbar_wait(barrier(sm.q_empty, slot), query_phase(work) ^ 1);
    mbar_arrive_expect(bar, QUANTISES_QUERIES ? RAW_BYTES : Q_BYTES);
#if PACKED_QUERIES
    const int first = tile.first + tile.m0 + c * 64, b = 0;
#else
    const int first = tile.m0 + c * 64, b = tile.b;
#endif
#if QUANTISES_QUERIES
#pragma unroll
    for (int x = 0; x < RAW_COLUMNS; x++)
      tma_load(slot_at<RAW_BYTES>(sm.raw, c) + x * 64 * 128, p.q, bar, x * 128, first, tile.h, b);
#else
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++)
      tma_load(slot_at<Q_BYTES>(sm.q, slot) + x * 64 * 128, p.q, bar, x * 128, first, tile.h, b);
#endif
  }
}

#if IS_PAGED
// Executed by one thread. Where a page does not exist zeros are copied, and consumers read which copies have
// a page.
DEVICE void load_paged_keys(const QuantizedParams& p, const QuantizedShared& sm, PipelineState<STAGES>& k,
                            const PagedBlock& block, int h) {
  const u32 bar = barrier(sm.k_full, k.stage), at = slot_at<K_BYTES>(sm.k, k.stage);
  mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
  store_shared(slot_at<4>(sm.pages, k.stage), block.exists);
  mbar_arrive_expect(bar, K_BYTES);
#pragma unroll
  for (int j = 0; j < COPIES; j++)
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++)
      tma_load(at + (x * BLOCK_N + j * COPY_KEYS) * 128, p.k, bar, x * 128, block.tokens[j], h,
               block.pages[j]);
  k.next();
}

// Executed by one warp, whose lanes look up a block's pages while its leader copies the block before it.
DEVICE void load_work_item(const QuantizedParams& p, const QuantizedShared& sm, const WorkItem& item,
                           const PipelineState<2>& work, PipelineState<STAGES>& k, PipelineState<STAGES>& v,
                           bool leader) {
  const int h = item.tile.h / p.group, first_block = key_start(p, item.tile).y;
  const BlockRange& n = item.blocks;
  PagedCopy next = find_copy(p, item, n.end - 1);
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    const PagedBlock block = gather_copies(p, next);
    next = find_copy(p, item, j - 1);
    if (leader) {
      if (j >= n.begin) load_paged_keys(p, sm, k, block, h);
      if (j == n.end - 1) load_queries(p, sm, item.tile, work);
      else load_values(p, sm, v, first_block + j + 1, h, 0);
    }
    if (j < n.begin) break;
  }
}
#else
// Executed by one thread. K is a block ahead of V, and Q comes after the first block of K.
DEVICE void load_work_item(const QuantizedParams& p, const QuantizedShared& sm, const WorkItem& item,
                           const PipelineState<2>& work, PipelineState<STAGES>& k, PipelineState<STAGES>& v) {
#if PACKED_QUERIES
  const int2 start = key_start(p, item.tile);
  const int h = item.tile.h / p.group, b = 0, first_key = start.x, first_block = start.y;
#else
  const int h = item.tile.h / p.group, b = item.tile.b, first_key = 0, first_block = 0;
#endif
  const BlockRange& n = item.blocks;
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    if (j >= n.begin) load_keys(p, sm, k, j, h, b, first_key);
    if (j == n.end - 1) load_queries(p, sm, item.tile, work);
    else load_values(p, sm, v, first_block + j + 1, h, b);
    if (j < n.begin) break;
  }
}
#endif

// Executed by one warp.
DEVICE void produce(const QuantizedParams& p, const QuantizedShared& sm) {
  PipelineState<STAGES> k, v;
  produce_tiles(p, sm, [&](const WorkItem& item, const PipelineState<2>& work, bool leader) {
#if IS_PAGED
    load_work_item(p, sm, item, work, k, v, leader);
#else
    if (leader) load_work_item(p, sm, item, work, k, v);
#endif
  });
}

// Queries of 16 bits in shared memory, which a consumer quantises before it attends: each has a scale.

#if QUANTISES_QUERIES
// Of a row, a lane of four has 16 consecutive features of every 64.
constexpr int ROW_PARTS = RAW_COLUMNS, ROW_NUMBERS = 16 * ROW_PARTS;
typedef float RowPart[ROW_NUMBERS];
constexpr float ROTATION = (ROTATED_BITS % 2 ? 0.70710678118654752f : 1.f) / (1 << ROTATED_BITS / 2);

DEVICE void load_row_part(RowPart& x, u32 raw, int row, int lane) {
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i += 8) {
    const int chunk = 2 * lane + i / 8 % 2;
    const int4 y = load_shared<int4>(raw + i / 16 * 64 * 128 + row * 128 + (chunk ^ row & 7) * 16);
    const u32 words[4] = {(u32)y.x, (u32)y.y, (u32)y.z, (u32)y.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 z = unpack(words[j]);
      x[i + 2 * j] = z.x, x[i + 2 * j + 1] = z.y;
    }
  }
}

// Rotates the features of a row by Hadamard's matrix in blocks, as quantize.cu does.
DEVICE void rotate_row(RowPart& x, int lane) {
#pragma unroll
  for (int bit = 0; bit < ROTATED_BITS; bit++) {
    if (bit == 4 || bit == 5) {
      const int other_lane = bit == 4 ? 1 : 2;
#pragma unroll
      for (int i = 0; i < ROW_NUMBERS; i++) {
        const float other = __shfl_xor_sync(~0u, x[i], other_lane);
        x[i] = lane & other_lane ? other - x[i] : x[i] + other;
      }
    } else {
      const int half = bit < 4 ? 1 << bit : 16 << bit - 6;
#pragma unroll
      for (int i = 0; i < ROW_NUMBERS; i++)
        if (!(i & half)) {
          const float a = x[i], b = x[(i | half) % ROW_NUMBERS];
          x[i] = a + b, x[(i | half) % ROW_NUMBERS] = a - b;
        }
    }
  }
  if (ROTATED_BITS)
#pragma unroll
    for (int i = 0; i < ROW_NUMBERS; i++) x[i] *= ROTATION;
}

// The product of a row with the mean of a head's keys.
DEVICE float product_with_mean(const RowPart& x, const float* mean, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i++) {
    const int feature = i / 16 * 64 + lane * 16 + i % 16;
    if (feature < HEAD_FEATURES) sum += x[i] * mean[feature];
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Quantises a row from `raw` to `to`; returns its scale. Executed by all lanes of a warp.
DEVICE float quantize_row(RowPart& x, u32 to, int row, int lane) {
  rotate_row(x, lane);
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i++) largest = fmaxf(largest, fabsf(x[i]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const Scale found = scale_of(largest);
#pragma unroll
  for (int i = 0; i < ROW_NUMBERS; i += 16) {
    const int chunk = i / 4 + lane;
    store_shared(to + row * 128 + (chunk ^ row & 7) * 16,
                 make_int4(pack_numbers(x + i, found.inverse), pack_numbers(x + i + 4, found.inverse),
                           pack_numbers(x + i + 8, found.inverse), pack_numbers(x + i + 12, found.inverse)));
  }
  return found.scale;
}
#endif

// Online softmax whose weights are rounded to e4m3 relative to a power of two. A thread holds two rows of
// scores, elements 4i and 4i + 1 of the first and 4i + 2 and 4i + 3 of the second.

// The bits of the float 1.5 * 2^23 are added to int8 products: read as a float, the sum is that number plus
// the product, so that no integer is converted. After a softcap the scores are plain floats in either case.
#if IS_INT8
typedef u32 Accumulator;
constexpr u32 FIRST_BITS = 0x4B400000;
constexpr float FIRST = 12582912.f;
DEVICE float as_float(u32 x) { return __int_as_float(x); }
DEVICE int as_bits(u32 x) { return x; }
#else
typedef float Accumulator;
constexpr float FIRST = 0.f;
DEVICE float as_float(float x) { return x; }
DEVICE int as_bits(float x) { return __float_as_int(x); }
#endif
constexpr float ZERO = HAS_SOFTCAP ? 0.f : FIRST;  // the representation of the score 0
constexpr bool SCORES_ARE_POSITIVE = ZERO > 0.f;  // in this representation, except masked ones
// A weight of 1 is rounded as 2^WEIGHT_BITS; the largest e4m3 number is 448.
constexpr float WEIGHT_BITS = 8.f, UNIT_WEIGHT = 256.f;
// When an accumulation starts, the running max may fall to this many bits above the largest score, as long as
// no sum of weights exceeds 2^MAX_SUM_BITS.
constexpr float SLACK_BITS = 4.f, MAX_SUM_BITS = 60.f;

// 64 keys share a scale, or with HEAD_SCALES all keys of a head: a thread holds KEY_SCORES scores of them.
constexpr int KEY_SCALES = HEAD_SCALES ? 1 : BLOCK_N / 64, KEY_SCORES = SCORES / KEY_SCALES;
struct alignas(4 * KEY_SCALES) KeyScales {
  float scales[KEY_SCALES];
};
typedef Accumulator Scores[SCORES];
typedef u32 Weights[SCORES / 4];  // four e4m3 numbers each

DEVICE int larger(int a, int b) { return max(a, b); }

// The maximum over a row's four lanes.
DEVICE float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

struct QuantizedSoftmax {
  float max[2];        // the running max in units of log2, rounded up to an integer
  bool max_moved;      // in some row of this warp, in the last block
  bool has_negative_max;  // in some row of this warp
  float rescale[2];    // if so, the factors for everything accumulated before
  float row_scale[2];  // query scales, times the scale of the scores, and with HEAD_SCALES that of the keys
  float key_scale[KEY_SCALES];  // one per 64 keys of the block; 1 with HEAD_SCALES

  DEVICE void reset() {
    max[0] = max[1] = UNINITIALISED_MAX, has_negative_max = true;
  }

  static DEVICE float unit_of(float scale) { return fmaxf(fabsf(scale), 1e-37f); }

  // The log2 of a weight, from a product with the sign of the score.
  DEVICE float unit(const QuantizedParams& p, int row, int part) const {
    if (HAS_SOFTCAP) return p.scale_log2;
    return HEAD_SCALES ? row_scale[row] : unit_of(row_scale[row] * key_scale[part]);
  }

  // The largest score of a row in one part of this thread's keys. The bits of floats are compared as
  // integers, for which Hopper has a three-way maximum; this is correct if at least one is not negative.
  template <int ROW, int PART, bool AS_BITS>
  DEVICE float largest_in_part(const QuantizedParams& p, const Scores& s) const {
    constexpr int CHAINS = KEY_SCALES == 1 ? 4 : 2;
    float x[4];  // several maxima, so that comparisons do not form one chain
    int bits[CHAINS];
#pragma unroll
    for (int i = 0; i < KEY_SCORES / 4; i++) {
      const int at = PART * KEY_SCORES + 4 * i + 2 * ROW;
      if (AS_BITS) {
        const int pair = larger(as_bits(s[at]), as_bits(s[at + 1]));
        bits[i % CHAINS] = i < CHAINS ? pair : larger(pair, bits[i % CHAINS]);
      } else {
        const float pair = fmaxf(as_float(s[at]), as_float(s[at + 1]));
        x[i % 4] = i < 4 ? pair : fmaxf(x[i % 4], pair);
      }
    }
    const float factor = unit(p, ROW, PART);
    int largest_bits = AS_BITS ? bits[0] : 0;
#pragma unroll
    for (int i = 1; i < CHAINS; i++)
      if (AS_BITS) largest_bits = larger(largest_bits, bits[i]);
    const float largest = AS_BITS ? __int_as_float(largest_bits)
                                  : fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    return ZERO > 0.f ? fmaf(largest, factor, -ZERO * factor) : largest * factor;
  }

  template <bool AS_BITS, int ROW>
  DEVICE float largest_score(const QuantizedParams& p, const Scores& s) const {
    const float first = largest_in_part<ROW, 0, AS_BITS>(p, s);
    return KEY_SCALES == 1 ? first : fmaxf(first, largest_in_part<ROW, KEY_SCALES - 1, AS_BITS>(p, s));
  }

  // Moves the running maxima if necessary. Each of a row's four lanes tests its own scores, and they exchange
  // maxima only if a lane of the warp found a larger one. If no running max is negative, a thread without
  // positive scores may return a wrong maximum, which has no effect.
  DEVICE void update_max(const QuantizedParams& p, const Scores& s) {
    float found[2];
    if (SCORES_ARE_POSITIVE || !has_negative_max) {
      found[0] = largest_score<true, 0>(p, s), found[1] = largest_score<true, 1>(p, s);
    } else {
      found[0] = largest_score<false, 0>(p, s), found[1] = largest_score<false, 1>(p, s);
    }
    max_moved = __any_sync(~0u, found[0] > max[0] || found[1] > max[1]);
    if (!max_moved) return;
#pragma unroll
    for (int r = 0; r < 2; r++) move_max(r, fmaxf(max[r], ceilf(largest_of_row(found[r]))));
    has_negative_max = __any_sync(~0u, fminf(max[0], max[1]) < 0.f);
  }

  // The same at the start of an accumulation, where the maxima may also fall: if the scores of all its keys
  // were far below the row's largest, their weights would otherwise round to 0. `sums` are the sums of the
  // rows' earlier weights, which grow when a max falls.
  DEVICE void update_max_of_sum(const QuantizedParams& p, const Scores& s, const float (&sums)[2]) {
    const float found[2] = {largest_score<SCORES_ARE_POSITIVE, 0>(p, s),
                            largest_score<SCORES_ARE_POSITIVE, 1>(p, s)};
    max_moved = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float largest = ceilf(largest_of_row(found[r]));
      const float sum_bits = ceilf(log2_fast(fmaxf(largest_of_row(sums[r]), 1.f)));
      const float lowest = max[r] + fminf(sum_bits - MAX_SUM_BITS, 0.f);
      const float fallen = largest == -INFINITE ? max[r] : fmaxf(largest + SLACK_BITS, lowest);
      const float x = fmaxf(fminf(fallen, max[r]), largest);
      max_moved |= x != max[r];
      move_max(r, x);
    }
    max_moved = __any_sync(~0u, max_moved);
    if (max_moved) has_negative_max = __any_sync(~0u, fminf(max[0], max[1]) < 0.f);
  }

  DEVICE void move_max(int r, float x) { rescale[r] = exp2_fast(max[r] - x), max[r] = x; }

  // Replaces the scores of a row by weights.
  template <int ROW> DEVICE void exponentiate(const QuantizedParams& p, Scores& s) const {
#pragma unroll
    for (int part = 0; part < KEY_SCALES; part++) {
      const float factor = unit(p, ROW, part), base = WEIGHT_BITS - max[ROW],
                  shift = ZERO > 0.f ? fmaf(-ZERO, factor, base) : base;
#pragma unroll
      for (int i = part * KEY_SCORES + 2 * ROW; i < (part + 1) * KEY_SCORES; i += 4) {
        set(s[i], exp2_fast(fmaf(as_float(s[i]), factor, shift)));
        set(s[i + 1], exp2_fast(fmaf(as_float(s[i + 1]), factor, shift)));
      }
    }
  }

  // Rounds a row's weights. Returns this thread's part of the sum of the rounded weights, or 0 if that sum is
  // computed by a product.
  template <int ROW> DEVICE float round(const Scores& s, Weights& weights) const {
#pragma unroll
    for (int i = ROW; i < SCORES / 4; i += 2) weights[i] = pack_weights(s, i);
    return SUMS_BY_PRODUCT ? 0.f : sum_of<ROW>(weights);
  }

  // This thread's part of the sum of a row's rounded weights.
  template <int ROW> static DEVICE float sum_of(const Weights& weights) {
    u32 sums[4];  // float16 pairs: sums of 32 weights are at most 2^13, rounded to 11 bits
#pragma unroll
    for (int i = ROW; i < SCORES / 4; i += 2) {
      u32 low, high;
      unpack_e4m3(weights[i], low, high);
      const u32 sum = add_halves(low, high);
      sums[i / 2 % 4] = i < 8 ? sum : add_halves(sums[i / 2 % 4], sum);
    }
    return sum_of_halves(add_halves(add_halves(sums[0], sums[1]), add_halves(sums[2], sums[3])));
  }

  // One operand register of the product with the values. Of 32 keys, a thread's fragment holds positions 16a
  // + 4t + 2b + c, but its scores belong to keys 8(2a + b) + 2t + c: quantize.cu stores the values in this
  // order.
  static DEVICE u32 pack_weights(const Scores& w, int i) {
    const int at = i / 4 * 16 + (i & 2) * 4 + (i & 1) * 2;
    return pack_e4m3(as_float(w[at]), as_float(w[at + 1]), as_float(w[at + 4]), as_float(w[at + 5]));
  }
};

// The totals of a consumer's output in shared memory, to which its accumulators are added from time to time.
// Each thread reads and writes its own elements only.
//
// They are float16, relative to the largest power of two that does not exceed the sum of the row's weights,
// so that their magnitude is at most twice that of the largest value.

struct SharedTotals {
  static constexpr int BATCH = 32;  // elements that are loaded at once

  u32 at;           // the address of this thread's first elements
  bool exist;       // whether something has been added
  float factor[2];  // the factor of a row's elements

  // The address of eight elements.
  DEVICE u32 piece(int i) const { return at + i / 8 * 128 * 16; }

  DEVICE void reset(u32 where) {
    at = where, exist = false, factor[0] = factor[1] = 0.f;
#pragma unroll 1
    for (int i = 0; i < OUTPUTS; i += 8) store_shared(piece(i), make_int4(0, 0, 0, 0));
  }

  DEVICE void rescale(const float (&by)[2]) { factor[0] *= by[0], factor[1] *= by[1]; }

  // Adds an accumulator; `sums` are the sums of the row's weights.
  DEVICE void add(const float (&t)[PRODUCTS], const float (&sums)[2]) {
    float unit[2];
    u32 shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int exponent = __float_as_int(fmaxf(sums[r], 1e-30f)) & 0x7f800000;
      unit[r] = __int_as_float(0x7f000000 - exponent);  // 2^-e, where the sum is at least 2^e
      shrink[r] = pack_halves(factor[r] * unit[r], factor[r] * unit[r]);
      factor[r] = __int_as_float(exponent);
    }
#pragma unroll
    for (int begin = 0; begin < OUTPUTS; begin += BATCH) {
      int4 x[BATCH / 8];  // several at once, as a load takes longer than what follows it
#pragma unroll
      for (int i = begin; i < begin + BATCH && i < OUTPUTS; i += 8)
        x[(i - begin) / 8] = load_shared<int4>(piece(i));
#pragma unroll
      for (int i = begin; i < begin + BATCH && i < OUTPUTS; i += 8) {
        int4& y = x[(i - begin) / 8];
        int* const words[4] = {&y.x, &y.y, &y.z, &y.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (i + 2 * j >= OUTPUTS) continue;
          const u32 added = pack_halves(t[i + 2 * j] * unit[j & 1], t[i + 2 * j + 1] * unit[j & 1]);
          *words[j] = fma_halves(*words[j], shrink[j & 1], added);
        }
        store_shared(piece(i), y);
      }
    }
    exist = true;
  }

  DEVICE void finish(float (&t)[PRODUCTS]) const {
    if (!exist) return;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 8) {
      const int4 x = load_shared<int4>(piece(i));
      const int words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (i + 2 * j >= OUTPUTS) continue;
        const float2 y = unpack_halves(words[j]);
        t[i + 2 * j] = fmaf(y.x, factor[j & 1], t[i + 2 * j]);
        t[i + 2 * j + 1] = fmaf(y.y, factor[j & 1], t[i + 2 * j + 1]);
      }
    }
  }
};

// A consumer warpgroup: 64 queries.

constexpr u32 SUMMED_BLOCKS = SUMMED_KEYS / BLOCK_N;
constexpr bool TAKES_TURNS = CONSUMERS == 3;
// FIRST_BITS is added to the scores after the turn, rather than written to the accumulators during it, so
// that turns are shorter. With up to 64 features this is slower, as `tests.gpu.compare --groups quantized`
// shows: the additions compete with the row maxima for the ALU.
constexpr bool ADDS_FIRST_BITS = IS_INT8 && TAKES_TURNS && HEAD_FEATURES > 64;

struct QuantizedConsumer {
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

  PipelineState<STAGES> k, v;
  u32 queries;  // the descriptor of this work item's queries
  const KeyScales* key_scales;
  Scores s;
  u32 summed;        // how many blocks these are, the same in all warps
  u32 existing_copies;  // one bit for each copy of the block, set if its page exists
  Weights weights;
  SharedTotals totals;
  KeyRange range0, range1;  // the keys of this thread's two rows
#if HEAD_SCALES
  float head_scale;                 // of the keys
  bool negative[2], some_negative;  // the product of the scales of a row, and that in some row of this warp
#endif

  DEVICE QuantizedConsumer(const QuantizedParams& p, const QuantizedShared& sm, int c)
      : p(p), sm(sm), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31) {}

  DEVICE void start_scores() {
#if IS_INT8
    if (ADDS_FIRST_BITS) return;
#pragma unroll
    for (int i = 0; i < SCORES; i++) asm volatile("mov.b32 %0, %1;" : "=r"(s[i]) : "n"(FIRST_BITS));
#endif
  }

  DEVICE void score_product() {
#if IS_PAGED
    existing_copies = load_shared<u32>(slot_at<4>(sm.pages, k.stage));
    __syncwarp();  // all lanes have read the bits before one lane releases the keys
#endif
    const u32 keys = descriptor_base(slot_at<K_BYTES>(sm.k, k.stage), 16);
    wgmma_fence();
    if (IS_INT8 && !ADDS_FIRST_BITS) wgmma_scores(s, queries, keys);
    else wgmma_scores_start(s, queries, keys);
    wgmma_commit();
  }

  DEVICE void value_product() {
    const u32 values = descriptor_base(slot_at<V_BYTES>(sm.v, v.stage), 16);
    wgmma_fence();
    wgmma_output_if(t, weights, values, summed);
    wgmma_commit();
    summed++;
  }

  // Every warp arrives for itself: a warp that waits for the same values again, in a skipped block, must not
  // miss a phase.
  DEVICE void release_values() {
    if (lane == 0) mbar_arrive(barrier(sm.v_empty, v.stage));
    v.next();
  }

  // After the last block of a work item its queries are released as well.
  DEVICE void release_keys(bool is_last) {
    if (lane == 0) mbar_arrive(barrier(sm.k_empty, k.stage));
    k.next();
    if (is_last && !QUANTISES_QUERIES) release_queries();
  }

  DEVICE void release_queries() {
    if (lane == 0) mbar_arrive(barrier(sm.q_empty, query_slot(work, c)));
  }

  // Called once for each block of a tile, including skipped ones.
  DEVICE void take_turn() {
    if (TAKES_TURNS) named_barrier_sync(Barrier::TURN + c, 256);
  }
  DEVICE void pass_turn() {
    if (TAKES_TURNS) named_barrier_arrive(Barrier::TURN + (c + 1 == CONSUMERS ? 0 : c + 1), 256);
  }

  DEVICE void wait_keys() { mbar_wait(barrier(sm.k_full, k.stage), k.phase); }
  DEVICE void wait_values() { mbar_wait(barrier(sm.v_full, v.stage), v.phase); }

  // Called after a block's product with values: adds `t` to the totals once it covers SUMMED_BLOCKS blocks.
  DEVICE void finish_block() {
    finish_values();
    if (summed == SUMMED_BLOCKS) add_to_totals(), summed = 0;
  }

  DEVICE void add_to_totals() {
    float whole[2] = {sums[0], sums[1]};
    if (!SUMS_BY_PRODUCT)
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)
        whole[0] += __shfl_xor_sync(~0u, whole[0], lanes), whole[1] += __shfl_xor_sync(~0u, whole[1], lanes);
    totals.add(t, whole);
  }

  // Rescales all sums if this warp's maxima have moved.
  DEVICE void rescale() {
    if (!softmax.max_moved) return;
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) t[i] *= softmax.rescale[i >> 1 & 1];
    totals.rescale(softmax.rescale);
    sums[0] *= softmax.rescale[0], sums[1] *= softmax.rescale[1];
  }

  // Adds the row sums in every block: they grow faster than the products with values and would lose more
  // precision in the tensor cores, which therefore start them anew in each block.
  DEVICE void add_row_sums() {
    if (!SUMS_BY_PRODUCT) return;
#pragma unroll
    for (int r = 0; r < 2; r++) sums[r] += t[OUTPUTS + 2 * r], t[OUTPUTS + 2 * r] = 0.f;
  }

  // All operations between the product of the scores and the softmax.
  DEVICE void modify_scores(int block, const BlockRange& n) {
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const float unit = p.tanh_scale * softmax.row_scale[i >> 1 & 1] * softmax.key_scale[i / KEY_SCORES];
      set(s[i], softcap_tanh((as_float(s[i]) - FIRST) * unit));
    }
#elif HEAD_SCALES
    if (some_negative)
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (negative[i >> 1 & 1]) s[i] = -s[i];
#elif HAS_SIGNS
#pragma unroll
    for (int part = 0; part < KEY_SCALES; part++) {
      const bool negative0 = softmax.row_scale[0] * softmax.key_scale[part] < 0.f,
                 negative1 = softmax.row_scale[1] * softmax.key_scale[part] < 0.f;
      if (__any_sync(~0u, negative0 || negative1))
#pragma unroll
        for (int i = part * KEY_SCORES; i < (part + 1) * KEY_SCORES; i++)
          if (i & 2 ? negative1 : negative0) s[i] = -s[i];
    }
#endif
#if IS_PAGED
    if (existing_copies != (1u << BLOCK_N / COPY_KEYS) - 1)
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!(existing_copies & 1u << (i >> 2) * 8 / COPY_KEYS)) set(s[i], -INFINITE);
#endif
    if (block >= n.full_end || block < n.full_begin)
      mask_by_position(s, block * BLOCK_N + (lane & 3) * 2, range0, range1);
  }

  DEVICE void load_key_scale(int block) {
    if (HEAD_SCALES) return;
    const KeyScales x = key_scales[block];
#pragma unroll
    for (int part = 0; part < KEY_SCALES; part++) softmax.key_scale[part] = x.scales[part];
  }

  // Computes the scores of `block`, and the product of the weights of the previous block with their values.
  DEVICE void step(int block, const BlockRange& n) {
    load_key_scale(block);
    if (TAKES_TURNS) step_in_turn(block, n);
    else step_with_both_products(block, n);
  }

  DEVICE void step_in_turn(int block, const BlockRange& n) {
    wait_values();
    take_turn();
    value_product();
    wait_keys();  // during the product
    wgmma_wait<0>();
    fence_operand(t);
    if (summed == SUMMED_BLOCKS) {  // while there are no scores, whose registers it needs
      add_row_sums();
      add_to_totals(), summed = 0;
    }
    start_scores();
    score_product();
    pass_turn();
    release_values();
    add_row_sums();  // adds 0 if the branch above has added them
    wgmma_wait<0>();
    find_max(block, n, summed == 0);
    rescale();  // before the exponentials, so that rounding overlaps with them
    exponentiate();
    add_sums(round_weights());
  }

  DEVICE void step_with_both_products(int block, const BlockRange& n) {
    start_scores();
    wait_keys(), score_product();
    wait_values(), value_product();
    wgmma_wait<1>();
    find_max(block, n, summed == SUMMED_BLOCKS);
    exponentiate();
    fence_operand(s);
    wait_values();  // returns at once; keeps the wait for the product below the maxima
    wgmma_wait<0>();
    fence_operand(weights);
    const float2 added = round_weights();  // first, to free the registers of the scores
    finish_block();
    rescale();
    add_sums(added);
  }

  // Called after all products.
  DEVICE void finish_values() {
    fence_operand(t);
    release_values();
    add_row_sums();
  }

  // Called after the product of the scores. `begins_sum`: the accumulation of weights times values starts
  // from 0, and there are earlier sums.
  DEVICE void find_max(int block, const BlockRange& n, bool begins_sum) {
    fence_operand(s);
    release_keys(block == n.begin);
#if IS_INT8
#pragma unroll
    for (int i = 0; ADDS_FIRST_BITS && i < SCORES; i++) s[i] += FIRST_BITS;
#endif
    modify_scores(block, n);
    if (begins_sum) softmax.update_max_of_sum(p, s, sums);
    else softmax.update_max(p, s);
  }

  DEVICE void exponentiate() { softmax.exponentiate<0>(p, s), softmax.exponentiate<1>(p, s); }

  // Returns this thread's sums of the rounded weights, unless the sums are computed by products.
  DEVICE float2 round_weights() { return {softmax.round<0>(s, weights), softmax.round<1>(s, weights)}; }

  DEVICE void add_sums(const float2& added) {
    if (!SUMS_BY_PRODUCT) sums[0] += added.x, sums[1] += added.y;
  }

  // Reconverges the warps. Without products nothing else does, and the lanes of a warp may diverge under a
  // tool that instruments the kernel: a lane must not release a slot that another lane has not yet seen full,
  // which would then miss a phase. The compiler removes __syncwarp here.
  DEVICE void meet() { named_barrier_sync(Barrier::WARPGROUP + c, 128); }

  // Skips blocks of the tile that no row of this consumer attends, from the last to the first.
  DEVICE void skip_blocks(int end, int begin) {
#pragma unroll 1
    for (int j = end - 1; j >= begin; j--) {
      take_turn(), pass_turn();
      wait_keys(), wait_values();
      meet();
      release_keys(false), release_values();
    }
  }

  // The blocks of the tile that some row of this consumer attends.
  DEVICE BlockRange consumer_blocks(const WorkItem& item) const {
    Tile rows = item.tile;
    rows.m0 += c * 64;
    BlockRange n = blocks_of(p, rows, item.keys, 64);
    if (rows.m0 >= queries_of(p, rows) || n.end <= n.begin) n.begin = n.end = item.blocks.begin;
    return n;
  }

  DEVICE void attend(const BlockRange& n) {
    wait_keys();
    load_key_scale(n.end - 1);
    start_scores();
    take_turn();
    score_product();
    finish_scales();
    wgmma_wait<0>();
    pass_turn();
    find_max(n.end - 1, n, false);
    exponentiate();
    add_sums(round_weights());
    summed = 0;
#pragma unroll 1
    for (int j = n.end - 2; j >= n.begin; j--) step(j, n);
    wait_values();
    value_product();
    load_factors();
    wgmma_wait<0>();
    finish_values();
    totals.finish(t);
  }

  // Completes the scales that `begin` has loaded. Called while the first product runs.
  DEVICE void finish_scales() {
    fence_operand(softmax.row_scale);  // the compiler would wait for them before the product
    if (!HAS_SOFTCAP) softmax.row_scale[0] *= p.scale_log2, softmax.row_scale[1] *= p.scale_log2;
#if HEAD_SCALES
    some_negative = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float& scale = softmax.row_scale[r];
      scale *= head_scale;
      negative[r] = scale < 0.f, some_negative |= negative[r];
      if (!HAS_SOFTCAP) scale = QuantizedSoftmax::unit_of(scale);
    }
    some_negative = __any_sync(~0u, some_negative);
    softmax.key_scale[0] = 1.f;
#endif
  }

  // No row of this consumer attends a key.
  DEVICE void skip_item() {
    meet();
    if (!QUANTISES_QUERIES) release_queries();
    load_factors();
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) t[i] = 0.f;
  }

  DEVICE void begin(const WorkItem& item) {
    const Tile& tile = item.tile;
    const int row = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
    range0 = row_range(p, tile, row, item.keys), range1 = row_range(p, tile, row + 8, item.keys);
#if !QUANTISES_QUERIES
    const float* scales = p.q_scale + first_row(p, tile);
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.row_scale[r] = scales[min(row + 8 * r, queries_of(p, tile) - 1)];
#endif
    const float* key_scale = p.k_scale + first_key_scale(p, tile);
#if HEAD_SCALES
    head_scale = *key_scale;
#else
    key_scales = (const KeyScales*)key_scale;
#endif
    softmax.reset();
    sums[0] = sums[1] = 0.f;
    totals.reset(slot_at<TOTAL_BYTES>(sm.totals, c) + tid * 16);
    const int slot = query_slot(work, c);
    // otherwise each step would compute it again
    queries = opaque(descriptor_base(slot_at<Q_BYTES>(sm.q, slot), 16));
    mbar_wait(barrier(sm.q_full, slot), query_phase(work));
#if QUANTISES_QUERIES
    quantize_queries(tile);
#endif
  }

#if QUANTISES_QUERIES
  DEVICE void quantize_queries(const Tile& tile) {
    meet();  // all warps are done with the products of the queries before
    const float* mean = p.mean + (long long)(tile.b * (p.Hq / p.group) + tile.h / p.group) * HEAD_FEATURES;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = (tid >> 5) * 16 + (lane >> 2) + 8 * r;
      RowPart x;
      load_row_part(x, slot_at<RAW_BYTES>(sm.raw, c), row, lane & 3);
      if (p.offset) {  // each lane reads what it writes here
        const float both = product_with_mean(x, mean, lane & 3);
        if (row_of(tile, r) < p.Sq) p.offset[lse_at(tile, r)] = both * p.scale_log2 * LN2;
      }
      softmax.row_scale[r] = quantize_row(x, slot_at<Q_BYTES>(sm.q, c), row, lane & 3);
    }
    release_queries();
    fence_async_shared();
    meet();
  }
#endif

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

  DEVICE void run() {
    if (c == CONSUMERS - 1) pass_turn();  // consumer 0 has the first turn
    for (;; work.next()) {
      mbar_wait(barrier(sm.work_full, work.stage), work.phase);
      const WorkItem item = load_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage));
      if (item.tile.m0 == NO_WORK) break;
      begin(item);
      const BlockRange n = consumer_blocks(item);
      skip_blocks(item.blocks.end, n.end);
      if (n.end > n.begin) attend(n);
      else skip_item();
      skip_blocks(n.begin, item.blocks.begin);
      finish();
    }
  }
};

DEVICE void init_barriers(const QuantizedShared& sm) {
  init_tile_barriers(sm, QUERY_SLOTS, READERS);
  mbar_init_fence();
}

#if SUMS_BY_PRODUCT
// Fills the rows of ones behind the values of each slot, which copies do not overwrite.
DEVICE void store_ones(const QuantizedShared& sm) {
  constexpr int ONE = 0x38383838, PIECES = ONES * BLOCK_N / 16;
  for (int i = threadIdx.x; i < STAGES * PIECES; i += blockDim.x)
    store_shared(slot_at<V_BYTES>(sm.v, i / PIECES) + V_COPY_BYTES + i % PIECES * 16,
                 make_int4(ONE, ONE, ONE, ONE));
  fence_async_shared();
}
#else
DEVICE void store_ones(const QuantizedShared&) {}
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    quantized(const __grid_constant__ QuantizedParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const QuantizedShared sm{smem_address(shared)};
  if (threadIdx.x == 0) init_barriers(sm);
  store_ones(sm);
  wait_for_prior_grid();  // the prior grid writes the 8-bit numbers
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<(CONSUMERS == 2 ? 24 : 32)>();
    if (threadIdx.x < 32) produce(p, sm);
  } else {
    register_alloc<(CONSUMERS == 2 ? 240 : 160)>();
    QuantizedConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
