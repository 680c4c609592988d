// Attention backward in one pass, after FlashAttention-3: persistent CTAs own a block of keys at a time, and
// the next block's keys are copied while the last one's gradients are written. Warpgroup 0 produces; each
// consumer owns 64 keys and keeps their dK and dV in registers while the queries of a group of heads pass.
// Scores are computed transposed, so that weights and their gradients leave the accumulators as the register
// operand of the next product.
//
// dQ needs all keys of the block: dS of both consumers meets in shared memory, each multiplies it with its
// half of K's columns and adds the result to global memory in fp32, from registers, as shared memory has no
// time to spare. A half must not cross from one column of 64 features into the next: where it would, with
// ALTERNATES, the consumers compute whole blocks of dQ in turn. That product is one step late, so that a
// consumer does not wait for the other while they are less than a step apart. The additions have no fixed
// order: without ADDS_DQ, backward_queries.cu computes dQ.
#include "key_consumer.cuh"

constexpr int GRADS = HEAD_FEATURES / 2, QUERY_GRADS = ALTERNATES ? GRADS : BLOCK_M * SUM_FEATURES / 256;
constexpr u32 DS_BYTES = BLOCK_N * BLOCK_M * 2;
constexpr bool SPLITS_ROWS = BLOCK_M == 128;  // of dQ a consumer has 64 queries
constexpr bool SPLITS_COLUMNS = !(SPLITS_ROWS || ALTERNATES);  // it has half the columns
// of those the second half ends with as many that do not exist
constexpr int UNUSED_GRADS = SPLITS_COLUMNS ? (SUM_FEATURES - HEAD_FEATURES) / 2 : 0;
static_assert(BLOCK_N == 64 * CONSUMERS && VALUE_FEATURES == HEAD_FEATURES, "halves of the head dim");
static_assert(HEAD_DIM <= 2 * BLOCK_M, "dK leaves by two buffers of gradients of scores");

DEVICE u32 kv_empty(const BackwardShared& sm) { return sm.extra; }

// Publishes a tile, with the phase of `kv_full` for the tile after it.
DEVICE void store_key_tile(const BackwardShared& sm, const KeyTile& t, u32 phase) {
  store_shared(sm.tile, make_int4(t.n0, t.part, t.b, t.keys));
  store_shared(sm.tile + 16, make_int4(t.first, t.last, phase, 0));
}

DEVICE u32 phase_after(const BackwardShared& sm) { return load_shared<u32>(sm.tile + 24); }

DEVICE KeyTile load_key_tile(const BackwardShared& sm) {
  const int4 x = load_shared<int4>(sm.tile), y = load_shared<int4>(sm.tile + 16);
  return {warp_uniform(x.x), warp_uniform(x.y), warp_uniform(x.z),
          warp_uniform(x.w), warp_uniform(y.x), warp_uniform(y.y)};
}

struct BackwardConsumer : KeyConsumerBase {
  const int c;
  u32 buffer = 0;
  // The block of queries of the last step, counted over all heads, if this consumer computes dQ of it. With
  // ALTERNATES these are the blocks whose dS is in buffer `c`.
  int previous = -1;
  float s[SCORES], dp[SCORES], dk[GRADS], dv[GRADS], dq[QUERY_GRADS];
  u32 w[SCORES / 2], ds[SCORES / 2];

  DEVICE BackwardConsumer(const BackwardParams& p, const BackwardShared& sm, int c)
      : KeyConsumerBase(p, sm, {}, c * 64), c(c) {}

  DEVICE void gradient_product(float (&d)[GRADS], u32 (&a)[SCORES / 2], u32 queries) {
    wgmma_fence();
    wgmma_grads(d, a, descriptor_base(queries, BLOCK_M * 128));
    wgmma_commit();
  }

  DEVICE void query_product(u32 ds_at) {
    constexpr int HALF = SUM_FEATURES / 2;
    const u32 columns = SPLITS_COLUMNS ? sm.k + (c * HALF / 64) * BLOCK_N * 128 + (c * HALF % 64) * 2 : sm.k;
    if (SPLITS_ROWS) ds_at += c * BLOCK_N * 128;
    wgmma_fence();
    wgmma_queries_start(dq, descriptor_base(ds_at, BLOCK_N * 128), descriptor_base(columns, BLOCK_N * 128));
    wgmma_commit();
  }

  // Computes the gradients of the scores, in dp.
  DEVICE void score_gradients(u32 delta) {
    const u32 row = opaque(delta + (lane & 3) * 8);
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 d = deltas(row + i * 8);
      dp[i] = score_gradient(s[i], dp[i], d.x), dp[i + 1] = score_gradient(s[i + 1], dp[i + 1], d.y);
      dp[i + 2] = score_gradient(s[i + 2], dp[i + 2], d.x),
             dp[i + 3] = score_gradient(s[i + 3], dp[i + 3], d.y);
    }
  }

  // Adds dQ to the sums of a block of queries.
  DEVICE void add_query_gradients(long long block) {
    const int half = ALTERNATES ? 0 : c;
    float* const to = p.sums + block * (BLOCK_M * SUM_FEATURES) + opaque(half * 128 * QUERY_GRADS + tid * 4);
    add_fragments<0, QUERY_GRADS - UNUSED_GRADS>(to, dq);
    if (UNUSED_GRADS > 0 && c == 0) add_fragments<QUERY_GRADS - UNUSED_GRADS, QUERY_GRADS>(to, dq);
  }

  // Issues the product for dQ of the last step, once the other consumer has stored its dS.
  DEVICE void delayed_query_product(u32 from) {
    named_barrier_sync(Barrier::DS_STORED + (c ^ 1) * 2 + from, 128 * CONSUMERS);
    query_product(slot_at<DS_BYTES>(sm.exchange, from));
  }

  // Signals that this consumer's dS is stored. Its products from the other buffer must have ended. With
  // ALTERNATES it does not signal a dS that this consumer alone reads.
  DEVICE void signal_stored(u32 to) {
    fence_async_shared();
    if (!ALTERNATES || to != c) named_barrier_arrive(Barrier::DS_STORED + c * 2 + to, 128 * CONSUMERS);
  }

  // After a wait for dK and dV: until then their operands keep their registers.
  DEVICE void end_products() {
    fence_operand(dk);
    fence_operand(dv);
    fence_operand(ds);
  }

  // No read is in flight: each went into a product that was waited for.
  DEVICE void release(u32 stage) {
    mbar_arrive(barrier(sm.q_empty, stage));
    mbar_arrive(barrier(sm.do_empty, stage));
  }

  DEVICE void step(int h, int m, bool edge) {
    const u32 i = ring.stage, queries = slot_at<Q_BYTES>(sm.q, i), grads = slot_at<DO_BYTES>(sm.grad_out, i);
    read_mask(h, m);
    mbar_wait(barrier(sm.q_full, i), ring.phase);
    score_product<HEAD_FEATURES>(s, sm.k, queries);
    mbar_wait(barrier(sm.do_full, i), ring.phase);
    score_product<VALUE_FEATURES>(dp, sm.v, grads);
    find_dropped(slot_at<SEED_BYTES>(sm.row_seeds, i), barrier(sm.do_full, i));
    wgmma_wait<1>();
    fence_operand(s);
    float tanh_grad[SCORES];
    apply_softcap(s, tanh_grad);
    scores_to_weights(s, m, edge, slot_at<ROW_BYTES>(sm.lse, i), slot_at<RANGE_BYTES>(sm.ranges, i));
    pack_weights(w, s);
    fence_operand(w);
    mbar_wait(barrier(sm.do_full, i), ring.phase);  // is over, but ends a basic block, in which ptxas would
                                                    // wait for dP before most exponentials
    wgmma_wait<0>();
    fence_operand(dp);
    gradient_product(dv, w, grads);
    score_gradients(slot_at<ROW_BYTES>(sm.delta, i));
    multiply_by_softcap_grad(dp, tanh_grad);
    pack_fragments(ds, dp);
#if ADDS_DQ
    const long long block = (long long)(t.b * p.Hq + h) * p.m_blocks + m;
    const u32 extra = buffer;
    const u32 ds_at = sm.exchange + buffer * DS_BYTES;
    buffer ^= 1;
    if (previous >= 0) {
      delayed_query_product(buffer);
      store_fragments(ds_at + first * 128, ds, BLOCK_N * 128);
      gradient_product(dk, ds, queries);
      wgmma_wait<1>();
      fence_operand(dq);
      signal_stored(extra);
      add_query_gradients(previous);
    } else {  // separately: registers of dQ that only one branch uses would be taken in all of the loop
      store_fragments(ds_at + first * 128, ds, BLOCK_N * 128);
      gradient_product(dk, ds, queries);
      signal_stored(extra);
    }
    previous = !ALTERNATES || extra == c ? block : -1;
#else
    gradient_product(dk, ds, queries);
#endif
    wgmma_wait<0>();
    end_products();
    release(i);
    ring.next();
  }

  // Writes the gradients of a tile. dK leaves through this consumer's rows of dS and dV through what follows
  // them, so that the next keys can be copied to K and V at once.
  DEVICE u32 finish_tile() {
    t = load_key_tile(sm);
    const u32 phase = phase_after(sm);
#if ADDS_DQ
    if (previous >= 0) {
      delayed_query_product(buffer ^ 1);
      wgmma_wait<0>();
      fence_operand(dq);
      mbar_arrive(kv_empty(sm));
      add_query_gradients(previous);
      previous = -1;
    } else {
      mbar_arrive(kv_empty(sm));
    }
#elif SPLITS_GROUP
    mbar_arrive(kv_empty(sm));
#endif
#if SPLITS_GROUP
    float* const sums = key_sums_of(p, t) + opaque(c * 128 * GRADS + tid * 4);
    write_key_sums(sums, dk);
    write_key_sums(sums + BLOCK_N * HEAD_FEATURES, dv);
#elif ADDS_DQ
    named_barrier_sync(Barrier::CONSUMER_SYNC, 128 * CONSUMERS);  // both consumers have read all of dS
    store(dv, value_factor(), sm.exchange + 2 * DS_BYTES + first * 128, BLOCK_N * 128, DV, p.dv);
    store(dk, p.scale, sm.exchange + first * 128, BLOCK_N * 128, DK, p.dk);
    if (tid == 0) tma_store_wait_read();
    named_barrier_sync(Barrier::WARPGROUP + c, 128);
#else
    store(dv, value_factor(), sm.v + first * 128, BLOCK_N * 128, DV, p.dv);
    store(dk, p.scale, sm.k + first * 128, BLOCK_N * 128, DK, p.dk);
    if (tid == 0) tma_store_wait_read();
    mbar_arrive(kv_empty(sm));
#endif
    return phase;
  }

  DEVICE void run() {
    for (u32 phase = 0;;) {
      mbar_wait(sm.kv_full, phase);
      t = load_key_tile(sm);
      if (t.n0 < 0) break;
#pragma unroll
      for (int i = 0; i < GRADS; i++) dk[i] = dv[i] = 0.f;
#if HAS_KV_LENS
      if (t.keys < t.n0 + BLOCK_N) clear_keys();
#endif
      for_each_query_block(*this);
      phase = finish_tile();
    }
    if (tid == 0) tma_store_wait();
  }

  // Zeroes this consumer's rows; the other's are zeroed before its dS is stored.
  DEVICE void clear_keys() {
    const int from = max(first, t.keys - t.n0);
    clear_rows<BLOCK_N, HEAD_DIM>(sm.k, from, first + 64, Barrier::WARPGROUP + c);
    clear_rows<BLOCK_N, VALUE_DIM>(sm.v, from, first + 64, Barrier::WARPGROUP + c);
  }

  DEVICE void store(const float (&grads)[GRADS], float factor, u32 at, u32 column_bytes, int tensor,
                    const TensorMap& map) {
    u32* const note = note_at(p, tensor, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0 + first);
    store_gradients(grads, factor, at, column_bytes, Barrier::WARPGROUP + c, map, t.n0 + first, t.part, t.b,
                    note);
  }
};

// Executed by one warp. What it publishes about a tile is valid as long as the tile's keys are in shared
// memory.
DEVICE void produce(const BackwardParams& p, const BackwardShared& sm) {
  const bool leader = elect_one();
  const int tiles = p.n_blocks * p.B * p.Hkv * p.parts;
  PipelineState<STAGES> ring;
  PipelineState<1> bias;
  u32 phase = 1;
  for (int i = blockIdx.x; i < tiles; phase ^= 1) {
    const KeyTile t = tile_at(p, i);
    mbar_wait(kv_empty(sm), phase);
    if (leader) {
      store_key_tile(sm, t, phase);
      if (t.first < t.last) load_keys(p, sm, t);
      else mbar_arrive(sm.kv_full);
    }
    wait_for_prior_grid();  // `preprocess` writes nothing read above
    produce_queries(p, sm, t, leader, ring, bias);
    if (leader)
      i = gridDim.x +
          atomicAdd(p.counter, 1);  // late: a tile taken earlier would wait here while other CTAs have none
    i = __shfl_sync(~0u, i, __ffs(__ballot_sync(~0u, leader)) - 1);
  }
  mbar_wait(kv_empty(sm), phase);
  if (leader) {
    store_key_tile(sm, {-1, 0, 0, 0, 0, 0}, 0);
    mbar_arrive(sm.kv_full);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardShared sm(smem_address(shared));
  launch_dependent_grids();
  if (threadIdx.x == 0) {
    sm.init();
    mbar_init(kv_empty(sm), 128 * CONSUMERS);
    mbar_init_fence();
  }
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x < 32) produce(p, sm);
  } else {
    register_alloc<240>();
    BackwardConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
