// The output of a consumer in shared memory, to which products are added now and then. Each thread reads and
// writes its own elements only.
//
// With HALF_TOTALS they are float16 numbers, relative to a power of two near the sum of the row's weights:
// they do not exceed twice the largest value then.
#pragma once
#include "quantized_shared.cuh"

constexpr int TOTALS_AT_ONCE = HALF_TOTALS ? 8 : 4;  // elements in 16 bytes

struct SharedTotals {
  u32 at;           // of this thread's first elements
  bool exist;       // something has been added
  float factor[2];  // of a row's elements

  DEVICE u32 piece(int i) const { return at + i / TOTALS_AT_ONCE * 128 * 16; }

  DEVICE void reset(u32 where) {
    at = where, exist = false, factor[0] = factor[1] = HALF_TOTALS ? 0.f : 1.f;
#pragma unroll 1
    for (int i = 0; i < OUTPUTS; i += TOTALS_AT_ONCE) store_shared(piece(i), make_int4(0, 0, 0, 0));
  }

  DEVICE void rescale(const float (&by)[2]) { factor[0] *= by[0], factor[1] *= by[1]; }

#if HALF_TOTALS
  // `sums` are those of the row's weights.
  DEVICE void add(const float (&t)[PRODUCTS], const float (&sums)[2]) {
    float unit[2];
    u32 shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int exponent = __float_as_int(fmaxf(sums[r], 1e-30f)) & 0x7f800000;
      unit[r] = __int_as_float(0x7f000000 - exponent);  // 2^-e, where the sum is at least 2^e
      shrink[r] = pack_halves(factor[r] * unit[r], factor[r] * unit[r]);
      factor[r] = __int_as_float(exponent);
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 8) {
      int4 x = load_shared<int4>(piece(i));
      int* const words[4] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
      for (int j = 0; j < 4; j++)
        *words[j] = fma_halves(*words[j], shrink[j & 1],
                               pack_halves(t[i + 2 * j] * unit[j & 1], t[i + 2 * j + 1] * unit[j & 1]));
      store_shared(piece(i), x);
    }
    exist = true;
  }

  DEVICE void finish(float (&t)[PRODUCTS]) const {
    if (!exist) return;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 8) {
      const int4 x = load_shared<int4>(piece(i));
      const int words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 y = unpack_halves(words[j]);
        t[i + 2 * j] = fmaf(y.x, factor[j & 1], t[i + 2 * j]);
        t[i + 2 * j + 1] = fmaf(y.y, factor[j & 1], t[i + 2 * j + 1]);
      }
    }
  }
#else
  DEVICE float4 sum(const float (&t)[PRODUCTS], int i) const {
    const float4 x = load_shared<float4>(piece(i));
    return {fmaf(x.x, factor[0], t[i]), fmaf(x.y, factor[0], t[i + 1]), fmaf(x.z, factor[1], t[i + 2]),
            fmaf(x.w, factor[1], t[i + 3])};
  }

  DEVICE void add(const float (&t)[PRODUCTS], const float (&)[2]) {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) store_shared(piece(i), sum(t, i));
    exist = true, factor[0] = factor[1] = 1.f;
  }

  DEVICE void finish(float (&t)[PRODUCTS]) const {
    if (!exist) return;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      const float4 x = sum(t, i);
      t[i] = x.x, t[i + 1] = x.y, t[i + 2] = x.z, t[i + 3] = x.w;
    }
  }
#endif
};
