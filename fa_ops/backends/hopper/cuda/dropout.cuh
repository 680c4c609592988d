// Dropout: the rule of backends/dropout.py. A weight is dropped where the hash of its row's key plus its column's is below a threshold; all of the seed,
// the batch, the head and the query is in the row's key, which dropout.cu writes before other kernels run.

struct Dropout {
  const u32* row_keys;  // (B * Hq, rows), or null
  int rows;             // Sq, padded
  u32 threshold;
  float scale, kept;    // 1 / (1 - p), and 1 - p
  u32 column_key;       // COLUMN_KEY: of a constant ptxas would make additions, and what adds is busier than what multiplies
};

constexpr u32 COLUMN_KEY = 0xC2B2AE35;  // of column 1: column j has j times as much

DEVICE u32 mixed_twice(u32 x) {
  x = (x ^ x >> 16) * 0x7FEB352D;
  return (x ^ x >> 15) * 0x846CA68B;
}
DEVICE u32 mixed(u32 x) {
  x = mixed_twice(x);
  return x ^ x >> 16;
}

DEVICE u32 row_key(u64 seed, u32 batch_head, u32 row) {
  const u32 stream = mixed(batch_head * 0x9E3779B9 + (u32)(seed >> 32)) ^ (u32)seed;
  return mixed(stream + row * 0x85EBCA6B);
}

// What is below the threshold if and only if mixed(key) is, a shift cheaper: the last round leaves the upper half as it is, and where the lower one
// decides, the upper is the threshold's.
DEVICE u32 compared(u32 key, u32 threshold) { return mixed_twice(key) ^ threshold >> 16; }

// Sets a bit if the weight with this key is dropped.
DEVICE void note_dropped(u32& bits, int i, u32 key, u32 threshold) {
  asm("{ .reg .pred dropped; setp.lo.u32 dropped, %1, %2; @dropped or.b32 %0, %0, %3; }"
      : "+r"(bits) : "r"(compared(key, threshold)), "r"(threshold), "r"(1u << i));
}
