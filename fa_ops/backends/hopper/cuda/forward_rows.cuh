// The parameters of the forward kernels, and their output rows: the LSE, addresses, and the exact
// recomputation of rows whose fast result is unusable. With SPLITS_KEYS the partial results are float32,
// (splits, B, Sq, Hq).
#pragma once
#include "dropout.cuh"
#include "exact_row.cuh"
#include "masks.cuh"
#if HAS_PROGRAM
#include "programs.cuh"
#include "score_program.cuh"
#endif
#include "softmax.cuh"
#include "tiles.cuh"

#if HAS_PROGRAM
struct ForwardProgram {
  ProgramInputs inputs;
  TileRuns runs;  // with SKIPS_TILES
};
#endif

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct ForwardParams {
  TensorMap q, k, v;
  Element* out;                             // (B, Sq, Hq, Dv)
  float* lse;                               // (B, Hq, Sq) or null
  const int* kv_lens;                       // (B,) or null
  const int* key_ranges;                    // (B|1, Hq|1, Sq|1, 2) or null, with the strides below
  const float* sinks;                       // (Hq,) or null
  const float* alibi;                       // (B|1, Hq) or null
  const unsigned char* mask;                // from mask.cu, one bit for each key of each query, or null
  long long mask_b, mask_h, mask_q;         // its strides in bytes, 0 for broadcast dimensions
  int* tile_counter;                        // tiles claimed beyond each CTA's first, 0 at launch; or null
  const Element *q_rows, *k_rows, *v_rows;  // the tensors of the maps, for rows that are attended exactly
  Strides q_strides, k_strides, v_strides;
  int B, Hq, group, Sq, Sk, D, Dv;
  int window_left, window_right;  // UNBOUNDED: no limit; causal is window_right = 0
  int m_blocks, tiles, section;   // section: the number of heads whose K and V share the L2
  int ranges_b, ranges_h, ranges_q, alibi_b;
  float tanh_scale;  // with a softcap: scale / softcap
  float scale_log2;  // log2(e) * scale, or log2(e) * softcap
  float alibi_unit;  // of ALiBi, in accumulator units
  int mask_range;    // byte offset of the key range in a row of the mask
  Dropout dropout;
  PageTable pages;
  MaskBlocks blocks;  // of a bool mask with SKIPS_TILES
  const int2* positions;  // of the queries of packed sequences with ALiBi, from packed_ranges.cu
#if BIAS_BITS
  Bias bias;
#endif
#if HAS_PROGRAM
  ForwardProgram program;
#endif
};

#if SKIPS_TILES
DEVICE const MaskBlocks& mask_blocks_of(const ForwardParams& p) {
#if BIAS_BITS
  return p.bias.blocks;
#else
  return p.blocks;
#endif
}
#endif

// Scores beyond this, in log2 units, are so large that a difference of scaled scores has an error of a
// sixteenth.
constexpr float MAX_EXACT_SCORE = 1 << 20;

// The batch row and the token of a query in `q`, `out` and `lse`.
DEVICE int batch_of([[maybe_unused]] const Tile& tile) {
#if PACKED_QUERIES
  return 0;
#else
  return tile.b;
#endif
}
DEVICE int token_of([[maybe_unused]] const Tile& tile, int row) {
#if PACKED_QUERIES
  return tile.first + row;
#else
  return row;
#endif
}

#if HAS_ALIBI
DEVICE Alibi alibi_of_row(const ForwardParams& p, const Tile& tile, int row, int keys) {
#if PACKED_QUERIES
  const int b = max(0, min(tile.b, p.B - 1));
#else
  const int b = tile.b;
#endif
  return alibi_of(p, tile.h, b, keys - queries_of(p, tile), p.positions, min(row, p.Sq - 1));
}
#endif

// A row of the output, computed exactly.
struct ForwardExactRow {
  const ForwardParams& p;
  const Tile& tile;
  const int row, keys;
  int begin, end;
  float scale_log2;
  const Element* query;
#if HAS_PROGRAM
  const ProgramTile program;
  const ProgramRow program_values;
#endif

  DEVICE ForwardExactRow(const ForwardParams& p, const Tile& tile, int row)
      : p(p),
        tile(tile),
        row(row),
        keys(keys_of(p, tile.b)),
        scale_log2(p.scale_log2),
        query(row_at(p.q_rows, p.q_strides, batch_of(tile), tile.h, token_of(tile, row)))
#if HAS_PROGRAM
        ,
        program(program_tile(p.program.inputs, tile.b, tile.h)),
        program_values(program_row(program, row))
#endif
  {
    const KeyRange range = row_range(p, tile, row, keys);
    begin = warp_uniform(range.begin), end = warp_uniform(range.end);
  }

  // The address of a key's row in `x`, or of an arbitrary row if its page does not exist.
  DEVICE const Element* key_row(const Element* x, const Strides& strides, int key) const {
    int b = tile.b;
#if IS_PAGED
    b = p.pages.clamped(p.pages.page_of(b, key)), key %= p.pages.size;
#endif
    return row_at(x, strides, b, tile.h / p.group, key);
  }

  DEVICE bool attends([[maybe_unused]] int key) const {
#if HAS_MASK
    return p.mask[tile.b * p.mask_b + tile.h * p.mask_h + row * p.mask_q + key / 8] >> (key & 7) & 1;
#elif HAS_PROGRAM
    const ProgramBlock x = program_block(program, row, key);
    return program_keeps(program, program_values, program_column(program, key), x, 0, 0);
#elif IS_PAGED
    return p.pages.exists(p.pages.page_of(tile.b, key));
#else
    return true;
#endif
  }

  DEVICE float score(int key) const {
    float s = dot(query, key_row(p.k_rows, p.k_strides, key), p.D);
#if HAS_SOFTCAP
    s = softcap_tanh(s * p.tanh_scale);
#endif
#if HAS_ALIBI
    const Alibi alibi = alibi_of_row(p, tile, row, keys);
    s -= alibi.slope * fabsf((float)(row + alibi.shift - key));
#endif
#if HAS_PROGRAM
    const ProgramBlock x = program_block(program, row, key);
    if (PROGRAM_HAS_SCORE)
      s = program_score(program, program_values, program_column(program, key), x, 0, 0, s);
#endif
#if BIAS_BITS
    const float bias = bias_at(p.bias, tile.b, tile.h, row, key);
    s = bias == -INFINITE ? bias : s * p.bias.unit + bias;  // masked out even if its score is NaN
#endif
    return s;
  }

  DEVICE float weight([[maybe_unused]] int key, float x) const {
#if HAS_DROPOUT
    const u32* seeds = p.dropout.row_seeds + (long long)(tile.b * p.Hq + tile.h) * p.dropout.rows;
    if (is_dropped(p.dropout, seeds[row] + key * COLUMN_STEP)) return 0.f;
#endif
    return x;
  }

  DEVICE const Element* value(int key) const { return key_row(p.v_rows, p.v_strides, key); }
};

// Returns the LSE of a row, and sets `inverse` to the factor that normalises its output.
DEVICE float finish_row(const ForwardParams& p, const Tile& tile, float row_max, float sum, float& inverse) {
#if HAS_SINKS
  const bool has_sink = !PACKED_QUERIES || (u32)tile.b < (u32)p.B;  // tokens outside every sequence have none
  const float lse = finish_row(row_max, sum, p.scale_log2, has_sink, p.sinks[tile.h], inverse);
#else
  const float lse = finish_row(row_max, sum, p.scale_log2, false, 0.f, inverse);
#endif
#if HAS_DROPOUT
  inverse *= p.dropout.scale;
#endif
  return lse;
}

#if SPLITS_KEYS
typedef float Output;

DEVICE long long part_row(const ForwardParams& p, const Tile& tile, int row) {
  const int rows = PACKED_QUERIES ? 1 : p.B;
  return ((long long)(tile.split * rows + batch_of(tile)) * p.Sq + token_of(tile, row)) * p.Hq + tile.h;
}

DEVICE Output* output_row(const ForwardParams& p, const Tile& tile, int row) {
  return (float*)p.out + part_row(p, tile, row) * p.Dv;
}

DEVICE void write_lse(const ForwardParams& p, const Tile& tile, int row, float lse) {
  p.lse[part_row(p, tile, row)] = lse;
}

DEVICE void write_columns(Output* row, int column, float x, float y) {
  ((float2*)row)[column / 2] = make_float2(x, y);
}
#else
typedef Element Output;

DEVICE Output* output_row(const ForwardParams& p, const Tile& tile, int row) {
  return p.out + (((long long)batch_of(tile) * p.Sq + token_of(tile, row)) * p.Hq + tile.h) * p.Dv;
}

DEVICE void write_lse(const ForwardParams& p, const Tile& tile, int row, float lse) {
  p.lse[(long long)(batch_of(tile) * p.Hq + tile.h) * p.Sq + token_of(tile, row)] = lse;
}

DEVICE void write_columns(Output* row, int column, float x, float y) { ((u32*)row)[column / 2] = pack(x, y); }
#endif

// The tile of the head that a row belongs to.
DEVICE Tile tile_of_row(const Tile& tile, int row) {
#if SPLITS_KEYS || PACKED_QUERIES
  Tile found = tile;
  found.h += packed_head(row);
  return found;
#else
  return {tile.m0, tile.h + packed_head(row), tile.b};
#endif
}

// The number of existing rows from `top` on (of 16).
DEVICE int existing_rows(const ForwardParams& p, const Tile& tile, int top) {
  if (PACKED_HEADS == 1) return queries_of(p, tile) - top;
  const int queries = min(CONSUMER_QUERIES, queries_of(p, tile) - query_of(top & ~63));
  return queries * PACKED_HEADS - top % 64;
}

DEVICE bool row_exists(const ForwardParams& p, const Tile& tile, int row) {
  return query_of(row) < queries_of(p, tile) && (CONSUMER_ROWS == 64 || row % 64 < CONSUMER_ROWS);
}

// Recomputes columns [begin, end) of row `first + i` for each bit i of `unusable`. The fast results of the
// rows in `overflowed` are discarded entirely. Executed by one warp, after its rows have been written.
DEVICE void replace_rows(const ForwardParams& p, const Tile& packed, int first, u32 unusable, u32 overflowed,
                         int begin = 0, int end = VALUE_DIM) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll 1
  for (; unusable; unusable &= unusable - 1) {
    const int i = __ffs(unusable) - 1, row = query_of(first + i);
    const Tile tile = tile_of_row(packed, first + i);
    const ForwardExactRow exact(p, tile, row);
    Output* const to = output_row(p, tile, row);
#pragma unroll 1
    for (int x = begin; x < end; x += 64) {
      const int column = x + lane * 2;
      const bool exists = column < p.Dv;
      ExactColumns found;
      if (attend_exactly(exact, column, p.Dv, found, overflowed >> i & 1)) {
        float inverse;
        const float lse = finish_row(p, tile, found.max, found.sum, inverse);
        if (exists) write_columns(to, column, found.x.x * inverse, found.x.y * inverse);
        if (p.lse && column == 0) write_lse(p, tile, row, lse);
      }
    }
  }
}

// Whether the rounding errors of a row's scaled differences may be too large, so that its weights overflow or
// vanish.
DEVICE bool has_overflowed(const ForwardParams& p, float row_max, float sum) {
  const bool is_huge = !BIAS_BITS && fabsf(row_max) * p.scale_log2 > MAX_EXACT_SCORE;
  return row_max != UNINITIALISED_MAX && is_finite(row_max) && (is_huge || sum == 0.f || sum == INFINITE);
}
