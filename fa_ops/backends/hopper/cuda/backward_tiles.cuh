// Which blocks of queries a block of keys meets in the backward pass, and what its kernels write beside
// gradients: sums of parts of a group, and notes of rows that are not finite.
//
// Compile-time: BLOCK_M BLOCK_N HEAD_FEATURES VALUE_FEATURES ADDS_DQ SPLITS_GROUP HAS_WINDOW HAS_RANGES
// HAS_MASK BIAS_BITS
#pragma once
#include "backward_params.cuh"
#include "seqlen_info.cuh"

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

// The base-2 exponent of a weight.
DEVICE float exponent(const BackwardParams& p, float s, float lse) {
#if BIAS_BITS  // exact for scores so far from 0 that their product with the scale is not
  return (s - lse) * p.scale_log2;
#else
  return fmaf(s, p.scale_log2, -lse);
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
