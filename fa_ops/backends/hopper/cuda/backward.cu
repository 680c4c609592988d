// Attention backward for sm_90a, one CTA per block of keys. Warpgroup 0 copies; each consumer warpgroup owns 64 keys and keeps their dK and
// dV in registers while the queries of the whole group of heads pass by. Scores are computed transposed, so that weights and their
// gradients leave the accumulators as the register operand of the next product. dQ needs all keys of the block: the gradients of the scores meet in
// shared memory, each consumer multiplies them with its half of K's columns and adds the result to global memory in fp32 by bulk reduction.
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM STAGES IS_RAGGED HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_ALIBI

constexpr int CONSUMERS = BLOCK_N / 64;
constexpr int WIDTH = HEAD_DIM / 64;
constexpr int SCORES = BLOCK_M / 2, GRADS = HEAD_DIM / 2, QUERY_GRADS = HEAD_DIM / 4;
constexpr u32 Q_BYTES = BLOCK_M * HEAD_DIM * 2, K_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr u32 ROW_BYTES = BLOCK_M * 4, RUN_BYTES = HAS_RANGES ? BLOCK_M * 8 : 0;
constexpr u32 DS_BYTES = BLOCK_N * BLOCK_M * 2, DQ_BYTES = BLOCK_M * HEAD_DIM * 4 / CONSUMERS;
constexpr u32 ALL_BARRIER = 1, OWN_BARRIER = 2;  // named barriers: of all consumers, and one per consumer
static_assert(BLOCK_M == 64 && CONSUMERS == 2, "one swizzle atom of queries, halves of the head dim");

struct Params {
  TensorMap q, k, v, grad_out, dk, dv;
  const float* lse;      // (B * Hq, padded Sq), in units of log2, +inf where a row has no keys or does not exist
  const float* delta;    // the same shape
  float* dq;             // (B * Hq, blocks of queries, BLOCK_M * HEAD_DIM), each block in accumulator order
  const int* kv_lens;    // (B,) or null
  const float* alibi;    // (B|1, Hq) or null
  const int2* runs;      // with key ranges: (B, Hq|1, padded Sq), the keys that each query attends after every mask
  const int4* bounds;    // with key ranges: (B, Hq|1, blocks of queries), see `keep_runs`
  int B, Hq, Hkv, group, Sq, Sk;
  int window_left, window_right;
  int m_blocks, n_blocks, section, alibi_b, run_heads;
  float scale;           // of the gradients of q and k
  float score_scale;     // with a softcap: scale / softcap, inside the tanh
  float scale_log2;      // from score units to log2 units
  float alibi_unit;
};

struct Smem {
  u32 k, v, q, grad_out, ds, dq, lse, delta, runs, kv_full, q_full, q_empty, do_full, do_empty;
  DEVICE Smem(u32 base) {
    k = base, v = k + K_BYTES, q = v + K_BYTES, grad_out = q + STAGES * Q_BYTES, ds = grad_out + STAGES * Q_BYTES;
    dq = ds + 2 * DS_BYTES, lse = dq + CONSUMERS * DQ_BYTES, delta = lse + STAGES * ROW_BYTES, runs = delta + STAGES * ROW_BYTES, kv_full = runs + STAGES * RUN_BYTES;
    q_full = kv_full + 8, q_empty = q_full + 8 * STAGES, do_full = q_empty + 8 * STAGES, do_empty = do_full + 8 * STAGES;
  }
};

// A block of keys of one key head, and the blocks of queries [first, last) that attend some of it.
struct Tile { int n0, h, b, keys, first, last; };

DEVICE Tile tile_of(const Params& p) {
  const int heads = p.B * p.Hkv, per = p.section * p.n_blocks;
  const int sec = blockIdx.x / per, r = blockIdx.x - sec * per;
  const int inside = min(p.section, heads - sec * p.section);
  const int head = sec * p.section + r % inside;
  Tile t;
  t.n0 = (r / inside) * BLOCK_N;
  t.b = head / p.Hkv;
  t.h = head - t.b * p.Hkv;
#if HAS_KV_LENS
  t.keys = max(0, min(p.kv_lens[t.b], p.Sk));
#else
  t.keys = p.Sk;
#endif
  int lo = 0, hi = p.Sq;
#if IS_RAGGED
  const int shift = t.keys - p.Sq;
  lo = max(0, t.n0 - shift - p.window_right);
  hi = min(p.Sq, min(t.n0 + BLOCK_N, t.keys) - shift + p.window_left);
#endif
  if (t.n0 >= t.keys || lo >= hi) lo = hi = 0;
  t.first = lo / BLOCK_M;
  t.last = (hi + BLOCK_M - 1) / BLOCK_M;
  return t;
}

DEVICE void load_rows(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}

DEVICE long long run_head(const Params& p, const Tile& t, int h) { return t.b * p.run_heads + (p.run_heads > 1 ? h : 0); }

// Of the 32 blocks of queries from `base` on, a bit each: which attend some key of the tile, and which do not attend them all.
struct Visits { u32 some, edge; };

DEVICE Visits visits(const Params& p, const Tile& t, int h, int base) {
  const int m = base + (threadIdx.x & 31);
  bool some = m < t.last, edge = t.n0 + BLOCK_N > t.keys;
#if IS_RAGGED
  const int diagonal = m * BLOCK_M + t.keys - p.Sq;
  edge = edge || t.n0 + BLOCK_N - 1 > diagonal + p.window_right || t.n0 < diagonal + BLOCK_M - 1 - p.window_left;
#endif
#if HAS_RANGES
  if (some) {
    const int4 b = p.bounds[run_head(p, t, h) * p.m_blocks + m];
    some = b.x < t.n0 + BLOCK_N && b.y > t.n0;
    edge = edge || b.z > t.n0 || b.w < t.n0 + BLOCK_N;
  }
#endif
  return {__ballot_sync(~0u, some), __ballot_sync(~0u, edge)};
}

DEVICE void load_queries(const Params& p, const Smem& sm, const Tile& t, int h, int m, const Ring<STAGES>& ring) {
  const u32 i = ring.stage, q_full = sm.q_full + 8 * i, do_full = sm.do_full + 8 * i;
  const long long row = ((long long)(t.b * p.Hq + h) * p.m_blocks + m) * BLOCK_M;
  mbar_wait(sm.q_empty + 8 * i, ring.phase ^ 1);
  mbar_expect(q_full, Q_BYTES + ROW_BYTES + RUN_BYTES);
  for (int x = 0; x < WIDTH; x++) tma_load(sm.q + i * Q_BYTES + x * BLOCK_M * 128, p.q, q_full, x * 64, m * BLOCK_M, h, t.b);
  load_rows(sm.lse + i * ROW_BYTES, p.lse + row, ROW_BYTES, q_full);
  if (HAS_RANGES) load_rows(sm.runs + i * RUN_BYTES, p.runs + (run_head(p, t, h) * p.m_blocks + m) * BLOCK_M, RUN_BYTES, q_full);
  mbar_wait(sm.do_empty + 8 * i, ring.phase ^ 1);
  mbar_expect(do_full, Q_BYTES + ROW_BYTES);
  for (int x = 0; x < WIDTH; x++)
    tma_load(sm.grad_out + i * Q_BYTES + x * BLOCK_M * 128, p.grad_out, do_full, x * 64, m * BLOCK_M, h, t.b);
  load_rows(sm.delta + i * ROW_BYTES, p.delta + row, ROW_BYTES, do_full);
}

// One warp; its first lane issues copies.
DEVICE void produce(const Params& p, const Smem& sm, const Tile& t) {
  const bool leader = threadIdx.x == 0;
  if (t.first == t.last) return;
  if (leader) {
    mbar_expect(sm.kv_full, 2 * K_BYTES);
    for (int x = 0; x < WIDTH; x++) {
      tma_load(sm.k + x * BLOCK_N * 128, p.k, sm.kv_full, x * 64, t.n0, t.h, t.b);
      tma_load(sm.v + x * BLOCK_N * 128, p.v, sm.kv_full, x * 64, t.n0, t.h, t.b);
    }
  }
  Ring<STAGES> ring;
  for (int h = t.h * p.group; h < (t.h + 1) * p.group; h++)
    for (int base = t.first; base < t.last; base += 32) {
      Visits n = visits(p, t, h, base);
      for (; n.some; n.some &= n.some - 1, ring.next())
        if (leader) load_queries(p, sm, t, h, base + __ffs(n.some) - 1, ring);
    }
}

DEVICE float2 shared_pair(u32 address) {
  float2 y;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y.x), "=f"(y.y) : "r"(address));
  return y;
}

DEVICE int2 shared_run(u32 address) {
  int2 y;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "r"(address));
  return y;
}

struct Consumer {
  const Params& p;
  const Smem& sm;
  const Tile t;
  const int c, tid, lane, key;  // `key`: this thread's first row of the block; the second is 8 below
  Ring<STAGES> ring;
  float s[SCORES], dp[SCORES], dk[GRADS], dv[GRADS], dq[QUERY_GRADS];
  u32 w[SCORES / 2], ds[SCORES / 2];
  float slope;

  DEVICE Consumer(const Params& p, const Smem& sm, const Tile& t, int c)
      : p(p), sm(sm), t(t), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31), key(c * 64 + (tid >> 5) * 16 + (lane >> 2)) {}

  // rows x queries, from this consumer's 64 rows of K or V and a block of Q or dO
  DEVICE void score_product(float (&d)[SCORES], u32 rows, u32 queries) {
    const u32 from_rows = descriptor_base(rows + c * 64 * 128, 16), from_queries = descriptor_base(queries, 16);
    wgmma_fence();
#pragma unroll
    for (int f = 0; f < HEAD_DIM / 16; f++) {
      const u64 a = descriptor(from_rows, (f >> 2) * BLOCK_N * 128 + (f & 3) * 32);
      const u64 b = descriptor(from_queries, (f >> 2) * BLOCK_M * 128 + (f & 3) * 32);
      if (f == 0) wgmma_scores_start(d, a, b); else wgmma_scores(d, a, b);
    }
    wgmma_commit();
  }

  DEVICE void gradient_product(float (&d)[GRADS], u32 (&a)[SCORES / 2], u32 queries) {
    const u32 from = descriptor_base(queries, BLOCK_M * 128);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_M / 16; i++)
      wgmma_grads(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], descriptor(from, i * 2048));
    wgmma_commit();
  }

  DEVICE void query_product(u32 ds_at) {
    const u32 columns = sm.k + (c * HEAD_DIM / 2 / 64) * BLOCK_N * 128 + (c * HEAD_DIM / 2 % 64) * 2;
    const u32 from_ds = descriptor_base(ds_at, BLOCK_N * 128), from_k = descriptor_base(columns, BLOCK_N * 128);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; j++) {
      const u64 a = descriptor(from_ds, j * 2048), b = descriptor(from_k, j * 2048);
      if (j == 0) wgmma_queries_start(dq, a, b); else wgmma_queries(dq, a, b);
    }
    wgmma_commit();
  }

  // Scores to weights, in place.
  DEVICE void weights(int m, bool edge, u32 lse, u32 runs) {
    const int i0 = m * BLOCK_M + (lane & 3) * 2;
#if HAS_ALIBI
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      s[i] -= slope * fabsf((float)(i0 + (i >> 2) * 8 + (i & 1) + t.keys - p.Sq - (t.n0 + key + (i & 2) * 4)));
#endif
    if (edge) {
#pragma unroll
      for (int i = 0; i < SCORES; i++) {
        const int j = t.n0 + key + (i & 2) * 4;
#if HAS_RANGES
        const int2 run = shared_run(runs + ((i >> 2) * 8 + (lane & 3) * 2 + (i & 1)) * 8);
        const bool keep = j >= run.x && j < run.y;
#else
        bool keep = j < t.keys;
#if IS_RAGGED
        const int diagonal = i0 + (i >> 2) * 8 + (i & 1) + t.keys - p.Sq;
        keep = keep && j <= diagonal + p.window_right && j >= diagonal - p.window_left;
#endif
#endif
        if (!keep) s[i] = -__int_as_float(0x7f800000);
      }
    }
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 l = shared_pair(lse + (i * 2 + (lane & 3) * 2) * 4);
      s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -l.x)), s[i + 1] = exp2_fast(fmaf(s[i + 1], p.scale_log2, -l.y));
      s[i + 2] = exp2_fast(fmaf(s[i + 2], p.scale_log2, -l.x)), s[i + 3] = exp2_fast(fmaf(s[i + 3], p.scale_log2, -l.y));
    }
  }

  // The gradient of the scores, in dp.
  DEVICE void score_gradients(u32 delta) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 d = shared_pair(delta + (i * 2 + (lane & 3) * 2) * 4);
      dp[i] = s[i] * (dp[i] - d.x), dp[i + 1] = s[i + 1] * (dp[i + 1] - d.y);
      dp[i + 2] = s[i + 2] * (dp[i + 2] - d.x), dp[i + 3] = s[i + 3] * (dp[i + 3] - d.y);
    }
  }

  DEVICE void pack_all(u32 (&to)[SCORES / 2], const float (&from)[SCORES]) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
  }

  // An accumulator's 16-bit fragments into 64 rows of 128 swizzled bytes per column of the tile at `at`.
  template <int COUNT> DEVICE void store_fragments(u32 at, const u32 (&x)[COUNT], u32 column_bytes) {
    const int r = (tid >> 5) * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const int col = i * 4 + ((lane >> 4) & 1) * 8;
      store_matrix_x4(at + (col >> 6) * column_bytes + r * 128 + ((((col & 63) >> 3) ^ (r & 7)) << 4), x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }

  DEVICE void add_query_gradients(float* to) {
    const u32 at = sm.dq + c * DQ_BYTES;
    if (tid == 0) tma_store_wait_read();
    named_sync(OWN_BARRIER + c, 128);
#pragma unroll
    for (int i = 0; i < QUERY_GRADS; i += 4)
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + (i / 4 * 128 + tid) * 16), "f"(dq[i]), "f"(dq[i + 1]),
                   "f"(dq[i + 2]), "f"(dq[i + 3])
                   : "memory");
    fence_async_smem();
    named_sync(OWN_BARRIER + c, 128);
    if (tid == 0) {
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to + c * (DQ_BYTES / 4)), "r"(at),
                   "r"(DQ_BYTES)
                   : "memory");
      tma_store_commit();
    }
  }

  DEVICE void step(int m, bool edge, float* dq_block, u32 ds_at) {
    const u32 i = ring.stage, queries = sm.q + i * Q_BYTES, grads = sm.grad_out + i * Q_BYTES;
    mbar_wait(sm.q_full + 8 * i, ring.phase);
    score_product(s, sm.k, queries);
    mbar_wait(sm.do_full + 8 * i, ring.phase);
    score_product(dp, sm.v, grads);
    wgmma_wait<1>();
    pin(s);
#if HAS_SOFTCAP
    float slack[SCORES];
#pragma unroll
    for (int e = 0; e < SCORES; e++) s[e] = tanh_exact(s[e] * p.score_scale), slack[e] = 1.f - s[e] * s[e];
#endif
    weights(m, edge, sm.lse + i * ROW_BYTES, sm.runs + i * RUN_BYTES);
    pack_all(w, s);
    wgmma_wait<0>();
    pin(dp);
    gradient_product(dv, w, grads);
    score_gradients(sm.delta + i * ROW_BYTES);
#if HAS_SOFTCAP
#pragma unroll
    for (int e = 0; e < SCORES; e++) dp[e] *= slack[e];
#endif
    pack_all(ds, dp);
    store_fragments(ds_at + c * 64 * 128, ds, 0);
    fence_async_smem();
    named_sync(ALL_BARRIER, 128 * CONSUMERS);
    query_product(ds_at);
    gradient_product(dk, ds, queries);
    wgmma_wait<1>();
    pin(dq);
    add_query_gradients(dq_block);
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
    mbar_arrive(sm.q_empty + 8 * i);
    mbar_arrive(sm.do_empty + 8 * i);
    ring.next();
  }

  DEVICE void store(float (&grads)[GRADS], float factor, u32 at, const TensorMap& map) {
    u32 x[GRADS / 2];
#pragma unroll
    for (int i = 0; i < GRADS / 2; i++) x[i] = pack(grads[2 * i] * factor, grads[2 * i + 1] * factor);
    store_fragments(at + c * 64 * 128, x, BLOCK_N * 128);
    fence_async_smem();
    named_sync(OWN_BARRIER + c, 128);
    if (tid == 0) {
      for (int x = 0; x < WIDTH; x++) tma_store(map, at + c * 64 * 128 + x * BLOCK_N * 128, x * 64, t.n0 + c * 64, t.h, t.b);
      tma_store_commit();
    }
  }

  DEVICE void work() {
#pragma unroll
    for (int i = 0; i < GRADS; i++) dk[i] = dv[i] = 0.f;
    if (t.first < t.last) mbar_wait(sm.kv_full, 0);
    u32 buffer = 0;
    for (int h = t.h * p.group; h < (t.h + 1) * p.group; h++) {
      float* dq_head = p.dq + (long long)(t.b * p.Hq + h) * p.m_blocks * (BLOCK_M * HEAD_DIM);
#if HAS_ALIBI
      slope = p.alibi[t.b * p.alibi_b + h] * p.alibi_unit;
#endif
      for (int base = t.first; base < t.last; base += 32) {
        Visits n = visits(p, t, h, base);
#pragma unroll 1
        for (; n.some; n.some &= n.some - 1, buffer ^= 1) {
          const int bit = __ffs(n.some) - 1, m = base + bit;
          step(m, n.edge >> bit & 1, dq_head + (long long)m * (BLOCK_M * HEAD_DIM), sm.ds + buffer * DS_BYTES);
        }
      }
    }
    store(dv, 1.f, sm.v, p.dv);
    named_sync(ALL_BARRIER, 128 * CONSUMERS);  // every consumer has read all of K
    store(dk, p.scale, sm.k, p.dk);
    if (tid == 0) tma_store_wait();
  }
};

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1) backward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Smem sm(smem_address(shared));
  if (threadIdx.x == 0) {
    mbar_init(sm.kv_full, 1);
    for (int i = 0; i < STAGES; i++) {
      mbar_init(sm.q_full + 8 * i, 1), mbar_init(sm.do_full + 8 * i, 1);
      // by thread: racecheck does not follow one thread's arrival for its warp, at the same speed
      mbar_init(sm.q_empty + 8 * i, 128 * CONSUMERS), mbar_init(sm.do_empty + 8 * i, 128 * CONSUMERS);
    }
    mbar_init_fence();
  }
  __syncthreads();
  const Tile t = tile_of(p);
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_release<24>();
    if (threadIdx.x < 32) produce(p, sm, t);
  } else {
    register_claim<240>();
    Consumer consumer(p, sm, t, warpgroup - 1);
    consumer.work();
  }
}

// Before: delta = rowsum(dO * O) - dlse, LSE in log2 units with the dead and the missing rows at +inf, dQ's sums at zero. One warp a row.
extern "C" __global__ void __launch_bounds__(256) prepare(const Element* out, const Element* grad_out, const float* lse, const float* grad_lse,
                                                         float* lse_log2, float* delta, float* dq, Strides o, Strides d, int Hq, int Sq, int D, int rows) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  const int bh = blockIdx.y, b = bh / Hq, h = bh - b * Hq;
  const long long at = (long long)bh * rows + row;
  float sum = 0.f;
  if (row < Sq) {
    const Element* x = out + b * o.b + h * o.h + row * o.s;
    const Element* y = grad_out + b * d.b + h * d.h + row * d.s;
    for (int i = lane * 8; i < D; i += 256) sum += dot8(x + i, y + i);
  }
#pragma unroll
  for (int w = 16; w; w >>= 1) sum += __shfl_xor_sync(~0u, sum, w);
  if (lane == 0) {
    const float l = row < Sq ? lse[(long long)bh * Sq + row] : -__int_as_float(0x7f800000);
    lse_log2[at] = l == -__int_as_float(0x7f800000) ? __int_as_float(0x7f800000) : l * 1.4426950408889634f;
    delta[at] = row < Sq ? sum - (grad_lse ? grad_lse[(long long)bh * Sq + row] : 0.f) : 0.f;
  }
  for (int i = lane * 4; i < HEAD_DIM; i += 128) *(float4*)(dq + at * HEAD_DIM + i) = make_float4(0.f, 0.f, 0.f, 0.f);
}

#if HAS_RANGES
// Before: every query's run of keys after every mask, and of each block of queries the bounds of what some (x, y) and what all (z, w) of
// them attend. One thread a query. Queries that do not exist attend nothing and bound nothing.
extern "C" __global__ void __launch_bounds__(BLOCK_M) keep_runs(const int* ranges, const int* kv_lens, int2* runs, int4* bounds, Strides r,
                                                               int heads, int Sq, int Sk, int left, int right) {
  const int i = blockIdx.x * BLOCK_M + threadIdx.x, b = blockIdx.y / heads, h = blockIdx.y - b * heads;
  int2 run = make_int2(0, 0);
  if (i < Sq) {
    const int keys = kv_lens ? max(0, min(kv_lens[b], Sk)) : Sk, diagonal = i + keys - Sq;
    const int* range = ranges + b * r.b + h * r.h + i * r.s;
    run.x = max(max(0, range[0]), diagonal - left);
    run.y = min(min(keys, range[1]), diagonal + right + 1);
  }
  runs[(long long)blockIdx.y * gridDim.x * BLOCK_M + i] = run;
  const bool any = run.y > run.x;
  int4 x = make_int4(any ? run.x : 1 << 30, any ? run.y : 0, i < Sq ? run.x : 0, i < Sq ? run.y : 1 << 30);
  x.x = __reduce_min_sync(~0u, x.x), x.y = __reduce_max_sync(~0u, x.y), x.z = __reduce_max_sync(~0u, x.z), x.w = __reduce_min_sync(~0u, x.w);
  __shared__ int4 halves[2];
  if (threadIdx.x % 32 == 0) halves[threadIdx.x / 32] = x;
  __syncthreads();
  const int4 y = halves[1];
  if (threadIdx.x == 0) bounds[(long long)blockIdx.y * gridDim.x + blockIdx.x] = make_int4(min(x.x, y.x), max(x.y, y.y), max(x.z, y.z), min(x.w, y.w));
}
#endif

// After: dQ from accumulator order and fp32 to rows of the input type, scaled. One CTA a block of queries.
extern "C" __global__ void __launch_bounds__(256) finish(const float* dq, Element* to, Strides q, int Hq, int Sq, int D, float scale) {
  const int tid = threadIdx.x & 127, c = threadIdx.x / 128, lane = tid & 31;
  const int bh = blockIdx.y, b = bh / Hq, h = bh - b * Hq;
  const float4* block = (const float4*)(dq + ((long long)bh * gridDim.x + blockIdx.x) * (BLOCK_M * HEAD_DIM) + c * (DQ_BYTES / 4));
  const int row = blockIdx.x * BLOCK_M + (tid >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < QUERY_GRADS / 4; i++) {
    const float4 x = block[i * 128 + tid];
    const int col = c * (HEAD_DIM / 2) + i * 8 + (lane & 3) * 2;
    if (col >= D) break;
    Element* at = to + b * q.b + h * q.h + col;
    if (row < Sq) *(u32*)(at + row * q.s) = pack(x.x * scale, x.y * scale);
    if (row + 8 < Sq) *(u32*)(at + (row + 8) * q.s) = pack(x.z * scale, x.w * scale);
  }
}
