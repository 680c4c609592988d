// What the programs of score_mods and mask_mods need: where their terms are, and operations of their own.
// fa_ops/backends/hopper/programs.py generates the functions of a program, score_program.cuh, and says there
// what they are.
#pragma once
#include "ptx.cuh"

// The terms of a call. They are packed as ScoreProgram.places of fa_ops/programs/program.py says.
struct ProgramInputs {
  const float* values;  // of float terms, or null
  const int* indices;   // of int terms, or null
  float scale;          // of products of queries and keys
  int B, H, Sq, Sk;
};

// Numbers that are the same for all threads of a launch are read through the read-only cache.
template <class T> DEVICE T program_load(const T* x) { return __ldg(x); }
DEVICE void program_load2(const float* x, float& first, float& second) {
  const float2 y = __ldg((const float2*)x);
  first = y.x, second = y.y;
}
DEVICE void program_load2(const int* x, int& first, int& second) {
  const int2 y = __ldg((const int2*)x);
  first = y.x, second = y.y;
}

// The number of a term's elements in memory, of `count` elements: a multiple of 64.
DEVICE constexpr long long program_aligned(long long count) { return (count + 63) / 64 * 64; }
// A number of queries or keys as terms have it.
DEVICE constexpr long long program_padded(int length) { return (length + 255ll) / 256 * 256; }

DEVICE int program_floordiv(int a, int b) {
  const int quotient = a / b, rest = a % b;
  return quotient - (rest != 0 && (rest < 0) != (b < 0));
}
DEVICE int program_mod(int a, int b) {
  const int rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// The lesser and the larger number, and NaN where one of them is.
DEVICE float program_min(float a, float b) { return nan_min(a, b); }
DEVICE float program_max(float a, float b) { return nan_max(a, b); }

// An angle with the same sine and cosine between -pi and pi, to the rounding of one of a few hundred turns.
DEVICE float program_angle(float x) {
  const float turns = rintf(x * 0.15915494f);
  return fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.2831855f, x));
}
DEVICE float program_sin(float x) { return sin_fast(program_angle(x)); }
DEVICE float program_cos(float x) { return cos_fast(program_angle(x)); }
