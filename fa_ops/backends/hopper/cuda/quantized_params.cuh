// The parameters of the forward kernel with 8-bit products.
#pragma once
#include "elements.cuh"
#include "paged_kv.cuh"

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct QuantizedParams {
  TensorMap q, k, v;      // (B, Hq, Sq, D), (B, Hkv, Sk, D), and (B, Hkv, Dv, keys) as quantize.cu writes it
  Element* out;           // (B, Sq, Hq, Dv)
  float* lse;             // (B, Hq, Sq) or null
  const float* q_scale;   // (B, Hq, Sq), unless queries are quantised here
  const float* k_scale;   // (B, Hkv, 2 blocks of keys): of each 64 keys
  const float* v_scale;   // (B, Hkv, Dv)
  float* offset;          // (B, Hq, Sq), what scores lack, or null
  const float* mean;      // (B, Hkv, D), of the keys, where offset is computed here
  const int* kv_lens;     // (B,) or null
  const int* key_ranges;  // (B|1, Hq|1, Sq|1, 2) or null, with the strides below
  const float* sinks;     // (Hq,) or null
  int* tile_counter;      // tiles claimed beyond each CTA's first, 0 at launch; or null
  int B, Hq, group, Sq, Sk, Dv;
  int window_left, window_right;  // UNBOUNDED: no limit; causal is window_right = 0
  int m_blocks, tiles, section;   // section: the number of heads whose K and V share the L2
  int ranges_b, ranges_h, ranges_q;
  float tanh_scale;  // with a softcap: scale / softcap
  float scale_log2;  // log2(e) * scale, or log2(e) * softcap
#if PACKED_QUERIES  // B sequences with Sq tokens in total; see scaled_packed.cu for the keys
  PageTable pages;         // without a table only cu_seqlens_q
  const int2* key_starts;  // (B,): the first key (without pages) and the first block of keys
#endif
};
