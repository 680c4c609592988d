// Attention backward in one pass for head dimensions for which the registers of a multiprocessor hold dK and
// dV of only 64 keys. Adding dQ to memory once per 64 keys would take longer than the products, so a cluster
// of two CTAs owns a block of 128 keys, 64 keys each. Both CTAs iterate over the same queries and exchange
// their dS; each then computes half the columns of dQ for all 128 keys. For this it also holds those columns
// of the other CTA's K.
//
// Warpgroup 0 is the producer. The other three split the work on the CTA's keys by product, which keeps the
// tensor cores busy:
//
//   values    S = K.Q^T     weights                    dV += P.dO
//   keys      dP = V.dO^T            dS, to both CTAs  dK += dS.Q
//   queries                                            dQ = dS^T.K, added to memory in fp32
//
// Scores are transposed, so that the weights and their gradients leave the accumulators as the register
// operand of the next product. Shared memory holds two blocks of Q and one and a half of dO, which is copied
// in halves of its columns: the first half of the next block arrives while the current block is used.
#include "pair_consumers.cuh"

// Executed by one thread. The copies are issued in the order in which the consumers release their slots; in
// any other order a copy could wait for consumers that wait for a later copy.
DEVICE void load_queries(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t, int h, int m,
                         const PipelineState<STAGES>& ring, u32 blocks) {
  const u32 i = ring.stage, q_full = barrier(sm.q_full, i);
  const long long row = ((long long)(t.b * p.Hq + h) * p.m_blocks + m) * BLOCK_M;
  mbar_wait(barrier(sm.q_empty, i), ring.phase ^ 1);
  mbar_arrive_expect(q_full, Q_BYTES + ROW_BYTES + RANGE_BYTES);
  load_tile(slot_at<Q_BYTES>(sm.q, i), p.q, q_full, HEAD_DIM, BLOCK_M, m * BLOCK_M, h, t.b);
  bulk_load(slot_at<ROW_BYTES>(sm.lse, i), p.lse + row, ROW_BYTES, q_full);
  if (HAS_RANGES)
    bulk_load(slot_at<RANGE_BYTES>(sm.ranges, i),
              p.ranges + (range_row(p, h, t.b) * p.m_blocks + m) * BLOCK_M, RANGE_BYTES, q_full);
  for (int x = 0; x < 2; x++) {
    const GradHalf half(sm, 2 * blocks + x);
    mbar_wait(half.empty, half.phase ^ 1);
    mbar_arrive_expect(half.full, GRAD_BYTES + x * ROW_BYTES);
    for (int column = 0; column < HALF; column += 64)
      tma_load(half.at + column * 128, p.grad_out, half.full, x * HALF + column, m * BLOCK_M, h, t.b);
    if (x) bulk_load(half.delta, p.delta + row, ROW_BYTES, half.full);
  }
}

// Copies this CTA's keys and values, and its columns of the other CTA's keys. Executed by one thread.
DEVICE void load_pair_keys(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t) {
  const int h = key_head(p, t), own = t.n0 + cta_rank() * CTA_KEYS,
            other = t.n0 + (cta_rank() ^ 1) * CTA_KEYS;
  mbar_arrive_expect(sm.kv_full, K_BYTES + V_BYTES + OTHER_KEYS_BYTES);
  load_tile(sm.k, p.k, sm.kv_full, HEAD_DIM, CTA_KEYS, own, h, t.b);
  load_tile(sm.v, p.v, sm.kv_full, VALUE_DIM, CTA_KEYS, own, h, t.b);
  for (int x = 0; x < HALF; x += 64)
    tma_load(other_keys(sm) + x * 128, p.k, sm.kv_full, cta_rank() * HALF + x, other, h, t.b);
}

// Executed by one warp.
DEVICE void produce(const BackwardParams& p, const BackwardShared& sm) {
  const KeyTile t = pair_tile(p);
  const bool leader = elect_one();
  if (leader && t.first < t.last) load_pair_keys(p, sm, t);
  wait_for_prior_grid();  // `preprocess` writes nothing read above
  PipelineState<STAGES> ring;
  u32 blocks = 0;
  for (int h = first_head(p, t); h < first_head(p, t) + p.part_heads; h++)
    for (int base = t.first; base < t.last; base += 32) {
      QueryBlocks n = query_blocks(p, t, h, base);
      for (; n.some; n.some &= n.some - 1, ring.next(), blocks++)
        if (leader) load_queries(p, sm, t, h, base + __ffs(n.some) - 1, ring, blocks);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (CONSUMERS + 1), 1)
    backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardShared sm(smem_address(shared));
  launch_dependent_grids();
  if (threadIdx.x == 0) init_pair_barriers(sm);
  cluster_sync();  // both CTAs' barriers are initialised
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x < 32) produce(p, sm);
  } else if (warpgroup == 1) {
    register_alloc<216>();
    PairValueConsumer consumer(p, sm);
    consumer.run();
  } else if (warpgroup == 2) {
    register_alloc<208>();
    PairKeyConsumer consumer(p, sm);
    consumer.run();
  } else {
    register_dealloc<64>();
    PairQueryConsumer consumer(p, sm);
    consumer.run();
  }
  __syncwarp();
  cluster_sync();  // a CTA must not exit while the other still writes to its shared memory
}
