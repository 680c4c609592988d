// What the backward kernels share: their parameters, the blocks of queries that attend a block of keys and
// the blocks of keys that a block of queries attends, the exponent of a weight, and the stores of results.
//
// Compile-time: BLOCK_M BLOCK_N QUERY_BLOCK_N HEAD_FEATURES VALUE_FEATURES ADDS_DQ SPLITS_GROUP WHOLE_HEADS
// HAS_WINDOW HAS_RANGES HAS_ALIBI HAS_MASK BIAS_BITS SKIPS_TILES HAS_PROGRAM
#pragma once
#include "dropout.cuh"
#include "elements.cuh"
#include "masks.cuh"
#include "sequences.cuh"
#if HAS_PROGRAM
#include "terms.cuh"
constexpr bool SUMS_DISTANCES = PROGRAM_DISTANCE_SUMS;
#else
constexpr bool SUMS_DISTANCES = false;
#endif

// Sums of a warp's gradients of scores along diagonals of 8 x 8 elements, as floats: a row for each of 8
// keys, whose first and last columns stay 0.
constexpr int DIAGONAL_ROW = 88, WARP_DIAGONALS = 8 * DIAGONAL_ROW;

// fa_ops/backends/hopper/runtime/structs.py reads these declarations.

// A mask packed by mask.cu: strides in bytes, 0 for broadcast dimensions, and the offset of the key range in
// a row.
struct MaskBits {
  const unsigned char* bits;
  long long b, h, row, range;
};

// The tensors of a call, in the order of their maps.
enum { Q, K, V, GRAD_OUT, DQ, DK, DV };
constexpr int TENSORS = 7;

#if HAS_PROGRAM
struct ProgramOfCall {
  ProgramInputs inputs;
  TileRuns runs;     // with SKIPS_TILES, in place of the lists of a mask
  float* term_sums;  // gradients of terms of keys, see `term_sums_of`
  float* distance_sums;  // of a term of distances, see `distance_sums_of`
  float* distances;      // the gradient of that term: of distance 0
  long long distances_b, distances_h;  // its strides, 0 where batches or heads share it
};
#endif

struct BackwardParams {
  TensorMap q, k, v, grad_out, dq, dk, dv;
  Element* tensors[TENSORS];  // the tensors of the maps, for reads and writes of single rows
  const Element* out;      // (B, Hq, Sq, Dv)
  const float* saved_lse;  // of the forward pass, (B, Hq, Sq), natural, -inf for rows without keys
  const float* grad_lse;   // the same shape, or null
  float* lse;    // (B * Hq, padded Sq), in log2 units (natural with a bias), +inf for rows without keys
  float* delta;  // the same shape
  float* sums;         // dQ with ADDS_DQ: (B * Hq, m_blocks, BLOCK_M * SUM_FEATURES), accumulator order
  int* counter;        // the number of tiles claimed by persistent CTAs beyond their first
  const int* kv_lens;  // (B,) or null
  const float* alibi;  // (B|1, Hq) or null
  const int2* ranges;  // with key ranges: (B, Hq|1, padded Sq), from `clip_ranges`
  const int4* bounds;  // with key ranges: (B, Hq|1, m_blocks), from `clip_ranges`
  float* key_sums;     // sums of dK and dV with SPLITS_GROUP, see `key_sums_of`; or null
  u32* nonfinite;      // flags for 16 rows of dK, dV or dQ each, see `note_at`
  int B, Hq, Hkv, group, Sq, Sk;
  int window_left, window_right;
  int m_blocks, n_blocks, section, query_section, alibi_b, range_heads;
  int parts, part_heads;  // parts of a group of query heads, and query heads per part
  int D, Dv;
  float scale;       // of the gradients of q and k
  float tanh_scale;  // with a softcap: scale / softcap
  float scale_log2;  // from score units to log2 units
  float alibi_unit;
  Strides strides[TENSORS], out_strides;
  long long zeros;    // sums that `preprocess` clears, in units of 16 bytes
  MaskBits by_key;    // with a mask: rows are keys
  MaskBits by_query;  // with a mask, unless ADDS_DQ: rows are queries
  int mask_block;     // bytes of a block of queries in `by_key`, 0 if queries share the mask
  Dropout dropout;
  const int2* positions;  // with ALiBi, of the queries, then the keys, of packed sequences: packed_ranges.cu
#if BIAS_BITS || (SKIPS_TILES && !HAS_PROGRAM)
  Bias bias;
#endif
#if HAS_PROGRAM
  ProgramOfCall program;
#endif
};

// A block of keys and one part of a group of query heads (`part` counts the parts of all groups), and the
// range [first, last) of the query blocks that attend some of it.
struct KeyTile {
  int n0, part, b, keys, first, last;
  int stored, complete;  // with WHOLE_HEADS: query blocks below these have dQ sums, have final dQ
};

DEVICE int key_head(const BackwardParams& p, const KeyTile& t) {
  return SPLITS_GROUP ? t.part / p.parts : t.part;
}
DEVICE int first_head(const BackwardParams& p, const KeyTile& t) { return t.part * p.part_heads; }

// The range [x, y) of queries that may attend some of the BLOCK_N keys from `n0` on; empty if y <= x.
DEVICE int2 queries_of(const BackwardParams& p, int n0, int keys) {
#if HAS_WINDOW
  const int shift = keys - p.Sq;
  return make_int2(max(0, n0 - shift - p.window_right),
                   min(p.Sq, min(n0 + BLOCK_N, keys) - shift + p.window_left));
#else
  return make_int2(0, p.Sq);
#endif
}

DEVICE KeyTile tile_at(const BackwardParams& p, int i) {
  const int parts = p.Hkv * p.parts;
#if WHOLE_HEADS
  const int part = i / p.n_blocks, n = i - part * p.n_blocks;
#else
  const int all = p.B * parts, per = p.section * p.n_blocks;
  const int sec = i / per, r = i - sec * per;
  const int inside = min(p.section, all - sec * p.section);
  const int part = sec * p.section + r % inside, n = r / inside;
#endif
  KeyTile t;
  t.n0 = n * BLOCK_N;
  t.b = part / parts;
  t.part = part - t.b * parts;
  t.keys = keys_of(p, t.b);
  const int2 queries = queries_of(p, t.n0, t.keys);
  int lo = queries.x, hi = queries.y;
  if (t.n0 >= t.keys || lo >= hi) lo = hi = 0;
  t.first = lo / BLOCK_M;
  t.last = (hi + BLOCK_M - 1) / BLOCK_M;
#if WHOLE_HEADS
  const int2 later = queries_of(p, t.n0 + BLOCK_N, t.keys);
  t.stored = n == 0 ? 0 : (queries_of(p, t.n0 - BLOCK_N, t.keys).y + BLOCK_M - 1) / BLOCK_M;
  t.complete = t.n0 + BLOCK_N >= t.keys || later.x >= later.y ? UNBOUNDED : later.x / BLOCK_M;
#endif
  return t;
}

DEVICE long long range_row(const BackwardParams& p, int h, int b) {
  return b * p.range_heads + (p.range_heads > 1 ? h : 0);
}

// The range from the first to the last column that a mask keeps in any of COUNT rows. Executed by one warp.
template <int COUNT> DEVICE int2 kept_range(const MaskBits& bits, int b, int h, int row, int rows) {
  const unsigned char* from = bits.bits + b * bits.b + h * bits.h + bits.range;
  int lo = UNBOUNDED, hi = 0;
  for (int i = threadIdx.x & 31; i < COUNT; i += 32) {
    const int2 range = *(const int2*)(from + min(row + i, rows - 1) * bits.row);
    lo = min(lo, range.x), hi = max(hi, range.y);
  }
  return make_int2(__reduce_min_sync(~0u, lo), __reduce_max_sync(~0u, hi));
}

// One bit for each of the 32 query blocks starting at `base`. some: the block attends a key of the tile.
// edge: some query of the block does not attend the whole tile. full, with SKIPS_TILES: the mask keeps
// everything.
struct QueryBlocks {
  u32 some, edge, full;
};

DEVICE QueryBlocks query_blocks(const BackwardParams& p, const KeyTile& t, int h, int base) {
  const int m = base + (threadIdx.x & 31);
  bool some = m < t.last;
  bool edge = t.n0 + BLOCK_N > t.keys;
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
  QueryBlocks n = {__ballot_sync(~0u, some), __ballot_sync(~0u, edge), 0};
#if SKIPS_TILES
#if HAS_PROGRAM
  const ListedBlocks listed =
      blocks_of_runs<BLOCK_M>(line_of_runs<false>(p.program.runs, t.b, h, t.n0), base);
#else
  const ListedBlocks listed =
      listed_blocks<BLOCK_M>(tile_list<false>(p.bias.blocks, t.b, h, t.n0), base);
#endif
  n.some &= listed.some, n.full = listed.full;
#endif
  return n;
}

// The base-2 exponent of a weight.
DEVICE float exponent(const BackwardParams& p, float s, float lse) {
#if BIAS_BITS  // exact for large scores, whose product with the scale is rounded
  return (s - lse) * p.scale_log2;
#else
  return fmaf(s, p.scale_log2, -lse);
#endif
}

// The queries of a block that attend a thread's keys, for transposed scores, whose rows are keys.

// From the lengths and the window, for two keys that are 8 apart: the distance of `query` from the first
// query that attends a key, and the number of queries that attend it.
DEVICE void attending_queries(const BackwardParams& p, const KeyTile& t, int query, int key,
                              int (&distance)[2], u32 (&count)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int j = t.n0 + key + 8 * r;
    distance[r] = 0, count[r] = j < t.keys ? ~0u : 0;
#if HAS_WINDOW
    distance[r] = query + t.keys - p.Sq - j + p.window_right,
    count[r] = min(count[r], (u32)p.window_left + (u32)p.window_right + 1);
#endif
  }
}

// Whether score element `i` of this thread is attended.
DEVICE bool is_attended(int i, const int (&distance)[2], const u32 (&count)[2]) {
  const int r = i >> 1 & 1;
  return (u32)(distance[r] + column_offset(i)) < count[r];
}

// The keys that a block of 64 queries attends in the backward pass, in blocks of QUERY_BLOCK_N.

constexpr int ROWS = 64;

// The keys that some query of a block of 64 attends, and the keys that all of them attend.
struct QueryBlockKeys {
  int lo, hi, all_lo, all_hi;
};

// A block of 64 queries of a head.
struct QueryBlock {
  int m, h, b, keys;
};

DEVICE QueryBlockKeys keys_of_block(const BackwardParams& p, const QueryBlock& t) {
  QueryBlockKeys s = {0, 0, 0, 0};
  if (t.m >= p.m_blocks) return s;
#if HAS_RANGES
  const int4 x = p.bounds[range_row(p, t.h, t.b) * p.m_blocks + t.m];
  s = {x.x, x.y, x.z, x.w};
#else
  s = {0, t.keys, 0, t.keys};
#if HAS_WINDOW
  const int first = t.m * ROWS + t.keys - p.Sq, last = min((t.m + 1) * ROWS, p.Sq) - 1 + t.keys - p.Sq;
  s.lo = max(0, first - p.window_left), s.hi = min(t.keys, last + p.window_right + 1);
  s.all_lo = max(0, last - p.window_left), s.all_hi = min(t.keys, first + p.window_right + 1);
#endif
#endif
#if HAS_MASK
  const int2 kept = kept_range<ROWS>(p.by_query, t.b, t.h, t.m * ROWS, p.Sq);
  s.lo = max(s.lo, kept.x), s.hi = min(s.hi, kept.y);
#endif
  if (s.hi <= s.lo) s.lo = s.hi = 0;
  return s;
}

// Blocks of keys [first, end).
struct KeyBlocks {
  int first, end;
};

#if SKIPS_TILES
// Calls `visit` for each block of keys that overlaps a listed tile of these queries, with whether the mask
// keeps all of it. Executed by whole warps.
template <class Visit>
DEVICE void for_each_listed_block(const BackwardParams& p, const QueryBlock& t, const KeyBlocks& n,
                                  Visit visit) {
#if HAS_PROGRAM
  const int* const line = line_of_runs<true>(p.program.runs, t.b, t.h, t.m * ROWS);
#else
  const TileList list = tile_list<true>(p.bias.blocks, t.b, t.h, t.m * ROWS);
#endif
  for (int base = n.first; base < n.end; base += 32) {
#if HAS_PROGRAM
    ListedBlocks listed = blocks_of_runs<QUERY_BLOCK_N>(line, base);
#else
    ListedBlocks listed = listed_blocks<QUERY_BLOCK_N>(list, base);
#endif
    if (n.end - base < 32) listed.some &= (1u << n.end - base) - 1;
#pragma unroll 1
    for (; listed.some; listed.some &= listed.some - 1) {
      const int bit = __ffs(listed.some) - 1;
      visit(base + bit, listed.full >> bit & 1);
    }
  }
}
#endif

DEVICE KeyBlocks keys_of(const QueryBlockKeys& s) {
  return {s.lo / QUERY_BLOCK_N, (s.hi + QUERY_BLOCK_N - 1) / QUERY_BLOCK_N};
}

// The results: fragments of gradients in shared memory, partial sums of a group of query heads, and flags for
// rows that are not finite.

// Stores a warpgroup's accumulator as 16-bit fragments: for each column of 64 features, 64 rows of 128
// swizzled bytes.
template <int COUNT> DEVICE void store_fragments(u32 at, const u32 (&x)[COUNT], u32 column_bytes) {
  const int lane = threadIdx.x & 31, r = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const int col = i * 4 + ((lane >> 4) & 1) * 8;
    const u32 to = at + (col >> 6) * column_bytes + r * 128 + ((((col & 63) >> 3) ^ (r & 7)) << 4);
    if (i + 4 <= COUNT) stmatrix_x4(to, x[i], x[i + 1], x[i + 2], x[i + 3]);
    else stmatrix_x2(to, x[i], x[i + 1]);  // eight columns; only the addresses of lanes 0 to 15 are used
  }
}

constexpr int ROWS_PER_NOTE = 16;  // rows per word of `nonfinite`, as many as a warp holds

// The number of words of `nonfinite` for dK, and for dV.
DEVICE int key_notes(const BackwardParams& p) {
  return SPLITS_GROUP ? 0 : p.B * p.Hkv * p.n_blocks * (BLOCK_N / ROWS_PER_NOTE);
}

// The word of `nonfinite` for the first 16 of 64 rows. `h` counts the heads of all batch rows, and a head has
// `rows` rows including padding.
DEVICE u32* note_at(const BackwardParams& p, int tensor, int h, int rows, int row) {
  const int previous = tensor == DK ? 0 : tensor == DV ? key_notes(p) : 2 * key_notes(p);
  return p.nonfinite + previous + (h * (rows / ROWS_PER_NOTE) + row / ROWS_PER_NOTE);
}

// 0 if all elements are finite, else NaN.
template <int COUNT> DEVICE float probe(const float (&x)[COUNT]) {
  float found[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < COUNT; i++) found[i % 4] = fmaf(x[i], 0.f, found[i % 4]);
  return (found[0] + found[1]) + (found[2] + found[3]);
}

// Zeroes rows [from, to) of a tile of ROWS rows, since memory past the length of a batch row is arbitrary.
// Executed by a warpgroup before its own products.
template <int ROWS, int FEATURES> DEVICE void clear_rows(u32 tile, int from, int to, u32 barrier) {
#pragma unroll 1
  for (int i = from * 8 + (threadIdx.x & 127); i < to * 8; i += 128)
#pragma unroll
    for (int x = 0; x < FEATURES / 64; x++)
      store_shared(tile + x * ROWS * 128 + i * 16, make_int4(0, 0, 0, 0));
  fence_async_shared();
  named_barrier_sync(barrier, 128);
}

#if HAS_PROGRAM
// The sums of term `n` of those of which the pass over keys computes gradients: one for each key, of each
// head where terms differ by head, else of each part of a group of heads.
DEVICE float* term_sums_of(const BackwardParams& p, int n, int b, int of) {
  const long long rows = p.B * (long long)max(p.Hq, p.Hkv * p.parts);
  const int heads = PROGRAM_SUMS_BY_HEAD >> n & 1 ? p.Hq : p.Hkv * p.parts;
  return p.program.term_sums + (n * rows + b * heads + of) * (p.n_blocks * BLOCK_N);
}
#endif

#if PROGRAM_DISTANCE_SUMS
// The gradient of a term of distances by 64 keys, number `block` of a head. That of distance d is at
// d + k + 64, where k is the first of these keys. Written are those from the first block of queries that
// attends some of the CTA's keys to one behind the last.
DEVICE float* distance_sums_of(const BackwardParams& p, int b, int h, int block) {
  const long long blocks = p.n_blocks * (BLOCK_N / 64), row = p.m_blocks * BLOCK_M + 64;
  return p.program.distance_sums + ((b * p.Hq + h) * blocks + block) * row;
}
#endif

constexpr int KEY_SUMS = BLOCK_N * (HEAD_FEATURES + VALUE_FEATURES);

// The sums of a block of keys: dK, followed by dV, in the accumulator order of each consumer. With ADDS_DQ
// all parts of a group add to the same sums, in no fixed order; otherwise each part has its own.
DEVICE float* key_sums_of(const BackwardParams& p, const KeyTile& t) {
  const int of = ADDS_DQ ? t.b * p.Hkv + key_head(p, t) : t.b * p.Hkv * p.parts + t.part;
  return p.key_sums + ((long long)of * p.n_blocks + t.n0 / BLOCK_N) * KEY_SUMS;
}

// Adds elements [BEGIN, END) of a thread's accumulator to the sums that start at `to`.
template <int BEGIN, int END, int COUNT> DEVICE void add_fragments(float* to, const float (&x)[COUNT]) {
#pragma unroll
  for (int i = BEGIN; i < END; i += 4) atomic_add(to + i * 128, x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// Adds to the sums of the group, or writes those of a part.
template <int COUNT> DEVICE void write_key_sums(float* to, const float (&x)[COUNT]) {
  if (ADDS_DQ) {
    add_fragments<0, COUNT>(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4)
      *(float4*)(to + i * 128) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}
