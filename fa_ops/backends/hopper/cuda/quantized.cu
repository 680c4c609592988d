// Attention forward with 8-bit products for sm_90a: persistent, warp-specialised CTAs as in forward.cu, on
// queries, keys and values that quantize.cu has written.
//
// Compile-time: IS_BF16 IS_INT8 BLOCK_M BLOCK_N HEAD_DIM HEAD_FEATURES VALUE_FEATURES STAGES QUERY_STAGES
// SHARED_BYTES SUMMED_KEYS HAS_WINDOW HAS_LEFT HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_SINKS
// SUMS_BY_PRODUCT: row sums are products with ones, in place of additions
// HAS_SIGNS: scales may be negative
// HEAD_SCALES: all keys of a head have one scale, and all of its values
// QUANTISES_QUERIES ROTATED_BITS: queries have 16 bits
// PACKED_QUERIES: of packed sequences; IS_PAGED COPY_KEYS: whose keys are in pages
#define HAS_MASK 0
#define PACKED_HEADS 1
#define BIAS_BITS 0
#define RESCALE_THRESHOLD 0
#include "quantized_producer.cuh"

#include "quantized_mainloop.cuh"

DEVICE void init_barriers(const QuantizedShared& sm) {
  init_tile_barriers(sm, QUERY_SLOTS);
  mbar_init_fence();
}

#if SUMS_BY_PRODUCT
// Fills the rows of ones behind the values of each slot, which copies do not overwrite.
DEVICE void store_ones(const QuantizedShared& sm) {
  constexpr int ONE = 0x38383838, PIECES = ONES * BLOCK_N / 16;
  for (int i = threadIdx.x; i < STAGES * PIECES; i += blockDim.x)
    store_shared(slot_at<V_BYTES>(sm.v, i / PIECES) + V_COPY_BYTES + i % PIECES * 16,
                 make_int4(ONE, ONE, ONE, ONE));
  fence_async_shared();
}
#else
DEVICE void store_ones(const QuantizedShared&) {}
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    quantized(const __grid_constant__ QuantizedParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const QuantizedShared sm{smem_address(shared)};
  if (threadIdx.x == 0) init_barriers(sm);
  store_ones(sm);
  wait_for_prior_grid();  // the prior grid writes the 8-bit numbers
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<(CONSUMERS == 2 ? 24 : 32)>();
    if (threadIdx.x < 32) produce(p, sm);
  } else {
    register_alloc<(CONSUMERS == 2 ? 240 : 160)>();
    QuantizedConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
