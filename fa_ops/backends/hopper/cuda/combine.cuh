// The combine kernel of Flash-Decoding: merges the splits of work items that several CTAs share. It is
// launched together with the attention kernel and is already resident when that kernel ends; no CTA polls a
// counter. Each CTA whose work range begins inside an item merges a slice of that item's rows and columns.
// Where all items are cut alike, so does the CTA whose range begins with the item. All slices of an item have
// equal size, at most the elements of two splits.
//
// A kernel provides ROWS and VALUE_DIM; packed_rows(p), the number of rows that exist; finish_packed_row(p,
// split, row, max2, total, writes_lse, inverse), which returns the row's index in the output and sets the
// factor that normalises it; write_columns(p, row, column, x, inverse), for two columns; and
// replace_columns(p, split, row, column), which computes two columns of a row exactly in each lane. Its
// parameters hold `partial` (2 * CTAs, ROWS, VALUE_DIM), the weighted sums of values relative to the maxima,
// and `partial_stats` (2 * CTAs, ROWS, stats_per_row(p)), a maximum in log2 units and a sum of weights for
// each of a row's stats_per_row(p) equal parts. Each 64 columns of a row of `partial` are 32 pairs: each a
// float2, or a u32 with two numbers of float16. The kernel's partial_column(p, i) is the first column of pair
// i.
#pragma once
#include "exact_row.cuh"
#include "softmax.cuh"
#include "work_ranges.cuh"

// A CTA has one slot for each end of its work range. Only the first split of an item can be the second split
// of its CTA.
template <class Params> DEVICE int slot_of(const Params& p, const Split& t, int split) {
  return ((t.first_group + split) * group_width(p) + blockIdx.x % group_width(p)) * 2 +
         (split == 0 && t.flags & FIRST_IN_SECOND_SLOT ? 1 : 0);
}
DEVICE int own_slot(const Split& t) { return blockIdx.x * 2 + (t.flags & SECOND_SLOT ? 1 : 0); }

constexpr int SEGMENTS = VALUE_DIM / 64;  // per row, of 64 columns each

DEVICE float2 unpack_partial(float2 x) { return x; }
DEVICE float2 unpack_partial(u32 x) { return unpack_halves(x); }

// Merges segments of an item: segment `first` and every `step`-th one after it. Executed by one warp, which
// reads SPLITS splits of 32 / SPLITS segments at a time; each lane reads the statistics of one. An item may
// have more splits only if SPLITS is 32. The order of the additions does not depend on which warp merges.
// Returns whether this lane has found a sum that is not finite.
template <int SPLITS, class Params, class Pair>
DEVICE bool combine_rows(const Params& p, const Pair* partial, const Split& t, int first, int step) {
  constexpr int ITEMS = 32 / SPLITS;
  bool is_unusable = false;
  const int lane = threadIdx.x & 31, segments = packed_rows(p) * SEGMENTS;
#pragma unroll 1
  for (int i = first; i < segments; i += step * ITEMS) {
    const int own_segment = i + lane / SPLITS * step,  // whose statistics this lane reads
        existing = min(own_segment, segments - 1), own = existing / SEGMENTS;
    float max2 = UNINITIALISED_MAX, total = 0.f;
    float2 x[ITEMS] = {};
#pragma unroll 1
    for (int split = 0; split < (SPLITS < 32 ? SPLITS : t.splits); split += SPLITS) {
      float2 stats = make_float2(UNINITIALISED_MAX, 0.f);
      Pair y[ITEMS][SPLITS];
      if (split + lane % SPLITS < t.splits)
        stats = __ldcg(p.partial_stats + slot_of(p, t, split + lane % SPLITS) * (ROWS * stats_per_row(p)) +
                       existing / (SEGMENTS / stats_per_row(p)));
#pragma unroll
      for (int j = 0; j < SPLITS; j++) {
        const Pair* from = partial + slot_of(p, t, split + j) * (ROWS * VALUE_DIM / 2) + lane;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
          y[k][j] = Pair();
          if (split + j < t.splits && i + k * step < segments) y[k][j] = __ldcg(from + (i + k * step) * 32);
        }
      }
      float m = stats.y > 0.f ? stats.x : UNINITIALISED_MAX;
#pragma unroll
      for (int w = 1; w < SPLITS; w <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, w));
      m = fmaxf(m, max2);
      const float factor = stats.y > 0.f ? exp2_fast(stats.x - m) : 0.f, old = exp2_fast(max2 - m);
      float sum = stats.y * factor;
#pragma unroll
      for (int w = 1; w < SPLITS; w <<= 1) sum += __shfl_xor_sync(~0u, sum, w);
      max2 = m, total = total * old + sum;
#pragma unroll
      for (int k = 0; k < ITEMS; k++) {
        const float kept = __shfl_sync(~0u, old, k * SPLITS);
        x[k].x *= kept, x[k].y *= kept;
#pragma unroll
        for (int j = 0; j < SPLITS; j++) {
          const float f = __shfl_sync(~0u, factor, k * SPLITS + j);
          const float2 sums = unpack_partial(y[k][j]);
          x[k].x += sums.x * f, x[k].y += sums.y * f;
        }
      }
    }
    float inverse;
    const bool writes_lse = own_segment < segments && own_segment % SEGMENTS == 0 && lane % SPLITS == 0;
    const int out_row = finish_packed_row(p, t, own, max2, total, writes_lse, inverse);
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
      const int segment = i + k * step, to = __shfl_sync(~0u, out_row, k * SPLITS);
      const float factor = __shfl_sync(~0u, inverse, k * SPLITS);
      if (segment < segments)
        write_columns(p, to, segment % SEGMENTS * 64 + partial_column(p, lane), x[k], factor);
      is_unusable = is_unusable || (segment < segments && !is_finite(x[k]));
    }
  }
  return is_unusable;
}

template <class Params> DEVICE void combine_splits(const Params& p) {
  launch_dependent_grids();
  const WorkIterator<Params> iterator(p);  // the lengths can be read at once, the splits only after the wait
  const bool are_cut_alike = iterator.ranges.item_splits > 1;
  const bool shared = iterator.at < iterator.stop && (are_cut_alike || iterator.at > iterator.item_begin);
  Split t;
  if (shared) t = iterator.split(), iterator.find_splits(t);
  wait_for_prior_grid();  // CTAs without work wait too: the end of this kernel must imply that of
                          // the attention kernel
  if (!shared) return;
  const int first_slice = are_cut_alike ? 0 : 1, slices = t.splits - first_slice, warps = blockDim.x / 32,
            slice = iterator.cta_group - t.first_group - first_slice,
            first = slice + warp_uniform(threadIdx.x / 32) * slices, step = warps * slices;
  bool is_unusable;
  if (t.splits <= 2) is_unusable = combine_rows<2>(p, p.partial, t, first, step);
  else if (t.splits <= 4) is_unusable = combine_rows<4>(p, p.partial, t, first, step);
  else if (t.splits <= 8) is_unusable = combine_rows<8>(p, p.partial, t, first, step);
  else is_unusable = combine_rows<32>(p, p.partial, t, first, step);
  if (__any_sync(~0u, is_unusable)) {
    t = WorkIterator<Params>(p).split();  // computed again here to save registers until now
#pragma unroll 1
    for (int segment = first; segment < packed_rows(p) * SEGMENTS; segment += step)
      replace_columns(p, t, segment / SEGMENTS, segment % SEGMENTS * 64 + (threadIdx.x & 31) * 2);
  }
}
