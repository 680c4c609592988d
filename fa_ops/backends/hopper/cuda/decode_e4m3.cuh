// The products of decode.cu with e4m3 keys and values, which are converted to float16 exactly. `ldmatrix`
// moves pairs of bytes, so the numbers of a pair are neighbouring features of a key or, after a
// transposition, of a value. The queries are permuted to the order in which lanes hold the features of keys,
// and the columns of the accumulators are permuted likewise.
#pragma once
#include "decode_params.cuh"

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
