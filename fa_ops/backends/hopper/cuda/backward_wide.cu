// Gradients for more than 256 features, in two passes over the scores: `wide_keys` computes dK and dV of 64
// keys, `wide_queries` computes dQ of 64 queries. Each is what the registers of a cluster of two CTAs can
// hold. Each CTA holds one tensor of the cluster's own tokens and streams one tensor of the others in blocks
// of 64 tokens, which both of its products read:
//
//            dK and dV                                dQ
//   CTA 0    P = exp(K.Q^T - LSE)      dK += dS^T.Q   P = exp(Q.K^T - LSE)      dQ += dS.K
//   CTA 1    dS = P (V.dO^T - delta)   dV += P^T.dO   dS = P (dO.V^T - delta)
//
// P is sent from CTA 0 to CTA 1, and dS back, as 16-bit values through distributed shared memory. Warpgroup 0
// copies, warpgroup 1 computes scores, and warpgroups 2 and 3 share the columns of the gradient. Nothing is
// accumulated in memory, so all gradients are bitwise reproducible.
//
// The score warpgroup keeps half the features of the cluster's own tokens in registers, so that shared memory
// has room for two and a half blocks of the streamed tensor instead of two.
//
// Compile-time: IS_BF16 HEAD_DIM SHARED_BYTES HAS_KV_LENS, and what backward_results.cuh has
#include "wide_consumers.cuh"

// Executed by one thread.
DEVICE void init_barriers(const WideShared& sm) {
  constexpr int SCORE_WARPS = 4, GRADIENT_WARPS = 8, ALL = SCORE_WARPS + GRADIENT_WARPS;
  mbar_init(sm.resident_full, 1);
  const bool has_gradient = cta_rank() == 0 || VALUES_HAVE_GRADIENT;
  // every thread that reads LSE or delta arrives: racecheck does not accept one arrival per warp
  const int block_readers = 32 * SCORE_WARPS + (has_gradient ? GRADIENT_WARPS : 0);
  for (int i = 0; i < SLOTS; i++)
    mbar_init(barrier(sm.full, i), 1), mbar_init(barrier(sm.empty, i), block_readers);
  // weights are read by the score warps for dS and the dV warps; dS by the dK or dQ warps
  const int readers = cta_rank() == 1 ? GRADIENT_WARPS : VALUES_HAVE_GRADIENT ? ALL : SCORE_WARPS;
  for (int i = 0; i < 2; i++)
    mbar_init(barrier(sm.received_full, i), 1), mbar_init(barrier(sm.sent_empty, i), readers);
  mbar_init_fence();
  for (int i = 0; i < 2; i++) mbar_arrive_expect(barrier(sm.received_full, i), COLUMN_BYTES);
}

DEVICE void load_half(u32 dst, const TensorMap& map, u32 bar, int half, int row, int h, int b) {
#pragma unroll 1
  for (int i = 0; i < HALF_COLUMNS; i++)
    tma_load(dst + i * COLUMN_BYTES, map, bar, (half * HALF_COLUMNS + i) * 64, row, h, b);
}

// Executed by one warp, whose leader issues the copies.
struct Producer : WideRole {
  const bool leader;

  DEVICE Producer(const BackwardParams& p, const WideShared& sm, const WideWork& work)
      : WideRole(p, sm, work), leader(elect_one()) {}

  DEVICE void load_resident() {
    const TensorMap& map = OF_QUERIES ? (rank == 0 ? p.q : p.grad_out) : (rank == 0 ? p.k : p.v);
    for (int half = 0; half < 2; half++) {  // the first half is moved to registers
      const u32 bar = half == 0 ? full() : sm.resident_full;
      mbar_arrive_expect(bar, HALF_BYTES);
      const u32 to = half == 0 ? stream() : sm.resident;
      load_half(to, map, bar, half, work.first_token(), work.head(p), work.t.b);
    }
  }

  // The LSE or delta of a block's queries, copied with the first half.
  DEVICE void load_numbers([[maybe_unused]] int h, [[maybe_unused]] int m) const {
#if !OF_QUERIES
    const long long row = ((long long)(work.t.b * p.Hq + h) * p.m_blocks + m) * TOKENS;
    bulk_load(slot_at<NUMBER_BYTES>(sm.numbers, numbers.stage), (rank == 0 ? p.lse : p.delta) + row,
              NUMBER_BYTES, full());
    if (HAS_RANGES)
      bulk_load(slot_at<RANGE_BYTES>(sm.ranges, numbers.stage),
                p.ranges + (range_row(p, h, work.t.b) * p.m_blocks + m) * TOKENS, RANGE_BYTES, full());
#endif
  }

  DEVICE void step(int h, int block, bool) {
    constexpr u32 MORE = OF_QUERIES ? 0 : NUMBER_BYTES + HAS_RANGES * RANGE_BYTES;
    const TensorMap& map = OF_QUERIES ? (rank == 0 ? p.k : p.v) : (rank == 0 ? p.q : p.grad_out);
    for (int half = 0; half < 2; half++, ring.next())
      if (leader) {
        mbar_wait(empty(), ring.phase ^ 1);
        mbar_arrive_expect(full(), HALF_BYTES + (half == 0 ? MORE : 0));
        load_half(stream(), map, full(), half, block * TOKENS, h, work.t.b);
        if (half == 0) load_numbers(h, block);
      }
    next_block();
  }

  DEVICE void run() {
    if (work.has_blocks()) {
      if (leader) load_resident();
      ring.next();
    }
    wait_for_prior_grid();  // `preprocess` writes nothing read above
    work.for_each_block(p, *this);
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1)
#if OF_QUERIES
    wide_queries(const __grid_constant__ BackwardParams p) {
#else
    wide_keys(const __grid_constant__ BackwardParams p) {
#endif
  extern __shared__ __align__(1024) unsigned char shared[];
  const WideShared sm(smem_address(shared));
  launch_dependent_grids();
  if (threadIdx.x == 0) init_barriers(sm);
  cluster_sync();  // both CTAs' barriers are initialised
  const WideWork work(p);
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x < 32) {
      Producer producer(p, sm, work);
      producer.run();
    }
  } else if (warpgroup == 1) {
    register_alloc<168>();
    ScoreConsumer consumer(p, sm, work);
    consumer.run();
  } else {
    register_alloc<160>();
    if (cta_rank() == 0 || VALUES_HAVE_GRADIENT) {
      GradientConsumer consumer(p, sm, work, warpgroup - 2);
      consumer.run();
    }
  }
  __syncwarp();
  cluster_sync();  // a CTA must not exit while the other still writes to its shared memory
}
