// The gradient of a term of distances, behind the pass over keys: the sums of all blocks of 64 keys, in
// order, and of the heads and batches that share the term. One thread per distance.
#include "backward_tiles.cuh"

extern "C" __global__ void __launch_bounds__(256)
    distance_gradient(const __grid_constant__ BackwardParams p) {
  const ProgramOfCall& of = p.program;
  const int blocks = (p.Sq + p.Sk + 255) / 256, line = blockIdx.x / blocks;
  const int distance = (blockIdx.x - line * blocks) * 256 + threadIdx.x - p.Sk;
  const int heads = of.distances_h ? p.Hq : 1, b = line / heads, h = line - b * heads;
  if (distance >= p.Sq) return;
  float sum = 0.f;
  for (int i = b; i < (of.distances_b ? b + 1 : p.B); i++) {
    const int keys = keys_of(p, i);
    for (int j = h; j < (of.distances_h ? h + 1 : p.Hq); j++)
#pragma unroll 4
      for (int block = 0; block * 64 < keys; block++) {
        const int n0 = block * 64 / BLOCK_N * BLOCK_N, at = distance + block * 64 + 64;
        const int2 n = queries_of(p, n0, keys);  // from the first block of them to behind the last
        if (n.x < n.y && at >= n.x / 64 * 64 && at < (n.y + 63) / 64 * 64 + 64)
          sum += __ldcg(distance_sums_of(p, i, j, block) + at);
      }
  }
  of.distances[b * of.distances_b + h * of.distances_h + distance] = sum;
}
