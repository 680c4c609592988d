// The parameters of the backward kernels.
#pragma once
#include "bias.cuh"
#include "dropout.cuh"
#include "elements.cuh"

// fa_ops/backends/hopper/kernel_params.py reads these declarations.

// A mask packed by mask.cu: strides in bytes, 0 for broadcast dimensions, and the offset of the key range in
// a row.
struct MaskBits {
  const unsigned char* bits;
  long long b, h, row, range;
};

// The tensors of a call, in the order of their maps.
enum { Q, K, V, GRAD_OUT, DQ, DK, DV };
constexpr int TENSORS = 7;

struct BackwardParams {
  TensorMap q, k, v, grad_out, dq, dk, dv;
  Element* tensors[TENSORS];  // the tensors of the maps, for reads and writes of single rows
  const Element* out;      // (B, Hq, Sq, Dv)
  const float* saved_lse;  // of the forward pass, (B, Hq, Sq), natural, -inf for rows without keys
  const float* grad_lse;   // the same shape, or null
  float* lse;    // (B * Hq, padded Sq), in log2 units (natural with a bias), +inf for rows without keys
  float* delta;  // the same shape
  float* sums;         // dQ with ADDS_DQ: (B * Hq, m_blocks, BLOCK_M * SUM_FEATURES), accumulator order
  int* counter;        // the number of tiles claimed by persistent CTAs beyond their first
  const int* kv_lens;  // (B,) or null
  const float* alibi;  // (B|1, Hq) or null
  const int2* ranges;  // with key ranges: (B, Hq|1, padded Sq), from `clip_ranges`
  const int4* bounds;  // with key ranges: (B, Hq|1, m_blocks), from `clip_ranges`
  float* key_sums;     // sums of dK and dV with SPLITS_GROUP, see `key_sums_of`; or null
  u32* nonfinite;      // flags for 16 rows of dK, dV or dQ each, see `note_at`
  int B, Hq, Hkv, group, Sq, Sk;
  int window_left, window_right;
  int m_blocks, n_blocks, section, query_section, alibi_b, range_heads;
  int parts, part_heads;  // parts of a group of query heads, and query heads per part
  int D, Dv;
  float scale;       // of the gradients of q and k
  float tanh_scale;  // with a softcap: scale / softcap
  float scale_log2;  // from score units to log2 units
  float alibi_unit;
  Strides strides[TENSORS], out_strides;
  long long zeros;    // sums that `preprocess` clears, in units of 16 bytes
  MaskBits by_key;    // with a mask: rows are keys
  MaskBits by_query;  // with a mask, unless ADDS_DQ: rows are queries
  int mask_block;     // bytes of a block of queries in `by_key`, 0 if queries share the mask
  Dropout dropout;
  const int2* positions;  // of the queries, then the keys, of packed sequences with ALiBi, from packed.cu
#if BIAS_BITS || SKIPS_TILES
  Bias bias;
#endif
};
