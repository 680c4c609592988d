// The parameters of the kernel that prepares packed e4m3 tensors and their scales.
#pragma once
#include "elements.cuh"
#include "paged_kv.cuh"

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct ScaledPackedParams {
  const unsigned char* v;              // (Tk, Hkv, Dv), or pages (pages, page, Hkv, Dv)
  const float *q_from, *k_from, *v_from;  // one number, or (B, Hq), (B, Hkv), (B, Hkv)
  const int* cu_seqlens_k;             // (B + 1,), or null with pages
  const int* lens_from;                // (B,), or null without pages
  u32* v8;                             // (Hkv, Dv, 128 key_blocks)
  float *q_scale, *k_scale, *v_scale;  // (Hq, Tq), (Hkv, 2 key_blocks), (B, Hkv, Dv)
  int* kv_lens;                        // (B,): how many keys a sequence has
  int2* key_starts;                    // (B,): its first key, 0 in pages, and its first block
  PageTable pages;
  Strides v_strides;  // b: from page to page
  int q_each, k_each, v_each;  // whether each sequence and head has a scale
  int B, Hq, Hkv, Tq, keys, Dv;  // keys: tokens, or of one sequence whose pages are all in use
  int key_blocks;
};
