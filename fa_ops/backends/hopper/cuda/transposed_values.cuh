// Transposed values, in the key order of quantized.cu's weights: of 32 keys, those at positions 16a + 4t + 2b
// + c are 8(2a + b) + 2t + c.
#pragma once
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int VALUE_BLOCK = 128, WORDS = VALUE_BLOCK / 4;  // keys that are transposed together

// The threads of a warp write words of channels that are multiples of eight; SHIFT spreads them over the
// banks.
struct TransposedValues {
  static constexpr int CHANNELS = VALUE_LANES * 8, SHIFT = 32 / VALUE_LANES;
  u32 words[CHANNELS * (WORDS + 1) + CHANNELS / 32 * SHIFT];
  DEVICE u32& at(int channel, int word) {
    return words[channel * (WORDS + 1) + channel / 32 * SHIFT + word];
  }
};

// The first of the four keys of a word; the others are 1, 8 and 9 further on.
DEVICE int key_of_word(int word) { return word / 8 * 32 + (word & 4) * 4 + (word & 3) * 2; }

// The values of a word's four keys in eight channels from `channel` on.
DEVICE void transpose_bytes(TransposedValues& transposed, int channel, int word, const u32 (&x)[4][2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 bytes = i % 4 | (i % 4 + 4) << 4;
    transposed.at(channel + i, word) = __byte_perm(__byte_perm(x[0][i / 4], x[1][i / 4], bytes),
                                                   __byte_perm(x[2][i / 4], x[3][i / 4], bytes), 0x5410);
  }
}

// Writes a block of a head's values. Executed by all threads.
DEVICE void store_transposed(u32* values, TransposedValues& transposed, int Dv, int blocks, int head,
                             int block) {
  __syncthreads();
  u32* to = values + (long long)head * Dv * blocks * WORDS + block * WORDS + threadIdx.x % WORDS;
#pragma unroll 4
  for (int i = threadIdx.x / WORDS; i < Dv; i += THREADS / WORDS)
    to[(long long)i * blocks * WORDS] = transposed.at(i, threadIdx.x % WORDS);
}
