// dK and dV for head dimensions for which the registers of a warpgroup cannot hold both, or one of them and
// dQ. One CTA per block of 64 keys; its two consumers split the work by product. One computes the scores and
// accumulates dV, the other computes dP and accumulates dK. The first passes the weights, in fp32, to the
// second through two buffers of shared memory (one with a bias). Both the weights and their gradients leave
// the accumulators as the register operand of the next product.
//
// One step of both consumers, over time, for block m of the queries. The last product of a step runs until
// the scores of the next one are there.
//
//   values      | S(m) = K.Q^T   | P(m), to the keys' consumer             | dV += P(m).dO(m)
//   keys        | dP(m) = V.dO^T |       | dS(m) = P (dP - delta)          | dK += dS(m).Q(m)
//   mbarriers   q_full  do_full   weights_full    weights_empty, do_empty    q_empty
//
// Compile-time: what backward.cuh has
#include "key_consumer.cuh"

constexpr u32 WEIGHTS_BYTES = BLOCK_M * BLOCK_N * 4;
constexpr int BUFFERS = EXCHANGE_BYTES / WEIGHTS_BYTES;
static_assert(BLOCK_N == 64 && BUFFERS * WEIGHTS_BYTES == EXCHANGE_BYTES && BUFFERS <= 2,
              "one warpgroup's rows");

DEVICE u32 weights_full(const BackwardShared& sm, int i) { return sm.extra + 8 * i; }
DEVICE u32 weights_empty(const BackwardShared& sm, int i) { return sm.extra + 16 + 8 * i; }

// The address of elements `i` to `i + 3` of a thread's accumulator in an exchange buffer. The same thread
// index of both consumers holds the same elements.
DEVICE u32 weights_address(const BackwardShared& sm, int buffer, int i) {
  return sm.exchange + buffer * WEIGHTS_BYTES + (i / 4 * 128 + (threadIdx.x & 127)) * 16;
}

struct ValueConsumer : KeyConsumerBase {
  PipelineState<BUFFERS> exchange;
  u32 operand_barrier = 0;  // the barrier that releases the operands of the product in flight
  float s[SCORES], dv[VALUE_FEATURES / 2];
  u32 w[SCORES / 2];

  DEVICE ValueConsumer(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t)
      : KeyConsumerBase(p, sm, t, 0) {}

  DEVICE void step(int h, int m, bool edge) {
    const u32 i = ring.stage;
    read_mask(h, m);
    mbar_wait(barrier(sm.q_full, i), ring.phase);
    score_product<HEAD_FEATURES>(s, sm.k, slot_at<Q_BYTES>(sm.q, i));
    find_dropped(slot_at<SEED_BYTES>(sm.row_seeds, i), barrier(sm.q_full, i));
    wgmma_wait<1>();
    if (operand_barrier) mbar_arrive(operand_barrier);
    wgmma_wait<0>();
    fence_operand(s);
    float tanh_grad[SCORES];
    apply_softcap(s, tanh_grad);
    scores_to_weights(s, m, edge, slot_at<ROW_BYTES>(sm.lse, i), slot_at<RANGE_BYTES>(sm.ranges, i));
    fence_async_shared();  // as in forward.cu
    mbar_arrive(barrier(sm.q_empty, i));
    pack_weights(w, s);
    multiply_by_softcap_grad(s, tanh_grad);
    mbar_wait(weights_empty(sm, exchange.stage), exchange.phase ^ 1);
#pragma unroll
    for (int e = 0; e < SCORES; e += 4)
      store_shared(weights_address(sm, exchange.stage, e), make_float4(s[e], s[e + 1], s[e + 2], s[e + 3]));
    mbar_arrive(weights_full(sm, exchange.stage));
    exchange.next();
    mbar_wait(barrier(sm.do_full, i), ring.phase);
    wgmma_fence();
    wgmma_value_grads(dv, w, descriptor_base(slot_at<DO_BYTES>(sm.grad_out, i), BLOCK_M * 128));
    wgmma_commit();
#if BIAS_BITS  // ptxas would serialise this product if it were in flight during the reads of the bias
               // (C7515)
    wgmma_wait<0>();
    fence_operand(dv);
#endif
    operand_barrier = barrier(sm.do_empty, i);
    ring.next();
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < VALUE_FEATURES / 2; i++) dv[i] = 0.f;
    if (t.first < t.last) mbar_wait(sm.kv_full, 0);
    for_each_query_block(*this);
    wgmma_wait<0>();
    fence_operand(dv);
#if SPLITS_GROUP
    write_key_sums(key_sums_of(p, t) + BLOCK_N * HEAD_FEATURES + tid * 4, dv);
#else
    named_barrier_arrive(Barrier::K_READ, 128 * CONSUMERS);
    named_barrier_sync(Barrier::V_READ, 128 * CONSUMERS);
    const Note note = note_at(p, DV, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0);
    store_gradients(dv, value_factor(), sm.v, BLOCK_N * 128, Barrier::WARPGROUP, p.dv, t.n0, t.part, t.b,
                    note);
    if (tid == 0) tma_store_wait();
#endif
  }
};

struct KeyConsumer : KeyConsumerBase {
  PipelineState<BUFFERS> exchange;
  u32 operand_barrier = 0;
  float dp[SCORES], dk[HEAD_FEATURES / 2];
  u32 ds[SCORES / 2];

  DEVICE KeyConsumer(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t)
      : KeyConsumerBase(p, sm, t, 0) {}

  DEVICE void step(int h, int m, bool edge) {
    const u32 i = ring.stage, delta = slot_at<ROW_BYTES>(sm.delta, i);
    mbar_wait(barrier(sm.do_full, i), ring.phase);
    score_product<VALUE_FEATURES>(dp, sm.v, slot_at<DO_BYTES>(sm.grad_out, i));
    wgmma_wait<1>();
    if (operand_barrier) mbar_arrive(operand_barrier);
    wgmma_wait<0>();
    fence_operand(dp);
    mbar_wait(weights_full(sm, exchange.stage), exchange.phase);
#pragma unroll
    for (int e = 0; e < SCORES; e += 4) {
      const float4 w = load_shared<float4>(weights_address(sm, exchange.stage, e));
      const float2 d = deltas(delta + (e * 2 + (lane & 3) * 2) * 4);
      dp[e] = score_gradient(w.x, dp[e], d.x), dp[e + 1] = score_gradient(w.y, dp[e + 1], d.y);
      dp[e + 2] = score_gradient(w.z, dp[e + 2], d.x), dp[e + 3] = score_gradient(w.w, dp[e + 3], d.y);
    }
    mbar_arrive(weights_empty(sm, exchange.stage));
    fence_async_shared();
    mbar_arrive(barrier(sm.do_empty, i));
    exchange.next();
    pack_fragments(ds, dp);
    mbar_wait(barrier(sm.q_full, i), ring.phase);
    wgmma_fence();
    wgmma_grads(dk, ds, descriptor_base(slot_at<Q_BYTES>(sm.q, i), BLOCK_M * 128));
    wgmma_commit();
    operand_barrier = barrier(sm.q_empty, i);
    ring.next();
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < HEAD_FEATURES / 2; i++) dk[i] = 0.f;
    if (t.first < t.last) mbar_wait(sm.kv_full, 0);
#if HAS_KV_LENS  // K is read for the scores only, and those are masked
    if (t.keys < t.n0 + BLOCK_N)
      clear_rows<BLOCK_N, VALUE_DIM>(sm.v, max(0, t.keys - t.n0), BLOCK_N, Barrier::WARPGROUP + 1);
#endif
    for_each_query_block(*this);
    wgmma_wait<0>();
    fence_operand(dk);
#if SPLITS_GROUP
    write_key_sums(key_sums_of(p, t) + tid * 4, dk);
#else
    named_barrier_arrive(Barrier::V_READ, 128 * CONSUMERS);
    named_barrier_sync(Barrier::K_READ, 128 * CONSUMERS);
    const Note note = note_at(p, DK, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0);
    store_gradients(dk, p.scale, sm.k, BLOCK_N * 128, Barrier::WARPGROUP + 1, p.dk, t.n0, t.part, t.b, note);
    if (tid == 0) tma_store_wait();
#endif
  }
};

// Executed by one warp.
DEVICE void produce(const BackwardParams& p, const BackwardShared& sm, const KeyTile& t) {
  const bool leader = elect_one();
  if (leader && t.first < t.last) load_keys(p, sm, t);
  wait_for_prior_grid();  // also without queries: what waits for this kernel relies on `preprocess`, which
                          // writes nothing read above
  launch_dependent_grids();  // only now: `backward_queries` reads what `preprocess` writes, without a wait
  PipelineState<STAGES> ring;
  PipelineState<1> bias;
  produce_queries(p, sm, t, leader, ring, bias);
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardShared sm(smem_address(shared));
  if (threadIdx.x == 0) {
    sm.init();
    for (int i = 0; i < BUFFERS; i++)
      mbar_init(weights_full(sm, i), 128), mbar_init(weights_empty(sm, i), 128);
    mbar_init_fence();
  }
  __syncthreads();
  const KeyTile t = tile_at(p, blockIdx.x);
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x < 32) produce(p, sm, t);
  } else if (warpgroup == 1) {
    register_alloc<240>();
    ValueConsumer consumer(p, sm, t);
    consumer.run();
  } else {
    register_alloc<240>();
    KeyConsumer consumer(p, sm, t);
    consumer.run();
  }
}
