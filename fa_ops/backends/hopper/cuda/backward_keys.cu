// dK and dV of head dims for which registers hold neither both nor dQ beside them: one CTA per block of 64 keys, and two consumers that share the
// block by product. One computes the scores and keeps dV, the other the gradients of the weights and keeps dK; the weights, in fp32, go from the first
// to the second through two buffers of shared memory, one where a bias leaves no more room. Weights and gradients leave the accumulators as the register
// operand of the next product.
// Compile-time: what backward.cuh has

constexpr u32 WEIGHTS_BYTES = BLOCK_M * BLOCK_N * 4;
constexpr int BUFFERS = EXCHANGE_BYTES / WEIGHTS_BYTES;
constexpr u32 K_READ_BARRIER = ALL_BARRIER, V_READ_BARRIER = OWN_BARRIER + CONSUMERS;
static_assert(BLOCK_N == 64 && BUFFERS * WEIGHTS_BYTES == EXCHANGE_BYTES && BUFFERS <= 2, "one warpgroup's rows");

DEVICE u32 weights_full(const Smem& sm, int i) { return sm.own + 8 * i; }
DEVICE u32 weights_empty(const Smem& sm, int i) { return sm.own + 16 + 8 * i; }

// Where a thread's `i`-th accumulator elements and the three after them lie in a buffer: both consumers hold the same ones.
DEVICE u32 weights_at(const Smem& sm, int buffer, int i) { return sm.exchange + buffer * WEIGHTS_BYTES + (i / 4 * 128 + (threadIdx.x & 127)) * 16; }

struct ValueConsumer : KeyRows {
  Ring<BUFFERS> exchange;
  u32 held = 0;  // the barrier that frees what the product in flight reads
  float s[SCORES], dv[VALUE_DIM / 2];
  u32 w[SCORES / 2];

  DEVICE ValueConsumer(const Params& p, const Smem& sm, const Tile& t) : KeyRows(p, sm, t, 0) {}

  DEVICE void step(int h, int m, bool edge) {
    const u32 i = ring.stage;
    read_mask(h, m);
    mbar_wait(sm.q_full + 8 * i, ring.phase);
    score_product<HEAD_DIM>(s, sm.k, sm.q + i * Q_BYTES);
    find_dropped(sm.row_keys + i * KEY_BYTES, sm.q_full + 8 * i);
    wgmma_wait<1>();
    if (held) mbar_arrive(held);
    wgmma_wait<0>();
    pin(s);
#if HAS_SOFTCAP
    float slack[SCORES];
#pragma unroll
    for (int e = 0; e < SCORES; e++) s[e] = capped(s[e] * p.score_scale), slack[e] = 1.f - s[e] * s[e];
#endif
    weights(s, m, edge, sm.lse + i * ROW_BYTES, sm.runs + i * RUN_BYTES);
    fence_async_smem();  // as in forward.cu
    mbar_arrive(sm.q_empty + 8 * i);
    pack_kept(w, s);
#if HAS_SOFTCAP
#pragma unroll
    for (int e = 0; e < SCORES; e++) s[e] *= slack[e];
#endif
    mbar_wait(weights_empty(sm, exchange.stage), exchange.phase ^ 1);
#pragma unroll
    for (int e = 0; e < SCORES; e += 4)
      store_shared(weights_at(sm, exchange.stage, e), make_float4(s[e], s[e + 1], s[e + 2], s[e + 3]));
    mbar_arrive(weights_full(sm, exchange.stage));
    exchange.next();
    mbar_wait(sm.do_full + 8 * i, ring.phase);
    wgmma_fence();
    wgmma_value_grads(dv, w, descriptor_base(sm.grad_out + i * DO_BYTES, BLOCK_M * 128));
    wgmma_commit();
#if BIAS_BITS  // in flight beside what reads the next block's bias, ptxas would wait for it product by product (C7515)
    wgmma_wait<0>();
    pin(dv);
#endif
    held = sm.do_empty + 8 * i;
    ring.next();
  }

  DEVICE void work() {
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; i++) dv[i] = 0.f;
    if (t.first < t.last) mbar_wait(sm.kv_full, 0);
    meet_queries(*this);
    wgmma_wait<0>();
    pin(dv);
#if SPLITS_GROUP
    leave_fragments(key_sums_of(p, t) + BLOCK_N * HEAD_DIM + tid * 4, dv);
#else
    named_arrive(K_READ_BARRIER, 128 * CONSUMERS);
    named_sync(V_READ_BARRIER, 128 * CONSUMERS);
    u32* const note = note_at(p, DV, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0);
    store_gradients(dv, value_factor(), sm.v, BLOCK_N * 128, OWN_BARRIER, p.dv, t.n0, t.part, t.b, note);
    if (tid == 0) tma_store_wait();
#endif
  }
};

struct KeyConsumer : KeyRows {
  Ring<BUFFERS> exchange;
  u32 held = 0;
  float dp[SCORES], dk[HEAD_DIM / 2];
  u32 ds[SCORES / 2];

  DEVICE KeyConsumer(const Params& p, const Smem& sm, const Tile& t) : KeyRows(p, sm, t, 0) {}

  DEVICE void step(int h, int m, bool edge) {
    const u32 i = ring.stage, delta = sm.delta + i * ROW_BYTES;
    mbar_wait(sm.do_full + 8 * i, ring.phase);
    score_product<VALUE_DIM>(dp, sm.v, sm.grad_out + i * DO_BYTES);
    wgmma_wait<1>();
    if (held) mbar_arrive(held);
    wgmma_wait<0>();
    pin(dp);
    mbar_wait(weights_full(sm, exchange.stage), exchange.phase);
#pragma unroll
    for (int e = 0; e < SCORES; e += 4) {
      const float4 w = load_shared<float4>(weights_at(sm, exchange.stage, e));
      const float2 d = deltas(delta + (e * 2 + (lane & 3) * 2) * 4);
      dp[e] = score_gradient(w.x, dp[e], d.x), dp[e + 1] = score_gradient(w.y, dp[e + 1], d.y);
      dp[e + 2] = score_gradient(w.z, dp[e + 2], d.x), dp[e + 3] = score_gradient(w.w, dp[e + 3], d.y);
    }
    mbar_arrive(weights_empty(sm, exchange.stage));
    fence_async_smem();
    mbar_arrive(sm.do_empty + 8 * i);
    exchange.next();
    pack_all(ds, dp);
    mbar_wait(sm.q_full + 8 * i, ring.phase);
    wgmma_fence();
    wgmma_grads(dk, ds, descriptor_base(sm.q + i * Q_BYTES, BLOCK_M * 128));
    wgmma_commit();
    held = sm.q_empty + 8 * i;
    ring.next();
  }

  DEVICE void work() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dk[i] = 0.f;
    if (t.first < t.last) mbar_wait(sm.kv_full, 0);
#if HAS_KV_LENS  // of K the scores alone are made here, and those of such keys are masked
    if (t.keys < t.n0 + BLOCK_N) clear_rows<BLOCK_N, VALUE_DIM>(sm.v, max(0, t.keys - t.n0), BLOCK_N, OWN_BARRIER + 1);
#endif
    meet_queries(*this);
    wgmma_wait<0>();
    pin(dk);
#if SPLITS_GROUP
    leave_fragments(key_sums_of(p, t) + tid * 4, dk);
#else
    named_arrive(V_READ_BARRIER, 128 * CONSUMERS);
    named_sync(K_READ_BARRIER, 128 * CONSUMERS);
    u32* const note = note_at(p, DK, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0);
    store_gradients(dk, p.scale, sm.k, BLOCK_N * 128, OWN_BARRIER + 1, p.dk, t.n0, t.part, t.b, note);
    if (tid == 0) tma_store_wait();
#endif
  }
};

// One warp.
DEVICE void produce(const Params& p, const Smem& sm, const Tile& t) {
  const bool leader = elected();
  if (leader && t.first < t.last) load_keys(p, sm, t);
  wait_for_last_grid();  // `prepare` writes nothing read above; without queries too, as what waits for this kernel counts on that one
  Ring<STAGES> ring;
  Ring<1> bias;
  produce_queries(p, sm, t, leader, ring, bias);
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1) backward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Smem sm(smem_address(shared));
  if (threadIdx.x == 0) {
    sm.init();
    for (int i = 0; i < BUFFERS; i++) mbar_init(weights_full(sm, i), 128), mbar_init(weights_empty(sm, i), 128);
    mbar_init_fence();
  }
  __syncthreads();
  const Tile t = tile_at(p, blockIdx.x);
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_release<24>();
    if (threadIdx.x < 32) produce(p, sm, t);
  } else if (warpgroup == 1) {
    register_claim<240>();
    ValueConsumer consumer(p, sm, t);
    consumer.work();
  } else {
    register_claim<240>();
    KeyConsumer consumer(p, sm, t);
    consumer.work();
  }
}
