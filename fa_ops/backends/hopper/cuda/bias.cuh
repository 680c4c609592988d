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

// To a warpgroup's scores, a row a query: s * unit + bias.
template <int COUNT> DEVICE void add_bias_rows(float (&s)[COUNT], u32 tile, float unit) {
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5 & 3) * 16;
  const u32 at = BIAS_BITS == 16 ? bias_at(tile, first + (lane & 15), (lane >> 4) * 8) : bias_at(tile, first + (lane >> 2), (lane & 3) * 2);
#pragma unroll
  for (int i = 0; i < COUNT; i += 8) {
#if BIAS_BITS == 16
    u32 x[4];
    load_matrix_x4<false>(x, columns_on(at, i * 2));
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 y = unpack(x[e]);
      s[i + 2 * e] = fmaf(s[i + 2 * e], unit, y.x), s[i + 2 * e + 1] = fmaf(s[i + 2 * e + 1], unit, y.y);
    }
#else
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float2 y = load_shared<float2>(columns_on(at, i * 2 + (e & 4) * 2) + (e & 2) * 4 * 128);
      s[i + e] = fmaf(s[i + e], unit, y.x), s[i + e + 1] = fmaf(s[i + e + 1], unit, y.y);
    }
#endif
  }
}

// The same for scores with a row a key, the first of them the tile's column `first`.
template <int COUNT> DEVICE void add_bias_columns(float (&s)[COUNT], u32 tile, int first, float unit) {
  const int lane = threadIdx.x & 31;
  first += (threadIdx.x >> 5 & 3) * 16;
  const u32 at = BIAS_BITS == 16 ? bias_at(tile, (lane >> 4) * 8 + (lane & 7), first + (lane & 8)) : bias_at(tile, (lane & 3) * 2, first + (lane >> 2));
#pragma unroll
  for (int i = 0; i < COUNT; i += 8) {
#if BIAS_BITS == 16
    u32 x[4];
    load_matrix_x4<true>(x, at + i * 2 * 128);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 y = unpack(x[e]);
      s[i + 2 * e] = fmaf(s[i + 2 * e], unit, y.x), s[i + 2 * e + 1] = fmaf(s[i + 2 * e + 1], unit, y.y);
    }
#else
#pragma unroll
    for (int e = 0; e < 8; e++)
      s[i + e] = fmaf(s[i + e], unit, load_shared<float>((at ^ (e & 3) << 4) + (i * 2 + (e & 4) * 2 + (e & 1)) * 128));  // the next query, or 8 keys on
#endif
  }
}

// Two neighbours of a row in global memory, of a block of keys that starts at `column`.
struct BiasPair { u32 x[BIAS_BITS / 16]; };

DEVICE BiasPair bias_pair(const char* row, const Bias& bias, int column, int inside) {
  const char* from = row + (long long)min(column * bias.of_column + inside, bias.last_column) * (BIAS_BITS / 8);
  BiasPair y;
#if BIAS_BITS == 16
  y.x[0] = *(const u32*)from;
#else
  const uint2 x = *(const uint2*)from;
  y.x[0] = x.x, y.x[1] = x.y;
#endif
  return y;
}

DEVICE float2 floats(const BiasPair& y) {
#if BIAS_BITS == 16
  return unpack(y.x[0]);
#else
  return make_float2(__int_as_float(y.x[0]), __int_as_float(y.x[1]));
#endif
}
#endif
