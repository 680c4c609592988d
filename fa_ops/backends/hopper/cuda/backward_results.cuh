// Outputs of the backward kernels: fragments of gradients in shared memory, partial sums of a group of query
// heads, and flags for rows that are not finite.
//
// Compile-time: HEAD_FEATURES VALUE_FEATURES ADDS_DQ, and what backward_tiles.cuh has
#pragma once
#include "backward_tiles.cuh"

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
