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
  int* kv_lens;                        // (B,): the number of keys of each sequence
  int2* key_starts;                    // (B,): its first key (0 for pages) and its first block
  PageTable pages;
  Strides v_strides;  // b: from page to page
  int q_each, k_each, v_each;  // whether there is one scale per sequence and head
  int B, Hq, Hkv, Tq, keys, Dv;  // keys: tokens, or for pages the capacity of one sequence
  int key_blocks;
};
