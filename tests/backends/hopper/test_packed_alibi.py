"""ALiBi of packed sequences: the Hopper kernels run on the CPU. Tiles have rows and columns of
several sequences."""

import ctypes
import dataclasses

import pytest
import torch

from fa_ops.backends.hopper import backward as dense_backward
from fa_ops.backends.hopper import forward as dense_forward
from fa_ops.backends.hopper.configs import BackwardConfig, forward_config
from tests.backends.hopper.cuda_as_cpp import needs_compiler
from tests.backends.hopper.cuda_cluster import PTX, compiled
from tests.backends.hopper.cuda_forward import FORWARD_PTX, softmax_without_fences

pytestmark = needs_compiler
# Queries and keys of each sequence; tokens before the first and behind the last belong to none.
SEQUENCES = (40, 70), (0, 13), (3, 0), (90, 75)
BEFORE, BEHIND = (5, 9), (7, 4)
HEADS, KEY_HEADS, D, SCALE, LOG2E = 4, 2, 16, 0.25, 1.4426950408889634
SHARED = r"""
template <class Params> static void read_sizes(Params& p, const int* n, const float* slopes, const int2* positions) {
  p.B = 1, p.Hq = n[0], p.group = n[0] / n[1], p.Sq = n[2], p.Sk = n[3], p.D = p.Dv = n[4];
  p.m_blocks = (n[2] + BLOCK_M - 1) / BLOCK_M, p.scale_log2 = 0.25f * LOG2E;
  p.alibi = slopes, p.alibi_b = n[0], p.alibi_unit = 4.f, p.positions = positions;
  gridDim.x = 1;
}
static Tensor tensor_of(u16* data, const int* n, bool of_keys, int rows) {
  return {data, n[4], of_keys ? n[3] : n[2], of_keys ? n[1] : n[0], 1, rows};
}
"""  # noqa: E501
FORWARD = (
    f'#include "forward.cu"\n{SHARED}'
    + r"""
static ForwardParams params;
static void body_of_thread() { forward(params); }
extern "C" const char* run(u16** data, const int* n, float* lse, const float* slopes,
                           const int2* positions, const int* ranges, int seed) {
  ForwardParams& p = params;
  read_sizes(p, n, slopes, positions);
  static Tensor tensors[3];
  TensorMap* maps[] = {&p.q, &p.k, &p.v};
  for (int i = 0; i < 3; i++) {
    tensors[i] = tensor_of(data[i], n, i > 0, i ? BLOCK_N : 64);
    maps[i]->words[0] = (u64)&tensors[i];
  }
  p.out = data[3], p.lse = lse, p.key_ranges = ranges, p.ranges_q = 2;
  p.window_left = p.window_right = UNBOUNDED;
  p.tiles = p.m_blocks * p.Hq, p.section = p.Hq;
  return run_cluster(body_of_thread, 0, seed);
}
"""
)
BACKWARD = (
    f"#include KERNEL_FILE\n{SHARED}"
    + r"""
static BackwardParams params;
static void body_of_thread() { KERNEL(params); }
extern "C" const char* run(u16** data, const int* n, float* lse, const float* slopes,
                           const int2* positions, const int2* ranges, int seed, const int4* bounds,
                           float* delta, float* sums, u32* notes) {
  BackwardParams& p = params;
  read_sizes(p, n, slopes, positions);
  static Tensor tensors[TENSORS];
  TensorMap* maps[TENSORS] = {&p.q, &p.k, &p.v, &p.grad_out, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < TENSORS; i++) {
    tensors[i] = tensor_of(data[i], n, i == K || i == V || i == DK || i == DV, 64);
    maps[i]->words[0] = (u64)&tensors[i];
  }
  static int counter;
  counter = 0, p.counter = &counter;
  p.lse = lse, p.delta = delta, p.sums = sums, p.nonfinite = notes;
  p.ranges = ranges, p.bounds = bounds, p.range_heads = 1;
  p.Hkv = n[1], p.n_blocks = (p.Sk + BLOCK_N - 1) / BLOCK_N, p.scale = 0.25f;
  p.section = p.Hkv, p.query_section = p.Hq, p.parts = 1, p.part_heads = p.group;
  const int ctas = ADDS_DQ ? 1 : (p.m_blocks + 1) / 2 * p.Hq;
  for (int i = 0; i < ctas; i++)
    if (const char* found = run_cluster(body_of_thread, i, seed + i)) return found;
  return nullptr;
}
"""
)


@dataclasses.dataclass
class Batch:
    """A packed batch: tensors (H, T, D), each query's keys, and what `packed_ranges.cu` writes."""

    is_causal: bool
    seed: int

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        tokens = [sum(x) + BEFORE[i] + BEHIND[i] for i, x in enumerate(zip(*SEQUENCES))]
        self.queries, self.keys = tokens
        self.q, self.k, self.v, self.grad_out = (
            torch.randn(heads, tokens[i], D, generator=g).bfloat16()
            for heads, i in ((HEADS, 0), (KEY_HEADS, 1), (KEY_HEADS, 1), (HEADS, 0))
        )
        self.slopes = torch.rand(len(SEQUENCES), HEADS, generator=g) * 0.3 - 0.1
        self.ranges = torch.zeros(self.queries, 2, dtype=torch.int32)
        self.positions = torch.zeros(self.queries + self.keys, 2, dtype=torch.int32)
        self.attended = torch.zeros(self.queries, self.keys, dtype=torch.bool)
        self.bias = torch.zeros(HEADS, self.queries, self.keys)
        first_q, first_k = BEFORE
        for b, (Sq, Sk) in enumerate(SEQUENCES):
            rows, columns = torch.arange(Sq).view(-1, 1), torch.arange(Sk)
            own = slice(first_q, first_q + Sq), slice(first_k, first_k + Sk)
            diagonal = rows + Sk - Sq
            self.attended[own] = columns <= diagonal if self.is_causal else True
            distance = (diagonal - columns).abs()
            self.bias[:, own[0], own[1]] = -self.slopes[b].view(-1, 1, 1) * distance
            ends = (diagonal + 1).clamp(0, Sk) if self.is_causal else torch.full_like(rows, Sk)
            self.ranges[own[0]] = torch.cat([torch.zeros_like(ends), ends], 1).int() + first_k
            self.ranges[own[0]] *= (ends > 0).int()
            at = torch.tensor([first_k + Sk - first_q - Sq, b], dtype=torch.int32)
            self.positions[own[0]] = at
            self.positions[self.queries + first_k : self.queries + first_k + Sk] = at
            first_q, first_k = first_q + Sq, first_k + Sk

    def expected(self):
        """out and lse, and the gradients of q, k and v."""
        leaves = [x.float().requires_grad_() for x in (self.q, self.k, self.v)]
        keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in leaves[1:])
        scores = leaves[0] @ keys.mT * SCALE + self.bias
        scores = scores.masked_fill(~self.attended, float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.where(lse.isfinite(), 0.0).unsqueeze(-1)).exp()
        out = weights @ values
        return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, self.grad_out.float())

    def arguments(self, tensors, lse, ranges, seed):
        """What all kernels take."""
        sizes = HEADS, KEY_HEADS, self.queries, self.keys, D
        data = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
        pointers = (at(x) for x in (lse, self.slopes, self.positions, ranges))
        return data, (ctypes.c_int * 5)(*sizes), *pointers, seed


def at(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    config = forward_config(D, D, differs_by_row=True)
    config = dataclasses.replace(config, block_m=128, block_n=64)
    defines = dense_forward.kernel_defines(config, torch.bfloat16, ranges=True, alibi=2)
    machine = PTX.replace("CTAS = 2, THREADS = 512", f"CTAS = 1, THREADS = {config.threads}")
    others = {"softmax.cuh": softmax_without_fences()}
    folder = tmp_path_factory.mktemp("forward")
    return compiled(folder, "forward.cu", FORWARD, defines, machine + FORWARD_PTX, others)


@pytest.fixture(scope="module")
def backward(tmp_path_factory):
    """The kernel of this name."""
    made = {}

    def compile(kernel):
        if kernel not in made:
            config = BackwardConfig(D, D, adds_dq=kernel == "backward")
            defines = dense_backward.kernel_defines(config, torch.bfloat16, ranges=True, alibi=2)
            machine = PTX.replace("CTAS = 2, THREADS = 512", "CTAS = 1, THREADS = 384")
            call = BACKWARD.replace("KERNEL_FILE", f'"{kernel}.cu"')
            call, folder = call.replace("KERNEL(", f"{kernel}("), tmp_path_factory.mktemp(kernel)
            made[kernel] = compiled(folder, f"{kernel}.cu", call, defines, machine + FORWARD_PTX)
        return made[kernel]

    return compile


@pytest.mark.parametrize("is_causal, seed", [(False, 0), (True, 1), (True, 2)])
def test_forward(is_causal, seed, forward):
    batch = Batch(is_causal, seed)
    out = torch.full((batch.queries, HEADS, D), float("nan")).bfloat16()
    lse = torch.full((HEADS, batch.queries), float("nan"))
    tensors = batch.q, batch.k, batch.v, out
    error = forward.run(*batch.arguments(tensors, lse, batch.ranges, seed))
    assert error is None, error.decode()
    expected, expected_lse, _ = batch.expected()
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.transpose(0, 1).float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kernel", ["backward", "backward_queries"])
@pytest.mark.parametrize("is_causal, seed", [(False, 0), (True, 1), (True, 2)])
def test_backward(is_causal, seed, kernel, backward):
    batch = Batch(is_causal, seed)
    out, lse, expected = batch.expected()
    blocks = -(-batch.queries // 64)
    pad = blocks * 64 - batch.queries
    lse = torch.where(lse.isneginf(), torch.inf, lse * LOG2E)
    lse = torch.nn.functional.pad(lse, (0, pad), value=torch.inf).contiguous()
    delta = torch.nn.functional.pad((out * batch.grad_out).sum(-1), (0, pad)).contiguous()
    ranges = torch.nn.functional.pad(batch.ranges, (0, 0, 0, pad)).contiguous()
    begin, end = ranges.view(blocks, 64, 2).unbind(-1)
    exists = (torch.arange(blocks * 64) < batch.queries).view(blocks, 64)
    some = end > begin
    bounds = [
        begin.where(some, 1 << 30).amin(-1), end.where(some, 0).amax(-1),
        begin.where(exists, 0).amax(-1), end.where(exists, 1 << 30).amin(-1),
    ]  # fmt: skip
    bounds = torch.stack(bounds, -1).int().contiguous()
    sums = torch.zeros(HEADS * blocks * 64 * D)
    notes = torch.zeros(4 * HEADS * (batch.keys + 64 * blocks), dtype=torch.int32)
    grads = [torch.zeros_like(x) for x in (batch.q, batch.k, batch.v)]
    tensors = batch.q, batch.k, batch.v, batch.grad_out, *grads
    given = batch.arguments(tensors, lse, ranges, seed)
    error = backward(kernel).run(*given, *map(at, (bounds, delta, sums, notes)))
    assert error is None, error.decode()
    found = [x.float() for x in grads]
    if kernel == "backward":
        # by block of 64 queries: four elements, warp, row, pair of columns, second row, column
        x = sums.view(HEADS * blocks, 2, 4, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)
        found[0] = x.reshape(HEADS, blocks * 64, D)[:, : batch.queries] * SCALE
    for x, y in list(zip(found, expected))[: 1 if kernel == "backward_queries" else 3]:
        assert (x - y).abs().max() <= 0.02 * y.abs().max()
