// The totals of a consumer's output in shared memory, to which its accumulators are added from time to time.
// Each thread reads and writes its own elements only.
//
// They are float16, relative to the largest power of two that does not exceed the sum of the row's weights,
// so that their magnitude is at most twice that of the largest value.
#pragma once
#include "quantized_shared.cuh"

struct SharedTotals {
  static constexpr int BATCH = 32;  // elements that are loaded at once

  u32 at;           // the address of this thread's first elements
  bool exist;       // whether something has been added
  float factor[2];  // the factor of a row's elements

  // The address of eight elements.
  DEVICE u32 piece(int i) const { return at + i / 8 * 128 * 16; }

  DEVICE void reset(u32 where) {
    at = where, exist = false, factor[0] = factor[1] = 0.f;
#pragma unroll 1
    for (int i = 0; i < OUTPUTS; i += 8) store_shared(piece(i), make_int4(0, 0, 0, 0));
  }

  DEVICE void rescale(const float (&by)[2]) { factor[0] *= by[0], factor[1] *= by[1]; }

  // Adds an accumulator; `sums` are the sums of the row's weights.
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
    for (int begin = 0; begin < OUTPUTS; begin += BATCH) {
      int4 x[BATCH / 8];  // several at once, as a load takes longer than what follows it
#pragma unroll
      for (int i = begin; i < begin + BATCH && i < OUTPUTS; i += 8)
        x[(i - begin) / 8] = load_shared<int4>(piece(i));
#pragma unroll
      for (int i = begin; i < begin + BATCH && i < OUTPUTS; i += 8) {
        int4& y = x[(i - begin) / 8];
        int* const words[4] = {&y.x, &y.y, &y.z, &y.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (i + 2 * j >= OUTPUTS) continue;
          const u32 added = pack_halves(t[i + 2 * j] * unit[j & 1], t[i + 2 * j + 1] * unit[j & 1]);
          *words[j] = fma_halves(*words[j], shrink[j & 1], added);
        }
        store_shared(piece(i), y);
      }
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
        if (i + 2 * j >= OUTPUTS) continue;
        const float2 y = unpack_halves(words[j]);
        t[i + 2 * j] = fmaf(y.x, factor[j & 1], t[i + 2 * j]);
        t[i + 2 * j + 1] = fmaf(y.y, factor[j & 1], t[i + 2 * j + 1]);
      }
    }
  }
};
