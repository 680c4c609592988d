// Attention backward in one pass, a block of keys after the other in persistent CTAs: the next one's keys come while the last one's gradients leave.
// Warpgroup 0 copies; each consumer warpgroup owns 64 keys and keeps their dK and dV in registers while the queries of the whole group of heads pass by.
// Scores are computed transposed, so that weights and their gradients leave the accumulators as the register operand of the next product. dQ needs all
// keys of the block: the gradients of the scores meet in shared memory, each consumer multiplies them with its half of K's columns and adds the result
// to global memory in fp32, out of registers: shared memory has no time to spare. That happens a step later: neither consumer then waits for the other
// as long as it is less than a step ahead.
// Those additions come in no fixed order: without ADDS_DQ, dQ is left to backward_queries.cu.
// Compile-time, beside backward.cuh: ADDS_DQ

constexpr int GRADS = HEAD_DIM / 2, QUERY_GRADS = BLOCK_M * HEAD_DIM / 256;
constexpr u32 DS_BYTES = BLOCK_N * BLOCK_M * 2;
constexpr bool SPLITS_ROWS = BLOCK_M == 128;  // of dQ a consumer has 64 queries, or else half the columns
constexpr u32 STORED_BARRIER = OWN_BARRIER + CONSUMERS;  // of each consumer and buffer of gradients of scores
static_assert(BLOCK_N == 64 * CONSUMERS && VALUE_DIM == HEAD_DIM, "halves of the head dim");
static_assert(HEAD_DIM <= 2 * BLOCK_M, "dK leaves by two buffers of gradients of scores");

DEVICE u32 kv_empty(const Smem& sm) { return sm.own; }

// With the phase of `kv_full` for the tile after.
DEVICE void publish(const Smem& sm, const Tile& t, u32 phase) {
  store_shared(sm.tile, make_int4(t.n0, t.part, t.b, t.keys));
  store_shared(sm.tile + 16, make_int4(t.first, t.last, phase, 0));
}

DEVICE u32 phase_after(const Smem& sm) { return load_shared<u32>(sm.tile + 24); }

DEVICE Tile published(const Smem& sm) {
  const int4 x = load_shared<int4>(sm.tile), y = load_shared<int4>(sm.tile + 16);
  return {uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w), uniform(y.x), uniform(y.y)};
}

struct Consumer : KeyRows {
  const int c;
  u32 buffer = 0;
  int before = -1;  // the last step's block of queries, of all heads'
  float s[SCORES], dp[SCORES], dk[GRADS], dv[GRADS], dq[QUERY_GRADS];
  u32 w[SCORES / 2], ds[SCORES / 2];

  DEVICE Consumer(const Params& p, const Smem& sm, int c) : KeyRows(p, sm, {}, c * 64), c(c) {}

  DEVICE void gradient_product(float (&d)[GRADS], u32 (&a)[SCORES / 2], u32 queries) {
    wgmma_fence();
    wgmma_grads(d, a, descriptor_base(queries, BLOCK_M * 128));
    wgmma_commit();
  }

  DEVICE void query_product(u32 ds_at) {
    const u32 columns = SPLITS_ROWS ? sm.k : sm.k + (c * HEAD_DIM / 2 / 64) * BLOCK_N * 128 + (c * HEAD_DIM / 2 % 64) * 2;
    if (SPLITS_ROWS) ds_at += c * BLOCK_N * 128;
    wgmma_fence();
    wgmma_queries_start(dq, descriptor_base(ds_at, BLOCK_N * 128), descriptor_base(columns, BLOCK_N * 128));
    wgmma_commit();
  }

  // The gradient of the scores, in dp.
  DEVICE void score_gradients(u32 delta) {
    const u32 row = base_of(delta + (lane & 3) * 8);
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 d = deltas(row + i * 8);
      dp[i] = score_gradient(s[i], dp[i], d.x), dp[i + 1] = score_gradient(s[i + 1], dp[i + 1], d.y);
      dp[i + 2] = score_gradient(s[i + 2], dp[i + 2], d.x), dp[i + 3] = score_gradient(s[i + 3], dp[i + 3], d.y);
    }
  }

  // To the sums of a block of queries.
  DEVICE void add_query_gradients(long long block) {
    add_fragments(p.sums + block * (BLOCK_M * HEAD_DIM) + base_of(c * 128 * QUERY_GRADS + tid * 4), dq);
  }

  // dQ of the last step, once the other consumer has stored its gradients of scores.
  DEVICE void delayed_product(u32 from) {
    named_sync(STORED_BARRIER + (c ^ 1) * 2 + from, 128 * CONSUMERS);
    query_product(sm.exchange + from * DS_BYTES);
  }

  // Before the arrival this consumer must have ended its products from the other buffer.
  DEVICE void tell_stored(u32 to) {
    fence_async_smem();
    named_arrive(STORED_BARRIER + c * 2 + to, 128 * CONSUMERS);
  }

  // After a wait for dK and dV: till then their operands keep their registers.
  DEVICE void end_products() {
    pin(dk);
    pin(dv);
    pin(ds);
  }

  // No read is in flight: what each gave went into a product that was waited for.
  DEVICE void release(u32 stage) {
    mbar_arrive(sm.q_empty + 8 * stage);
    mbar_arrive(sm.do_empty + 8 * stage);
  }

  DEVICE void step(int h, int m, bool edge) {
    const u32 i = ring.stage, queries = sm.q + i * Q_BYTES, grads = sm.grad_out + i * DO_BYTES;
    read_mask(h, m);
    mbar_wait(sm.q_full + 8 * i, ring.phase);
    score_product<HEAD_DIM>(s, sm.k, queries);
    mbar_wait(sm.do_full + 8 * i, ring.phase);
    score_product<VALUE_DIM>(dp, sm.v, grads);
    find_dropped(sm.row_keys + i * KEY_BYTES, sm.do_full + 8 * i);
    wgmma_wait<1>();
    pin(s);
#if HAS_SOFTCAP
    float slack[SCORES];
#pragma unroll
    for (int e = 0; e < SCORES; e++) s[e] = capped(s[e] * p.score_scale), slack[e] = 1.f - s[e] * s[e];
#endif
    weights(s, m, edge, sm.lse + i * ROW_BYTES, sm.runs + i * RUN_BYTES);
    pack_kept(w, s);
    pin(w);
    mbar_wait(sm.do_full + 8 * i, ring.phase);  // over: it ends a basic block, in which ptxas would wait for dP before most exponentials
    wgmma_wait<0>();
    pin(dp);
    gradient_product(dv, w, grads);
    score_gradients(sm.delta + i * ROW_BYTES);
#if HAS_SOFTCAP
#pragma unroll
    for (int e = 0; e < SCORES; e++) dp[e] *= slack[e];
#endif
    pack_all(ds, dp);
#if ADDS_DQ
    const long long block = (long long)(t.b * p.Hq + h) * p.m_blocks + m;
    const u32 own = buffer;
    const u32 ds_at = sm.exchange + buffer * DS_BYTES;
    buffer ^= 1;
    if (before >= 0) {
      delayed_product(buffer);
      store_fragments(ds_at + first * 128, ds, BLOCK_N * 128);
      gradient_product(dk, ds, queries);
      wgmma_wait<1>();
      pin(dq);
      tell_stored(own);
      add_query_gradients(before);
    } else {  // apart: what dQ has in one branch only would take registers in all of the loop
      store_fragments(ds_at + first * 128, ds, BLOCK_N * 128);
      gradient_product(dk, ds, queries);
      tell_stored(own);
    }
    before = block;
#else
    gradient_product(dk, ds, queries);
#endif
    wgmma_wait<0>();
    end_products();
    release(i);
    ring.next();
  }

  // dK leaves by this consumer's rows of the gradients of scores, dV by what lies behind those: the next keys come to K and V at once.
  DEVICE u32 end_tile() {
    t = published(sm);
    const u32 phase = phase_after(sm);
#if ADDS_DQ
    if (before >= 0) {
      delayed_product(buffer ^ 1);
      wgmma_wait<0>();
      pin(dq);
      mbar_arrive(kv_empty(sm));
      add_query_gradients(before);
      before = -1;
    } else {
      mbar_arrive(kv_empty(sm));
    }
#elif SPLITS_GROUP
    mbar_arrive(kv_empty(sm));
#endif
#if SPLITS_GROUP
    float* const sums = key_sums_of(p, t) + base_of(c * 128 * GRADS + tid * 4);
    leave_fragments(sums, dk);
    leave_fragments(sums + BLOCK_N * HEAD_DIM, dv);
#elif ADDS_DQ
    named_sync(ALL_BARRIER, 128 * CONSUMERS);  // every consumer has read all gradients of scores
    store(dv, value_factor(), sm.exchange + 2 * DS_BYTES + first * 128, BLOCK_N * 128, DV, p.dv);
    store(dk, p.scale, sm.exchange + first * 128, BLOCK_N * 128, DK, p.dk);
    if (tid == 0) tma_store_wait_read();
    named_sync(OWN_BARRIER + c, 128);
#else
    store(dv, value_factor(), sm.v + first * 128, BLOCK_N * 128, DV, p.dv);
    store(dk, p.scale, sm.k + first * 128, BLOCK_N * 128, DK, p.dk);
    if (tid == 0) tma_store_wait_read();
    mbar_arrive(kv_empty(sm));
#endif
    return phase;
  }

  DEVICE void work() {
    for (u32 phase = 0;;) {
      mbar_wait(sm.kv_full, phase);
      t = published(sm);
      if (t.n0 < 0) break;
#pragma unroll
      for (int i = 0; i < GRADS; i++) dk[i] = dv[i] = 0.f;
#if HAS_KV_LENS
      if (t.keys < t.n0 + BLOCK_N) clear_keys();
#endif
      meet_queries(*this);
      phase = end_tile();
    }
    if (tid == 0) tma_store_wait();
  }

  // Of this consumer's rows; the other's are cleared before its gradients of scores are there.
  DEVICE void clear_keys() {
    const int from = max(first, t.keys - t.n0);
    clear_rows<BLOCK_N, HEAD_DIM>(sm.k, from, first + 64, OWN_BARRIER + c);
    clear_rows<BLOCK_N, VALUE_DIM>(sm.v, from, first + 64, OWN_BARRIER + c);
  }

  DEVICE void store(const float (&grads)[GRADS], float factor, u32 at, u32 column_bytes, int tensor, const TensorMap& map) {
    u32* const note = note_at(p, tensor, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0 + first);
    store_gradients(grads, factor, at, column_bytes, OWN_BARRIER + c, map, t.n0 + first, t.part, t.b, note);
  }
};

// One warp. What it publishes about a tile stands as long as the tile's keys do.
DEVICE void produce(const Params& p, const Smem& sm) {
  const bool leader = elected();
  const int tiles = p.n_blocks * p.B * p.Hkv * p.parts;
  Ring<STAGES> ring;
  Ring<1> bias;
  u32 phase = 1;
  for (int i = blockIdx.x; i < tiles; phase ^= 1) {
    const Tile t = tile_at(p, i);
    mbar_wait(kv_empty(sm), phase);
    if (leader) {
      publish(sm, t, phase);
      if (t.first < t.last) load_keys(p, sm, t); else mbar_arrive(sm.kv_full);
    }
    wait_for_last_grid();  // `prepare` writes nothing read above
    produce_queries(p, sm, t, leader, ring, bias);
    if (leader) i = gridDim.x + atomicAdd(p.counter, 1);  // late: a tile claimed before could wait here while other CTAs have none
    i = __shfl_sync(~0u, i, __ffs(__ballot_sync(~0u, leader)) - 1);
  }
  mbar_wait(kv_empty(sm), phase);
  if (leader) {
    publish(sm, {-1, 0, 0, 0, 0, 0}, 0);
    mbar_arrive(sm.kv_full);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1) backward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Smem sm(smem_address(shared));
  next_grid_may_start();
  if (threadIdx.x == 0) {
    sm.init();
    mbar_init(kv_empty(sm), 128 * CONSUMERS);
    mbar_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_release<24>();
    if (threadIdx.x < 32) produce(p, sm);
  } else {
    register_claim<240>();
    Consumer consumer(p, sm, warpgroup - 1);
    consumer.work();
  }
}
