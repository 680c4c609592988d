// The parameters of the kernels that quantise to 8 bits.
#pragma once
#include "elements.cuh"

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct QuantizeParams {
  const Element *q, *k, *v;
  // q8 may be null: not written
  unsigned char *q8, *k8, *v8;  // (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Dv, 128 blocks of keys)
  float *q_scale, *k_scale, *v_scale;  // (B, Hq, Sq), (B, Hkv, 2 blocks of keys), (B, Hkv, Dv)
  float* offset;                       // (B, Hq, Sq), or null: not computed
  float* mean;                         // (B, Hkv, D), or null: not subtracted
  u32* largest;                        // (B, Hkv, Dv): bits of the largest |v|, 0 at launch
  int *largest_found, *means_found;    // (B, Hkv): the number of CTAs that have finished a head, 0 at launch
  const int* kv_lens;                  // (B,) or null
  Strides q_strides, k_strides, v_strides;
  int B, Hq, group, Sq, Sk, D, Dv;
  int parts;       // CTAs that share the values of a head
  float scale;     // of the scores
  float rotation;  // factor of rotated features
};
