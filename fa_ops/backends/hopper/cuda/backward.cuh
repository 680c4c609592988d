// What the kernels of the backward pass share: their parameters, which blocks of queries a block of keys meets, how a warp brings those, and the
// weights of scores that are transposed, a row a key. Every copy is a box of 64 tokens by 64 features.
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM STAGES EXCHANGE_BYTES IS_WIDE ADDS_DQ SPLITS_GROUP IS_RAGGED HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_ALIBI HAS_MASK
// HAS_DROPOUT BIAS_BITS
//
// What is NaN or infinite in a token may reach only what attends it, or is attended by it. Products spread it further: a weight of 0 does not hide it. So
// kernels note which 16 rows of a gradient hold any, and backward_finish.cu computes those rows again. Keys from a row's length on are cleared at once.

constexpr int SCORES = BLOCK_M / 2;
constexpr u32 Q_BYTES = BLOCK_M * HEAD_DIM * 2, DO_BYTES = BLOCK_M * VALUE_DIM * 2, K_BYTES = BLOCK_N * HEAD_DIM * 2, V_BYTES = BLOCK_N * VALUE_DIM * 2;
constexpr u32 ROW_BYTES = BLOCK_M * 4, RUN_BYTES = HAS_RANGES ? BLOCK_M * 8 : 0, KEY_BYTES = HAS_DROPOUT ? BLOCK_M * 4 : 0;
constexpr u32 BIAS_BYTES = BLOCK_M * BLOCK_N * BIAS_BITS / 8;
constexpr u32 ALL_BARRIER = 1, OWN_BARRIER = 2;  // named barriers: of all consumers, and one per consumer
constexpr int CONSUMERS = 2;
static_assert(BLOCK_M == 64 || (BLOCK_M == 128 && !HAS_MASK), "swizzle atoms of queries; a mask's bits of 64");

// A mask's bits from mask.cu: the steps between batches, heads and rows in bytes, 0 where they share bits, and where in a row its run stands.
struct Bits { const unsigned char* at; long long b, h, row, run; };

// The tensors of a call, in the order of their maps.
enum { Q, K, V, GRAD_OUT, DQ, DK, DV, TENSORS };

struct Params {
  TensorMap q, k, v, grad_out, dq, dk, dv;
  Element* tensors[TENSORS];  // the same, for what reads and writes single rows
  const float* lse;      // (B * Hq, padded Sq), in units of log2 (with a bias, of 1), +inf where a row has no keys or does not exist
  const float* delta;    // the same shape
  float* sums;           // of dQ in one pass: (B * Hq, blocks of queries, BLOCK_M * HEAD_DIM), each block in accumulator order; or null
  int* counter;          // tiles handed out beyond the first of each CTA, where CTAs are persistent
  const int* kv_lens;    // (B,) or null
  const float* alibi;    // (B|1, Hq) or null
  const int2* runs;      // with key ranges: (B, Hq|1, padded Sq), the keys that each query attends after every mask
  const int4* bounds;    // with key ranges: (B, Hq|1, blocks of queries), see `keep_runs`
  float* key_sums;       // of dK and dV where SPLITS_GROUP, see `key_sums_of`; or null
  u32* nonfinite;        // whether some of 16 rows is not finite: those of dK and of dV unless SPLITS_GROUP, and unless ADDS_DQ of dQ
  int B, Hq, Hkv, group, Sq, Sk;
  int window_left, window_right;
  int m_blocks, n_blocks, section, query_section, alibi_b, run_heads;
  int parts, part_heads; // of a group of query heads, and the heads of a part: one CTA has a block of keys and the queries of one part
  int D, Dv;
  float scale;           // of the gradients of q and k
  float score_scale;     // with a softcap: scale / softcap, inside the tanh
  float scale_log2;      // from score units to log2 units
  float alibi_unit;
  Strides strides[TENSORS];
  Bits by_key, by_query; // with a mask: each key's queries; in two passes, each query's keys too
  int mask_block;        // bytes from a block of queries to the next in `by_key`, 0 where they share bits
  Dropout dropout;
#if BIAS_BITS
  Bias bias;
#endif
};

// `exchange`: what consumers tell each other; `tile`: what the producer does; `own`: barriers that a kernel has beside those of the copies.
struct Smem {
  u32 k, v, q, grad_out, exchange, bias, lse, delta, runs, row_keys, tile, kv_full, q_full, q_empty, do_full, do_empty, own, bias_full, bias_empty;
  DEVICE Smem(u32 base) {
    k = base, v = k + K_BYTES, q = v + V_BYTES, grad_out = q + STAGES * Q_BYTES, exchange = grad_out + STAGES * DO_BYTES;
    bias = exchange + EXCHANGE_BYTES, lse = bias + BIAS_BYTES, delta = lse + STAGES * ROW_BYTES, runs = delta + STAGES * ROW_BYTES;
    row_keys = runs + STAGES * RUN_BYTES, tile = row_keys + STAGES * KEY_BYTES, kv_full = tile + 32, q_full = kv_full + 8;
    q_empty = q_full + 8 * STAGES;
    do_full = q_empty + 8 * STAGES, do_empty = do_full + 8 * STAGES, own = do_empty + 8 * STAGES, bias_full = own + 32, bias_empty = bias_full + 8;
  }
  DEVICE void init() const {
    mbar_init(kv_full, 1);
    if (BIAS_BITS) mbar_init(bias_full, 1), mbar_init(bias_empty, IS_WIDE ? 128 : 128 * CONSUMERS);
    for (int i = 0; i < STAGES; i++) {
      mbar_init(q_full + 8 * i, 1), mbar_init(do_full + 8 * i, 1);
      // by thread: racecheck does not follow one thread's arrival for its warp, at the same speed
      mbar_init(q_empty + 8 * i, 128 * CONSUMERS), mbar_init(do_empty + 8 * i, 128 * CONSUMERS);
    }
  }
};

// A block of keys and one part of a group of query heads, counted over all groups, and the blocks of queries [first, last) that attend some of it.
struct Tile { int n0, part, b, keys, first, last; };

DEVICE int key_head(const Params& p, const Tile& t) { return SPLITS_GROUP ? t.part / p.parts : t.part; }
DEVICE int first_head(const Params& p, const Tile& t) { return t.part * p.part_heads; }

DEVICE int keys_of(const Params& p, int b) {
#if HAS_KV_LENS
  return max(0, min(p.kv_lens[b], p.Sk));
#else
  return p.Sk;
#endif
}

DEVICE Tile tile_at(const Params& p, int i) {
  const int parts = p.Hkv * p.parts, all = p.B * parts, per = p.section * p.n_blocks;
  const int sec = i / per, r = i - sec * per;
  const int inside = min(p.section, all - sec * p.section);
  const int part = sec * p.section + r % inside;
  Tile t;
  t.n0 = (r / inside) * BLOCK_N;
  t.b = part / parts;
  t.part = part - t.b * parts;
  t.keys = keys_of(p, t.b);
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

DEVICE long long runs_of(const Params& p, int h, int b) { return b * p.run_heads + (p.run_heads > 1 ? h : 0); }

// From the first to the last column that a mask keeps in some of COUNT rows.
template <int COUNT> DEVICE int2 kept_run(const Bits& bits, int b, int h, int row, int rows) {
  const unsigned char* from = bits.at + b * bits.b + h * bits.h + bits.run;
  int lo = FAR, hi = 0;
  for (int i = threadIdx.x & 31; i < COUNT; i += 32) {
    const int2 run = *(const int2*)(from + min(row + i, rows - 1) * bits.row);
    lo = min(lo, run.x), hi = max(hi, run.y);
  }
  return make_int2(__reduce_min_sync(~0u, lo), __reduce_max_sync(~0u, hi));
}

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
    const int4 b = p.bounds[runs_of(p, h, t.b) * p.m_blocks + m];
    some = b.x < t.n0 + BLOCK_N && b.y > t.n0;
    edge = edge || b.z > t.n0 || b.w < t.n0 + BLOCK_N;
  }
#endif
#if HAS_MASK
  const int2 kept = kept_run<BLOCK_N>(p.by_key, t.b, h, t.n0, p.Sk);
  const int first = p.mask_block ? m * BLOCK_M : 0;
  some = some && kept.x < first + BLOCK_M && kept.y > first;
#endif
  return {__ballot_sync(~0u, some), __ballot_sync(~0u, edge)};
}

DEVICE void load_tile(u32 dst, const TensorMap& map, u32 bar, int width, int rows, int row, int h, int b) {
  for (int x = 0; x < width; x += 64)
    for (int r = 0; r < rows; r += 64) tma_load(dst + (x * rows + r * 64) * 2, map, bar, x, row + r, h, b);
}

DEVICE void load_queries(const Params& p, const Smem& sm, const Tile& t, int h, int m, const Ring<STAGES>& ring) {
  const u32 i = ring.stage, q_full = sm.q_full + 8 * i, do_full = sm.do_full + 8 * i;
  const long long row = ((long long)(t.b * p.Hq + h) * p.m_blocks + m) * BLOCK_M;
  mbar_wait(sm.q_empty + 8 * i, ring.phase ^ 1);
  mbar_expect(q_full, Q_BYTES + ROW_BYTES + RUN_BYTES + KEY_BYTES);
  load_tile(sm.q + i * Q_BYTES, p.q, q_full, HEAD_DIM, BLOCK_M, m * BLOCK_M, h, t.b);
  load_rows(sm.lse + i * ROW_BYTES, p.lse + row, ROW_BYTES, q_full);
  if (HAS_RANGES) load_rows(sm.runs + i * RUN_BYTES, p.runs + (runs_of(p, h, t.b) * p.m_blocks + m) * BLOCK_M, RUN_BYTES, q_full);
  if (HAS_DROPOUT) load_rows(sm.row_keys + i * KEY_BYTES, p.dropout.row_keys + row, KEY_BYTES, q_full);
  mbar_wait(sm.do_empty + 8 * i, ring.phase ^ 1);
  mbar_expect(do_full, DO_BYTES + ROW_BYTES);
  load_tile(sm.grad_out + i * DO_BYTES, p.grad_out, do_full, VALUE_DIM, BLOCK_M, m * BLOCK_M, h, t.b);
  load_rows(sm.delta + i * ROW_BYTES, p.delta + row, ROW_BYTES, do_full);
}

#if BIAS_BITS
DEVICE void load_bias(const Params& p, const Smem& sm, const Tile& t, int h, int m, Ring<1>& ring) {
  mbar_wait(sm.bias_empty, ring.phase ^ 1);
  mbar_expect(sm.bias_full, BIAS_BYTES);
  load_bias_tile<BLOCK_N>(sm.bias, p.bias, sm.bias_full, m * BLOCK_M, t.n0, h, t.b);
  ring.next();
}
#endif

// What the exponential with base 2 makes a weight.
DEVICE float exponent(const Params& p, float s, float lse) {
#if BIAS_BITS  // exact where scores are so far from 0 that a product with them is not
  return (s - lse) * p.scale_log2;
#else
  return fmaf(s, p.scale_log2, -lse);
#endif
}

DEVICE void load_keys(const Params& p, const Smem& sm, const Tile& t) {
  mbar_expect(sm.kv_full, K_BYTES + V_BYTES);
  const int h = key_head(p, t);
  load_tile(sm.k, p.k, sm.kv_full, HEAD_DIM, BLOCK_N, t.n0, h, t.b);
  load_tile(sm.v, p.v, sm.kv_full, VALUE_DIM, BLOCK_N, t.n0, h, t.b);
}

// Zeros in rows [from, to) of a tile of ROWS rows, by a warpgroup, before its own products: keys from a row's length on may hold anything.
template <int ROWS, int FEATURES> DEVICE void clear_rows(u32 tile, int from, int to, u32 barrier) {
#pragma unroll 1
  for (int i = from * 8 + (threadIdx.x & 127); i < to * 8; i += 128)
#pragma unroll
    for (int x = 0; x < FEATURES / 64; x++) store_shared(tile + x * ROWS * 128 + i * 16, make_int4(0, 0, 0, 0));
  fence_async_smem();
  named_sync(barrier, 128);
}

// One warp, whose leader issues the copies of all queries that a tile meets.
DEVICE void produce_queries(const Params& p, const Smem& sm, const Tile& t, bool leader, Ring<STAGES>& ring, [[maybe_unused]] Ring<1>& bias) {
  for (int h = first_head(p, t); h < first_head(p, t) + p.part_heads; h++)
    for (int base = t.first; base < t.last; base += 32) {
      Visits n = visits(p, t, h, base);
      for (; n.some; n.some &= n.some - 1, ring.next())
        if (leader) {
          load_queries(p, sm, t, h, base + __ffs(n.some) - 1, ring);
#if BIAS_BITS
          load_bias(p, sm, t, h, base + __ffs(n.some) - 1, bias);
#endif
        }
    }
}

template <int R> DEVICE void pin(u32 (&x)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Opaque to the compiler, which else keeps the sum of it and each constant in a register for all of a loop.
DEVICE u32 base_of(u32 address) {
  asm volatile("" : "+r"(address));
  return address;
}

// Of 64 of a row's bits, moved down by `first_bit`, the one for a thread's `i`-th accumulator element: two of every eight are its own.
DEVICE int first_bit() { return (threadIdx.x & 3) * 2; }
DEVICE bool bit_of(u64 row, int i) { return row >> column_offset(i % 32) & 1; }

template <int COUNT> DEVICE void pack_all(u32 (&to)[COUNT], const float (&from)[2 * COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}

// Weights that are dropped have their sign set: what meets the values takes them for 0, gradients of scores need them as they were.
template <int COUNT> DEVICE void pack_kept(u32 (&to)[COUNT], const float (&from)[2 * COUNT]) {
#if HAS_DROPOUT
#pragma unroll
  for (int i = 0; i < COUNT; i++) to[i] = pack_positive(from[2 * i], from[2 * i + 1]);
#else
  pack_all(to, from);
#endif
}

// Under dropout but for its scale.
DEVICE float score_gradient(float weight, float dp, float delta) {
#if HAS_DROPOUT
  return fmaxf(weight, 0.f) * dp - fabsf(weight) * delta;
#else
  return weight * (dp - delta);
#endif
}

// A warpgroup's accumulator, as 16-bit fragments, into 64 rows of 128 swizzled bytes per column of the tile at `at`.
template <int COUNT> DEVICE void store_fragments(u32 at, const u32 (&x)[COUNT], u32 column_bytes) {
  const int lane = threadIdx.x & 31, r = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const int col = i * 4 + ((lane >> 4) & 1) * 8;
    store_matrix_x4(at + (col >> 6) * column_bytes + r * 128 + ((((col & 63) >> 3) ^ (r & 7)) << 4), x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

constexpr int NOTED_ROWS = 16;  // that a word of `nonfinite` stands for: those of a warp

// How many words there are of dK, and as many of dV.
DEVICE int key_notes(const Params& p) { return SPLITS_GROUP ? 0 : p.B * p.Hkv * p.n_blocks * (BLOCK_N / NOTED_ROWS); }

// The word of 64 rows' first 16: `h` counts over all batches, `rows` are a head's, padded.
DEVICE u32* note_at(const Params& p, int tensor, int h, int rows, int row) {
  const int before = tensor == DK ? 0 : tensor == DV ? key_notes(p) : 2 * key_notes(p);
  return p.nonfinite + before + (h * (rows / NOTED_ROWS) + row / NOTED_ROWS);
}

// 0 where all are finite, or else NaN.
template <int COUNT> DEVICE float probe(const float (&x)[COUNT]) {
  float found[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < COUNT; i++) found[i % 4] = fmaf(x[i], 0.f, found[i % 4]);
  return (found[0] + found[1]) + (found[2] + found[3]);
}

// A warpgroup's gradients of 64 tokens, through shared memory to the tensor.
template <int COUNT>
DEVICE void store_gradients(const float (&grads)[COUNT], float factor, u32 at, u32 column_bytes, u32 barrier, const TensorMap& map, int row, int h,
                            int b, u32* note) {
  const bool is_nonfinite = __any_sync(~0u, probe(grads) != 0.f);
  if ((threadIdx.x & 31) == 0) note[threadIdx.x >> 5 & 3] = is_nonfinite;
  u32 x[COUNT / 2];
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++) x[i] = pack(grads[2 * i] * factor, grads[2 * i + 1] * factor);
  store_fragments(at, x, column_bytes);
  fence_async_smem();
  named_sync(barrier, 128);
  if ((threadIdx.x & 127) == 0) {
    for (int x = 0; x < COUNT / 32; x++) tma_store(map, at + x * column_bytes, x * 64, row, h, b);
    tma_store_commit();
  }
}

constexpr int KEY_SUMS = BLOCK_N * (HEAD_DIM + VALUE_DIM);

// The sums of a block of keys, each consumer's in accumulator order: of dK, and behind them of dV. With ADDS_DQ all parts of a group add to the same
// ones, in no fixed order; else each has its own.
DEVICE float* key_sums_of(const Params& p, const Tile& t) {
  const int of = ADDS_DQ ? t.b * p.Hkv + key_head(p, t) : t.b * p.Hkv * p.parts + t.part;
  return p.key_sums + ((long long)of * p.n_blocks + t.n0 / BLOCK_N) * KEY_SUMS;
}

// A thread's accumulator, to sums in which `to` is its own first element.
template <int COUNT> DEVICE void add_fragments(float* to, const float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * 128), "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3])
                 : "memory");
}

// The same to a part's own sums.
template <int COUNT> DEVICE void leave_fragments(float* to, const float (&x)[COUNT]) {
  if (ADDS_DQ) {
    add_fragments(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) *(float4*)(to + i * 128) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

// 64 keys of the block, a row each.
struct KeyRows {
  const Params& p;
  const Smem& sm;
  Tile t;
  const int first, tid, lane, key;  // `key`: this thread's first row of the block; the second is 8 below
  Ring<STAGES> ring;
  Ring<1> bias;
  float slope;
#if HAS_MASK
  u64 kept[2];  // a bit for each query of a block, for this thread's two rows
#endif
#if HAS_DROPOUT
  u32 dropped;  // a bit for each of a thread's scores
#endif

  DEVICE KeyRows(const Params& p, const Smem& sm, const Tile& t, int first)
      : p(p), sm(sm), t(t), first(first), tid(threadIdx.x & 127), lane(threadIdx.x & 31), key(first + (tid >> 5) * 16 + (lane >> 2)) {}

  // keys x queries, from these rows of K or V and a block of Q or dO
  template <int FEATURES> DEVICE void score_product(float (&d)[SCORES], u32 rows, u32 queries) {
    const u32 from_rows = descriptor_base(rows + first * 128, 16), from_queries = descriptor_base(queries, 16);
    wgmma_fence();
    if (FEATURES == HEAD_DIM) wgmma_scores_start(d, from_rows, from_queries); else wgmma_value_scores_start(d, from_rows, from_queries);
    wgmma_commit();
  }

  // The mask, early: it comes from the L2 while scores are computed.
  DEVICE void read_mask(int h, int m) {
#if HAS_MASK
    const unsigned char* from = p.by_key.at + t.b * p.by_key.b + h * p.by_key.h + m * p.mask_block;
#pragma unroll
    for (int r = 0; r < 2; r++) kept[r] = *(const u64*)(from + min(t.n0 + key + 8 * r, p.Sk - 1) * p.by_key.row);
#endif
  }

  // Early as well: hashes are computed under the products of the scores. `arrived` is a barrier whose phase is over: a wait ends a basic block, and
  // within one ptxas puts hashes between the products, or after them.
  DEVICE void find_dropped([[maybe_unused]] u32 row_keys, [[maybe_unused]] u32 arrived) {
#if HAS_DROPOUT
    static_assert(SCORES == 32, "a bit each");
    mbar_wait(arrived, ring.phase);
    const u32 columns[2] = {(t.n0 + key) * COLUMN_KEY, (t.n0 + key + 8) * COLUMN_KEY};
    u32 found[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const int2 rows = load_shared<int2>(row_keys + (i * 2 + (lane & 3) * 2) * 4);
#pragma unroll
      for (int e = 0; e < 4; e++) note_dropped(found[e], i + e, (e & 1 ? rows.y : rows.x) + columns[e >> 1], p.dropout.threshold);
    }
    dropped = found[0] | found[1] | found[2] | found[3];
    asm volatile("" : "+r"(dropped)::"memory");
    mbar_wait(arrived, ring.phase);
#endif
  }

  // Two queries' deltas, in units of what the gradients of the weights are.
  DEVICE float2 deltas(u32 at) const {
    float2 d = load_shared<float2>(at);
#if HAS_DROPOUT
    d.x *= p.dropout.kept, d.y *= p.dropout.kept;
#endif
    return d;
  }

  // Scores to weights, in place.
  DEVICE void weights(float (&s)[SCORES], int m, bool edge, u32 lse, u32 runs) {
    [[maybe_unused]] const int i0 = m * BLOCK_M + (lane & 3) * 2;
#if HAS_ALIBI
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      s[i] -= slope * fabsf((float)(i0 + (i >> 2) * 8 + (i & 1) + t.keys - p.Sq - (t.n0 + key + row_offset(i))));
#endif
#if BIAS_BITS
    mbar_wait(sm.bias_full, bias.phase);
    add_bias_tile<true>(s, sm.bias, first, p.bias.unit);
    fence_async_smem();  // as in forward.cu
    mbar_arrive(sm.bias_empty);
    bias.next();
#endif
    if (edge) {
#if !HAS_RANGES
      // Of each of this thread's keys: how far this thread's first query stands behind the first that sees it, and how many see it.
      int behind[2] = {0, 0};
      u32 seen[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int j = t.n0 + key + 8 * r;
        seen[r] = j < t.keys ? ~0u : 0;
#if IS_RAGGED
        behind[r] = i0 + t.keys - p.Sq - j + p.window_right, seen[r] = min(seen[r], (u32)p.window_left + (u32)p.window_right + 1);
#endif
      }
#endif
#pragma unroll
      for (int i = 0; i < SCORES; i++) {
#if HAS_RANGES
        const int j = t.n0 + key + row_offset(i);
        const int2 run = load_shared<int2>(runs + ((i >> 2) * 8 + (lane & 3) * 2 + (i & 1)) * 8);
        const bool keep = j >= run.x && j < run.y;
#else
        const int r = i >> 1 & 1;
        const bool keep = (u32)(behind[r] + (i >> 2) * 8 + (i & 1)) < seen[r];
#endif
        if (!keep) s[i] = -INFINITE;
      }
    }
#if HAS_MASK
    if (!__all_sync(~0u, (kept[0] & kept[1]) == ~0ull)) {
      const u64 rows[2] = {kept[0] >> first_bit(), kept[1] >> first_bit()};
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!bit_of(rows[i >> 1 & 1], i)) s[i] = -INFINITE;
    }
#endif
    const u32 row = base_of(lse + (lane & 3) * 8);
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 l = load_shared<float2>(row + i * 8);
      s[i] = exp2_fast(exponent(p, s[i], l.x)), s[i + 1] = exp2_fast(exponent(p, s[i + 1], l.y));
      s[i + 2] = exp2_fast(exponent(p, s[i + 2], l.x)), s[i + 3] = exp2_fast(exponent(p, s[i + 3], l.y));
    }
#if HAS_DROPOUT
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = __int_as_float(__float_as_int(s[i]) | (dropped << (31 - i) & 0x80000000));
#endif
  }

  DEVICE float value_factor() const { return HAS_DROPOUT ? p.dropout.scale : 1.f; }

  // Calls `self.step` for every block of queries that attends some key, in the order in which `produce` brings them.
  template <class Self> DEVICE void meet_queries(Self& self) {
    for (int h = first_head(p, t); h < first_head(p, t) + p.part_heads; h++) {
#if HAS_ALIBI
      slope = p.alibi[t.b * p.alibi_b + h] * p.alibi_unit;
#endif
      for (int base = t.first; base < t.last; base += 32) {
        Visits n = visits(p, t, h, base);
#pragma unroll 1
        for (; n.some; n.some &= n.some - 1) {
          const int bit = __ffs(n.some) - 1;
          self.step(h, base + bit, n.edge >> bit & 1);
        }
      }
    }
  }
};

// From here on float32 does not resolve a score to the unit of an exponential.
constexpr float UNRESOLVED = 1 << 24;

// A row's LSE as kernels take it. Of scores that are not resolved, rounding could make weights that overflow: those rows' weights vanish instead.
DEVICE float lse_of(float lse) {
  if (lse == -INFINITE) return INFINITE;
#if BIAS_BITS  // differences are exact
  return lse;
#else
  const float x = lse * LOG2E;
  return fabsf(x) < UNRESOLVED ? x : x + fabsf(x) * (1.f / (1 << 21));
#endif
}

// Before: delta = rowsum(dO * O) - dlse, LSE in log2 units with the dead and the missing rows at +inf, and at zero the counter and all sums, if any:
// `zeros` times 16 bytes. A CTA has 64 rows.
constexpr int LANES = VALUE_DIM == 64 ? 8 : VALUE_DIM == 128 ? 16 : 32;  // of a row

extern "C" __global__ void __launch_bounds__(256) prepare(const Element* out, const Element* grad_out, const float* lse, const float* grad_lse,
                                                         float* lse_log2, float* delta, float* sums, int* counter, Strides o, Strides d, int Hq,
                                                         int Sq, int Dv, int rows, long long zeros) {
  next_grid_may_start();
  if (counter && blockIdx.x + blockIdx.y + threadIdx.x == 0) *counter = 0;
  const int bh = blockIdx.x, b = bh / Hq, h = bh - b * Hq, feature = threadIdx.x % LANES * 8, there = feature < Dv ? feature : 0;
  const long long base = (long long)bh * rows, threads = (long long)gridDim.x * gridDim.y * 256;
#pragma unroll 4
  for (long long i = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x; i < zeros; i += threads)
    ((float4*)sums)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  const Element* x = out + b * o.b + h * o.h + there;
  const Element* y = grad_out + b * d.b + h * d.h + there;
  float sum[LANES / 4];  // of each row that these lanes have
#pragma unroll
  for (int i = 0; i < LANES / 4; i++) {
    const int row = min(blockIdx.y * 64 + (i * 256 + (int)threadIdx.x) / LANES, Sq - 1);  // no branch: all loads are under way at once
    const float found = dot8(x + row * o.s, y + row * d.s);
    sum[i] = feature < Dv ? found : 0.f;
  }
#pragma unroll
  for (int i = 0; i < LANES / 4; i++) {
    const int row = blockIdx.y * 64 + (i * 256 + threadIdx.x) / LANES;
#pragma unroll
    for (int w = LANES / 2; w; w >>= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], w);
    if (feature == 0) {
      const long long at = (long long)bh * Sq + row;
      const float l = row < Sq ? lse[at] : -INFINITE;
      lse_log2[base + row] = lse_of(l);
      delta[base + row] = l == -INFINITE ? 0.f : sum[i] - (grad_lse ? grad_lse[at] : 0.f);
    }
  }
}

#if HAS_RANGES
// Before: every query's run of keys after every mask, and of each block of queries the bounds of what some (x, y) and what all (z, w) of
// them attend. One thread a query. Queries that do not exist attend nothing and bound nothing.
extern "C" __global__ void __launch_bounds__(BLOCK_M) keep_runs(const int* ranges, const int* kv_lens, int2* runs, int4* bounds, Strides r,
                                                               int heads, int Sq, int Sk, int left, int right) {
  const int i = blockIdx.y * BLOCK_M + threadIdx.x, b = blockIdx.x / heads, h = blockIdx.x - b * heads;
  int2 run = make_int2(0, 0);
  if (i < Sq) {
    const int keys = kv_lens ? max(0, min(kv_lens[b], Sk)) : Sk, diagonal = i + keys - Sq;
    const int* range = ranges + b * r.b + h * r.h + i * r.s;
    run.x = max(max(0, range[0]), diagonal - left);
    run.y = min(min(keys, range[1]), diagonal + right + 1);
  }
  runs[(long long)blockIdx.x * gridDim.y * BLOCK_M + i] = run;
  const bool any = run.y > run.x;
  int4 x = make_int4(any ? run.x : 1 << 30, any ? run.y : 0, i < Sq ? run.x : 0, i < Sq ? run.y : 1 << 30);
  x.x = __reduce_min_sync(~0u, x.x), x.y = __reduce_max_sync(~0u, x.y), x.z = __reduce_max_sync(~0u, x.z), x.w = __reduce_min_sync(~0u, x.w);
  __shared__ int4 parts[BLOCK_M / 32];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 1; i < BLOCK_M / 32; i++) {
    const int4 y = parts[i];
    x = make_int4(min(x.x, y.x), max(x.y, y.y), max(x.z, y.z), min(x.w, y.w));
  }
  if (threadIdx.x == 0) bounds[(long long)blockIdx.x * gridDim.y + blockIdx.y] = x;
}
#endif
