// Numbers of 8 bits, int8 or e4m3, with a scale, and the transposed values of quantized.cu.
#pragma once
#include "ptx.cuh"

constexpr float SMALLEST = 7.888609052210118e-31f;  // 2^-100
constexpr float INT8_LARGEST = 127.43f;

struct Scale {
  float scale, inverse;
};

// The smallest power of two by which `largest` is at most 448, as an exponent with its bias.
DEVICE int scale_exponent(float largest) {
  const int bits = __float_as_int(fmaxf(largest, SMALLEST));
  return min(max(((bits + 0x1FFFFF) >> 23) - 8, 1), 253);
}

// The scale of numbers of which `largest` is the largest.
DEVICE Scale scale_of(float largest) {
#if IS_INT8
  largest = fmaxf(largest, SMALLEST);
  return {largest / INT8_LARGEST, INT8_LARGEST / largest};
#else
  const int exponent = scale_exponent(largest);
  return {__int_as_float(exponent << 23), __int_as_float(254 - exponent << 23)};
#endif
}

// The nearest integers; the low byte of the sum with 1.5 * 2^23 is one in two's complement.
DEVICE u32 pack_int8(float a, float b, float c, float d) {
  constexpr float INTEGERS = 12582912.f;
  const u32 low = __byte_perm(__float_as_int(a + INTEGERS), __float_as_int(b + INTEGERS), 0x0040);
  const u32 high = __byte_perm(__float_as_int(c + INTEGERS), __float_as_int(d + INTEGERS), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// Four numbers, rounded after they are multiplied by `inverse`.
DEVICE u32 pack_numbers(const float* x, float inverse) {
  const float a = x[0] * inverse, b = x[1] * inverse, c = x[2] * inverse, d = x[3] * inverse;
#if IS_INT8
  return pack_int8(a, b, c, d);
#else
  return pack_e4m3(a, b, c, d);
#endif
}

#ifdef VALUE_LANES
// Transposed values, in the key order of quantized.cu's weights: of 32 keys, those at positions 16a + 4t + 2b
// + c are 8(2a + b) + 2t + c.

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
#endif
