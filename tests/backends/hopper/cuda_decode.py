"""Stand-ins for what decode.cu finds in `ptx.cuh`, for its source as C++ on the CPU."""

import ctypes

import torch

from tests.backends.hopper.cuda_as_cpp import WARP

# Shared memory is an array; the operands of a warp's products are put together from all lanes.
TENSOR_CORES = """
struct int2 { int x, y; };
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static unsigned char shared[1 << 18];
template <class T> static T load_shared(u32 at) {
  T x;
  std::memcpy(&x, shared + at, sizeof x);
  return x;
}
template <class T> static void store_shared(u32 at, T x) { std::memcpy(shared + at, &x, sizeof x); }
static u32 any_number() { return 0x7e007e00u; }  // NaN
static u32 swizzled(u32 base, int rows, int row, int chunk) {
  return base + (chunk >> 3) * rows * 128 + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}
static u32 __byte_perm(u32 x, u32 y, u32 selector) {
  const u64 both = (u64)y << 32 | x;
  u32 z = 0;
  for (int i = 0; i < 4; i++) z |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return z;
}
static u32 half_bits(float x) {
  const _Float16 y = x;
  unsigned short bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}
static float half_value(u32 bits) {
  const unsigned short x = bits;
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return y;
}
static u32 pack_f16(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
static void unpack_e4m3(u32 x, u32& low, u32& high) {
  const float2 a = unpack_e4m3((unsigned short)x), b = unpack_e4m3((unsigned short)(x >> 16));
  low = pack_f16(a.x, a.y), high = pack_f16(b.x, b.y);
}
// Eight rows of 16 bytes each; those of matrix m are at the addresses of lanes 8 m to 8 m + 7.
template <bool TRANSPOSED> static void ldmatrix_x4(u32 (&r)[4], u32 at) {
  const int lane = threadIdx.x & 31, *addresses = tell(at);
  for (int m = 0; m < 4; m++) {
    unsigned short pair[2];
    for (int i = 0; i < 2; i++) {
      const int row = TRANSPOSED ? lane % 4 * 2 + i : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + i;
      std::memcpy(pair + i, shared + addresses[8 * m + row] + column * 2, 2);
    }
    r[m] = pair[0] | pair[1] << 16;
  }
}
static float a_matrix[16][16], b_matrix[16][8];
static void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 2; i++) {
    for (int r = 0; r < 4; r++)
      a_matrix[g + r % 2 * 8][t * 2 + i + r / 2 * 8] = half_value(a[r] >> 16 * i);
    b_matrix[t * 2 + i][g] = half_value(b0 >> 16 * i), b_matrix[t * 2 + i + 8][g] = half_value(b1 >> 16 * i);
  }
  tell(0);
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) d[i] += a_matrix[g + i / 2 * 8][k] * b_matrix[k][t * 2 + i % 2];
  tell(0);
}
"""  # noqa: E501
PTX = WARP.replace("static void store_shared(u32, int4) {}", "").replace(
    "template <class T> static T load_shared(u32) { return {}; }", ""
)
PTX += TENSOR_CORES
# What else decode.cu needs: TMA copies and barriers do nothing, others are complete at once.
NO_TMA = """
constexpr int RESCALE_THRESHOLD = 8;
template <class... T> static void mbar_wait(T...) {}
template <class... T> static void mbar_arrive(T...) {}
template <class... T> static void mbar_arrive_expect(T...) {}
template <class... T> static void named_barrier_sync(T...) {}
template <class... T> static void tma_load(T...) {}
template <class... T> static void tma_load_hinted(T...) {}
template <class... T> static void tma_load_rows_hinted(T...) {}
static void copy_some(u32 to, const void* from, u32 size, u32 bytes) {
  std::memset(shared + to, 0, size);
  if (bytes) std::memcpy(shared + to, from, bytes);
}
static void copy_word(u32 to, const void* from, bool is_there) { copy_some(to, from, 4, is_there ? 4 : 0); }
constexpr u64 EVICT_FIRST = 1, EVICT_NORMAL = 2;
static void copy_chunk(u32 to, const void* from, u32 bytes, u64) { copy_some(to, from, 16, bytes); }
static void copies_arrive(u32) {}
static void __syncwarp() {}
static bool elect_one() { return false; }
static u32 pack(float, float) { return 0; }
"""  # noqa: E501


def place(kernel, address, x):
    """Copies rows into shared memory, 16 bytes at a time, as the copies of the kernel do."""
    data = x.contiguous().view(torch.uint8).numpy()
    used = set()
    for row, line in enumerate(data):
        for chunk in range(len(line) // 16):
            at = address(row, chunk)
            assert at % 16 == 0 and at not in used
            used.add(at)
            ctypes.memmove(kernel.memory() + at, line[16 * chunk :].ctypes.data, 16)
