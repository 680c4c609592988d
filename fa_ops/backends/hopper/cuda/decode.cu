// Decoding for sm_90a, after Flash-Decoding: few queries against a long KV cache. A CTA attends the packed
// queries of all heads that share a KV head (pack_gqa), at most ROWS rows. split_keys.cuh divides the keys
// among CTAs, and merges the items that several CTAs share. One warp is the producer (or two, see
// gathered_keys.cuh) and copies as far ahead as the ring allows, across items. WARPS warps attend 16 keys of
// each tile each, with their own running maxima and sums, which are reduced at the end of an item.
//
// One step of a warp, for tile j of a ring of STAGES. The warps do not wait for each other, so that the
// products of one overlap with the exponentials of others.
//
//   tensor cores        | S(j) = Q.K(j)^T                            | O += P(j).V(j)
//   CUDA cores      .....................| mask | max | exp2 | pack P(j)              (O is rescaled before,
//   mbarriers       k_full(j)                           v_full(j)            kv_empty(j)   if the max rises)
//
// Compile-time: IS_BF16 IS_E4M3 HEAD_DIM VALUE_DIM STAGES WARPS ROWS SHARED_BYTES IS_PAGED COPY_KEYS
// WHOLE_ROWS WHOLE_TILES HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_ALIBI HAS_SINKS HAS_SCALES SHARES_TOKENS
constexpr int BLOCK_N = 16 * WARPS;  // keys per tile
#include "elements.cuh"
#include "gathered_keys.cuh"
#include "pipeline.cuh"
#include "split_keys.cuh"

constexpr int COPIES = BLOCK_N / COPY_KEYS;  // copies per tile
#if IS_E4M3
typedef E4m3 CacheElement;
#else
typedef Element CacheElement;
#endif

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct DecodeParams {
  TensorMap q, k, v;
  Element* out;                       // (B, Sq, Hq, Dv)
  float* lse;                         // (B, Hq, Sq)
  float2* partial;                    // (2 * CTAs, ROWS, VALUE_DIM / 2), see split_keys.cuh
  float2* partial_stats;              // (2 * CTAs, ROWS)
  const int* kv_lens;                 // (B,) or null
  const int* ranges;                  // (B|1, ranges_b) or null: begin and end of each batch row's keys
  const int* table;                   // (B, table_stride) or null
  const float* sinks;                 // (Hq,) or null
  const float* alibi;                 // (B|1, Hq) or null
  const float *k_scale, *v_scale;     // or null, as HAS_SCALES says
  int B, Hq, Hkv, group, Sq, Sk, Dv;  // Sk: capacity of the cache
  int idle;  // groups of CTAs without work in the last wave, if each processes whole items
  int window_left, window_right, page, page_count, table_stride, alibi_b, ranges_b;
  float tanh_scale, scale_log2, alibi_unit;
  int D;
  int width;  // CTAs per group, one for each kv head
  const Element* q_rows;  // the tensors of the maps, for rows that are attended exactly
  const CacheElement *k_rows, *v_rows;
  Strides q_strides, k_strides, v_strides;
};

DEVICE int capacity_tiles(const DecodeParams& p) { return ceil_div(p.Sk, BLOCK_N); }
DEVICE int whole_tiles(const DecodeParams&) { return WHOLE_TILES; }
DEVICE BatchRow batch_row(const DecodeParams& p, int b) {
  BatchRow r;
  r.keys = keys_of(p, b), r.begin = max(0, r.keys - p.Sq - p.window_left), r.end = r.keys;
#if HAS_RANGES
  r.begin = max(r.begin, p.ranges[b * p.ranges_b]), r.end = max(min(r.end, p.ranges[b * p.ranges_b + 1]), 0);
#endif
  r.begin = min(r.begin, r.end), r.first = r.begin / BLOCK_N;
  r.count = max(1, (r.end + BLOCK_N - 1) / BLOCK_N - r.first);
  return r;
}

// If the heads of a token are adjacent in memory, the CTAs of a group attend the same tokens at about the
// same time, each for one head.
DEVICE int group_width(const DecodeParams& p) { return SHARES_TOKENS ? p.width : 1; }
DEVICE int items_per_row(const DecodeParams& p) { return (u32)p.Hkv / (u32)group_width(p); }
DEVICE int kv_head(const DecodeParams& p, const Split& t) {
  return SHARES_TOKENS ? t.item * p.width + blockIdx.x % (u32)p.width : t.item;
}
DEVICE int packed_rows(const DecodeParams& p) { return p.group * p.Sq; }
DEVICE int stats_per_row(const DecodeParams&) { return 1; }
DEVICE int partial_column(const DecodeParams&, int pair) { return pair * 2; }

// Whole items, if all have the same length and no CTA gets more than one tile beyond its share: then nothing
// needs merging. Otherwise single tiles.
DEVICE Partition partition_of(const DecodeParams& p, int total, int shortest, int longest) {
  const int groups = gridDim.x / (u32)group_width(p);
  if (shortest == longest && (long long)p.idle * longest <= groups) return whole_items(p);
  return {groups, total};
}

// The scales of e4m3 keys and values. HAS_SCALES is 0 without scales, 1 for (B, Hkv), 2 for (pages, Hkv), and
// 3 for scales of tokens: (pages, page, Hkv) or (B, Hkv, Sk).

// Whether a tile has a scale for each token, also where the 16 keys of a warp may be in several pages.
#define SCALES_TOKENS (HAS_SCALES == 3 || (HAS_SCALES == 2 && COPY_KEYS < 16))

// The scales of a batch row, for one KV head.
struct RowScales {
#if HAS_SCALES == 1
  float key, value;

  DEVICE static RowScales of(const DecodeParams& p, int b, int h) {
    const int at = b * p.Hkv + h;
    return {p.k_scale ? p.k_scale[at] : 1.f, p.v_scale ? p.v_scale[at] : 1.f};
  }
  DEVICE static RowScales from_bits(int key, int value) {
    return {__int_as_float(key), __int_as_float(value)};
  }
#else
  static constexpr float key = 1.f, value = 1.f;

  DEVICE static RowScales of(const DecodeParams&, int, int) { return {}; }
  DEVICE static RowScales from_bits(int, int) { return {}; }
#endif
};

// The scales of a tile in shared memory: those of the keys (one per copy or token), then those of the values.
constexpr bool HAS_TILE_SCALES = HAS_SCALES >= 2;
constexpr int TILE_SCALES = SCALES_TOKENS ? BLOCK_N : HAS_SCALES == 2 ? COPIES : 0;
constexpr u32 SCALES_BYTES = TILE_SCALES * 8;

// The index of a token's scale: token `key` of batch row `b`, or token `slot` of a page.
DEVICE long long scale_at(const DecodeParams& p, int b, int h, int page, int slot, int key) {
  if (HAS_SCALES == 2) return (long long)page * p.Hkv + h;
  if (IS_PAGED) return ((long long)page * p.page + slot) * p.Hkv + h;
  return ((long long)b * p.Hkv + h) * p.Sk + key;
}

// Copies COUNT scales of a tile, from scale `begin` on; those of keys that are not attended become 0.
// Executed by one warp. `page_of(i)` returns the page of this lane's scale among 32 from `begin + i` on, or
// -1.
template <int COUNT, class PageOf>
DEVICE void copy_tile_scales(const DecodeParams& p, u32 to, int b, int h, int tile, int begin, KeyRange keys,
                             PageOf page_of) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int base = 0; base < COUNT; base += 32) {
    const int i = begin + base + lane, key = tile * BLOCK_N + (SCALES_TOKENS ? i : i * COPY_KEYS);
    const int own_page = page_of(base);
    if (base + lane >= COUNT) continue;
    bool is_there = !IS_PAGED || own_page >= 0;
    if (SCALES_TOKENS) is_there = is_there && key >= keys.begin && key < keys.end;
    const long long at = is_there ? scale_at(p, b, h, own_page, IS_PAGED ? key % p.page : 0, key) : 0;
    if (p.k_scale) copy_word(to + i * 4, p.k_scale + at, is_there);
    if (p.v_scale) copy_word(to + (TILE_SCALES + i) * 4, p.v_scale + at, is_there);
  }
}

// The scales of a lane's keys among the 16 of its warp, two in each half. In the product with values of scale
// v, which is in 16 bits, a weight is 2^(score + log2 |v|) relative to a reference near the row's largest
// such power. The sum of weights does not contain scales.
struct TileScales {
#if SCALES_TOKENS
  float2 keys[2], values[2];

  DEVICE static TileScales of(const DecodeParams& p, u32 at, int first) {
    TileScales s;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 own = at + (first + j * 8 + (threadIdx.x & 3) * 2) * 4;
      s.keys[j] = p.k_scale ? load_shared<float2>(own) : make_float2(1.f, 1.f);
      s.values[j] = p.v_scale ? load_shared<float2>(own + TILE_SCALES * 4) : make_float2(1.f, 1.f);
    }
    return s;
  }
  DEVICE float key(int j, int i) const { return i ? keys[j].y : keys[j].x; }
  DEVICE float value(int j, int i) const { return i ? values[j].y : values[j].x; }
#elif HAS_SCALES == 2
  float of_keys, of_values;

  DEVICE static TileScales of(const DecodeParams& p, u32 at, int first) {
    const u32 own = at + first / COPY_KEYS * 4;
    return {p.k_scale ? load_shared<float>(own) : 1.f,
            p.v_scale ? load_shared<float>(own + TILE_SCALES * 4) : 1.f};
  }
  DEVICE float key(int, int) const { return of_keys; }
  DEVICE float value(int, int) const { return of_values; }
#else
  DEVICE static TileScales of(const DecodeParams&, u32, int) { return {}; }
  DEVICE float key(int, int) const { return 1.f; }
  DEVICE float value(int, int) const { return 1.f; }
#endif

  DEVICE float log2_size(int j, int i) const {
    return HAS_TILE_SCALES ? log2_fast(fabsf(value(j, i))) : 0.f;
  }
  // The sign bits of two packed weights.
  DEVICE u32 signs(int j) const {
    return HAS_TILE_SCALES ? (value(j, 0) < 0.f ? 0x8000u : 0u) | (value(j, 1) < 0.f ? 0x80000000u : 0u) : 0u;
  }
};

#if !IS_E4M3
// The products with 16-bit keys and values, which `ldmatrix` loads as operands.

// Keys or values in shared memory: columns of 128 bytes, or whole rows.
template <int DIM> struct CacheTile {
  static constexpr int FEATURES = 64, COLUMNS = DIM / FEATURES;  // features per column
  static constexpr u32 COLUMN_BYTES = 128, BYTES = BLOCK_N * COLUMNS * COLUMN_BYTES;

  // The swizzled address of 16 bytes, in memory order if rows are copied whole. Eight rows then share half as
  // many banks, which costs less than reading the halves of a row from memory separately.
  DEVICE static u32 at(u32 base, int row, int chunk) {
    if (!WHOLE_ROWS) return swizzled(base, BLOCK_N, row, chunk);
    const int line = row * COLUMNS + (chunk >> 3);
    return base + line * 128 + (((chunk & 7) ^ (line & 7)) << 4);
  }
};

// The queries of a warp.
struct Queries {
  u32 q[HEAD_DIM / 16][4];

  DEVICE void load(u32 at) {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, row = ((lane & 7) + (matrix & 1) * 8) % ROWS;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++)
      ldmatrix_x4<false>(q[d], swizzled(at, ROWS, row, 2 * d + (matrix >> 1)));
  }

  // Accumulates the products with 16 keys from row `first` of a tile on, as [keys / 8][halves of the sum, to
  // shorten dependency chains].
  DEVICE void multiply(float (&s)[2][2][4], u32 tile, int first) const {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, row = first + (lane & 7) + (matrix >> 1) * 8;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
      u32 k[4];
      ldmatrix_x4<false>(k, CacheTile<HEAD_DIM>::at(tile, row, 2 * d + (matrix & 1)));
      mma(s[0][d & 1], q[d], k[0], k[1]), mma(s[1][d & 1], q[d], k[2], k[3]);
    }
  }

  // The products of row lane / 4 + 8 * r, in units of query times key.
  DEVICE float product(float x, int) const { return x; }
  DEVICE void scale(float, int) {}
};

DEVICE u32 pack_weights(float low, float high) { return pack(low, high); }

// A warp's sums of weighted values, for rows lane / 4 and lane / 4 + 8.
struct Sums {
  float o[VALUE_DIM / 8][4];

  // Accumulates 16 values from row `first` of a tile on. `keep` masks eight of them each.
  DEVICE void add(const u32 (&w)[4], u32 tile, int first, const u32 (&keep)[2]) {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, row = first + (lane & 7) + (matrix & 1) * 8;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 16; i++) {
      u32 v[4];
      ldmatrix_x4<true>(v, CacheTile<VALUE_DIM>::at(tile, row, 2 * i + (matrix >> 1)));
      mma(o[2 * i], w, v[0] & keep[0], v[1] & keep[1]), mma(o[2 * i + 1], w, v[2] & keep[0], v[3] & keep[1]);
    }
  }

  // Stores row lane / 4 + 8 * r at an address, whose columns are swizzled by this number.
  DEVICE void store(u32 at, int swizzle, int r) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++)
      store_shared(at + ((i * 8 + (lane & 3) * 2) ^ swizzle) * 4, make_float2(o[i][2 * r], o[i][2 * r + 1]));
  }
};
#else
// The products with e4m3 keys and values, which are converted to float16 exactly. `ldmatrix`
// moves pairs of bytes, so the numbers of a pair are neighbouring features of a key or, after a
// transposition, of a value. The queries are permuted to the order in which lanes hold the features of keys,
// and the columns of the accumulators are permuted likewise.

// Keys or values in shared memory: columns of 128 bytes, or one of 64, with a swizzle of the same width.
template <int DIM> struct CacheTile {
  static constexpr int FEATURES = DIM == 64 ? 64 : 128, COLUMNS = (DIM + FEATURES - 1) / FEATURES;
  static constexpr u32 COLUMN_BYTES = FEATURES, BYTES = BLOCK_N * COLUMNS * COLUMN_BYTES;

  // The address of 16 bytes.
  DEVICE static u32 at(u32 base, int row, int chunk) {
    if (DIM == 64) return base + row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
    return swizzled(base, BLOCK_N, row, chunk);
  }
};

// The queries of a warp. For rows l / 4 and l / 4 + 8, lane l holds features 16 d + 4 (l % 4) to 16 d + 4 (l
// % 4) + 3 of each 16, which match the bytes of key l / 4 that `ldmatrix` returns. float16 cannot represent
// every bfloat16 number, so each row is scaled by a power of two that brings its largest element into [2^14,
// 2^15).
struct Queries {
  u32 q[HEAD_DIM / 16][4];
  float unit[2];  // for rows lane / 4 and lane / 4 + 8

  DEVICE void load(u32 at) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      unit[r] = 1.f;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; d++) {
        if (r < ROWS / 8) {
          const int row = (lane >> 2) + 8 * r, chunk = 2 * d + (lane >> 1 & 1);
          const int2 x = load_shared<int2>(swizzled(at, ROWS, row, chunk) + (lane & 1) * 8);
          q[d][r] = x.x, q[d][2 + r] = x.y;
        }
      }
#if IS_BF16
      if (r < ROWS / 8) to_float16(r);
#endif
    }
    if (ROWS == 8)
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; d++) q[d][1] = q[d][3] = any_number();
  }

  DEVICE void to_float16(int r) {
    float largest = 0.f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 x = unpack(q[d][i + r]);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = max(__float_as_int(largest) >> 23, 15);  // so that neither factor is 0 or infinite
    const float factor = __int_as_float((268 - exponent) << 23);
    unit[r] = __int_as_float((exponent - 14) << 23);
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 x = unpack(q[d][i + r]);
        q[d][i + r] = pack_f16(x.x * factor, x.y * factor);
      }
  }

  // Accumulates the products with 16 keys from row `first` of a tile on, as [keys / 8][halves of the sum, to
  // shorten dependency chains].
  DEVICE void multiply(float (&s)[2][2][4], u32 tile, int first) const {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, row = first + (lane & 7) + (matrix >> 1) * 8;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d += 2) {
      u32 k[4];
      ldmatrix_x4<false>(k, CacheTile<HEAD_DIM>::at(tile, row, d + (matrix & 1)));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 low, high;
        unpack_e4m3(k[i], low, high);
        mma_f16(s[i >> 1][i & 1], q[d + (i & 1)], low, high);
      }
    }
  }

  // The products of row lane / 4 + 8 * r, in units of query times key.
  DEVICE float product(float x, int r) const { return x * unit[r]; }
  DEVICE void scale(float factor, int r) { unit[r] *= factor; }
};

DEVICE u32 pack_weights(float low, float high) { return pack_f16(low, high); }

// A warp's sums of weighted values, for rows lane / 4 and lane / 4 + 8. Tile 2 i holds the even columns of
// 16, tile 2 i + 1 the odd ones.
struct Sums {
  float o[VALUE_DIM / 8][4];

  // Accumulates 16 values from row `first` of a tile on. `keep` masks eight of them each.
  DEVICE void add(const u32 (&w)[4], u32 tile, int first, const u32 (&keep)[2]) {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, row = first + (lane & 7) + (matrix & 1) * 8;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 16; i += 2) {
      u32 v[4];
      ldmatrix_x4<true>(v, CacheTile<VALUE_DIM>::at(tile, row, i + (matrix >> 1)));
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 even[2], odd[2];  // for keys 0 to 7, and for keys 8 to 15
#pragma unroll
        for (int half = 0; half < 2; half++)
          unpack_e4m3(__byte_perm(v[2 * j + half] & keep[half], 0, 0x3120), even[half], odd[half]);
        mma_f16(o[2 * (i + j)], w, even[0], even[1]), mma_f16(o[2 * (i + j) + 1], w, odd[0], odd[1]);
      }
    }
  }

  // Stores row lane / 4 + 8 * r at an address, whose columns are swizzled by this number.
  DEVICE void store(u32 at, int swizzle, int r) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i += 2)
      store_shared(at + ((i * 8 + (lane & 3) * 4) ^ swizzle) * 4,
                   make_float4(o[i][2 * r], o[i + 1][2 * r], o[i][2 * r + 1], o[i + 1][2 * r + 1]));
  }
};
#endif

// The named barriers. Barrier 0 is that of __syncthreads.
struct Barrier {
  enum : u32 { CONSUMERS = 1 };  // for all attention warps
};

constexpr int ITEMS = 2;  // the number of items whose queries are in shared memory
constexpr u32 K_BYTES = CacheTile<HEAD_DIM>::BYTES, V_BYTES = CacheTile<VALUE_DIM>::BYTES,
              Q_BYTES = ROWS * HEAD_DIM * 2;
constexpr int K_ARRIVALS = GATHERS_KEYS ? GATHERING_WARPS + GATHERED_ARRIVALS : HAS_TILE_SCALES ? 1 + 32 : 1,
              V_ARRIVALS = GATHERS_KEYS ? GATHERED_ARRIVALS : 1;  // of the warps that copy a tile
constexpr float RESCALE_THRESHOLD_LOG2 = 8.f;
static_assert(ROWS == 8 || ROWS == 16, "one tensor-core tile of rows, or half of it");
static_assert(!IS_PAGED || GATHERS_KEYS || COPIES <= 32, "a lane for each page of a tile, and a bit");

// A split, the keys [begin, end) that its batch row attends, and the scales of its batch row.
struct DecodeSplit : Split {
  int begin, end;
  RowScales scales;
};
constexpr u32 DECODE_SPLIT_BYTES = SPLIT_BYTES + 16;

// Offsets in shared memory, in order.
struct DecodeShared {
  u32 k, v, q;
  u32 sums, stats;  // per warp, at the end of an item
  u32 split;        // per item
  u32 pages;        // per stage: one bit for each copy or gathered key, set if its page exists
  u32 scales;       // per stage: the scales of its pages or tokens
  u32 q_full, q_empty, k_full, v_full, kv_empty, end;

  DEVICE constexpr explicit DecodeShared(u32 base)
      : k(base),
        v(k + STAGES * K_BYTES),
        q(v + STAGES * V_BYTES),
        sums(q + ITEMS * Q_BYTES),
        stats(sums + WARPS * ROWS * VALUE_DIM * 4),
        split(stats + WARPS * ROWS * 8),
        pages(split + ITEMS * DECODE_SPLIT_BYTES),
        scales(pages + (STAGES * PAGES_BYTES + 7) / 8 * 8),
        q_full(scales + STAGES * SCALES_BYTES),
        q_empty(q_full + 8 * ITEMS),
        k_full(q_empty + 8 * ITEMS),
        v_full(k_full + 8 * STAGES),
        kv_empty(v_full + 8 * STAGES),
        end(kv_empty + 8 * STAGES) {}
};
constexpr DecodeShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");

#if GATHERS_KEYS
// `width`: elements of a row.
template <class Tile>
DEVICE void gather_rows(u32 to, const CacheElement* rows, const Strides& strides, int h, int width,
                        const GatheredKeys& keys) {
  const GatheredRows<CacheElement> from(rows, strides, h, keys);
  from.copy<Tile::COLUMN_BYTES, Tile::COLUMNS>(to, 0, width * sizeof(CacheElement));
}

// Copies a warp's part of a tile. `next` are its keys, which are found while the previous tile of the split
// is copied.
DEVICE void copy_tile(const DecodeParams& p, const DecodeShared& sm, const DecodeSplit& t, bool leader,
                      int tile, PipelineState<STAGES>& kv, GatheredKeys& next) {
  const int stage = kv.stage, h = kv_head(p, t);
  const u32 k_full = barrier(sm.k_full, stage), v_full = barrier(sm.v_full, stage);
  const KeyRange range = {t.begin, t.end};
  if (tile == t.tile) next.find(p, t.b, tile, range);
  next.validate(p);
  const GatheredKeys keys = next;
  next.find(p, t.b, tile + 1, range);
  mbar_wait(barrier(sm.kv_empty, stage), kv.phase ^ 1);
  keys.store_existing(slot_at<PAGES_BYTES>(sm.pages, stage), leader);
  if (leader) mbar_arrive(k_full);
  if (HAS_TILE_SCALES)
    copy_tile_scales<GATHERED_KEYS>(p, slot_at<SCALES_BYTES>(sm.scales, stage), t.b, h, tile, keys.first,
                                    range, [&](int i) { return keys.page[i / 32]; });
  gather_rows<CacheTile<HEAD_DIM>>(slot_at<K_BYTES>(sm.k, stage), p.k_rows, p.k_strides, h, p.D, keys);
  copies_arrive(k_full);
  gather_rows<CacheTile<VALUE_DIM>>(slot_at<V_BYTES>(sm.v, stage), p.v_rows, p.v_strides, h, p.Dv, keys);
  copies_arrive(v_full);
  kv.next();
}
#else
// Copies a tile in columns of COPY_KEYS keys, or all features of these keys in memory order. Out-of-bounds
// elements are zero-filled. Executed by one lane.
template <class Tile>
DEVICE void copy_rows(const TensorMap& map, u32 full, u32 to, int h, const int (&token)[COPIES],
                      const int (&page)[COPIES]) {
#pragma unroll
  for (int j = 0; j < COPIES; j++)
    if (WHOLE_ROWS)
      tma_load_rows_hinted(to + j * COPY_KEYS * Tile::COLUMNS * 128, map, full, token[j], h, page[j]);
    else
#pragma unroll
      for (int x = 0; x < Tile::COLUMNS; x++)
        tma_load_hinted(to + (x * BLOCK_N + j * COPY_KEYS) * Tile::COLUMN_BYTES, map, full,
                        x * Tile::FEATURES, token[j], h, page[j]);
}

DEVICE void copy_tile(const DecodeParams& p, const DecodeShared& sm, const DecodeSplit& t, bool leader,
                      int tile, PipelineState<STAGES>& kv, GatheredKeys&) {
  const int stage = kv.stage;
  const u32 k_full = barrier(sm.k_full, stage), v_full = barrier(sm.v_full, stage);
  [[maybe_unused]] const int lane = threadIdx.x & 31;
  int token[COPIES], page[COPIES];
#if IS_PAGED
  int at = tile * BLOCK_N + lane * COPY_KEYS, own_page = -1;
  if (lane < COPIES && at < t.end) own_page = p.table[(long long)t.b * p.table_stride + at / p.page];
  if (own_page >= p.page_count) own_page = -1;
  at %= p.page;
  const u32 found = __ballot_sync(~0u, own_page >= 0);
#pragma unroll
  for (int j = 0; j < COPIES; j++)  // pages of fewer than 64 keys are copied whole
    page[j] = __shfl_sync(~0u, own_page, j), token[j] = COPY_KEYS < 64 ? 0 : __shfl_sync(~0u, at, j);
#else
#pragma unroll
  for (int j = 0; j < COPIES; j++)
    token[j] = tile * BLOCK_N + j * COPY_KEYS, page[j] = token[j] < t.end ? t.b : -1;
#endif
  mbar_wait(barrier(sm.kv_empty, stage), kv.phase ^ 1);
#if HAS_SCALES >= 2
#if !IS_PAGED
  const int own_page = 0;
#endif
  copy_tile_scales<TILE_SCALES>(p, slot_at<SCALES_BYTES>(sm.scales, stage), t.b, kv_head(p, t), tile, 0,
                                {t.begin, t.end}, [&](int i) {
                                  const int copy = (i + lane) / COPY_KEYS;
                                  return SCALES_TOKENS ? __shfl_sync(~0u, own_page, copy) : own_page;
                                });
  copies_arrive(k_full);
#endif
  if (leader) {
#if IS_PAGED
    store_shared(slot_at<PAGES_BYTES>(sm.pages, stage), found);
#endif
    mbar_arrive_expect(k_full, K_BYTES), mbar_arrive_expect(v_full, V_BYTES);
    copy_rows<CacheTile<HEAD_DIM>>(p.k, k_full, slot_at<K_BYTES>(sm.k, stage), kv_head(p, t), token, page);
    copy_rows<CacheTile<VALUE_DIM>>(p.v, v_full, slot_at<V_BYTES>(sm.v, stage), kv_head(p, t), token, page);
  }
  kv.next();
}
#endif

// Executed by each warp that copies, of which only the first copies queries. The first copies of an item are
// issued before anything that they do not depend on.
DEVICE void produce(const DecodeParams& p, const DecodeShared& sm, int warp) {
  const bool leader = elect_one(), first = leader && warp == 0;
  PipelineState<STAGES> kv;
  PipelineState<ITEMS> items;
  GatheredKeys next(warp);
  for (WorkIterator<DecodeParams> iterator(p);; items.next()) {
    const u32 at = slot_at<DECODE_SPLIT_BYTES>(sm.split, items.stage), full = barrier(sm.q_full, items.stage);
    DecodeSplit t = {};
    if (warp == 0) mbar_wait(barrier(sm.q_empty, items.stage), items.phase ^ 1);
    if (iterator.at < iterator.stop) {
      static_cast<Split&>(t) = iterator.split(), t.begin = iterator.row.begin, t.end = iterator.row.end;
      if (first)
#pragma unroll
        for (int x = 0; x < HEAD_DIM / 64; x++)
          tma_load(slot_at<Q_BYTES>(sm.q, items.stage) + x * ROWS * 128, p.q, full, x * 64, 0,
                   kv_head(p, t) * p.group, t.b);
      copy_tile(p, sm, t, leader, t.tile, kv, next);
      t.scales = RowScales::of(p, t.b, kv_head(p, t));
      iterator.find_splits(t);
    }
    if (first) {
      store_split(at, t);
      store_shared(at + SPLIT_BYTES, make_int4(t.begin, t.end, __float_as_int(t.scales.key),
                                               __float_as_int(t.scales.value)));
      if (t.count) mbar_arrive_expect(full, packed_rows(p) * HEAD_DIM * 2);
      else mbar_arrive(full);
    }
    if (t.count == 0) break;
#pragma unroll 1
    for (int i = 1; i < t.count; i++) copy_tile(p, sm, t, leader, t.tile + i, kv, next);
    iterator.next(t.count);
  }
}

// Writes the LSE of a row of an item. Returns the row's index in the output, and sets `inverse` to the factor
// that normalises its sums.
DEVICE int finish_packed_row(const DecodeParams& p, const Split& t, int row, float max2, float total,
                             bool writes_lse, float& inverse) {
  const int head = kv_head(p, t) * p.group + (u32)row / (u32)p.Sq, s = (u32)row % (u32)p.Sq;
#if HAS_SINKS
  const float sink = p.sinks[head];
#else
  const float sink = 0.f;
#endif
  const float lse = finish_row(max2, total, 1.f, HAS_SINKS, sink, inverse);
  if (writes_lse) p.lse[((long long)t.b * p.Hq + head) * p.Sq + s] = lse;
  return (t.b * p.Sq + s) * p.Hq + head;
}

// Writes two normalised columns of an output row.
DEVICE void write_columns(const DecodeParams& p, int out_row, int column, float2 x, float inverse) {
  if (column < p.Dv) *(u32*)(p.out + (long long)out_row * p.Dv + column) = pack(x.x * inverse, x.y * inverse);
}

// A row of an item, computed exactly.
struct DecodeExactRow : ExactCacheRow<DecodeParams> {
  const int item, head, s, diagonal;
  int begin, end;
  float scale_log2;
  const Element* query;

  DEVICE DecodeExactRow(const DecodeParams& p, const Split& t, int row)
      : ExactCacheRow{p, t.b},
        item(kv_head(p, t)),
        head(kv_head(p, t) * p.group + (u32)row / (u32)p.Sq),
        s((u32)row % (u32)p.Sq),
        diagonal(s + t.keys - p.Sq),
        scale_log2(p.scale_log2),
        query(row_at(p.q_rows, p.q_strides, b, head, s)) {
    const BatchRow own = batch_row(p, b);
    begin = warp_uniform(max(own.begin, diagonal - p.window_left));
    end = warp_uniform(min(own.end, diagonal + p.window_right + 1));
  }

  DEVICE const CacheElement* key_row(const CacheElement* x, const Strides& strides, int key) const {
    const int from = find(key);
    return row_at(x, strides, from, item, key);
  }

  DEVICE float score(int key) const {
    float y = dot(query, key_row(p.k_rows, p.k_strides, key), p.D) * scale_of(p.k_scale, key);
#if HAS_SOFTCAP
    y = softcap_tanh(y * p.tanh_scale);
#endif
#if HAS_ALIBI
    y -= p.alibi[b * p.alibi_b + head] * p.alibi_unit * fabsf((float)(diagonal - key));
#endif
    return y;
  }

  DEVICE const CacheElement* value(int key) const { return key_row(p.v_rows, p.v_strides, key); }
  DEVICE float weight(int key, float x) const { return x * scale_of(p.v_scale, key); }

  DEVICE float scale_of(const float* scales, int key) const {
#if HAS_SCALES
    if (HAS_SCALES == 1) return scales ? scales[b * p.Hkv + item] : 1.f;
    int slot = key;
    const int page = find(slot);
    return scales ? scales[::scale_at(p, b, item, page, slot, key)] : 1.f;
#else
    return 1.f;
#endif
  }
};

// Replaces two columns of a row in each lane by exact results. Executed by one warp.
DEVICE void replace_columns(const DecodeParams& p, const Split& t, int row, int column) {
  ExactColumns found;
  if (attend_exactly(DecodeExactRow(p, t, row), column, p.Dv, found)) {
    float inverse;
    const int out_row =
        finish_packed_row(p, t, row, found.max * p.scale_log2, found.sum, column == 0, inverse);
    write_columns(p, out_row, column, found.x, inverse);
  }
}

// Which of a warp's 16 keys, from row `first` of a tile on, have a page.
struct ExistingKeys {
  static constexpr int KEYS = COPY_KEYS < 8 ? COPY_KEYS : 8, BITS = 16 / KEYS;  // keys of a bit, and bits
  u32 bits = (1 << BITS) - 1;

  DEVICE ExistingKeys(u32 pages, int first) {
#if IS_PAGED
    const int copy = first / COPY_KEYS;
    const u32 found = load_shared<u32>(pages + copy / 32 * 4) >> copy % 32;
    bits = KEYS < 8 ? found & bits : (found & 1) | (found >> (first % COPY_KEYS + 8) / COPY_KEYS & 1) << 1;
#endif
  }
  DEVICE bool all() const { return bits == (1 << BITS) - 1; }
  // Of a lane's keys, of which there are two in each half.
  DEVICE bool has(int j, int i) const { return bits >> (j * 8 + (threadIdx.x & 3) * 2 + i) / KEYS & 1; }
};

struct DecodeConsumer {
  const DecodeParams& p;
  const DecodeShared& sm;
  const int warp, lane, tid;
  PipelineState<STAGES> kv;
  Queries queries;
  Sums sums;
  float row_max[2], sum[2];  // for rows lane / 4 and lane / 4 + 8
  float reference[2];        // for the weights of values, in log2 units, see TileScales
  float slope[2];
  int first_key[2], end_key[2], diagonal[2];

  DEVICE DecodeConsumer(const DecodeParams& p, const DecodeShared& sm, int warp)
      : p(p), sm(sm), warp(warp), lane(threadIdx.x & 31), tid(threadIdx.x - 32) {}

  DEVICE void begin_item(const DecodeSplit& t, u32 q_at) {
    queries.load(q_at);
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++) sums.o[i][0] = sums.o[i][1] = sums.o[i][2] = sums.o[i][3] = 0.f;
#pragma unroll
    for (int r = 0; r < ROWS / 8; r++) {
      const int at = (lane >> 2) + 8 * r, s = at % p.Sq;
      row_max[r] = UNINITIALISED_MAX, sum[r] = 0.f, reference[r] = UNINITIALISED_MAX;
      queries.scale(t.scales.key, r);
      diagonal[r] = s + t.keys - p.Sq;
      first_key[r] = max(t.begin, diagonal[r] - p.window_left),
      end_key[r] = min(t.end, diagonal[r] + p.window_right + 1);
#if HAS_ALIBI
      slope[r] =
          at < p.group * p.Sq
              ? p.alibi[t.b * p.alibi_b + kv_head(p, t) * p.group + at / p.Sq] * p.alibi_unit
              : 0.f;
#endif
    }
  }

  DEVICE float log2_weight(float x, int r) const { return (x - row_max[r]) * p.scale_log2; }

  // The largest of a lane's four elements of a row.
  DEVICE static float largest(const float (&x)[2][4], int r) {
    return fmaxf(fmaxf(x[0][2 * r], x[0][2 * r + 1]), fmaxf(x[1][2 * r], x[1][2 * r + 1]));
  }
  DEVICE static float max_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }

  // Converts scores to weights, the operand of the product with the values.
  DEVICE void exponentiate(u32 (&w)[4], const float (&x)[2][4], const TileScales& scales) {
#pragma unroll
    for (int r = 0; r < ROWS / 8; r++) {
      const float m = max_of_row(largest(x, r));
      float rise = log2_weight(m, r);
      if (HAS_TILE_SCALES) rise = fmaxf(rise, largest_of_values(x, scales, m, r) - reference[r]);
      if (__any_sync(~0u, rise > RESCALE_THRESHOLD_LOG2)) {
        const float old = row_max[r];
        row_max[r] = fmaxf(m, old);
        const float factor = exp2_fast(log2_weight(old, r));
        sum[r] *= factor;
        rescale(r, HAS_TILE_SCALES ? move_reference(x, scales, m, log2_weight(old, r), r) : factor);
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float a = log2_weight(x[j][2 * r], r), b = log2_weight(x[j][2 * r + 1], r);
        const float weight_a = exp2_fast(a), weight_b = exp2_fast(b);
        sum[r] += weight_a + weight_b;
#if HAS_SCALES >= 2
        w[2 * j + r] = pack_weights(exp2_fast(a + scales.log2_size(j, 0) - reference[r]),
                                    exp2_fast(b + scales.log2_size(j, 1) - reference[r])) ^
                       scales.signs(j);
#else
        w[2 * j + r] = pack_weights(weight_a, weight_b);
#endif
      }
    }
  }

  DEVICE void rescale(int r, float factor) {
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++)
      sums.o[i][2 * r] *= factor, sums.o[i][2 * r + 1] *= factor;
  }

  // The base-2 logarithm of a row's largest product of a weight and the scale of its value; `m` is the
  // largest score.
  DEVICE float largest_of_values(const float (&x)[2][4], const TileScales& scales, float m, int r) const {
    if (HAS_SCALES == 2 && !SCALES_TOKENS) return log2_weight(m, r) + scales.log2_size(0, 0);
    float y[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        y[j][2 * r + i] = log2_weight(x[j][2 * r + i], r) + scales.log2_size(j, i);
    return max_of_row(largest(y, r));
  }

  // Returns the factor for the row's sums of values. `fall` is the base-2 logarithm of the factor for its
  // weights.
  DEVICE float move_reference(const float (&x)[2][4], const TileScales& scales, float m, float fall, int r) {
    const float old = reference[r] + fall;
    reference[r] = fmaxf(old, largest_of_values(x, scales, m, r));
    return exp2_fast(old - reference[r]);
  }

  DEVICE void attend(const DecodeSplit& t, int tile) {
    const int stage = kv.stage, key = tile * BLOCK_N + warp * 16;
    float s[2][2][4] = {};
    mbar_wait(barrier(sm.k_full, stage), kv.phase);
    queries.multiply(s, slot_at<K_BYTES>(sm.k, stage), warp * 16);
    const TileScales scales = TileScales::of(p, slot_at<SCALES_BYTES>(sm.scales, stage), warp * 16);
    const ExistingKeys exists(slot_at<PAGES_BYTES>(sm.pages, stage), warp * 16);
    const bool edge = key < t.begin || key + 16 > t.end || !exists.all() || p.window_right < UNBOUNDED ||
                      p.window_left < UNBOUNDED;
    float x[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i >> 1, column = key + j * 8 + (lane & 3) * 2 + (i & 1);
        if (r >= ROWS / 8) continue;
        float y = queries.product(s[j][0][i] + s[j][1][i], r) * scales.key(j, i & 1);
#if HAS_SOFTCAP
        y = softcap_tanh(y * p.tanh_scale);
#endif
#if HAS_ALIBI
        y -= slope[r] * fabsf((float)(diagonal[r] - column));
#endif
        if (edge && !(column >= first_key[r] && column < end_key[r] && exists.has(j, i & 1))) y = -INFINITE;
        x[j][i] = y;
      }
    u32 w[4];
    if (ROWS == 8) w[1] = w[3] = any_number();
    exponentiate(w, x, scales);
    mbar_wait(barrier(sm.v_full, stage), kv.phase);
    // memory outside the row's range is arbitrary, and 0 * NaN is NaN
    u32 keep[2] = {~0u, ~0u};
    const int own_key = key + (lane & 3) * 2;
    if (key + 16 > t.end) keep[0] = below(t.end - own_key), keep[1] = below(t.end - own_key - 8);
    if (key < t.begin) keep[0] &= ~below(t.begin - own_key), keep[1] &= ~below(t.begin - own_key - 8);
    sums.add(w, slot_at<V_BYTES>(sm.v, stage), warp * 16, keep);
    fence_async_shared();  // as in forward.cu
    __syncwarp();
    if (lane == 0) mbar_arrive(barrier(sm.kv_empty, stage));
    kv.next();
  }

  // A mask for two keys in one word, which selects those among the first `keys`.
  DEVICE u32 below(int keys) { return keys <= 0 ? 0u : keys == 1 ? 0xFFFFu : ~0u; }

  // The warps exchange their sums through shared memory, swizzled in units of 8 columns because the row size
  // is a multiple of all banks.
  DEVICE u32 sums_at(int w, int row) const { return sm.sums + (w * ROWS + row) * (VALUE_DIM * 4); }
  DEVICE static int swizzle(int row) { return (row & 7) * 8; }

  DEVICE void reduce_warps() {
#pragma unroll
    for (int r = 0; r < ROWS / 8; r++) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1), sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      const int row = (lane >> 2) + 8 * r;
      if ((lane & 3) == 0)
        store_shared(sm.stats + (warp * ROWS + row) * 8, make_float2(row_max[r] * p.scale_log2, sum[r]));
      if (HAS_TILE_SCALES) rescale(r, exp2_fast(reference[r]));
      sums.store(sums_at(warp, row), swizzle(row), r);
    }
    named_barrier_sync(Barrier::CONSUMERS, 32 * WARPS);
  }

  DEVICE void finish(const DecodeSplit& t) {
    reduce_warps();
    const int slot = own_slot(t);
    bool is_unusable = false;
    for (int i = tid; i < packed_rows(p) * (VALUE_DIM / 2); i += 32 * WARPS) {
      const int row = i / (VALUE_DIM / 2), column = i % (VALUE_DIM / 2) * 2;
      float2 stats[WARPS], x = make_float2(0.f, 0.f);
      float max2 = UNINITIALISED_MAX, total = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        stats[w] = load_shared<float2>(sm.stats + (w * ROWS + row) * 8);
        if (stats[w].y > 0.f) max2 = fmaxf(max2, stats[w].x);
      }
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float factor = stats[w].y > 0.f ? exp2_fast(stats[w].x - max2) : 0.f;
        const float2 y = load_shared<float2>(sums_at(w, row) + (column ^ swizzle(row)) * 4);
        total += stats[w].y * factor, x.x += y.x * factor, x.y += y.y * factor;
      }
      x.x *= t.scales.value, x.y *= t.scales.value;
      if (t.splits == 1) {
        float inverse;
        const int out_row = finish_packed_row(p, t, row, max2, total, column == 0, inverse);
        write_columns(p, out_row, column, x, inverse);
        is_unusable = is_unusable || !is_finite(x);
      } else {
        p.partial[((slot * ROWS + row) * VALUE_DIM + column) / 2] = x;
        if (column == 0) p.partial_stats[slot * ROWS + row] = make_float2(max2, total);
      }
    }
    if (__any_sync(~0u, is_unusable))
#pragma unroll 1
      for (int i = tid; i < packed_rows(p) * (VALUE_DIM / 2); i += 32 * WARPS)
        replace_columns(p, t, i / (VALUE_DIM / 2), i % (VALUE_DIM / 2) * 2);
    named_barrier_sync(Barrier::CONSUMERS, 32 * WARPS);  // all sums have been read
  }

  DEVICE void run() {
    for (PipelineState<ITEMS> items;; items.next()) {
      mbar_wait(barrier(sm.q_full, items.stage), items.phase);
      const u32 at = slot_at<DECODE_SPLIT_BYTES>(sm.split, items.stage);
      DecodeSplit t;
      static_cast<Split&>(t) = load_split(at);
      const int4 keys = load_shared<int4>(at + SPLIT_BYTES);
      t.begin = keys.x, t.end = keys.y, t.scales = RowScales::from_bits(keys.z, keys.w);
      if (t.count == 0) break;
      begin_item(t, slot_at<Q_BYTES>(sm.q, items.stage));
      __syncwarp();
      if (lane == 0) mbar_arrive(barrier(sm.q_empty, items.stage));
#pragma unroll 1
      for (int i = 0; i < t.count; i++) attend(t, t.tile + i);
      finish(t);
    }
  }
};

#if ENTRY_decode
extern "C" __global__ void __launch_bounds__(32 * (WARPS + (GATHERS_KEYS ? GATHERING_WARPS : 1)), 1)
    decode(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DecodeShared sm(smem_address(shared));
  if (threadIdx.x == 0) {
    for (int i = 0; i < ITEMS; i++)
      mbar_init(barrier(sm.q_full, i), 1), mbar_init(barrier(sm.q_empty, i), WARPS);
    for (int i = 0; i < STAGES; i++)
      mbar_init(barrier(sm.k_full, i), K_ARRIVALS), mbar_init(barrier(sm.v_full, i), V_ARRIVALS),
          mbar_init(barrier(sm.kv_empty, i), WARPS);
    // the first read of a line of parameters has the latency of memory, which is hidden here
    store_shared(sm.split, make_int4((int)(u64)p.out, p.B, p.window_right, __float_as_int(p.scale_log2)));
    mbar_init_fence();
  }
  if (threadIdx.x == 32) prefetch_tensor_map(p.q), prefetch_tensor_map(p.k), prefetch_tensor_map(p.v);
  clear_queries(sm.q, ITEMS * Q_BYTES);
  __syncthreads();
  wait_for_prior_grid(), launch_dependent_grids();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp == 0 || (GATHERS_KEYS && warp > WARPS)) produce(p, sm, GATHERS_KEYS && warp > 0);
  else {
    DecodeConsumer consumer(p, sm, warp - 1);
    consumer.run();
  }
}
#endif

#if ENTRY_combine
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ DecodeParams p) {
  combine_splits(p);
}
#endif
