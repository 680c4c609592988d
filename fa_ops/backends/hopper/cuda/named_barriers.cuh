// The hardware's named barriers (bar.sync), by kernel. Barrier 0 is that of __syncthreads.
#pragma once
#include "ptx.cuh"

template <int CONSUMERS> struct ForwardBarriers {
  enum : u32 {
    WARPGROUP = 1,                      // one per consumer, for its 128 threads
    PING_PONG = WARPGROUP + CONSUMERS,  // consumer c waits at PING_PONG + c until it may issue products
  };
};

template <int CONSUMERS> struct BackwardBarriers {
  enum : u32 {
    CONSUMER_SYNC = 1,                  // for all consumers
    WARPGROUP = 2,                      // one per consumer, for its 128 threads
    DS_STORED = WARPGROUP + CONSUMERS,  // dS of each consumer and buffer is in shared memory
    ROW_SUMS = DS_STORED + 2 * CONSUMERS,  // row sums of the CTA's heads are in memory
    K_READ = CONSUMER_SYNC,             // backward_keys.cu: no product reads K any more
    V_READ = WARPGROUP + CONSUMERS,     // and none reads V
    GRAD_OUT_READ = CONSUMER_SYNC,      // backward_pair.cu: no product reads dO any more
  };
};

struct QuantizedBarriers {
  enum : u32 {
    TURN = 1,       // consumer c waits at TURN + c until it may issue products
    WARPGROUP = 4,  // one per consumer (up to three), for its 128 threads
  };
};

enum DecodeBarriers : u32 { DECODE_CONSUMERS = 1 };  // for all attention warps

enum MlaBarriers : u32 {
  MLA_WARPGROUP = 1,  // one per consumer, for its 128 threads
  MLA_SUMS = 3,       // the row sums of each consumer are in shared memory
};

enum WideBarriers : u32 {
  WIDE_WARPGROUP = 1,  // one per consumer, for its 128 threads
  WIDE_SUMS = 3,       // the row sums of both consumers are in shared memory
  WIDE_SCORES = 4,     // consumer w waits at WIDE_SCORES + w until the other has issued its scores
};

enum WideBackwardBarriers : u32 {
  WIDE_SCORE_WARPGROUP = 1,     // for the 128 threads of the score warpgroup
  WIDE_GRADIENT_WARPGROUP = 2,  // one per half, for its 128 threads
  WIDE_GRADIENTS = 4,           // gradients of both halves are in shared memory
  WIDE_STREAM_READ = 5,         // no consumer reads a block any more
};
