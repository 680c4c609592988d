// The parameters of the kernels that quantise to 8 bits.
#pragma once
#include "elements.cuh"

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct QuantizeParams {
  const Element *q, *k, *v;
  unsigned char *q8, *k8, *v8;  // (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Dv, 128 blocks of keys)
  float *q_scale, *k_scale, *v_scale;  // (B, Hq, Sq), (B, Hkv, 2 blocks of keys), (B, Hkv, Dv)
  float *offset, *mean;                // (B, Hq, Sq) and (B, Hkv, D), or null: the mean is not subtracted
  u32* largest;                        // (B, Hkv, Dv): bits of the largest |v|, 0 at launch
  int* finished;                       // (B, Hkv): CTAs that are done with a head's statistics, 0 at launch
  const int* kv_lens;                  // (B,) or null
  Strides q_strides, k_strides, v_strides;
  int B, Hq, group, Sq, Sk, D, Dv;
  int parts;       // CTAs that share the values of a head
  float scale;     // of the scores
  float rotation;  // factor of rotated features
};
