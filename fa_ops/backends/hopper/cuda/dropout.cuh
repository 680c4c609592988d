// Dropout as defined in backends/dropout.py: a weight is dropped if the hash of its row's seed plus
// COLUMN_STEP times its column is below a threshold. A row's seed depends on the call's seed, the batch, the
// head and the query; dropout.cu writes the seeds of all rows before the other kernels run.
#pragma once
#include "ptx.cuh"

struct Dropout {
  const u32* row_seeds;  // (B * Hq, rows), or null
  int rows;              // Sq, padded
  u32 threshold;
  float scale, kept;  // 1 / (1 - p), and 1 - p
  u32 column_step;    // COLUMN_STEP as a run-time value: ptxas would turn products with a constant into
                      // additions, whose pipe is the busier one
};

constexpr u32 COLUMN_STEP = 0xC2B2AE35;

DEVICE u32 mix_twice(u32 x) {
  x = (x ^ x >> 16) * 0x7FEB352D;
  return (x ^ x >> 15) * 0x846CA68B;
}
DEVICE u32 mix(u32 x) {
  x = mix_twice(x);
  return x ^ x >> 16;
}

DEVICE u32 row_seed(u64 seed, u32 batch_head, u32 row) {
  const u32 stream = mix(batch_head * 0x9E3779B9 + (u32)(seed >> 32)) ^ (u32)seed;
  return mix(stream + row * 0x85EBCA6B);
}

// Equivalent to mix(x) for the comparison with the threshold, but one shift cheaper: the last round of `mix`
// leaves the upper half unchanged, and where the lower half decides, the upper half equals that of the
// threshold.
DEVICE u32 comparable_hash(u32 x, u32 threshold) { return mix_twice(x) ^ threshold >> 16; }

DEVICE bool is_dropped(const Dropout& dropout, u32 x) {
  return comparable_hash(x, dropout.threshold) < dropout.threshold;
}

// Sets bit `i` if the weight is dropped.
DEVICE void note_dropped(u32& bits, int i, u32 x, u32 threshold) {
  asm("{ .reg .pred dropped; setp.lo.u32 dropped, %1, %2; @dropped or.b32 %0, %0, %3; }"
      : "+r"(bits)
      : "r"(comparable_hash(x, threshold)), "r"(threshold), "r"(1u << i));
}
