// Which tile a persistent CTA takes next, and which key blocks a tile visits.

// Of a cache: key j of batch b is in page table[b * stride + j / size], if there is one of that number.
struct Pages {
  const int* table;
  int stride, size, count;
};

struct Params {
  TensorMap q, k, v;
  Element* out;           // (B, Sq, Hq, Dv)
  float* lse;             // (B, Hq, Sq) or null
  const int* kv_lens;     // (B,) or null
  const int* key_ranges;  // (B|1, Hq|1, Sq|1, 2) or null, with the strides below
  const float* sinks;     // (Hq,) or null
  const float* alibi;     // (B|1, Hq) or null
  const unsigned char* mask;            // bits of each query's keys, from mask.cu, with the strides below; or null
  long long mask_b, mask_h, mask_q;     // in bytes, 0 where it is the same for all
  int* counter;           // tiles handed out beyond the first of each CTA, zero at launch; or null
  const Element *q_rows, *k_rows, *v_rows;  // the tensors of the maps, for rows that are attended exactly
  Strides q_step, k_step, v_step;
  int B, Hq, group, Sq, Sk, D, Dv;
  int window_left, window_right;  // FAR: unbounded; causal is window_right = 0
  int m_blocks, tiles, section;   // heads per L2 section
  int ranges_b, ranges_h, ranges_q, alibi_b;
  float score_scale;    // with a softcap: scale / softcap, inside the tanh
  float scale_log2;     // from score units to log2 units: scale, or softcap, times log2(e)
  float alibi_unit;     // from score units of a bias to accumulator units
  int mask_run;         // where in a row of the mask's bits its run stands, in bytes
  Dropout dropout;
  Pages pages;
#if BIAS_BITS
  Bias bias;
#endif
};

struct Tile { int m0, h, b; };

// The tile after `t`: handed out on demand where tiles differ in length, so that no CTA waits for a longer one at the end.
DEVICE int next_tile(const Params& p, int t) { return gridDim.x + (p.counter ? atomicAdd(p.counter, 1) : t); }

// Sections of heads whose K and V share the L2; inside one, the longest query blocks come first over all its heads.
DEVICE Tile tile_at(const Params& p, int t) {
  const int heads = p.B * p.Hq, per = p.section * p.m_blocks;
  const int sec = t / per, r = t - sec * per;
  const int inside = min(p.section, heads - sec * p.section);
#if IS_RAGGED || HAS_RANGES || HAS_MASK  // nearly every mask is causal
  const int m = p.m_blocks - 1 - r / inside, head = sec * p.section + r % inside;
#else
  const int m = r % p.m_blocks, head = sec * p.section + r / p.m_blocks;
#endif
  Tile tile;
  tile.b = head / p.Hq;
  tile.h = head - tile.b * p.Hq;
  tile.m0 = m * BLOCK_M;
  return tile;
}

// The half-open run of keys one query row attends.
struct Run { int lo, hi; };

DEVICE int keys_of(const Params& p, int b) {
#if HAS_KV_LENS
  return max(0, min(p.kv_lens[b], p.Sk));
#else
  return p.Sk;
#endif
}

DEVICE Run row_run(const Params& p, const Tile& t, int row, int keys) {
  Run r = {0, keys};
#if IS_RAGGED
  const int diagonal = row + keys - p.Sq;
  if (HAS_LEFT) r.lo = max(0, diagonal - p.window_left);
  r.hi = min(keys, diagonal + p.window_right + 1);
#endif
#if HAS_RANGES
  const int i = min(row, p.Sq - 1);
  const int* range = p.key_ranges + (long long)t.b * p.ranges_b + (long long)t.h * p.ranges_h + (long long)i * p.ranges_q;
  r.lo = min(max(r.lo, range[0]), FAR);  // a range may hold anything: column differences must not overflow
  r.hi = max(min(r.hi, range[1]), 0);
#endif
  return r;
}

#if HAS_MASK
// From the first to the last key that the mask keeps for some row of a tile.
DEVICE Run kept_run(const Params& p, const Tile& t) {
  const unsigned char* from = p.mask + t.b * p.mask_b + t.h * p.mask_h + p.mask_run;
  int lo = FAR, hi = 0;
  for (int i = threadIdx.x & 31; i < BLOCK_M; i += 32) {
    const int2 run = *(const int2*)(from + min(t.m0 + i, p.Sq - 1) * p.mask_q);
    lo = min(lo, run.x), hi = max(hi, run.y);
  }
  return {__reduce_min_sync(~0u, lo), __reduce_max_sync(~0u, hi)};
}
#endif

// Key blocks of a tile: visits [first, last), masks outside [full_first, full_last).
struct Blocks { int first, last, full_first, full_last, hi; };

DEVICE Blocks blocks_of(const Params& p, const Tile& t, int keys, int rows = BLOCK_M) {
  Run any, all;  // attended by some row, by every row
#if HAS_RANGES
  const int lane = threadIdx.x & 31;
  any = {FAR, -FAR}, all = {-FAR, FAR};
  for (int i = lane; i < rows; i += 32) {
    Run r = row_run(p, t, min(t.m0 + i, p.Sq - 1), keys);
    if (r.hi > r.lo) any.lo = min(any.lo, r.lo), any.hi = max(any.hi, r.hi);
    all.lo = max(all.lo, r.lo), all.hi = min(all.hi, r.hi);
  }
  any.lo = __reduce_min_sync(~0u, any.lo), any.hi = __reduce_max_sync(~0u, any.hi);
  all.lo = __reduce_max_sync(~0u, all.lo), all.hi = __reduce_min_sync(~0u, all.hi);
#else
  const Run first = row_run(p, t, t.m0, keys), last = row_run(p, t, min(t.m0 + rows, p.Sq) - 1, keys);
  any = {first.lo, last.hi}, all = {last.lo, first.hi};
#endif
#if HAS_MASK
  const Run kept = kept_run(p, t);
  any.lo = max(any.lo, kept.lo), any.hi = min(any.hi, kept.hi);
#endif
  Blocks n;
  if (any.hi <= any.lo) { n = {0, 0, 0, 0, 0}; return n; }
  n.first = any.lo / BLOCK_N;
  n.last = (any.hi + BLOCK_N - 1) / BLOCK_N;
  n.full_first = max(n.first, (max(all.lo, 0) + BLOCK_N - 1) / BLOCK_N);
  n.full_last = min(n.last, max(all.hi, 0) / BLOCK_N);
  if (n.full_last < n.full_first) n.full_first = n.full_last = n.first;
  n.hi = any.hi;
  return n;
}

// What the producer finds out about a tile for everyone.
struct Task {
  Tile tile;
  int keys;
  Blocks n;
};
constexpr int NO_TASK = -1;  // as m0: the work is done
constexpr u32 TASK_BYTES = 48;

DEVICE Task task_at(const Params& p, int t) {
  Task task;
  task.tile = tile_at(p, t);
  task.keys = keys_of(p, task.tile.b);
  task.n = blocks_of(p, task.tile, task.keys);
  return task;
}

DEVICE void publish(u32 at, const Task& t) {
  store_shared(at, make_int4(t.tile.m0, t.tile.h, t.tile.b, t.keys));
  store_shared(at + 16, make_int4(t.n.first, t.n.last, t.n.full_first, t.n.full_last));
  store_shared(at + 32, make_int4(t.n.hi, 0, 0, 0));
}

DEVICE Tile published_tile(u32 at) {
  const int4 x = load_shared<int4>(at);
  return {uniform(x.x), uniform(x.y), uniform(x.z)};
}

DEVICE Task published(u32 at) {
  const int4 x = load_shared<int4>(at), y = load_shared<int4>(at + 16), z = load_shared<int4>(at + 32);
  Task t;
  t.tile = {uniform(x.x), uniform(x.y), uniform(x.z)}, t.keys = uniform(x.w);
  t.n = {uniform(y.x), uniform(y.y), uniform(y.z), uniform(y.w), uniform(z.x)};
  return t;
}
