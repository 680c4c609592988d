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
//
// What each barrier of a CTA protects. Both CTAs arrive at those marked *: lane 0 of a warp arrives in CTA 0
// and lane 1 in CTA 1. At the other barriers of consumers every thread arrives, as in backward.cuh.
//
//   kv_full        K, V and the other CTA's K are there; all consumers wait once
//   q_full         Q, its LSEs and key ranges are there
//   q_empty        the values' warps have computed weights of a block of Q, and the keys' warps its dK
//   do_full        half of dO's columns are there, with the second half its deltas
//   do_empty       the values' warps have computed their half of dV, and the keys' warps dS, which reads the
//                  deltas
//   weights_full   all threads of the values' warpgroup have written their weights
//   weights_empty  all threads of the keys' warpgroup have read them
//   ds_full        dS is there: own, which one thread arrives for after all have written, and the other
//                  CTA's, whose bytes the barrier counts
//   ds_empty *     the queries' warps of a CTA have computed dQ. After those of this CTA its own dS is free;
//                  after those of the other CTA its dS has been copied there, and the copy there is free
#include "key_consumer.cuh"

constexpr int HALF = HEAD_DIM / 2, GRADS = HEAD_DIM / 2;  // columns of dQ of a CTA; dK or dV of a thread
constexpr u32 COLUMN_BYTES = 64 * 128;
constexpr u32 OTHER_KEYS_BYTES = CTA_KEYS * HALF * 2, DS_BYTES = CTA_KEYS * BLOCK_M * 2,
              WEIGHTS_BYTES = CTA_KEYS * BLOCK_M * 4;
static_assert(CTA_KEYS == 64 && BLOCK_M == 64 && HALF % 64 == 0, "columns of 64");
static_assert(EXCHANGE_BYTES == OTHER_KEYS_BYTES + 2 * DS_BYTES + WEIGHTS_BYTES, "what follows");
static_assert(HEAD_FEATURES == HEAD_DIM && VALUE_FEATURES == HEAD_DIM, "gradients by halves");
static_assert(STAGES == 2 && ADDS_DQ, "two blocks of Q");
static_assert(!(HAS_MASK || HAS_DROPOUT || HAS_SOFTCAP || BIAS_BITS), "what registers have no room for");

enum PairWarpgroup { VALUES, KEYS, QUERIES };  // by which named barriers are counted

// The block of keys of this CTA's cluster. Each warpgroup finds it: what all of them hold at once would leave
// the registers of the one that has the fewest.
DEVICE KeyTile pair_tile(const BackwardParams& p) {
  const KeyTile t = tile_at(p, blockIdx.x / 2);
  return {warp_uniform(t.n0),   warp_uniform(t.part),  warp_uniform(t.b),
          warp_uniform(t.keys), warp_uniform(t.first), warp_uniform(t.last)};
}

DEVICE u32 other_keys(const BackwardShared& sm) { return sm.exchange; }
// The buffer of dS of this CTA's keys, or of the other CTA's.
DEVICE u32 ds_at(const BackwardShared& sm, bool others) {
  return sm.exchange + OTHER_KEYS_BYTES + others * DS_BYTES;
}
// The address of four weights of a thread; the same thread index of both warpgroups holds the same elements.
DEVICE u32 weights_address(const BackwardShared& sm, int i) {
  return sm.exchange + OTHER_KEYS_BYTES + 2 * DS_BYTES + (i / 4 * 128 + (threadIdx.x & 127)) * 16;
}

DEVICE u32 weights_full(const BackwardShared& sm) { return sm.extra; }
DEVICE u32 weights_empty(const BackwardShared& sm) { return sm.extra + 8; }
DEVICE u32 ds_full(const BackwardShared& sm) { return sm.extra + 16; }
DEVICE u32 ds_empty(const BackwardShared& sm) { return sm.extra + 24; }

// Half of the columns of a block of dO, the `i`-th half so far, in one of the slots in turn.
struct GradHalf {
  u32 at, delta, full, empty, phase;

  DEVICE GradHalf(const BackwardShared& sm, u32 i) : phase(i / GRAD_STAGES & 1) {
    const u32 slot = i % GRAD_STAGES;
    at = slot_at<GRAD_BYTES>(sm.grad_out, slot), delta = slot_at<ROW_BYTES>(sm.delta, slot);
    full = barrier(sm.do_full, slot), empty = barrier(sm.do_empty, slot);
  }
};

// Executed by one thread.
DEVICE void init_pair_barriers(const BackwardShared& sm) {
  mbar_init(sm.kv_full, 1);
  for (int i = 0; i < STAGES; i++)
    mbar_init(barrier(sm.q_full, i), 1), mbar_init(barrier(sm.q_empty, i), 256);
  for (int i = 0; i < GRAD_STAGES; i++)
    mbar_init(barrier(sm.do_full, i), 1), mbar_init(barrier(sm.do_empty, i), 256);
  mbar_init(weights_full(sm), 128), mbar_init(weights_empty(sm), 128);
  mbar_init(ds_full(sm), 1), mbar_init(ds_empty(sm), 4 * 2);
  mbar_init_fence();
}

// The producer.

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

// The consumers: one warpgroup each for dV, dK and dQ.

struct PairConsumer : KeyConsumerBase {
  // The number of query blocks so far. One counter in place of pipeline states saves registers: double
  // buffers use buffer `i()`, with barriers in phase `phase()`; barriers of single buffers are in phase
  // `i()`.
  u32 blocks = 0;
  DEVICE u32 i() const { return blocks & 1; }
  DEVICE u32 phase() const { return blocks >> 1 & 1; }

  DEVICE PairConsumer(const BackwardParams& p, const BackwardShared& sm)
      : KeyConsumerBase(p, sm, pair_tile(p), cta_rank() * CTA_KEYS) {}

  // Arrives for a warp, in both CTAs of the cluster.
  DEVICE void release_in_pair(u32 bar) const {
    __syncwarp();
    if (lane < 2) mbar_arrive_at(bar, lane);
  }

  DEVICE void wait_for_keys() const {
    if (t.first < t.last) mbar_wait(sm.kv_full, 0);
  }

  // The halves of dO of this block, and after those of earlier ones.
  DEVICE GradHalf grad_half(int i) const { return GradHalf(sm, 2 * blocks + i); }

  // Accumulates half X of the columns of dK or dV from those of Q or dO at `queries`, in two products: ptxas
  // rejects a product that needs more registers than the initial number per thread of a CTA of 512 threads.
  template <int X> DEVICE void half_product(float (&d)[GRADS], const u32 (&a)[SCORES / 2], u32 queries) {
    wgmma_fence();
    wgmma_half_grads((float (&)[GRADS / 2])d[X * (GRADS / 2)], a, cluster_descriptor(queries, COLUMN_BYTES));
  }

  // Rows of this CTA's keys from a batch row's length on, or of the other's.
  DEVICE int keys_end(bool others) const {
    return max(0, t.keys - t.n0 - (others ? cta_rank() ^ 1 : cta_rank()) * CTA_KEYS);
  }

  template <int COUNT>
  DEVICE void store(const float (&grads)[COUNT], float factor, u32 at, u32 warpgroup, int tensor,
                    const TensorMap& map) {
    const Note note = note_at(p, tensor, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0 + first);
    store_gradients(grads, factor, at, COLUMN_BYTES, Barrier::WARPGROUP + warpgroup, map, t.n0 + first,
                    t.part, t.b, note);
    if (tid == 0) tma_store_wait();
  }
};

struct PairValueConsumer : PairConsumer {
  float s[SCORES], dv[GRADS];
  u32 w[SCORES / 2];

  DEVICE PairValueConsumer(const BackwardParams& p, const BackwardShared& sm) : PairConsumer(p, sm) {}

  DEVICE void step(int, int m, bool edge) {
    const u32 q_full = barrier(sm.q_full, i()), q_empty = barrier(sm.q_empty, i());
    mbar_wait(q_full, phase());
    wgmma_fence();
    wgmma_scores_start(s, cluster_descriptor(sm.k, 16), cluster_descriptor(slot_at<Q_BYTES>(sm.q, i()), 16));
    wgmma_commit();
    wgmma_wait<2>();  // for dV of the last block, by halves
    if (blocks > 0) mbar_arrive(grad_half(-2).empty);
    wgmma_wait<1>();
    if (blocks > 0) mbar_arrive(grad_half(-1).empty);
    wgmma_wait<0>();
    fence_operand(s);
    scores_to_weights(s, m, edge, slot_at<ROW_BYTES>(sm.lse, i()), slot_at<RANGE_BYTES>(sm.ranges, i()));
    fence_async_shared();  // as in forward.cu
    mbar_arrive(q_empty);
    mbar_wait(weights_empty(sm), i() ^ 1);
#pragma unroll
    for (int e = 0; e < SCORES; e += 4) {
      store_shared(weights_address(sm, e), make_float4(s[e], s[e + 1], s[e + 2], s[e + 3]));
      w[e / 2] = pack(s[e], s[e + 1]), w[e / 2 + 1] = pack(s[e + 2], s[e + 3]);
    }
    mbar_arrive(weights_full(sm));
    const GradHalf front = grad_half(0), back = grad_half(1);
    mbar_wait(front.full, front.phase);
    half_product<0>(dv, w, front.at);
    wgmma_commit();
    mbar_wait(back.full, back.phase);
    half_product<1>(dv, w, back.at);
    wgmma_commit();
    blocks++;
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < GRADS; i++) dv[i] = 0.f;
    wait_for_keys();
    for_each_query_block(*this);
    wgmma_wait<0>();
    fence_operand(dv);
#if SPLITS_GROUP
    write_key_sums(key_sums_of(p, t) + BLOCK_N * HEAD_FEATURES + first * VALUE_FEATURES + tid * 4, dv);
#else
    named_barrier_sync(Barrier::GRAD_OUT_READ, 256);  // no product of the keys' warpgroup reads dO
    store(dv, value_factor(), sm.grad_out, VALUES, DV, p.dv);
#endif
  }
};

struct PairKeyConsumer : PairConsumer {
  float dp[SCORES], dk[GRADS];
  u32 ds[SCORES / 2];

  DEVICE PairKeyConsumer(const BackwardParams& p, const BackwardShared& sm) : PairConsumer(p, sm) {}

  // Replaces the gradients of weights by those of scores.
  DEVICE void score_gradients(u32 delta) {
    const u32 row = opaque(delta + (lane & 3) * 8);
#pragma unroll
    for (int e = 0; e < SCORES; e += 4) {
      const float4 w = load_shared<float4>(weights_address(sm, e));
      const float2 d = deltas(row + e * 8);
      dp[e] = score_gradient(w.x, dp[e], d.x), dp[e + 1] = score_gradient(w.y, dp[e + 1], d.y);
      dp[e + 2] = score_gradient(w.z, dp[e + 2], d.x), dp[e + 3] = score_gradient(w.w, dp[e + 3], d.y);
    }
  }

  // Passes dS to the dQ warpgroups of both CTAs, after all threads have stored it. The barrier that receives
  // the other CTA's bytes expects as many bytes as are sent to the other CTA.
  DEVICE void send() {
    named_barrier_sync(Barrier::WARPGROUP + KEYS, 128);
    if (tid == 0) {
      mbar_arrive_expect(ds_full(sm), DS_BYTES);
      bulk_send(ds_at(sm, true), ds_at(sm, false), DS_BYTES, ds_full(sm), cta_rank() ^ 1);
    }
  }

  DEVICE void step(int, int, bool) {
    const GradHalf front = grad_half(0), back = grad_half(1);
    mbar_wait(front.full, front.phase);
    wgmma_fence();
    wgmma_value_scores_start(dp, cluster_descriptor(sm.v, 16), cluster_descriptor(front.at, 16));
    mbar_wait(back.full, back.phase);
    wgmma_fence();
    const u32 v = sm.v + HALF / 64 * COLUMN_BYTES;
    wgmma_value_scores(dp, cluster_descriptor(v, 16), cluster_descriptor(back.at, 16));
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(dp);
    mbar_wait(weights_full(sm), i());
    score_gradients(back.delta);
    mbar_arrive(weights_empty(sm));
    fence_async_shared();
    mbar_arrive(front.empty);
    mbar_arrive(back.empty);
    pack_fragments(ds, dp);
    const u32 q = slot_at<Q_BYTES>(sm.q, i());
    mbar_wait(barrier(sm.q_full, i()), phase());
    half_product<0>(dk, ds, q);
    half_product<1>(dk, ds, q + HALF / 64 * COLUMN_BYTES);
    wgmma_commit();
    mbar_wait(ds_empty(sm), i() ^ 1);
    store_fragments(ds_at(sm, false), ds, DS_BYTES);
    fence_async_shared();
    send();
    wgmma_wait<0>();
    fence_operand(dk);
    fence_operand(ds);
    mbar_arrive(barrier(sm.q_empty, i()));
    blocks++;
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < GRADS; i++) dk[i] = 0.f;
    wait_for_keys();
#if HAS_KV_LENS
    clear_rows<CTA_KEYS, VALUE_DIM>(sm.v, keys_end(false), CTA_KEYS, Barrier::WARPGROUP + KEYS);
#endif
    for_each_query_block(*this);
#if SPLITS_GROUP
    write_key_sums(key_sums_of(p, t) + first * HEAD_FEATURES + tid * 4, dk);
#else
    named_barrier_arrive(Barrier::GRAD_OUT_READ, 256);
    // through the first block of Q: the last weights came after all products of the values' warpgroup with Q,
    // and no other warp of this one computes dK of it any more
    named_barrier_sync(Barrier::WARPGROUP + KEYS, 128);
    store(dk, p.scale, sm.q, KEYS, DK, p.dk);
#endif
  }
};

struct PairQueryConsumer : PairConsumer {
  float dq[SCORES];  // 64 columns

  DEVICE PairQueryConsumer(const BackwardParams& p, const BackwardShared& sm) : PairConsumer(p, sm) {}

  // 64 columns at a time, since dK and dV need the registers.
  DEVICE void step(int h, int m, bool) {
    mbar_wait(ds_full(sm), i());
    const long long block = (long long)(t.b * p.Hq + h) * p.m_blocks + m;
    float* const to = p.sums + block * (BLOCK_M * SUM_FEATURES) + (cta_rank() * BLOCK_M * HALF + tid * 4);
#pragma unroll 1
    for (int x = 0; x < HALF / 64; x++) {
      const u32 own = sm.k + (cta_rank() * (HALF / 64) + x) * COLUMN_BYTES;
      const u32 others = other_keys(sm) + x * COLUMN_BYTES;
      wgmma_fence();
      wgmma_queries_start(dq, cluster_descriptor(ds_at(sm, false), DS_BYTES),
                          cluster_descriptor(own, COLUMN_BYTES));
      wgmma_queries(dq, cluster_descriptor(ds_at(sm, true), DS_BYTES),
                    cluster_descriptor(others, COLUMN_BYTES));
      wgmma_commit();
      wgmma_wait<0>();
      fence_operand(dq);
      if (x == HALF / 64 - 1) release_in_pair(ds_empty(sm));
      add_fragments<0, SCORES>(to + x * (SCORES * 128), dq);
    }
    blocks++;
  }

  DEVICE void run() {
    wait_for_keys();
#if HAS_KV_LENS  // such keys' scores are masked, so S may read either value
    clear_rows<CTA_KEYS, HEAD_DIM>(sm.k, keys_end(false), CTA_KEYS, Barrier::WARPGROUP + QUERIES);
    clear_rows<CTA_KEYS, HALF>(other_keys(sm), keys_end(true), CTA_KEYS, Barrier::WARPGROUP + QUERIES);
#endif
    for_each_query_block(*this);
  }
};

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
