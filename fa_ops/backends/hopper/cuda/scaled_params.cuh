// The parameters of the kernel that prepares e4m3 tensors and their scales.
#pragma once
#include "elements.cuh"

// Where the scale of an element of a head lies: one of `each` per head, the next one after `per` elements;
// `each` is 0 for one scale in all.
struct ScaleOrder {
  int each, per;
};

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct ScaledParams {
  const unsigned char* v;
  const float *q_from, *k_from, *v_from;  // scales as the caller has them
  u32* v8;                                // (B, Hkv, Dv, 128 blocks of keys)
  float *q_scale, *k_scale, *v_scale;     // (B, Hq, Sq), (B, Hkv, 2 blocks of keys), (B, Hkv, Dv)
  const int* kv_lens;                     // (B,) or null
  Strides v_strides;
  ScaleOrder q_order, k_order, v_order;
  int B, Hq, Hkv, Sq, Sk, Dv;
};
