// A float mask that is added to the scores, as tiles of 64 queries in shared memory. A tile is a sequence of
// boxes with 128 swizzled bytes per row. BIAS_BITS is 16 for the input type and 32 for fp32.
#pragma once
#include "elements.cuh"
#include "mask_blocks.cuh"

#if BIAS_BITS || SKIPS_TILES
struct Bias {
  TensorMap map;
  const char* data;                           // the tensor of the map, for reads of single elements
  long long b, h, row;                        // its strides in bytes, 0 for broadcast dimensions
  int step_b, step_h, step_row, step_column;  // 0 for dimensions of the map that are broadcast, else 1
  int last_column;                            // the column of the last pair of a row
  float unit;                                 // one accumulator unit, in scores
  MaskBlocks blocks;                          // with SKIPS_TILES, in the backward of a bool mask too
};
#endif

#if BIAS_BITS
constexpr int BOX_COLUMNS = 1024 / BIAS_BITS, BOX_BYTES = 64 * 128;
constexpr int CHUNK_COLUMNS = 128 / BIAS_BITS;  // of 16 bytes

template <int COLUMNS>
DEVICE void load_bias_tile(u32 to, const Bias& bias, u32 bar, int row, int column, int h, int b) {
  static_assert(COLUMNS % BOX_COLUMNS == 0, "whole boxes");
#pragma unroll
  for (int x = 0; x < COLUMNS; x += BOX_COLUMNS)
    tma_load(to + x / BOX_COLUMNS * BOX_BYTES, bias.map, bar, column * bias.step_column + x,
             row * bias.step_row, h * bias.step_h, b * bias.step_b);
}

// The address of an element of a tile. Tiles start at multiples of 1024 bytes, so advancing by whole chunks
// from an address whose chunk bits are clear is an XOR of address bits.
DEVICE u32 bias_address(u32 tile, int row, int column) {
  return tile + column / BOX_COLUMNS * BOX_BYTES + row * 128 +
         (((column % BOX_COLUMNS / CHUNK_COLUMNS) ^ (row & 7)) << 4) +
         column % CHUNK_COLUMNS * (BIAS_BITS / 8);
}

// Advances an address in the first two chunks of a tile by `columns`, a multiple of two chunks.
DEVICE u32 advance_columns(u32 at, int columns) {
  return (at ^ (columns % BOX_COLUMNS / CHUNK_COLUMNS << 4)) + columns / BOX_COLUMNS * BOX_BYTES;
}

// The bias of scores `i` to `i + 7` of a thread. The rows of TRANSPOSED scores are the columns of the tile.
template <bool TRANSPOSED> DEVICE void load_bias_elements(float (&y)[8], u32 at, int i) {
#if BIAS_BITS == 16
  u32 x[4];
  ldmatrix_x4<TRANSPOSED>(x, TRANSPOSED ? at + i * 2 * 128 : advance_columns(at, i * 2));
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 z = unpack(x[e]);
    y[2 * e] = z.x, y[2 * e + 1] = z.y;
  }
#else
#pragma unroll
  for (int e = 0; e < 8; e++) {
    if (TRANSPOSED) {  // the next query, or the key 8 further on
      y[e] = load_shared<float>((at ^ (e & 3) << 4) + (i * 2 + (e & 4) * 2 + (e & 1)) * 128);
    } else if (e % 2 == 0) {
      const float2 z = load_shared<float2>(advance_columns(at, i * 2 + (e & 4) * 2) + (e & 2) * 4 * 128);
      y[e] = z.x, y[e + 1] = z.y;
    }
  }
#endif
}

// Replaces a warpgroup's scores s by s * unit + bias. Their rows are queries, or keys if TRANSPOSED; the
// first one is row, or column, `first` of the tile.
template <bool TRANSPOSED, int COUNT>
DEVICE void add_bias_tile(float (&s)[COUNT], u32 tile, int first, float unit) {
  const int lane = threadIdx.x & 31;
  first += (threadIdx.x >> 5 & 3) * 16;
  u32 at;
  if (BIAS_BITS == 16)
    at = TRANSPOSED ? bias_address(tile, (lane >> 4) * 8 + (lane & 7), first + (lane & 8))
                    : bias_address(tile, first + (lane & 15), (lane >> 4) * 8);
  else
    at = TRANSPOSED ? bias_address(tile, (lane & 3) * 2, first + (lane >> 2))
                    : bias_address(tile, first + (lane >> 2), (lane & 3) * 2);
#pragma unroll
  for (int i = 0; i < COUNT; i += 8) {
    float y[8];
    load_bias_elements<TRANSPOSED>(y, at, i);
#pragma unroll
    for (int e = 0; e < 8; e++) s[i + e] = fmaf(s[i + e], unit, y[e]);
  }
}

// Two neighbouring elements of a row in global memory.
#if BIAS_BITS == 16
typedef u32 BiasPair;
DEVICE float2 to_floats(BiasPair x) { return unpack(x); }
#else
typedef uint2 BiasPair;
DEVICE float2 to_floats(BiasPair x) { return make_float2(__int_as_float(x.x), __int_as_float(x.y)); }
#endif

DEVICE const char* bias_row(const Bias& bias, int b, int h, int row) {
  return bias.data + b * bias.b + h * bias.h + row * bias.row;
}

// The pair at offset `inside` of a block of keys that starts at `column`.
DEVICE BiasPair bias_pair(const char* row, const Bias& bias, int column, int inside) {
  return *(const BiasPair*)(row + (long long)min(column * bias.step_column + inside, bias.last_column) *
                                      (BIAS_BITS / 8));
}

DEVICE float bias_at(const Bias& bias, int b, int h, int row, int column) {
  const float2 pair = to_floats(bias_pair(bias_row(bias, b, h, row), bias, column & ~1, 0));
  return column & 1 ? pair.y : pair.x;
}
#endif
