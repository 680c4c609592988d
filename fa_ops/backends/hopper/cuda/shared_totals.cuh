// The output of a consumer in shared memory, in float32, to which products are added now and then. Each
// thread reads and writes its own elements only.
#pragma once
#include "quantized_shared.cuh"

struct SharedTotals {
  u32 at;           // of this thread's first four elements
  bool exist;       // something has been added
  float factor[2];  // of a row, for what was added before its max moved

  DEVICE void reset(u32 where) { at = where, exist = false, factor[0] = factor[1] = 1.f; }

  DEVICE void rescale(const float (&by)[2]) { factor[0] *= by[0], factor[1] *= by[1]; }

  // Four elements of the sum of totals and products.
  DEVICE float4 sum(const float (&t)[PRODUCTS], int i) const {
    float4 x = {t[i], t[i + 1], t[i + 2], t[i + 3]};
    if (!exist) return x;
    const float4 y = load_shared<float4>(at + i / 4 * 128 * 16);
    return {fmaf(y.x, factor[0], x.x), fmaf(y.y, factor[0], x.y), fmaf(y.z, factor[1], x.z),
            fmaf(y.w, factor[1], x.w)};
  }

  DEVICE void add(const float (&t)[PRODUCTS]) {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) store_shared(at + i / 4 * 128 * 16, sum(t, i));
    exist = true, factor[0] = factor[1] = 1.f;
  }

  DEVICE void finish(float (&t)[PRODUCTS]) const {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      const float4 x = sum(t, i);
      t[i] = x.x, t[i + 1] = x.y, t[i + 2] = x.z, t[i + 3] = x.w;
    }
  }
};
