// The program of a thread's scores in a block: its terms, and what changes scores and gradients.
//
// Compile-time: PROGRAM_FACTORS, how the derivatives by the scores are kept (NO_FACTORS and the following of
// backends/hopper/backward_programs.py); score_program.cuh
#pragma once
#include "programs.cuh"
#include "score_program.cuh"

// The derivatives by the scores that are kept while dP is computed.
template <int SCORES> struct ProgramFactors {
  static constexpr bool KEPT = PROGRAM_FACTORS >= 2, PACKED = PROGRAM_FACTORS == 2;
  u32 x[KEPT ? SCORES / (PACKED ? 2 : 1) : 1];

  DEVICE void keep(int i, float a, float b) {
    if (PACKED) x[i / 2] = pack_f16(a, b);
    else x[i] = __float_as_int(a), x[KEPT && !PACKED ? i + 1 : 0] = __float_as_int(b);
  }
  DEVICE float get(int i) const {
    if (!PACKED) return __int_as_float(x[i]);
    return i & 1 ? unpack_f16(x[i / 2]).y : unpack_f16(x[i / 2]).x;
  }
};

// The derivatives by a term that are kept in the same time, rounded: sums of many of them are wanted.
template <int SCORES> struct TermFactors {
  static constexpr bool KEPT = PROGRAM_KEPT_FACTOR >= 0;
  u32 x[KEPT ? SCORES / 2 : 1];

  DEVICE void keep(int i, float a, float b) { x[i / 2] = pack_bf16(a, b); }
  DEVICE float get(int i) const { return i & 1 ? unpack_bf16(x[i / 2]).y : unpack_bf16(x[i / 2]).x; }
};

// Two rows 8 apart, and two of every eight columns. The rows of TRANSPOSED scores are keys.
template <bool TRANSPOSED, int SCORES> struct BlockProgram {
  ProgramTile t;
  ProgramBlock x;
  ProgramRow rows[TRANSPOSED ? SCORES / 2 : 2];
  ProgramColumn columns[TRANSPOSED ? 2 : SCORES / 2];

  // Of the scores from that of query `q` and key `k` on.
  DEVICE void read(const ProgramTile& tile, int q, int k) {
    t = tile, x = program_block(t, q, k);
    if (TRANSPOSED) {
#pragma unroll
      for (int i = 0; i < SCORES / 2; i += 2) program_rows(x, i * 4, rows[i], rows[i + 1]);
      columns[0] = program_column(t, k), columns[1] = program_column(t, k + 8);
    } else {
#pragma unroll
      for (int i = 0; i < SCORES / 2; i += 2) program_columns(x, i * 4, columns[i], columns[i + 1]);
      rows[0] = program_row(t, q), rows[1] = program_row(t, q + 8);
    }
  }

  // Of score `i` of this thread, whose product of query and key is `s`.
  DEVICE float score(float s, int i) const { return program_score(t, row(i), column(i), x, R(i), C(i), s); }
  DEVICE float slope(float s, int i) const { return program_slope(t, row(i), column(i), x, R(i), C(i), s); }
  DEVICE bool keeps(int i) const { return program_keeps(t, row(i), column(i), x, R(i), C(i)); }
  DEVICE float factor(int grad, float s, int i) const {
    return program_factor(grad, t, row(i), column(i), x, R(i), C(i), s);
  }
  DEVICE int query(int i) const { return x.q + R(i); }

 private:
  DEVICE static constexpr int inside(int i) { return i / 4 * 2 + (i & 1); }
  DEVICE const ProgramRow& row(int i) const { return rows[TRANSPOSED ? inside(i) : i >> 1 & 1]; }
  DEVICE const ProgramColumn& column(int i) const { return columns[TRANSPOSED ? i >> 1 & 1 : inside(i)]; }
  DEVICE static constexpr int R(int i) { return TRANSPOSED ? column_offset(i) : row_offset(i); }
  DEVICE static constexpr int C(int i) { return TRANSPOSED ? row_offset(i) : column_offset(i); }
};
