// The tangents of out and lse, given both: with weights p, tangents z of scores and any number e of a row,
//
//   n = sum p (z - e)      lse. = e + n      out. = sum p (z - e) v + sum p v. - n out
//
// so that one accumulator and one row sum suffice. e is the mean of z over the keys of the first block that a
// row visits, which takes most of the sums' cancellation away where keys have a mean. Persistent CTAs as in
// forward.cu: warpgroup 0 is the producer, each of the others owns 64 queries. Of each block of keys a stage
// has K and its tangent, another one V and its tangent.
//
// One step of a consumer for block j. The products of values run until the next step's scores are issued.
//
//   tensor cores | S = Q.K(j)^T, Z = Q..K(j)^T + Q.K.(j)^T |                      | A += (P Z).V(j) + P.V.(j)
//   CUDA cores   ..........................................| P = exp2(S - LSE), P Z |
//   mbarriers    k_full(j)     release V(j + 1)    release K(j)              v_full(j)
//
// Rows of NaN or Inf are not computed again: they may reach all rows of a block of queries.
//
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM HEAD_FEATURES VALUE_FEATURES STAGES QUERY_STAGES
// PACKED_HEADS SHARED_BYTES HAS_WINDOW HAS_LEFT HAS_KV_LENS HAS_GRAD_OUT
#include "elements.cuh"
#include "tile_producer.cuh"
#include "wgmma.cuh"

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct TangentParams {
  TensorMap q, k, v, q_t, k_t, v_t;
  const Element *out, *grad_out;  // (B, Hq, Sq, Dv), with the strides below; grad_out may be null
  const float* lse;               // (B, Hq, Sq), natural, -inf for rows without keys
  Element* out_t;                 // (B, Sq, Hq, Dv)
  float *lse_t, *grad_dot;        // (B, Hq, Sq); with grad_out: the sum of its products with out_t
  const int* kv_lens;             // (B,) or null
  int* tile_counter;              // as in forward_rows.cuh
  Strides out_strides, grad_strides;
  int B, Hq, group, Sq, Sk, D, Dv;
  int window_left, window_right;  // UNBOUNDED: no limit; causal is window_right = 0
  int m_blocks, tiles, section;   // section: the number of heads whose keys and values share the L2
  float scale, scale_log2;        // from products to scores, and to powers of two
};

constexpr int QK_COLUMNS = HEAD_DIM / 64, V_COLUMNS = VALUE_DIM / 64;
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_FEATURES / 2;  // accumulator registers of a thread
constexpr u32 Q_BYTES = 64 * HEAD_DIM * 2, K_BYTES = BLOCK_N * HEAD_DIM * 2,
              V_BYTES = BLOCK_N * VALUE_DIM * 2;  // of a tile alone

static_assert(BLOCK_M % 64 == 0 && BLOCK_N % 16 == 0, "whole products");

// Offsets in shared memory, in order. A slot holds a tile and, behind it, that of its tangent.
struct TangentShared {
  u32 q, k, v, q_full, k_full, v_full, work_full, q_empty, k_empty, v_empty, work_empty, work, end;

  DEVICE constexpr explicit TangentShared(u32 base)
      : q(base),
        k(q + QUERY_STAGES * CONSUMERS * 2 * Q_BYTES),
        v(k + STAGES * 2 * K_BYTES),
        q_full(v + STAGES * 2 * V_BYTES),
        k_full(q_full + 8 * QUERY_STAGES * CONSUMERS),
        v_full(k_full + 8 * STAGES),
        work_full(v_full + 8 * STAGES),
        q_empty(work_full + 8 * 2),
        k_empty(q_empty + 8 * QUERY_STAGES * CONSUMERS),
        v_empty(k_empty + 8 * STAGES),
        work_empty(v_empty + 8 * STAGES),
        work((work_empty + 8 * 2 + 15) & ~15),
        end(work + 2 * WORK_ITEM_BYTES) {}
};
constexpr TangentShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");

struct Barrier {
  enum : u32 { WARPGROUP = 1 };  // one per consumer, for its 128 threads
};

// Copies ROWS tokens of a tensor and of its tangent, from token `row` on.
template <int COLUMNS, int ROWS>
DEVICE void load_pair(u32 at, u32 bar, const TensorMap& map, const TensorMap& tangent, int row, int h,
                      int b) {
#pragma unroll
  for (int x = 0; x < COLUMNS; x++) {
    tma_load(at + x * ROWS * 128, map, bar, x * 64, row, h, b);
    tma_load(at + (COLUMNS + x) * ROWS * 128, tangent, bar, x * 64, row, h, b);
  }
}

template <int COLUMNS>
DEVICE void load_block(u32 slots, u32 full, u32 empty, const TensorMap& map, const TensorMap& tangent,
                       PipelineState<STAGES>& state, int block, int h, int b) {
  constexpr u32 BYTES = 2 * COLUMNS * BLOCK_N * 128;
  const u32 bar = barrier(full, state.stage);
  mbar_wait(barrier(empty, state.stage), state.phase ^ 1);
  mbar_arrive_expect(bar, BYTES);
  load_pair<COLUMNS, BLOCK_N>(slot_at<BYTES>(slots, state.stage), bar, map, tangent, block * BLOCK_N, h, b);
  state.next();
}

DEVICE void load_queries(const TangentParams& p, const TangentShared& sm, const Tile& tile,
                         const PipelineState<2>& work) {
#pragma unroll
  for (int c = 0; c < CONSUMERS; c++) {
    const int slot = query_slot(work, c);
    mbar_wait(barrier(sm.q_empty, slot), query_phase(work) ^ 1);
    mbar_arrive_expect(barrier(sm.q_full, slot), 2 * Q_BYTES);
    load_pair<QK_COLUMNS, 64>(slot_at<2 * Q_BYTES>(sm.q, slot), barrier(sm.q_full, slot), p.q, p.q_t,
                              tile.m0 + c * 64, tile.h, tile.b);
  }
}

// Executed by one thread.
DEVICE void load_work_item(const TangentParams& p, const TangentShared& sm, const Tile& tile,
                           const BlockRange& n, const PipelineState<2>& work, PipelineState<STAGES>& k,
                           PipelineState<STAGES>& v) {
  const int h = tile.h / p.group;
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    if (j >= n.begin) load_block<QK_COLUMNS>(sm.k, sm.k_full, sm.k_empty, p.k, p.k_t, k, j, h, tile.b);
    if (j == n.end - 1) load_queries(p, sm, tile, work);
    if (j >= n.begin) load_block<V_COLUMNS>(sm.v, sm.v_full, sm.v_empty, p.v, p.v_t, v, j, h, tile.b);
    if (j <= n.begin) break;
  }
}

// The 64 queries of a warpgroup.
struct TangentConsumer {
  const TangentParams& p;
  const TangentShared& sm;
  const int c, tid, lane;
  PipelineState<2> work;
  PipelineState<STAGES> k, v;
  u32 queries;  // the address of this work item's queries
  float s[SCORES], z[SCORES], a[OUTPUTS];
  u32 weights[SCORES / 2], moved[SCORES / 2];  // p and p (z - e)
  float lse[2], reference[2], sum[2];          // in log2 units; e; this thread's part of n
  KeyRange range[2];                           // the keys of this thread's two rows
  bool values_in_flight = false;

  DEVICE TangentConsumer(const TangentParams& p, const TangentShared& sm, int c)
      : p(p), sm(sm), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31) {}

  DEVICE void release(u32 empty, int stage) {
    if (lane == 0) mbar_arrive(barrier(empty, stage));
  }

  DEVICE void read_rows(const Tile& tile, int keys) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2) + 8 * r;
      range[r] = row_range(p, tile, row, keys);
      lse[r] = row < p.Sq ? p.lse[(long long)(tile.b * p.Hq + tile.h) * p.Sq + row] * LOG2E : -INFINITE;
      // rows without keys, and those whose weights float32 does not resolve
      if (!(fabsf(lse[r]) < 16777216.f)) lse[r] = INFINITE;
      reference[r] = sum[r] = 0.f;
    }
  }

  DEVICE void score_products() {
    const u32 keys = slot_at<2 * K_BYTES>(sm.k, k.stage);
    const u32 key = descriptor_base(keys, 16), key_t = descriptor_base(keys + K_BYTES, 16),
              query = descriptor_base(queries, 16), query_t = descriptor_base(queries + Q_BYTES, 16);
    wgmma_fence();
    wgmma_scores_start(s, query, key);
    wgmma_scores_start(z, query_t, key);
    wgmma_scores(z, query, key_t);
    wgmma_commit();
  }

  // Zeroes values and tangents past the last attended key: that memory is arbitrary, and 0 * NaN is NaN.
  // Every consumer writes the same zeros to all of them.
  DEVICE void clear_values(int from) {
    const u32 at = slot_at<2 * V_BYTES>(sm.v, v.stage);
#pragma unroll 1
    for (int i = from * 8 + tid; i < BLOCK_N * 8; i += 128)
#pragma unroll
      for (int x = 0; x < 2 * V_COLUMNS; x++)
        store_shared(at + x * BLOCK_N * 128 + i * 16, make_int4(0, 0, 0, 0));
    fence_async_shared();
    named_barrier_sync(Barrier::WARPGROUP + c, 128);
  }

  DEVICE void value_products(int block, const BlockRange& n) {
    mbar_wait(barrier(sm.v_full, v.stage), v.phase);
#if HAS_KV_LENS
    if (n.key_end < min((block + 1) * BLOCK_N, p.Sk)) clear_values(n.key_end - block * BLOCK_N);
#endif
    const u32 values = slot_at<2 * V_BYTES>(sm.v, v.stage);
    wgmma_fence();
    wgmma_output(a, moved, descriptor_base(values, BLOCK_N * 128));
    wgmma_output(a, weights, descriptor_base(values + V_BYTES, BLOCK_N * 128));
    wgmma_commit();
    values_in_flight = true;
  }

  DEVICE void release_values() {
    release(sm.v_empty, v.stage);
    v.next(), values_in_flight = false;
  }

  // The means over the keys of a block, of which `count` exist.
  DEVICE void find_references(int count) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = 0.f;
#pragma unroll
      for (int i = 2 * r; i < SCORES; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; e++)
          if (column_offset(e) + (lane & 3) * 2 < count) total += z[e];
      total += __shfl_xor_sync(~0u, total, 1), total += __shfl_xor_sync(~0u, total, 2);
      reference[r] = total * p.scale / count;
    }
  }

  template <bool EDGE> DEVICE void make_weights(int block) {
    const int from = block * BLOCK_N + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) {
      const int r = i >> 1 & 1;
      float x[2], y[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        x[e] = exp2_fast(fmaf(s[i + e], p.scale_log2, -lse[r]));
        y[e] = x[e] * fmaf(z[i + e], p.scale, -reference[r]);
        if (EDGE) {
          const int j = column_offset(i + e);
          bool keep = j < range[r].end - from;
          if (HAS_LEFT) keep = keep && j >= range[r].begin - from;
          if (!keep) x[e] = y[e] = 0.f;
        }
      }
      sum[r] += y[0] + y[1];
      weights[i / 2] = pack(x[0], x[1]), moved[i / 2] = pack(y[0], y[1]);
    }
  }

  DEVICE void step(int block, const BlockRange& n, bool is_first, int keys) {
    mbar_wait(barrier(sm.k_full, k.stage), k.phase);
    score_products();
    if (values_in_flight) {
      wgmma_wait<1>();
      fence_operand(a);
      release_values();
    }
    wgmma_wait<0>();
    fence_operand(s), fence_operand(z);
    release(sm.k_empty, k.stage), k.next();
    if (block == n.begin) release(sm.q_empty, query_slot(work, c));
    if (is_first) find_references(min(BLOCK_N, keys - block * BLOCK_N));
    if (block >= n.full_end || block < n.full_begin) make_weights<true>(block);
    else make_weights<false>(block);
    value_products(block, n);
  }

  // Blocks of the tile that no row of this consumer attends.
  DEVICE void skip_blocks(int end, int begin) {
#pragma unroll 1
    for (int j = end - 1; j >= begin; j--) {
      mbar_wait(barrier(sm.k_full, k.stage), k.phase);
      mbar_wait(barrier(sm.v_full, v.stage), v.phase);
      __syncwarp();  // a lane that has not seen these phases yet would miss them
      release(sm.k_empty, k.stage), k.next();
      release_values();
    }
  }

  // Of the tile's blocks those that some row of this consumer attends.
  DEVICE BlockRange own_blocks(const WorkItem& item) const {
    Tile own = item.tile;
    own.m0 += c * 64;
    BlockRange n = blocks_of(p, own, item.keys, 64);
    if (own.m0 >= p.Sq || n.end <= n.begin) n.begin = n.end = item.blocks.begin;
    n.key_end = item.blocks.key_end;
    return n;
  }

  DEVICE void finish(const Tile& tile) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2) + 8 * r;
      const bool exists = row < p.Sq;
      const int of = min(row, p.Sq - 1);
      const Element* const out = row_at(p.out, p.out_strides, tile.b, tile.h, of);
      Element* const to = p.out_t + (((long long)tile.b * p.Sq + of) * p.Hq + tile.h) * p.Dv;
      float n = sum[r];
      n += __shfl_xor_sync(~0u, n, 1), n += __shfl_xor_sync(~0u, n, 2);
#if HAS_GRAD_OUT
      const Element* const grad = row_at(p.grad_out, p.grad_strides, tile.b, tile.h, of);
      float product = 0.f;
#endif
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 16) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          x[j] = 0;
          const int at = i + 4 * j, column = at / 4 * 8 + (lane & 3) * 2;
          if (at >= OUTPUTS) continue;
          float2 o = make_float2(0.f, 0.f);
          if (column < p.Dv) o = load2(out + column);
          const float2 y = make_float2(a[at] - n * o.x, a[at + 1] - n * o.y);
#if HAS_GRAD_OUT
          if (column < p.Dv) product += dot2(y, load2(grad + column));
#endif
          x[j] = pack(y.x, y.y);
        }
        transpose_quad(x);
        const int column = (i / 4 + (lane & 3)) * 8;
        if (exists && column < p.Dv) *(uint4*)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
      const long long at = (long long)(tile.b * p.Hq + tile.h) * p.Sq + row;
#if HAS_GRAD_OUT
      product += __shfl_xor_sync(~0u, product, 1), product += __shfl_xor_sync(~0u, product, 2);
      if ((lane & 3) == 0 && exists) p.grad_dot[at] = product;
#endif
      if ((lane & 3) == 0 && exists) p.lse_t[at] = lse[r] == INFINITE ? 0.f : n + reference[r];
    }
  }

  DEVICE void run() {
    for (;; work.next()) {
      mbar_wait(barrier(sm.work_full, work.stage), work.phase);
      const WorkItem item = load_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage));
      mbar_arrive(barrier(sm.work_empty, work.stage));
      const Tile& tile = item.tile;
      if (tile.m0 == NO_WORK) break;
      read_rows(tile, item.keys);
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) a[i] = 0.f;
      const int slot = query_slot(work, c);
      queries = opaque(slot_at<2 * Q_BYTES>(sm.q, slot));
      mbar_wait(barrier(sm.q_full, slot), query_phase(work));
      const BlockRange n = own_blocks(item);
      skip_blocks(item.blocks.end, n.end);
      if (n.end <= n.begin) release(sm.q_empty, slot);
#pragma unroll 1
      for (int j = n.end - 1; j >= n.begin; j--) step(j, n, j == n.end - 1, item.keys);
      wgmma_wait<0>();
      fence_operand(a);
      if (values_in_flight) release_values();
      skip_blocks(n.begin, item.blocks.begin);
      finish(tile);
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    tangent(const __grid_constant__ TangentParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const TangentShared sm{smem_address(shared)};
  if (threadIdx.x == 0) {
    init_tile_barriers(sm, QUERY_STAGES * CONSUMERS, 128 * CONSUMERS);
    mbar_init_fence();
  }
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<(CONSUMERS == 2 ? 40 : 32)>();
    if (threadIdx.x < 32) {
      PipelineState<STAGES> k, v;
      produce_tiles(p, sm, [&](const WorkItem& item, const PipelineState<2>& work, bool leader) {
        if (leader) load_work_item(p, sm, item.tile, item.blocks, work, k, v);
      });
    }
  } else {
    register_alloc<(CONSUMERS == 2 ? 232 : 160)>();
    TangentConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
