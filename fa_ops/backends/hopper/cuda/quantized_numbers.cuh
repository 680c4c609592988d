// Numbers of 8 bits, int8 or e4m3, with a scale.
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
