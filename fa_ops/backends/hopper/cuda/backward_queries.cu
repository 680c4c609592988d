// dQ in a separate pass that is bitwise reproducible, since nothing is accumulated in memory. One CTA per 128
// queries, 64 per consumer, iterates over the keys that they attend. V and K alternate in one ring of slots,
// V first: its slot is released after one product, early enough for the next block's K.
//
// Its CTAs start while those of backward_keys.cu finish, which launch their dependents only after they have
// waited for `preprocess`. The last CTA waits for backward_keys.cu, so that this kernel does not end before
// it: `postprocess` waits for this kernel only.
//
// One step of a consumer, over time, for block j of the keys. The last product of a step runs until the
// gradients of the next one's weights are there.
//
//   tensor cores   | dP = dO.V(j)^T | S = Q.K(j)^T   |                          | dQ += dS.K(j)
//   CUDA cores     .................| dropout hashes | dS = exp2(S - LSE) (dP - delta)
//   mbarriers      full, of V(j)   release K(j - 1)   full, of K(j)   release V(j)
//
// Compile-time: QUERY_BLOCK_N QUERY_STAGES QUERY_SHARED_BYTES, beside what backward.cuh has
#include "query_consumer.cuh"

static_assert(QUERY_LAYOUT.end == QUERY_SHARED_BYTES, "QUERY_SHARED_BYTES is the layout's size");

// The CTA's first block. Sections of heads share the L2 for K and V; within a section the longest blocks of
// all heads come first.
DEVICE QueryBlock first_block(const BackwardParams& p) {
  const int heads = p.B * p.Hq, tiles = (p.m_blocks + CONSUMERS - 1) / CONSUMERS,
            per = p.query_section * tiles;
  const int sec = blockIdx.x / per, r = blockIdx.x - sec * per;
  const int inside = min(p.query_section, heads - sec * p.query_section);
  const int head = sec * p.query_section + r % inside;
  QueryBlock t;
  t.m = (HAS_WINDOW || HAS_MASK || BIAS_BITS ? tiles - 1 - r / inside : r / inside) * CONSUMERS;
  t.b = head / p.Hq;
  t.h = head - t.b * p.Hq;
  t.keys = keys_of(p, t.b);
  return t;
}

DEVICE void load_slot(const QueryShared& sm, PipelineState<QUERY_STAGES>& ring, const TensorMap& map,
                      int width, int row, int h, int b) {
  const u32 full = barrier(sm.full, ring.stage);
  mbar_wait(barrier(sm.empty, ring.stage), ring.phase ^ 1);
  mbar_arrive_expect(full, QUERY_BLOCK_N * width * 2);
  load_tile(slot_at<KEYS_BYTES>(sm.slots, ring.stage), map, full, width, QUERY_BLOCK_N, row, h, b);
  ring.next();
}

// Executed by one thread.
DEVICE void load_consumer_queries(const BackwardParams& p, const QueryShared& sm, const QueryBlock& t) {
  for (int c = 0; c < CONSUMERS; c++) {
    const u32 full = barrier(sm.queries_full, c);
    mbar_arrive_expect(full, CONSUMER_Q_BYTES + CONSUMER_DO_BYTES);
    load_tile(slot_at<CONSUMER_DO_BYTES>(sm.grad_out, c), p.grad_out, full, VALUE_DIM, ROWS, (t.m + c) * ROWS,
              t.h, t.b);
    load_tile(slot_at<CONSUMER_Q_BYTES>(sm.q, c), p.q, full, HEAD_DIM, ROWS, (t.m + c) * ROWS, t.h, t.b);
  }
}

#if SKIPS_TILES
// Executed by one warp.
DEVICE void produce_keys(const BackwardParams& p, const QueryShared& sm, const QueryBlock& t,
                         const KeyBlocks& n) {
  if (n.first == n.end) return;
  const bool leader = elect_one();
  if (leader) load_consumer_queries(p, sm, t);
  PipelineState<QUERY_STAGES> ring;
  const int h = t.h / p.group;
  for_each_listed_block(p, t, n, [&](int j, bool) {
    if (!leader) return;
    load_slot(sm, ring, p.v, VALUE_DIM, j * QUERY_BLOCK_N, h, t.b);
    load_slot(sm, ring, p.k, HEAD_DIM, j * QUERY_BLOCK_N, h, t.b);
  });
}
#else
// Executed by one thread.
DEVICE void produce_keys(const BackwardParams& p, const QueryShared& sm, const QueryBlock& t,
                         const KeyBlocks& n) {
  if (n.first == n.end) return;
  load_consumer_queries(p, sm, t);
  PipelineState<QUERY_STAGES> ring;
  const int h = t.h / p.group;
  for (int j = n.first; j < n.end; j++) {
    load_slot(sm, ring, p.v, VALUE_DIM, j * QUERY_BLOCK_N, h, t.b);
    load_slot(sm, ring, p.k, HEAD_DIM, j * QUERY_BLOCK_N, h, t.b);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    backward_queries(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const QueryShared sm(smem_address(shared));
  launch_dependent_grids();
  if (threadIdx.x == 0) {
    for (int c = 0; c < CONSUMERS; c++) mbar_init(barrier(sm.queries_full, c), 1);
    for (int i = 0; i < QUERY_STAGES; i++)
      mbar_init(barrier(sm.full, i), 1), mbar_init(barrier(sm.empty, i), 128 * CONSUMERS);
    mbar_init_fence();
  }
  __syncthreads();
  const QueryBlock first = first_block(p);
  const KeyBlocks all = all_keys_of(p, first);
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x < 32 && (SKIPS_TILES || elect_one())) produce_keys(p, sm, first, all);
  } else {
    register_alloc<240>();
    QueryConsumer consumer(p, sm, first, warpgroup - 1);
    consumer.run(all);
  }
#if IS_WIDE  // backward.cu lets its dependents begin earlier: this kernel is launched behind it
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) wait_for_prior_grid();
#endif
}
