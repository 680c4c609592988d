// The dQ of a consumer of backward.cu: it adds the product of a block of queries with each block of keys to
// fp32 sums in global memory, in accumulator order, which `postprocess` converts to rows.
//
// With WHOLE_HEADS one CTA processes all keys of a head. The first block of keys then stores the sums, so
// that they need not be zeroed, and the last one writes the final rows. Each thread reads only what it wrote
// itself. The sums of consecutive heads of a CTA share memory, which stays in the L2 cache.
#pragma once
#include "key_consumer.cuh"

constexpr int QUERY_GRADS = ALTERNATES ? HEAD_FEATURES / 2 : BLOCK_M * SUM_FEATURES / 256;
constexpr bool SPLITS_ROWS = BLOCK_M == 128;  // a consumer computes dQ of 64 queries
constexpr bool SPLITS_COLUMNS = !(SPLITS_ROWS || ALTERNATES);  // a consumer computes half the columns of dQ
// padding columns at the end of the second half
constexpr int UNUSED_GRADS = SPLITS_COLUMNS ? (SUM_FEATURES - HEAD_FEATURES) / 2 : 0;

// Writes dQ of 64 queries, from column `first` on; `row` is this thread's first query.
template <int COUNT>
DEVICE void write_query_rows(const BackwardParams& p, const float (&x)[COUNT], int b, int h, int row,
                             int first) {
  Element* const to = (Element*)row_at(p.tensors[DQ], p.strides[DQ], b, h, row);
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 2 * r; i < COUNT; i += 16) {
      u32 y[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int e = i + 4 * j;
        y[j] = e < COUNT ? pack(x[e] * p.scale, x[e + 1] * p.scale) : 0;
      }
      transpose_quad(y);
      const int column = first + (i / 4 + (threadIdx.x & 3)) * 8;
      if (row + 8 * r < p.Sq && column < p.D)
        *(uint4*)(to + 8 * r * p.strides[DQ].s + column) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

struct QueryGradients : KeyConsumerBase {
  const int c;
  // The block of queries of the previous step, counted over all heads, or -1 if this consumer does not
  // compute dQ of it. With ALTERNATES it computes the blocks whose dS is in buffer `c`.
  int previous = -1;
  float dq[QUERY_GRADS];

  DEVICE QueryGradients(const BackwardParams& p, const BackwardShared& sm, int c)
      : KeyConsumerBase(p, sm, {}, c * 64), c(c) {}

  // The address of this thread's first sum of a block of queries.
  DEVICE float* sums_of(long long block) const {
    const int half = ALTERNATES ? 0 : c;
    return p.sums + block * (BLOCK_M * SUM_FEATURES) + opaque(half * 128 * QUERY_GRADS + tid * 4);
  }

  DEVICE void note_block(int h, int m) { previous = (t.b * p.Hq + h) * p.m_blocks + m; }

  DEVICE void write_query_gradients() {
    float* const to = sums_of(previous);
    add_fragments<0, QUERY_GRADS - UNUSED_GRADS>(to, dq);
    if (UNUSED_GRADS > 0 && c == 0) add_fragments<QUERY_GRADS - UNUSED_GRADS, QUERY_GRADS>(to, dq);
  }
};

#if WHOLE_HEADS
// The same if one CTA processes all keys of a head. `previous` only marks whether there was a step.
struct WholeQueryGradients : QueryGradients {
  using QueryGradients::QueryGradients;

  DEVICE void note_block(int, int) { previous = 0; }

  // The target of the step before the current position of `ring`.
  DEVICE QueryTarget target() const {
    return load_target(slot_at<16>(sm.targets, (ring.phase * STAGES + ring.stage + 3) & 3));
  }

  DEVICE float* own_sums(const QueryTarget& x) const {
    return sums_of((long long)blockIdx.x * p.part_heads * p.m_blocks + x.place);
  }

  DEVICE void write_query_gradients() {
    const QueryTarget x = target();
    if (x.is_complete) {
      if (x.is_stored) add_sums(own_sums(x));
      write_rows(x);
    } else if (x.is_stored) {
      add_fragments<0, QUERY_GRADS>(own_sums(x), dq);
    } else {
      float* const to = own_sums(x);
#pragma unroll
      for (int i = 0; i < QUERY_GRADS; i += 4)
        *(float4*)(to + i * 128) = make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
  }

  DEVICE void add_sums(const float* from) {
    float4 x[QUERY_GRADS / 4];
#pragma unroll
    for (int i = 0; i < QUERY_GRADS; i += 4) x[i / 4] = load_l2(from + i * 128);
#pragma unroll
    for (int i = 0; i < QUERY_GRADS; i += 4)
      dq[i] += x[i / 4].x, dq[i + 1] += x[i / 4].y, dq[i + 2] += x[i / 4].z, dq[i + 3] += x[i / 4].w;
  }

  DEVICE void write_rows(const QueryTarget& target) {
    const int b = target.b, h = target.h, tid = opaque(this->tid), lane = tid & 31;
    const int top = target.m * BLOCK_M + (SPLITS_ROWS ? first : 0) + (tid >> 5) * 16;
    note_rows(sm.nonfinite, __any_sync(~0u, probe(dq) != 0.f));
    write_query_rows(p, dq, b, h, top + (lane >> 2), SPLITS_ROWS ? 0 : c * (SUM_FEATURES / 2));
  }
};
#endif
