// The parameters of the kernel that prepares e4m3 tensors and their scales.
#pragma once
#include "elements.cuh"

// The location of the scale of an element of a head: there are `each` scales per head, each for `per`
// elements; `each` is 0 if there is a single scale.
struct ScaleOrder {
  int each, per;
};

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct ScaledParams {
  const unsigned char* v;
  const float *q_from, *k_from, *v_from;  // the caller's scales
  u32* v8;                                // (B, Hkv, Dv, 128 blocks of keys)
  float *q_scale, *k_scale, *v_scale;     // (B, Hq, Sq), (B, Hkv, 2 blocks of keys), (B, Hkv, Dv)
  const int* kv_lens;                     // (B,) or null
  Strides v_strides;
  ScaleOrder q_order, k_order, v_order;
  int B, Hq, Hkv, Sq, Sk, Dv;
};
