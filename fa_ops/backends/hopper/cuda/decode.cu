// Few queries against a long cache, for sm_90a. The rows of a unit are the queries of all heads that share a key head, at most ROWS. Which tiles a CTA
// takes: stretches.cuh. One warp copies, as far ahead as the ring allows and across units; WARPS warps attend 16 keys of each tile with maxima and sums
// of their own, which meet at the end of a unit. What becomes of a unit that several CTAs share: merge.cuh.
// Compile-time: IS_BF16 HEAD_DIM VALUE_DIM STAGES WARPS ROWS IS_PAGED COPY_KEYS WHOLE_ROWS HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_ALIBI HAS_SINKS

constexpr int BLOCK_N = 16 * WARPS, UNITS = 2;  // UNITS: queries held at once
constexpr int WIDTH = HEAD_DIM / 64, VALUE_WIDTH = VALUE_DIM / 64;
constexpr u32 K_BYTES = BLOCK_N * HEAD_DIM * 2, V_BYTES = BLOCK_N * VALUE_DIM * 2, Q_BYTES = ROWS * HEAD_DIM * 2;
constexpr u32 ALL_BARRIER = 1;
constexpr float SLACK_LOG2 = 8.f;
static_assert(ROWS == 8 || ROWS == 16, "one tensor-core tile of rows, or half of it");
static_assert(!IS_PAGED || BLOCK_N / COPY_KEYS <= 32, "a lane for each page of a tile, and a bit");

struct Params {
  TensorMap q, k, v;
  Element* out;          // (B, Sq, Hq, Dv)
  float* lse;            // (B, Hq, Sq)
  float* partial;        // as merge.cuh has them
  float2* partial_stats;
  const int* kv_lens;    // (B,) or null
  const int* ranges;     // (B|1, ranges_b) or null: first key and end of a row's run
  const int* table;      // (B, table_stride) or null
  const float* sinks;    // (Hq,) or null
  const float* alibi;    // (B|1, Hq) or null
  int B, Hq, Hkv, group, Sq, Sk, Dv;  // Sk: what the cache holds
  int idle;              // CTAs without a unit in the last round, if each takes whole ones
  int window_left, window_right, page, pages, table_stride, alibi_b, ranges_b;
  float score_scale, scale_log2, alibi_unit;
  int D;
  const Element *q_rows, *k_rows, *v_rows;  // the tensors of the maps, for rows that are attended exactly
  Strides q_step, k_step, v_step;
};

// A unit's part in this CTA's stretch, with the keys that its row attends.
struct Part : Task { int lo, hi; };
constexpr u32 PART_BYTES = TASK_BYTES + 16;

struct Smem {
  u32 k, v, q, sums, stats, task, valid, q_full, q_empty, k_full, v_full, empty;
  DEVICE Smem(u32 base) {
    k = base, v = k + STAGES * K_BYTES, q = v + STAGES * V_BYTES, sums = q + UNITS * Q_BYTES;
    stats = sums + WARPS * ROWS * VALUE_DIM * 4, task = stats + WARPS * ROWS * 8, valid = task + UNITS * PART_BYTES;
    q_full = valid + STAGES * 4 + STAGES % 2 * 4, q_empty = q_full + 8 * UNITS, k_full = q_empty + 8 * UNITS;
    v_full = k_full + 8 * STAGES, empty = v_full + 8 * STAGES;
  }
};

DEVICE Row row_of(const Params& p, int b) {
  Row r;
  r.keys = keys_of(p, b), r.lo = max(0, r.keys - p.Sq - p.window_left), r.hi = r.keys;
#if HAS_RANGES
  r.lo = max(r.lo, p.ranges[b * p.ranges_b]), r.hi = max(min(r.hi, p.ranges[b * p.ranges_b + 1]), 0);
#endif
  r.lo = min(r.lo, r.hi), r.first = r.lo / BLOCK_N;
  r.count = max(1, (r.hi + BLOCK_N - 1) / BLOCK_N - r.first);
  return r;
}

DEVICE int units_of(const Params& p) { return p.Hkv; }
DEVICE int width_of(const Params&) { return 1; }
DEVICE int rows_of(const Params& p) { return p.group * p.Sq; }

// In units, if all are alike and no CTA has more than a tile beyond its share: then none is shared, and nothing is merged. Else in tiles.
DEVICE Cut cut_of(const Params& p, int total, int shortest, int longest) {
  const int ctas = gridDim.x;
  if (shortest == longest && (long long)p.idle * longest <= ctas) return {ctas, p.B * p.Hkv, longest};
  return {ctas, total, 1};
}

// tma_load_once by a map of whole rows.
DEVICE void tma_load_rows_once(u32 dst, const TensorMap& map, u32 bar, int s, int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"((u64)&map), "r"(bar), "r"(0), "r"(s), "r"(h), "r"(b), "l"(FIRST_TO_LEAVE)
      : "memory");
}

constexpr int COPIES = BLOCK_N / COPY_KEYS;

// By one lane: columns of 128 bytes by COPY_KEYS keys, or all of these keys' bytes, in the order of the memory. Beyond the map lie zeros.
template <int WIDE> DEVICE void copy_rows(const TensorMap& map, u32 full, u32 to, int h, const int (&token)[COPIES], const int (&page)[COPIES]) {
#pragma unroll
  for (int j = 0; j < COPIES; j++)
    if (WHOLE_ROWS) tma_load_rows_once(to + j * COPY_KEYS * WIDE * 128, map, full, token[j], h, page[j]);
    else
#pragma unroll
      for (int x = 0; x < WIDE; x++) tma_load_once(to + (x * BLOCK_N + j * COPY_KEYS) * 128, map, full, x * 64, token[j], h, page[j]);
}

DEVICE void copy_tile(const Params& p, const Smem& sm, const Part& t, bool leader, int tile, Ring<STAGES>& ring) {
  const int stage = ring.stage;
  const u32 k_full = sm.k_full + 8 * stage, v_full = sm.v_full + 8 * stage;
  int token[COPIES], page[COPIES];
#if IS_PAGED
  const int lane = threadIdx.x & 31;
  int at = tile * BLOCK_N + lane * COPY_KEYS, own = -1;
  if (lane < COPIES && at < t.hi) own = p.table[(long long)t.b * p.table_stride + at / p.page];
  if (own >= p.pages) own = -1;
  at %= p.page;
  const u32 found = __ballot_sync(~0u, own >= 0);
#pragma unroll
  for (int j = 0; j < COPIES; j++)  // smaller pages are one copy each
    page[j] = __shfl_sync(~0u, own, j), token[j] = COPY_KEYS < 64 ? 0 : __shfl_sync(~0u, at, j);
#else
#pragma unroll
  for (int j = 0; j < COPIES; j++) token[j] = tile * BLOCK_N + j * COPY_KEYS, page[j] = token[j] < t.hi ? t.b : -1;
#endif
  mbar_wait(sm.empty + 8 * stage, ring.phase ^ 1);
  if (leader) {
#if IS_PAGED
    store_shared(sm.valid + 4 * stage, found);
#endif
    mbar_expect(k_full, K_BYTES), mbar_expect(v_full, V_BYTES);
    copy_rows<WIDTH>(p.k, k_full, sm.k + stage * K_BYTES, t.unit, token, page);
    copy_rows<VALUE_WIDTH>(p.v, v_full, sm.v + stage * V_BYTES, t.unit, token, page);
  }
  ring.next();
}

// A unit's first copies are on their way before anything is worked out that they do not need.
DEVICE void copy(const Params& p, const Smem& sm) {
  const bool leader = elected();
  Ring<STAGES> ring;
  Ring<UNITS> units;
  for (Walk<Params> walk(p);; units.next()) {
    const u32 at = sm.task + units.stage * PART_BYTES, full = sm.q_full + 8 * units.stage;
    Part t = {};
    mbar_wait(sm.q_empty + 8 * units.stage, units.phase ^ 1);
    if (walk.at < walk.stop) {
      static_cast<Task&>(t) = walk.task(), t.lo = walk.row.lo, t.hi = walk.row.hi;
      if (leader)
#pragma unroll
        for (int x = 0; x < WIDTH; x++) tma_load(sm.q + units.stage * Q_BYTES + x * ROWS * 128, p.q, full, x * 64, 0, t.unit * p.group, t.b);
      copy_tile(p, sm, t, leader, t.tile, ring);
      walk.share(t);
    }
    if (leader) {
      store_task(at, t), store_shared(at + TASK_BYTES, make_int4(t.lo, t.hi, 0, 0));
      if (t.count) mbar_expect(full, rows_of(p) * HEAD_DIM * 2); else mbar_arrive(full);
    }
    if (t.count == 0) break;
#pragma unroll 1
    for (int i = 1; i < t.count; i++) copy_tile(p, sm, t, leader, t.tile + i, ring);
    walk.next(t.count);
  }
}

// `swizzled` of keys or values, whose lines lie row after row where rows are copied whole. Eight rows then meet in half as many banks, which costs
// less than asking the memory for each half of a row by itself.
template <int WIDE> DEVICE u32 tile_at(u32 base, int row, int unit) {
  if (!WHOLE_ROWS) return swizzled(base, BLOCK_N, row, unit);
  const int line = row * WIDE + (unit >> 3);
  return base + line * 128 + (((unit & 7) ^ (line & 7)) << 4);
}

// A row of a unit: its LSE with the sink, and which of the output's rows it is.
DEVICE int close_row(const Params& p, const Task& t, int row, float m2, float total, bool writes_lse, float& inverse) {
  const int head = t.unit * p.group + (u32)row / (u32)p.Sq, s = (u32)row % (u32)p.Sq;
#if HAS_SINKS
  const float sink = p.sinks[head];
#else
  const float sink = 0.f;
#endif
  const float lse = finish_row(m2, total, 1.f, HAS_SINKS, sink, inverse);
  if (writes_lse) p.lse[((long long)t.b * p.Hq + head) * p.Sq + s] = lse;
  return (t.b * p.Sq + s) * p.Hq + head;
}

// Two columns of it, normalised.
DEVICE void put(const Params& p, int place, int column, float2 x, float inverse) {
  if (column < p.Dv) *(u32*)(p.out + (long long)place * p.Dv + column) = pack(x.x * inverse, x.y * inverse);
}

// A row of a unit that is attended exactly.
struct ExactRow {
  const Params& p;
  const int b, unit, head, s, diagonal;
  int first, last;
  float scale_log2;
  const Element* query;

  DEVICE ExactRow(const Params& p, const Task& t, int row)
      : p(p), b(t.b), unit(t.unit), head(t.unit * p.group + (u32)row / (u32)p.Sq), s((u32)row % (u32)p.Sq), diagonal(s + t.keys - p.Sq),
        scale_log2(p.scale_log2), query(row_at(p.q_rows, p.q_step, b, head, s)) {
    const Row own = row_of(p, b);
    first = uniform(max(own.lo, diagonal - p.window_left)), last = uniform(min(own.hi, diagonal + p.window_right + 1));
  }

  // The row of a key in `x`; in a page that does not exist, some other one.
  DEVICE const Element* at(const Element* x, const Strides& step, int key) const {
    int from = b;
#if IS_PAGED
    from = min(max(page_of(key), 0), p.pages - 1), key %= p.page;
#endif
    return row_at(x, step, from, unit, key);
  }

#if IS_PAGED
  DEVICE int page_of(int key) const { return p.table[(long long)b * p.table_stride + key / p.page]; }
  DEVICE bool attends(int key) const { return (u32)page_of(key) < (u32)p.pages; }
#else
  DEVICE bool attends(int) const { return true; }
#endif

  DEVICE float score(int key) const {
    float y = dot(query, at(p.k_rows, p.k_step, key), p.D);
#if HAS_SOFTCAP
    y = capped(y * p.score_scale);
#endif
#if HAS_ALIBI
    y -= p.alibi[b * p.alibi_b + head] * p.alibi_unit * fabsf((float)(diagonal - key));
#endif
    return y;
  }

  DEVICE float weight(int, float x) const { return x; }
  DEVICE const Element* value(int key) const { return at(p.v_rows, p.v_step, key); }
};

// Executed by one warp: two columns of a row for each lane.
DEVICE void replace_columns(const Params& p, const Task& t, int row, int column) {
  ExactColumns found;
  if (attend_exactly(ExactRow(p, t, row), column, p.Dv, found)) {
    float inverse;
    const int place = close_row(p, t, row, found.top * p.scale_log2, found.sum, column == 0, inverse);
    put(p, place, column, found.x, inverse);
  }
}

struct Consumer {
  const Params& p;
  const Smem& sm;
  const int warp, lane, tid;
  Ring<STAGES> ring;
  u32 q[HEAD_DIM / 16][4];
  float o[VALUE_DIM / 8][4];
  float top[2], sum[2];  // of rows lane / 4 and 8 below
  float slope[2];
  int lo[2], hi[2], diagonal[2];

  DEVICE Consumer(const Params& p, const Smem& sm, int warp) : p(p), sm(sm), warp(warp), lane(threadIdx.x & 31), tid(threadIdx.x - 32) {}

  DEVICE void begin(const Part& t, u32 q_at) {
    const int matrix = lane >> 3, row = ((lane & 7) + (matrix & 1) * 8) % ROWS;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) load_matrix_x4<false>(q[d], swizzled(q_at, ROWS, row, 2 * d + (matrix >> 1)));
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
#pragma unroll
    for (int r = 0; r < ROWS / 8; r++) {
      const int at = (lane >> 2) + 8 * r, s = at % p.Sq;
      top[r] = NEVER, sum[r] = 0.f;
      diagonal[r] = s + t.keys - p.Sq;
      lo[r] = max(t.lo, diagonal[r] - p.window_left), hi[r] = min(t.hi, diagonal[r] + p.window_right + 1);
#if HAS_ALIBI
      slope[r] = at < p.group * p.Sq ? p.alibi[t.b * p.alibi_b + t.unit * p.group + at / p.Sq] * p.alibi_unit : 0.f;
#endif
    }
  }

  // Scores to weights: the operand of the product with the values.
  DEVICE void weigh(u32 (&w)[4], const float (&x)[2][4]) {
#pragma unroll
    for (int r = 0; r < ROWS / 8; r++) {
      float m = fmaxf(fmaxf(x[0][2 * r], x[0][2 * r + 1]), fmaxf(x[1][2 * r], x[1][2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1)), m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      if (__any_sync(~0u, (m - top[r]) * p.scale_log2 > SLACK_LOG2)) {
        m = fmaxf(m, top[r]);
        const float factor = exp2_fast((top[r] - m) * p.scale_log2);
        top[r] = m, sum[r] *= factor;
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 8; i++) o[i][2 * r] *= factor, o[i][2 * r + 1] *= factor;
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float a = exp2_fast((x[j][2 * r] - top[r]) * p.scale_log2), b = exp2_fast((x[j][2 * r + 1] - top[r]) * p.scale_log2);
        sum[r] += a + b;
        w[2 * j + r] = pack(a, b);
      }
    }
  }

  DEVICE void attend(const Part& t, int tile) {
    const int stage = ring.stage, matrix = lane >> 3, key = tile * BLOCK_N + warp * 16;
    float s[2][2][4] = {};  // [keys / 8][halves of the sum, for shorter chains]
    mbar_wait(sm.k_full + 8 * stage, ring.phase);
    {
      const int row = warp * 16 + (lane & 7) + (matrix >> 1) * 8;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; d++) {
        u32 k[4];
        load_matrix_x4<false>(k, tile_at<WIDTH>(sm.k + stage * K_BYTES, row, 2 * d + (matrix & 1)));
        mma(s[0][d & 1], q[d], k[0], k[1]), mma(s[1][d & 1], q[d], k[2], k[3]);
      }
    }
    u32 present = 3;  // which of the two runs of 8 keys exist
#if IS_PAGED
    const u32 found = load_shared<u32>(sm.valid + 4 * stage);
    present = 0;
#pragma unroll
    for (int j = 0; j < 2; j++) present |= (found >> (warp * 16 + j * 8) / COPY_KEYS & 1) << j;
#endif
    const bool edge = key < t.lo || key + 16 > t.hi || present != 3 || p.window_right < FAR || p.window_left < FAR;
    float x[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i >> 1, column = key + j * 8 + (lane & 3) * 2 + (i & 1);
        if (r >= ROWS / 8) continue;
        float y = s[j][0][i] + s[j][1][i];
#if HAS_SOFTCAP
        y = capped(y * p.score_scale);
#endif
#if HAS_ALIBI
        y -= slope[r] * fabsf((float)(diagonal[r] - column));
#endif
        if (edge && !(column >= lo[r] && column < hi[r] && (present >> j & 1))) y = -INFINITE;
        x[j][i] = y;
      }
    u32 w[4] = {};
    weigh(w, x);
    mbar_wait(sm.v_full + 8 * stage, ring.phase);
    {
      // what lies outside the row's keys may be anything, and 0 * NaN is NaN
      u32 keep0 = ~0u, keep1 = ~0u;
      const int mine = key + (lane & 3) * 2;
      if (key + 16 > t.hi) keep0 = below(t.hi - mine), keep1 = below(t.hi - mine - 8);
      if (key < t.lo) keep0 &= ~below(t.lo - mine), keep1 &= ~below(t.lo - mine - 8);
      const int row = warp * 16 + (lane & 7) + (matrix & 1) * 8;
#pragma unroll
      for (int i = 0; i < VALUE_DIM / 16; i++) {
        u32 v[4];
        load_matrix_x4<true>(v, tile_at<VALUE_WIDTH>(sm.v + stage * V_BYTES, row, 2 * i + (matrix >> 1)));
        mma(o[2 * i], w, v[0] & keep0, v[1] & keep1), mma(o[2 * i + 1], w, v[2] & keep0, v[3] & keep1);
      }
    }
    fence_async_smem();  // as in forward.cu
    __syncwarp();
    if (lane == 0) mbar_arrive(sm.empty + 8 * stage);
    ring.next();
  }

  // Of two keys in one word, those among the first `keys`.
  DEVICE u32 below(int keys) { return keys <= 0 ? 0u : keys == 1 ? 0xFFFFu : ~0u; }

  // The warps' sums meet in shared memory. Rows are a multiple of all banks apart: swizzled by 8 columns.
  DEVICE u32 sums_at(int w, int row, int column) { return sm.sums + ((w * ROWS + row) * VALUE_DIM + (column ^ (row & 7) * 8)) * 4; }

  DEVICE void meet() {
#pragma unroll
    for (int r = 0; r < ROWS / 8; r++) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1), sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      const int row = (lane >> 2) + 8 * r;
      if ((lane & 3) == 0) store_shared(sm.stats + (warp * ROWS + row) * 8, make_float2(top[r] * p.scale_log2, sum[r]));
#pragma unroll
      for (int i = 0; i < VALUE_DIM / 8; i++)
        store_shared(sums_at(warp, row, i * 8 + (lane & 3) * 2), make_float2(o[i][2 * r], o[i][2 * r + 1]));
    }
    named_sync(ALL_BARRIER, 32 * WARPS);
  }

  DEVICE void finish(const Task& t) {
    meet();
    const int slot = own_slot(t);
    bool is_unusable = false;
    for (int i = tid; i < rows_of(p) * (VALUE_DIM / 2); i += 32 * WARPS) {
      const int row = i / (VALUE_DIM / 2), column = i % (VALUE_DIM / 2) * 2;
      float2 stats[WARPS], x = make_float2(0.f, 0.f);
      float m2 = NEVER, total = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        stats[w] = load_shared<float2>(sm.stats + (w * ROWS + row) * 8);
        if (stats[w].y > 0.f) m2 = fmaxf(m2, stats[w].x);
      }
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float factor = stats[w].y > 0.f ? exp2_fast(stats[w].x - m2) : 0.f;
        const float2 y = load_shared<float2>(sums_at(w, row, column));
        total += stats[w].y * factor, x.x += y.x * factor, x.y += y.y * factor;
      }
      if (t.parts == 1) {
        float inverse;
        const int place = close_row(p, t, row, m2, total, column == 0, inverse);
        put(p, place, column, x, inverse);
        is_unusable = is_unusable || !is_finite(x);
      } else {
        *(float2*)(p.partial + (slot * ROWS + row) * VALUE_DIM + column) = x;
        if (column == 0) p.partial_stats[slot * ROWS + row] = make_float2(m2, total);
      }
    }
    if (__any_sync(~0u, is_unusable))
#pragma unroll 1
      for (int i = tid; i < rows_of(p) * (VALUE_DIM / 2); i += 32 * WARPS) replace_columns(p, t, i / (VALUE_DIM / 2), i % (VALUE_DIM / 2) * 2);
    named_sync(ALL_BARRIER, 32 * WARPS);  // what met has been read
  }

  DEVICE void work() {
    for (Ring<UNITS> units;; units.next()) {
      mbar_wait(sm.q_full + 8 * units.stage, units.phase);
      const u32 at = sm.task + units.stage * PART_BYTES;
      Part t;
      static_cast<Task&>(t) = load_task(at);
      const int4 keys = load_shared<int4>(at + TASK_BYTES);
      t.lo = keys.x, t.hi = keys.y;
      if (t.count == 0) break;
      begin(t, sm.q + units.stage * Q_BYTES);
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.q_empty + 8 * units.stage);
#pragma unroll 1
      for (int i = 0; i < t.count; i++) attend(t, t.tile + i);
      finish(t);
    }
  }
};

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1) decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Smem sm(smem_address(shared));
  if (threadIdx.x == 0) {
    for (int i = 0; i < UNITS; i++) mbar_init(sm.q_full + 8 * i, 1), mbar_init(sm.q_empty + 8 * i, WARPS);
    for (int i = 0; i < STAGES; i++) mbar_init(sm.k_full + 8 * i, 1), mbar_init(sm.v_full + 8 * i, 1), mbar_init(sm.empty + 8 * i, WARPS);
    // a first look at a line of parameters takes as long as one into the memory: here it is waited for anyway
    store_shared(sm.task, make_int4((int)(u64)p.out, p.B, p.window_right, __float_as_int(p.scale_log2)));
    mbar_init_fence();
  }
  if (threadIdx.x == 32) prefetch_map(p.q), prefetch_map(p.k), prefetch_map(p.v);
  clear_queries(sm.q, UNITS * Q_BYTES);
  __syncthreads();
  wait_for_last_grid(), next_grid_may_start();
  const int warp = uniform(threadIdx.x / 32);
  if (warp == 0) copy(p, sm);
  else {
    Consumer consumer(p, sm, warp - 1);
    consumer.work();
  }
}

extern "C" __global__ void __launch_bounds__(256) merge_parts(const __grid_constant__ Params p) { merge(p); }
