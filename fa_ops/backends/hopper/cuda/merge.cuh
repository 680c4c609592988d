// Units that several teams share: where their parts lie, and the kernel that makes one result of them, launched with the first. A stretch that begins
// inside of a unit has a CTA there that merges a slice of it: all of them the same share, and none more than two parts' numbers. It is on its way when
// the first kernel ends, no CTA of which waits for others or counts them.
// A kernel says: ROWS and VALUE_DIM; rows_of(p), how many of the rows exist; close_row(p, t, row, m2, total, writes_lse, inverse), the row's place in the
// output, and what its sums must be multiplied with; put(p, place, column, x, inverse), two columns of it; replace_columns(p, t, row, column), the same
// computed exactly, where a sum of values is not finite.
// Its Params have: partial (2 * CTAs, ROWS, VALUE_DIM), sums of weighted values, relative to partial_stats (2 * CTAs, ROWS): maximum in log2 units, sum
// of weights.

// A CTA has a slot for each end of its stretch. Only a unit's first part can be its CTA's second.
template <class Params> DEVICE int slot_of(const Params& p, const Task& t, int part) {
  return ((t.first_team + part) * width_of(p) + blockIdx.x % width_of(p)) * 2 + (part == 0 && t.flags & FIRST_IN_SECOND_SLOT ? 1 : 0);
}
DEVICE int own_slot(const Task& t) { return blockIdx.x * 2 + (t.flags & SECOND_SLOT ? 1 : 0); }

constexpr int RUNS = VALUE_DIM / 64;  // of 64 columns, of a row

// A warp merges 64 columns of one row after the other: of the unit's 64 columns of a row, number `first` and each `step`th after it. It reads PARTS parts
// of 32 / PARTS of them at once, a lane the statistics of one. Always in the same order, whoever does it. Returns whether this lane has met a sum that
// is not finite.
template <int PARTS, class Params> DEVICE bool merge_by(const Params& p, const Task& t, int first, int step) {
  constexpr int ITEMS = 32 / PARTS;
  bool is_unusable = false;
  const int lane = threadIdx.x & 31, runs = rows_of(p) * RUNS;
#pragma unroll 1
  for (int i = first; i < runs; i += step * ITEMS) {
    const int own_run = i + lane / PARTS * step, own = min(own_run, runs - 1) / RUNS;  // those of this lane's statistics
    float m2 = NEVER, total = 0.f;
    float2 x[ITEMS] = {};
#pragma unroll 1
    for (int part = 0; part < t.parts; part += PARTS) {
      float2 stats = make_float2(NEVER, 0.f), y[ITEMS][PARTS];
      if (part + lane % PARTS < t.parts) stats = __ldcg(p.partial_stats + slot_of(p, t, part + lane % PARTS) * ROWS + own);
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        const float2* from = (const float2*)(p.partial + slot_of(p, t, part + j) * (ROWS * VALUE_DIM)) + lane;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
          y[k][j] = make_float2(0.f, 0.f);
          if (part + j < t.parts && i + k * step < runs) y[k][j] = __ldcg(from + (i + k * step) * 32);
        }
      }
      float m = stats.y > 0.f ? stats.x : NEVER;
#pragma unroll
      for (int w = 1; w < PARTS; w <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, w));
      m = fmaxf(m, m2);
      const float factor = stats.y > 0.f ? exp2_fast(stats.x - m) : 0.f, old = exp2_fast(m2 - m);
      float sum = stats.y * factor;
#pragma unroll
      for (int w = 1; w < PARTS; w <<= 1) sum += __shfl_xor_sync(~0u, sum, w);
      m2 = m, total = total * old + sum;
#pragma unroll
      for (int k = 0; k < ITEMS; k++) {
        const float kept = __shfl_sync(~0u, old, k * PARTS);
        x[k].x *= kept, x[k].y *= kept;
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
          const float f = __shfl_sync(~0u, factor, k * PARTS + j);
          x[k].x += y[k][j].x * f, x[k].y += y[k][j].y * f;
        }
      }
    }
    float inverse;
    const bool writes_lse = own_run < runs && own_run % RUNS == 0 && lane % PARTS == 0;
    const int place = close_row(p, t, own, m2, total, writes_lse, inverse);
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
      const int run = i + k * step, to = __shfl_sync(~0u, place, k * PARTS);
      const float factor = __shfl_sync(~0u, inverse, k * PARTS);
      if (run < runs) put(p, to, run % RUNS * 64 + lane * 2, x[k], factor);
      is_unusable = is_unusable || (run < runs && !is_finite(x[k]));
    }
  }
  return is_unusable;
}

template <class Params> DEVICE void merge(const Params& p) {
  next_grid_may_start();
  const Walk<Params> walk(p);  // the first kernel lets this one start when lengths can be read, and its parts are not there yet
  const bool shared = walk.at < walk.stop && walk.at > walk.begin;
  Task t;
  if (shared) t = walk.task(), walk.share(t);
  wait_for_last_grid();  // whoever shares nothing too: who comes next takes this kernel's end for the first one's
  if (!shared) return;
  const int slices = t.parts - 1, warps = blockDim.x / 32, first = walk.team - t.first_team - 1 + uniform(threadIdx.x / 32) * slices, step = warps * slices;
  bool is_unusable;
  if (t.parts <= 2) is_unusable = merge_by<2>(p, t, first, step);
  else if (t.parts <= 8) is_unusable = merge_by<8>(p, t, first, step);
  else is_unusable = merge_by<32>(p, t, first, step);
  if (__any_sync(~0u, is_unusable)) {
    t = Walk<Params>(p).task();  // again: it takes no registers until here
#pragma unroll 1
    for (int run = first; run < rows_of(p) * RUNS; run += step) replace_columns(p, t, run / RUNS, run % RUNS * 64 + (threadIdx.x & 31) * 2);
  }
}
