// A float mask that is added to the scores, as tiles of 64 queries in shared memory: boxes of 128 swizzled bytes a row, one behind the other.
// Compile-time: BIAS_BITS, 16 of the input type or 32 of fp32

#if BIAS_BITS
struct Bias {
  TensorMap map;
  const char* at;                   // the same again, for who reads single elements: with steps in bytes, 0 where all share it
  long long b, h, row;
  int of_b, of_h, of_row, of_column;  // 0 or 1: 0 where all share its first block
  int last_column;                  // where the last pair of a row begins
  float unit;                       // of the accumulators, in scores
};

constexpr int BOX_COLUMNS = 1024 / BIAS_BITS, BOX_BYTES = 64 * 128;

template <int COLUMNS> DEVICE void load_bias_tile(u32 to, const Bias& bias, u32 bar, int row, int column, int h, int b) {
  static_assert(COLUMNS % BOX_COLUMNS == 0, "whole boxes");
#pragma unroll
  for (int x = 0; x < COLUMNS; x += BOX_COLUMNS)
    tma_load(to + x / BOX_COLUMNS * BOX_BYTES, bias.map, bar, column * bias.of_column + x, row * bias.of_row, h * bias.of_h, b * bias.of_b);
}

// Where an element of a tile lies. As tiles start at multiples of 1024 bytes, a step of whole chunks, which touches no bit of the chunk from where it
// starts, flips bits of the address.
DEVICE u32 bias_at(u32 tile, int row, int column) {
  constexpr int CHUNK = 128 / BIAS_BITS;
  return tile + column / BOX_COLUMNS * BOX_BYTES + row * 128 + (((column % BOX_COLUMNS / CHUNK) ^ (row & 7)) << 4) + column % CHUNK * (BIAS_BITS / 8);
}

// From an address in columns [0, 2 chunks) of a tile, `columns` further, a multiple of two chunks.
DEVICE u32 columns_on(u32 at, int columns) {
  constexpr int CHUNK = 128 / BIAS_BITS;
  return (at ^ (columns % BOX_COLUMNS / CHUNK << 4)) + columns / BOX_COLUMNS * BOX_BYTES;
}

// Of a thread's scores the `i`-th and the seven after them: their bias. With TRANSPOSED scores have a row a column of the tile.
template <bool TRANSPOSED> DEVICE void load_eight(float (&y)[8], u32 at, int i) {
#if BIAS_BITS == 16
  u32 x[4];
  load_matrix_x4<TRANSPOSED>(x, TRANSPOSED ? at + i * 2 * 128 : columns_on(at, i * 2));
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 z = unpack(x[e]);
    y[2 * e] = z.x, y[2 * e + 1] = z.y;
  }
#else
#pragma unroll
  for (int e = 0; e < 8; e++) {
    if (TRANSPOSED) {
      y[e] = load_shared<float>((at ^ (e & 3) << 4) + (i * 2 + (e & 4) * 2 + (e & 1)) * 128);  // the next query, or 8 keys on
    } else if (e % 2 == 0) {
      const float2 z = load_shared<float2>(columns_on(at, i * 2 + (e & 4) * 2) + (e & 2) * 4 * 128);
      y[e] = z.x, y[e + 1] = z.y;
    }
  }
#endif
}

// To a warpgroup's scores, a row a query, or with TRANSPOSED a key: s * unit + bias. The first row is the tile's row, or column, `first`.
template <bool TRANSPOSED, int COUNT> DEVICE void add_bias_tile(float (&s)[COUNT], u32 tile, int first, float unit) {
  const int lane = threadIdx.x & 31;
  first += (threadIdx.x >> 5 & 3) * 16;
  u32 at;
  if (BIAS_BITS == 16)
    at = TRANSPOSED ? bias_at(tile, (lane >> 4) * 8 + (lane & 7), first + (lane & 8)) : bias_at(tile, first + (lane & 15), (lane >> 4) * 8);
  else
    at = TRANSPOSED ? bias_at(tile, (lane & 3) * 2, first + (lane >> 2)) : bias_at(tile, first + (lane >> 2), (lane & 3) * 2);
#pragma unroll
  for (int i = 0; i < COUNT; i += 8) {
    float y[8];
    load_eight<TRANSPOSED>(y, at, i);
#pragma unroll
    for (int e = 0; e < 8; e++) s[i + e] = fmaf(s[i + e], unit, y[e]);
  }
}

// Two neighbours of a row in global memory, of a block of keys that starts at `column`.
#if BIAS_BITS == 16
typedef u32 BiasPair;
DEVICE float2 floats(BiasPair x) { return unpack(x); }
#else
typedef uint2 BiasPair;
DEVICE float2 floats(BiasPair x) { return make_float2(__int_as_float(x.x), __int_as_float(x.y)); }
#endif

DEVICE const char* bias_row(const Bias& bias, int b, int h, int row) { return bias.at + b * bias.b + h * bias.h + row * bias.row; }

DEVICE BiasPair bias_pair(const char* row, const Bias& bias, int column, int inside) {
  return *(const BiasPair*)(row + (long long)min(column * bias.of_column + inside, bias.last_column) * (BIAS_BITS / 8));
}
#endif
