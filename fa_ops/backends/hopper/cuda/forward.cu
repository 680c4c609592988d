// Attention forward for sm_90a: FlashAttention-3 with persistent, warp-specialised CTAs. Warpgroup 0 is the
// producer: it schedules tiles and copies Q, K and V by TMA (forward_producer.cuh). Each of the other
// warpgroups is a consumer: it owns 64 queries, keeps one product of scores and one of values in flight, and
// uses the tensor cores in ping-pong order, so that its softmax overlaps with another consumer's products
// (forward_mainloop.cuh, forward_epilogue.cuh).
//
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM HEAD_FEATURES VALUE_FEATURES STAGES QUERY_STAGES
// PACKED_HEADS RESCALE_THRESHOLD SHARED_BYTES HAS_WINDOW HAS_LEFT HAS_KV_LENS HAS_RANGES HAS_SOFTCAP
// HAS_ALIBI HAS_SINKS HAS_MASK HAS_DROPOUT BIAS_BITS IS_PAGED COPY_KEYS WHOLE_ROWS SPLITS_KEYS
// PACKED_QUERIES CTAS SKIPS_TILES
#include "exact_row.cuh"
#include "softmax.cuh"
#include "forward_producer.cuh"

#include "forward_mainloop.cuh"

DEVICE void init_barriers(const ForwardShared& sm) {
  init_tile_barriers(sm, QUERY_STAGES * CONSUMERS, KEY_READERS);
#if SKIPS_TILES
  for (int i = 0; i < STAGES; i++) mbar_init(barrier(sm.steps_full, i), 1);
#endif
  if (HAS_HELPERS)
    for (int c = 0; c < CONSUMERS; c++)
      mbar_init(barrier(sm.helper_full, c), HAS_MASK ? 32 : 1), mbar_init(barrier(sm.helper_empty, c), 128);
  mbar_init_fence();
}

#if 64 % PACKED_HEADS
// Zeroes the rows that no copy fills, since their scores must be finite.
DEVICE void clear_unused_rows(const ForwardShared& sm) {
  constexpr int UNUSED = (64 - CONSUMER_ROWS) * 8, COLUMNS = QUERY_STAGES * CONSUMERS * QK_COLUMNS;
  for (int i = threadIdx.x; i < COLUMNS * UNUSED; i += blockDim.x)
    store_shared(sm.q + i / UNUSED * 64 * 128 + CONSUMER_ROWS * 128 + i % UNUSED * 16, make_int4(0, 0, 0, 0));
  fence_async_shared();
}
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), CTAS)
    forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardShared sm{smem_address(shared)};
#if SPLITS_KEYS
  launch_dependent_grids();
#endif
  if (threadIdx.x == 0) init_barriers(sm);
#if 64 % PACKED_HEADS
  clear_unused_rows(sm);
#endif
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<(CTAS == 3 ? 24 : CONSUMERS == 2 && CTAS == 1 ? 40 : 32)>();
#if BIAS_BITS
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) produce(p, sm);
    else if (warp <= CONSUMERS) produce_bias(p, sm, warp - 1);
#elif IS_PAGED
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) produce(p, sm);
    else if (warp == 1) produce_values(p, sm);
#else
    if (threadIdx.x < 32) produce(p, sm);
#if HAS_MASK
    else if (threadIdx.x < 32 + 32 * CONSUMERS) produce_mask(p, sm, warp_uniform(threadIdx.x / 32) - 1);
#endif
#endif
  } else {
    register_alloc<(CTAS == 3 ? 136 : CTAS == 2 ? 104 : CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112)>();
    ForwardConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
