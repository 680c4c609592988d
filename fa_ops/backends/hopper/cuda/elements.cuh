// 16-bit elements in global memory, and rows of e4m3 numbers: strides, conversion and dot products.
#pragma once
#include "ptx.cuh"

typedef unsigned short Element;
typedef unsigned char E4m3;

struct Strides {
  long long b, h, s;
};

template <class T> DEVICE T* row_at(T* x, const Strides& strides, int b, int h, int s) {
  return x + b * strides.b + h * strides.h + s * strides.s;
}

DEVICE float2 unpack(u32 x) {
#if IS_BF16
  return make_float2(__int_as_float(x << 16), __int_as_float(x & 0xFFFF0000u));
#else
  float2 y;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(y.x), "=f"(y.y)
      : "r"(x));
  return y;
#endif
}

// Two elements; the first has an even index.
DEVICE float2 load2(const Element* x) { return unpack(*(const u32*)x); }
DEVICE float2 load2(const E4m3* x) { return unpack_e4m3(*(const unsigned short*)x); }

DEVICE float dot2(float2 x, float2 y) { return x.x * y.x + x.y * y.y; }
DEVICE float dot2(u32 x, u32 y) { return dot2(unpack(x), unpack(y)); }

// The dot product of eight elements; both addresses are multiples of 16 bytes.
DEVICE float dot8(const Element* x, const Element* y) {
  const uint4 a = *(const uint4*)x, b = *(const uint4*)y;
  return dot2(a.x, b.x) + dot2(a.y, b.y) + dot2(a.z, b.z) + dot2(a.w, b.w);
}

DEVICE float dot8(const Element* x, const E4m3* y) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i += 2) sum += dot2(load2(x + i), load2(y + i));
  return sum;
}

// The dot product of two rows; `count` is a multiple of 8.
template <class T> DEVICE float dot(const Element* x, const T* y, int count) {
  float sum = 0.f;
#pragma unroll 1
  for (int i = 0; i < count; i += 8) sum += dot8(x + i, y + i);
  return sum;
}

// Transposes 4 x 4 words among four neighbouring lanes, so that each lane gets eight consecutive columns of
// its row.
DEVICE void transpose_quad(u32 (&x)[4]) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(~0u, lane & 1 ? x[i] : x[i + 1], 1);
    x[i] = lane & 1 ? got : x[i], x[i + 1] = lane & 1 ? x[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 got = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
    x[i] = lane & 2 ? got : x[i], x[i + 2] = lane & 2 ? x[i + 2] : got;
  }
}
