// The gradient of a float mask, in a separate pass. Scores that share an element of the mask, through
// broadcasting over batch rows, heads, queries or keys, are summed in registers in a fixed order. One CTA per
// 128 queries by QUERY_BLOCK_N keys of the mask, with 64 queries per consumer, iterates over `steps` of the
// blocks of scores that share them; CTAs with other steps write their own partial sums.
//
// Compile-time: MASK_STAGES MASK_SHARED_BYTES, beside what backward_queries.cu has
#include "query_consumer.cuh"

constexpr int MASK_QUERIES = CONSUMERS * ROWS;
constexpr u32 MASK_Q_BYTES = CONSUMERS * CONSUMER_Q_BYTES, MASK_DO_BYTES = CONSUMERS * CONSUMER_DO_BYTES;
constexpr u32 MASK_K_BYTES = QUERY_BLOCK_N * HEAD_DIM * 2, MASK_V_BYTES = QUERY_BLOCK_N * VALUE_DIM * 2;
constexpr u32 STAGE_BYTES = MASK_Q_BYTES + MASK_DO_BYTES + MASK_K_BYTES + MASK_V_BYTES;

struct MaskGradientParams {
  void* to;                                   // the output: fp32, or the input type if `is_narrow`
  long long split, b, h, row, column;         // its strides, 0 for summed dimensions
  int sums_b, sums_h, sums_row, sums_column;  // whether a dimension is summed
  int steps, is_narrow;
};

// The number of blocks of scores along each dimension.
struct MaskGrid {
  int columns, rows, heads, batches;
  DEVICE MaskGrid(const BackwardParams& p)
      : columns((p.Sk + QUERY_BLOCK_N - 1) / QUERY_BLOCK_N),
        rows((p.Sq + MASK_QUERIES - 1) / MASK_QUERIES),
        heads(p.Hq),
        batches(p.B) {}
};

struct ScoreBlock {
  int column, row, h, b;
};

// The block of scores of step `i` of a tile. Its index along a dimension is a digit of `i` if the mask is
// summed over that dimension, and a digit of `tile` otherwise.
DEVICE ScoreBlock block_at(const MaskGrid& n, const MaskGradientParams& m, int tile, int i) {
  auto digit = [&](int count, int sums) {
    int& from = sums ? i : tile;
    const int x = from % count;
    from /= count;
    return x;
  };
  ScoreBlock x;
  x.column = digit(n.columns, m.sums_column);
  x.row = digit(n.rows, m.sums_row);
  x.h = digit(n.heads, m.sums_h);
  x.b = digit(n.batches, m.sums_b);
  return x;
}

// The number of blocks that a tile sums, or the number of tiles.
DEVICE int tiles_of(const MaskGrid& n, const MaskGradientParams& m, bool summed) {
  return (m.sums_column == summed ? n.columns : 1) * (m.sums_row == summed ? n.rows : 1) *
         (m.sums_h == summed ? n.heads : 1) * (m.sums_b == summed ? n.batches : 1);
}

DEVICE QueryBlock queries_of(const BackwardParams& p, const ScoreBlock& x) {
  return {x.row * CONSUMERS, x.h, x.b, keys_of(p, x.b)};
}

DEVICE bool attends(const BackwardParams& p, const QueryBlock& t, int column) {
  const KeyBlocks n = all_keys_of(p, t);
  return column >= n.first && column < n.end;
}

// Offsets in shared memory, in order.
struct MaskGradientShared {
  u32 stages, full, empty, end;

  DEVICE constexpr explicit MaskGradientShared(u32 base)
      : stages(base),
        full(stages + MASK_STAGES * STAGE_BYTES),
        empty(full + 8 * MASK_STAGES),
        end(empty + 8 * MASK_STAGES) {}
  DEVICE u32 queries(int i) const { return stages + i * STAGE_BYTES; }
  DEVICE u32 grads(int i) const { return queries(i) + MASK_Q_BYTES; }
  DEVICE u32 keys(int i) const { return grads(i) + MASK_DO_BYTES; }
  DEVICE u32 values(int i) const { return keys(i) + MASK_K_BYTES; }
};
constexpr MaskGradientShared MASK_LAYOUT(0);
static_assert(MASK_LAYOUT.end == MASK_SHARED_BYTES, "MASK_SHARED_BYTES is the layout's size");

// Executed by one lane.
DEVICE void load_scores(const BackwardParams& p, const MaskGradientShared& sm, const QueryBlock& t,
                        int column, PipelineState<MASK_STAGES>& ring) {
  const int i = ring.stage;
  const u32 full = barrier(sm.full, i);
  mbar_wait(barrier(sm.empty, i), ring.phase ^ 1);
  mbar_arrive_expect(full, STAGE_BYTES);
  for (int c = 0; c < CONSUMERS; c++) {
    load_tile(sm.grads(i) + c * CONSUMER_DO_BYTES, p.grad_out, full, VALUE_DIM, ROWS, (t.m + c) * ROWS, t.h,
              t.b);
    load_tile(sm.queries(i) + c * CONSUMER_Q_BYTES, p.q, full, HEAD_DIM, ROWS, (t.m + c) * ROWS, t.h, t.b);
  }
  load_tile(sm.values(i), p.v, full, VALUE_DIM, QUERY_BLOCK_N, column * QUERY_BLOCK_N, t.h / p.group, t.b);
  load_tile(sm.keys(i), p.k, full, HEAD_DIM, QUERY_BLOCK_N, column * QUERY_BLOCK_N, t.h / p.group, t.b);
  ring.next();
}

// Adds the gradients of one block of scores to `sum`.
DEVICE void add_scores(const BackwardParams& p, const MaskGradientShared& sm, const QueryBlock& t, int column,
                       int c, PipelineState<MASK_STAGES>& ring, float (&sum)[ROW_SCORES]) {
  const int i = ring.stage, n0 = column * QUERY_BLOCK_N;
  const QueryShared none(0);
  QueryConsumer rows(p, none, t, c);
  rows.read_rows();
  rows.read_mask(n0);
  if (QueryConsumer::EARLY_BIAS) rows.read_bias(n0);
  mbar_wait(barrier(sm.full, i), ring.phase);
  rows.score_product<VALUE_FEATURES>(rows.dp, sm.grads(i) + c * CONSUMER_DO_BYTES, sm.values(i));
  rows.score_product<HEAD_FEATURES>(rows.s, sm.queries(i) + c * CONSUMER_Q_BYTES, sm.keys(i));
  rows.find_dropped(n0);
  wgmma_wait<0>();
  fence_operand(rows.dp);
  fence_operand(rows.s);
  mbar_arrive(barrier(sm.empty, i));
  ring.next();
  rows.score_gradients<true, false>(n0);
#pragma unroll
  for (int e = 0; e < ROW_SCORES; e++) sum[e] += rows.dp[e];
}

DEVICE void store_sums(const BackwardParams& p, const MaskGradientParams& m, const ScoreBlock& x, int split,
                       int c, const float (&sum)[ROW_SCORES]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const long long from = split * m.split + x.b * m.b + x.h * m.h;
#pragma unroll
  for (int e = 0; e < ROW_SCORES; e++) {
    int row = c * ROWS + warp * 16 + (lane >> 2) + (e & 2) * 4,
        column = (e >> 2) * 8 + (lane & 3) * 2 + (e & 1);
    if (!m.sums_row) row += x.row * MASK_QUERIES;
    if (!m.sums_column) column += x.column * QUERY_BLOCK_N;
    if ((!m.sums_row && row >= p.Sq) || (!m.sums_column && column >= p.Sk)) continue;
    const long long at = from + row * m.row + column * m.column;
    const float total = HAS_DROPOUT ? sum[e] * p.dropout.scale : sum[e];
    if (m.is_narrow) ((Element*)m.to)[at] = (Element)pack(total, 0.f);
    else ((float*)m.to)[at] = total;
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    mask_gradient(const __grid_constant__ BackwardParams p, const __grid_constant__ MaskGradientParams m) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const MaskGradientShared sm(smem_address(shared));
  if (threadIdx.x == 0) {
    for (int i = 0; i < MASK_STAGES; i++)
      mbar_init(barrier(sm.full, i), 1), mbar_init(barrier(sm.empty, i), 128 * CONSUMERS);
    mbar_init_fence();
  }
  __syncthreads();
  const MaskGrid n(p);
  const int tiles = tiles_of(n, m, false), split = blockIdx.x / tiles, tile = blockIdx.x - split * tiles;
  const int first = split * m.steps, end = min(first + m.steps, tiles_of(n, m, true));
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  PipelineState<MASK_STAGES> ring;
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x >= 32) return;
    const bool leader = elect_one();
    for (int i = first; i < end; i++) {
      const ScoreBlock x = block_at(n, m, tile, i);
      const QueryBlock t = queries_of(p, x);
      if (!attends(p, t, x.column)) continue;
      if (leader) load_scores(p, sm, t, x.column, ring);
    }
  } else {
    register_alloc<240>();
    const int c = warpgroup - 1;
    float sum[ROW_SCORES];
#pragma unroll
    for (int e = 0; e < ROW_SCORES; e++) sum[e] = 0.f;
#pragma unroll 1
    for (int i = first; i < end; i++) {
      const ScoreBlock x = block_at(n, m, tile, i);
      const QueryBlock t = queries_of(p, x);
      if (attends(p, t, x.column)) add_scores(p, sm, t, x.column, c, ring, sum);
    }
    store_sums(p, m, block_at(n, m, tile, first), split, c, sum);
  }
}
