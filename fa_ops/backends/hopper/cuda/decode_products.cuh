// The products of decode.cu with 16-bit keys and values, which `ldmatrix` loads as operands.
#pragma once
#include "decode_params.cuh"

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
