// Appends new keys and values to a cache, converted to its dtype, and applies the rotary embedding to queries
// and new keys. Each thread handles eight features of one row, which is a new key, a new value or a query.
// Lengths and page numbers are not trusted: what would lie outside the cache is not written. A row may begin
// at any multiple of the element size.
//
// Compile-time: IS_BF16, IS_E4M3 (of the cache), ROTATION (0: none, 1: by angles in float, 2: by those in the
// query's dtype)
#include "elements.cuh"

constexpr int THREADS = 128;

#if IS_E4M3
typedef E4m3 Cached;
#else
typedef Element Cached;
#endif
#if ROTATION == 1
typedef float Angle;
#else
typedef Element Angle;
#endif

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct AppendParams {
  const Element* q;
  Element* rotated;                // (B, Hq, Sq, D); queries where none is rotated
  const Element *key, *value;      // new ones, or null
  Cached *k, *v;                   // values at the address of the keys are their first features
  const int* kv_lens;              // (B,)
  int* ends;                       // (B,), lengths with the new keys; null without new keys
  const int* table;                // (B, table_stride) or null
  const float *k_scale, *v_scale;  // or null
  const Angle *cos, *sin;          // (positions, features / 2)
  Strides q_strides, key_strides, value_strides;
  Strides k_strides, v_strides;  // of batch rows or pages, heads and tokens
  int Hq, Hkv, Sq, tokens, D, Dv, capacity, page, page_count, table_stride;
  int scales;  // 1: (B, Hkv), 2: (pages, Hkv), 3: (pages, page, Hkv) or (B, Hkv, capacity)
  int positions, features, interleaved;  // of the rotation
  int new_keys, queries;                 // rows of new keys, and of queries to rotate
  int lanes_log2;                        // threads of a row
};

// The destination of a new token: token `token` of page or batch row `row`.
struct Slot {
  int row, token;
  bool exists;
};

DEVICE Slot slot_of(const AppendParams& p, int b, long long position) {
  if (position < 0 || position >= p.capacity) return {0, 0, false};
  const int at = (int)position;
  if (!p.table) return {b, at, true};
  const int page = p.table[(long long)b * p.table_stride + (u32)at / (u32)p.page];
  return {page, (int)((u32)at % (u32)p.page), (u32)page < (u32)p.page_count};
}

DEVICE long long scale_at(const AppendParams& p, const Slot& slot, int b, int h) {
  if (p.scales == 1) return (long long)b * p.Hkv + h;
  if (p.scales == 2) return (long long)slot.row * p.Hkv + h;
  if (p.table) return ((long long)slot.row * p.page + slot.token) * p.Hkv + h;
  return ((long long)b * p.Hkv + h) * p.capacity + slot.token;
}

// The length of a batch row, including its new keys.
DEVICE int length_of(const AppendParams& p, int b) {
  return max(0, min(min(p.kv_lens[b], p.capacity) + p.tokens, p.capacity));
}

template <class T> DEVICE bool is_aligned(const void* at) { return (u64)at % sizeof(T) == 0; }

// Eight elements, packed in pairs.
DEVICE void load8(const Element* from, u32 (&x)[4]) {
  if (is_aligned<uint4>(from)) {
    const uint4 y = *(const uint4*)from;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = from[2 * i] | (u32)from[2 * i + 1] << 16;
}

DEVICE void store8(Element* to, const u32 (&x)[4]) {
  if (is_aligned<uint4>(to)) {
    *(uint4*)to = make_uint4(x[0], x[1], x[2], x[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) to[2 * i] = (Element)x[i], to[2 * i + 1] = (Element)(x[i] >> 16);
}

DEVICE void unpack8(const u32 (&x)[4], float (&y)[8]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 z = unpack(x[i]);
    y[2 * i] = z.x, y[2 * i + 1] = z.y;
  }
}

// Eight elements divided by a scale and rounded to e4m3.
DEVICE void store8(E4m3* to, const u32 (&x)[4], const float* scale) {
  float y[8];
  unpack8(x, y);
  if (scale) {
    const float divisor = *scale;
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = __fdiv_rn(y[i], divisor);
  }
  const uint2 z = {pack_e4m3(y[0], y[1], y[2], y[3]), pack_e4m3(y[4], y[5], y[6], y[7])};
  if (is_aligned<uint2>(to)) {
    *(uint2*)to = z;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = (E4m3)(z.x >> 8 * i), to[4 + i] = (E4m3)(z.y >> 8 * i);
}

#if ROTATION
DEVICE float as_float(float x) { return x; }
DEVICE float as_float(Element x) { return unpack((u32)x).x; }

template <int N> DEVICE void load_floats(const float* from, float (&x)[N]) {
  const bool aligned = is_aligned<float4>(from);
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 y = aligned ? *(const float4*)(from + i)
                             : make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}
template <int N> DEVICE void load_floats(const Element* from, float (&x)[N]) {
  const bool aligned = is_aligned<uint2>(from);
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const Element* at = from + i;
    const uint2 y = aligned ? *(const uint2*)at
                            : make_uint2(at[0] | (u32)at[1] << 16, at[2] | (u32)at[3] << 16);
    const float2 low = unpack(y.x), high = unpack(y.y);
    x[i] = low.x, x[i + 1] = low.y, x[i + 2] = high.x, x[i + 3] = high.y;
  }
}

// Eight features of `row` starting at `column`, each with its partner in the rotation and the cosine and sine
// of its angle. For features that are not rotated, the partner and the angle are not used.
struct Pairs {
  float own[8], other[8], cos[8], sin[8];

  DEVICE Pairs(const AppendParams& p, const Element* row, int column, const u32 (&x)[4], int position) {
    const long long at = (long long)max(0, min(position, p.positions - 1)) * (p.features / 2);
    const int half = p.features / 2;
    unpack8(x, own);
    if (p.interleaved && p.features % 8 == 0) {
      float c[4], s[4];
      load_floats(p.cos + at + column / 2, c), load_floats(p.sin + at + column / 2, s);
#pragma unroll
      for (int i = 0; i < 8; i++) other[i] = own[i ^ 1], cos[i] = c[i / 2], sin[i] = s[i / 2];
    } else if (!p.interleaved && half % 8 == 0) {
      const int angle = column < half ? column : column - half;
      u32 y[4];
      load8(row + (column < half ? column + half : angle), y);
      unpack8(y, other);
      load_floats(p.cos + at + angle, cos), load_floats(p.sin + at + angle, sin);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int j = min(column + i, p.features - 1);
        const int partner = p.interleaved ? j ^ 1 : j < half ? j + half : j - half;
        const int angle = p.interleaved ? j / 2 : j < half ? j : j - half;
        other[i] = as_float(row[partner]), cos[i] = as_float(p.cos[at + angle]);
        sin[i] = as_float(p.sin[at + angle]);
      }
    }
  }
};

DEVICE void rotate(const AppendParams& p, const Element* row, int column, int position, u32 (&x)[4]) {
  if (column >= p.features) return;
  Pairs pairs(p, row, column, x, position);
  float (&y)[8] = pairs.own;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const bool is_first = p.interleaved ? i % 2 == 0 : column + i < p.features / 2;
    const float turned = __fmul_rn(is_first ? -pairs.other[i] : pairs.other[i], pairs.sin[i]);
    if (column + i < p.features) y[i] = __fmaf_rn(y[i], pairs.cos[i], turned);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = pack(y[2 * i], y[2 * i + 1]);
}

DEVICE void rotate_query(const AppendParams& p, int row, int column) {
  const int i = (u32)row % (u32)p.Sq, head = (u32)row / (u32)p.Sq;
  const int h = (u32)head % (u32)p.Hq, b = (u32)head / (u32)p.Hq;
  if (column >= p.D) return;
  const Element* from = row_at(p.q, p.q_strides, b, h, i);
  u32 x[4];
  load8(from + column, x);
  rotate(p, from, column, length_of(p, b) + i - p.Sq, x);
  store8(p.rotated + (long long)row * p.D + column, x);
}
#endif

DEVICE void write_new(const AppendParams& p, int row, int column, bool is_value) {
  const int h = (u32)row % (u32)p.Hkv, token = (u32)row / (u32)p.Hkv;
  const int n = (u32)token % (u32)p.tokens, b = (u32)token / (u32)p.tokens;
  if (p.ends && h + n + column == 0 && !is_value) p.ends[b] = length_of(p, b);
  if (is_value ? column >= p.Dv || p.v == p.k : column >= p.D) return;
  const Element* from = is_value ? row_at(p.value, p.value_strides, b, h, n)
                                 : row_at(p.key, p.key_strides, b, h, n);
  u32 x[4];
  load8(from + column, x);
  const long long position = (long long)p.kv_lens[b] + n;
  const Slot slot = slot_of(p, b, position);
  if (!slot.exists) return;
#if ROTATION
  if (!is_value) rotate(p, from, column, (int)position, x);
#endif
  Cached* const to = is_value ? row_at(p.v, p.v_strides, slot.row, h, slot.token)
                              : row_at(p.k, p.k_strides, slot.row, h, slot.token);
#if IS_E4M3
  const float* scale = is_value ? p.v_scale : p.k_scale;
  store8(to + column, x, scale ? scale + scale_at(p, slot, b, h) : nullptr);
#else
  store8(to + column, x);
#endif
}

// The rows are the new keys, then as many new values, then the queries.
extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams p) {
  wait_for_prior_grid(), launch_dependent_grids();
  const int lanes = 1 << p.lanes_log2, column = (threadIdx.x & lanes - 1) * 8;
  int row = blockIdx.x * (THREADS >> p.lanes_log2) + (threadIdx.x >> p.lanes_log2);
  const bool is_value = row >= p.new_keys;
  if (is_value) row -= p.new_keys;
  if (row < p.new_keys) return write_new(p, row, column, is_value);
#if ROTATION
  row -= p.new_keys;
  if (row < p.queries) rotate_query(p, row, column);
#endif
}
