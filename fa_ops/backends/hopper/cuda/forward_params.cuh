// The parameters of the forward kernel.
#pragma once
#include "bias.cuh"
#include "dropout.cuh"
#include "elements.cuh"
#include "paged_kv.cuh"

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct ForwardParams {
  TensorMap q, k, v;
  Element* out;                             // (B, Sq, Hq, Dv)
  float* lse;                               // (B, Hq, Sq) or null
  const int* kv_lens;                       // (B,) or null
  const int* key_ranges;                    // (B|1, Hq|1, Sq|1, 2) or null, with the strides below
  const float* sinks;                       // (Hq,) or null
  const float* alibi;                       // (B|1, Hq) or null
  const unsigned char* mask;                // from mask.cu, one bit for each key of each query, or null
  long long mask_b, mask_h, mask_q;         // its strides in bytes, 0 for broadcast dimensions
  int* tile_counter;                        // tiles claimed beyond each CTA's first, 0 at launch; or null
  const Element *q_rows, *k_rows, *v_rows;  // the tensors of the maps, for rows that are attended exactly
  Strides q_strides, k_strides, v_strides;
  int B, Hq, group, Sq, Sk, D, Dv;
  int window_left, window_right;  // UNBOUNDED: no limit; causal is window_right = 0
  int m_blocks, tiles, section;   // section: the number of heads whose K and V share the L2
  int ranges_b, ranges_h, ranges_q, alibi_b;
  float tanh_scale;  // with a softcap: scale / softcap
  float scale_log2;  // log2(e) * scale, or log2(e) * softcap
  float alibi_unit;  // of ALiBi, in accumulator units
  int mask_range;    // byte offset of the key range in a row of the mask
  Dropout dropout;
  PageTable pages;
  MaskBlocks blocks;  // of a bool mask with SKIPS_TILES
  const int2* positions;  // of the queries of packed sequences with ALiBi, from packed.cu
#if BIAS_BITS
  Bias bias;
#endif
};

#if SKIPS_TILES
DEVICE const MaskBlocks& mask_blocks_of(const ForwardParams& p) {
#if BIAS_BITS
  return p.bias.blocks;
#else
  return p.blocks;
#endif
}
#endif
