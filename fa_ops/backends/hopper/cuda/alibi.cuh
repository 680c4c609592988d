// ALiBi lowers a score by the slope of its head times the distance of its key from its query's position.
//
// Compile-time: HAS_ALIBI, 2 for packed sequences, whose slopes and positions differ
#pragma once
#include "ptx.cuh"

#if HAS_ALIBI
// A thread has two rows of scores, 8 apart. In one sequence they have the same slope, and distances that
// differ by 8.
constexpr int ALIBI_ROWS = HAS_ALIBI == 2 ? 2 : 1;

struct Alibi {
  float slope;  // in accumulator units
  int shift;    // the key at the position of query i is i + shift
};

// Of batch row `b`; of packed sequences those of a token are looked up instead, in `tokens`.
template <class Params>
DEVICE Alibi alibi_of(const Params& p, int h, int b, int shift, [[maybe_unused]] const int2* tokens,
                      [[maybe_unused]] int token) {
#if HAS_ALIBI == 2
  const int2 found = tokens[token];
  shift = found.x, b = found.y;
#endif
  return {p.alibi[b * p.alibi_b + h] * p.alibi_unit, shift};
}

// The scores of a thread's rows in a block of columns.
struct AlibiBlock {
  float slope[ALIBI_ROWS], from[ALIBI_ROWS];  // from: the distance from the first column

  // Score `i` of this thread.
  DEVICE float lowered(float s, int i) const {
    const int r = ALIBI_ROWS == 2 ? i >> 1 & 1 : 0, row = ALIBI_ROWS == 2 ? 0 : row_offset(i);
    return s - slope[r] * fabsf(from[r] - (column_offset(i) - row));
  }
};

struct AlibiRows {
  float slope[ALIBI_ROWS];
  int column[ALIBI_ROWS];  // at the row's position

  // Opaque, since the compiler would keep all distances in registers if it found that they are needed again.
  DEVICE AlibiBlock block(int first_column) const {
    AlibiBlock x;
#pragma unroll
    for (int r = 0; r < ALIBI_ROWS; r++)
      x.slope[r] = slope[r], x.from[r] = (float)(int)opaque(column[r] - first_column);
    return x;
  }
};
#endif
