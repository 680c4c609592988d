"""Packed sequences in the Hopper kernels, run on the CPU: borders, heads in a tile, ALiBi."""

import ctypes
import dataclasses
import random

import numpy as np
import pytest
import torch

from fa_ops.backends.hopper.configs import BackwardConfig, forward_config
from fa_ops.backends.hopper.kernel_plan import macros
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler
from tests.backends.hopper.cuda_cluster import PTX, compiled
from tests.backends.hopper.cuda_forward import FORWARD_PTX, softmax_without_fences

# Which keys a token of a packed batch attends, and where it is for ALiBi, whatever the borders
# hold: the kernel's own source, as C++ on the CPU.

CALL = """
#define __global__
#define __launch_bounds__(...)
struct int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
static bool sorted_of[2];
static int calls;
static bool __syncthreads_and(bool) { return sorted_of[calls++ % 2]; }
#include "packed_ranges.cu"
"""
RUN = """
extern "C" void run(const int* q, const int* k, const int* lens, int2* ranges, int B, int Tq, int Tk, int left, int right, int positions) {
  sorted_of[0] = std::is_sorted(q, q + B + 1), sorted_of[1] = std::is_sorted(k, k + B + 1);
  for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++) packed_ranges(q, k, lens, ranges, B, Tq, Tk, left, right, positions);
}
"""  # noqa: E501
UNBOUNDED = 1 << 29
EXTREMES = (-(2**31), -5, 2**31 - 1, 1 << 30)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return built(tmp_path_factory.mktemp("packed"), "packed", CALL + RUN).run


def counted(ends, tokens):
    """Borders as docs/semantics.md has them: clamped, and none less than the one before it."""
    return np.maximum.accumulate(np.clip(np.array(ends, np.int64), 0, tokens))


def expected(ends_q, ends_k, lens, Tq, Tk, left, right):
    """Ranges, and positions of all queries and keys."""
    q, k = counted(ends_q, Tq), counted(ends_k, Tk)
    ranges, positions = np.zeros((Tq, 2), np.int64), np.zeros((Tq + Tk, 2), np.int64)
    for b in range(len(q) - 1):
        first, end = k[b], k[b + 1]
        last = end if lens is None else first + min(max(lens[b], 0), end - first)
        positions[q[b] : q[b + 1]] = positions[Tq + first : Tq + end] = last - q[b + 1], b
        for i in range(q[b], q[b + 1]):
            diagonal = i + last - q[b + 1]
            begin, stop = max(first, diagonal - left), min(last, diagonal + right + 1)
            ranges[i] = (begin, stop) if begin < stop else (0, 0)
    return ranges, positions


@needs_compiler
@pytest.mark.parametrize("seed", range(200))
def test_ranges_of_broken_borders(kernel, seed):
    g = random.Random(seed)
    B, Tq, Tk = g.randint(1, 6), g.randint(1, 40), g.randint(0, 40)

    def borders(tokens):
        ends = sorted(g.randint(0, tokens) for _ in range(B + 1))
        for _ in range(g.randint(0, 2) if seed % 4 else 0):
            ends[g.randrange(B + 1)] = g.choice((*EXTREMES, g.randint(-9, tokens + 9)))
        return ends

    ends_q, ends_k = borders(Tq), borders(Tk)
    lens = [g.choice((*EXTREMES, g.randint(0, 20))) for _ in range(B)] if seed % 3 == 0 else None
    left, right = g.choice((UNBOUNDED, 0, 5)), g.choice((UNBOUNDED, 0, 3))
    given = [None if x is None else np.array(x, np.int32) for x in (ends_q, ends_k, lens)]
    pointers = [x if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in given]
    ranges, positions = expected(ends_q, ends_k, lens, Tq, Tk, left, right)
    for count in (0, Tq, Tq + Tk):
        written = np.full((Tq + count + 2, 2), 77, np.int32)
        to = written[1:].ctypes.data_as(ctypes.c_void_p)
        kernel(*pointers, to, B, Tq, Tk, left, right, count)
        assert (written[[0, -1]] == 77).all()
        found = np.split(written[1:-1], [Tq])
        np.testing.assert_array_equal(found[0], ranges)
        np.testing.assert_array_equal(found[1], positions[:count])


# The rows of tiles with the queries of several heads of a group, and the parts of their keys.

ROWS = """
#define BLOCK_M 128
#define BLOCK_N 64
static int atomicAdd(int*, int) { return 0; }
#include "tiles.cuh"
struct ForwardParams { int B, Hq, section, m_blocks, *tile_counter; };
extern "C" void run(int t, ForwardParams* p, int* to) {
  Cursor at;
  const Tile tile = tile_at(*p, t, at);
  to[0] = tile.b;
  for (int i = 0; i < BLOCK_M; i++) {
    const int row = tile.m0 + i;
    to[1 + 2 * i] = row % 64 < CONSUMER_ROWS ? query_of(row) : -1;
    to[2 + 2 * i] = tile.h + packed_head(row);
  }
}
"""


class Params(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("B", "Hq", "section", "m_blocks")] + [
        ("counter", ctypes.c_void_p)
    ]


@needs_compiler
@pytest.mark.parametrize("heads, Hq", [(1, 6), (2, 4), (4, 8), (3, 6), (7, 14), (5, 10), (16, 32)])
def test_every_query_of_every_head_has_a_row(heads, Hq, tmp_path):
    macros = f"#define PACKED_HEADS {heads}\n#define HAS_WINDOW {heads % 2}\n"
    macros += "#define HAS_RANGES 0\n#define HAS_MASK 0\n#define HAS_LEFT 0\n"
    run = built(tmp_path, "rows", macros + ROWS).run
    B, Sq, per_tile = 3, 77, 2 * (64 // heads)
    m_blocks = -(-Sq // per_tile)
    params, found = Params(B, Hq, 2, m_blocks, None), (ctypes.c_int * 257)()
    seen = []
    for t in range(B * Hq // heads * m_blocks):
        run(t, ctypes.byref(params), found)
        rows = zip(found[1::2], found[2::2])
        seen += [(found[0], query, head) for query, head in rows if 0 <= query < Sq]
    assert len(seen) == len(set(seen)) == B * Hq * Sq
    assert set(seen) == {(b, q, h) for b in range(B) for q in range(Sq) for h in range(Hq)}


PARTS = """
#define SPLITS_KEYS 1
#define HAS_WINDOW 1
#define HAS_KV_LENS 1
#define BLOCK_M 128
#define BLOCK_N 64
static int atomicAdd(int*, int) { return 0; }
#include "tiles.cuh"
struct Params { int B, Hq, Sq, Sk, section, m_blocks, tiles, window_left, window_right, *tile_counter, *kv_lens; };
extern "C" void run(int t, Params* p, int* to) {
  Cursor at;
  const WorkItem item = work_item_at(*p, t, at);
  const Tile& tile = item.tile;
  to[0] = tile.b, to[1] = tile.h, to[2] = tile.m0, to[3] = item.blocks.begin, to[4] = item.blocks.end;
  for (int i = 0; i < BLOCK_M; i++) {
    const KeyRange r = row_range(*p, tile, query_of(tile.m0 + i), item.keys);
    to[5 + 2 * i] = r.begin, to[6 + 2 * i] = r.end;
  }
}
"""  # noqa: E501


class PartParams(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in "B Hq Sq Sk section m_blocks tiles left right".split()
    ] + [("counter", ctypes.c_void_p), ("kv_lens", ctypes.c_void_p)]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("left, has_left", [(1 << 29, 0), (1 << 29, 1), (300, 1), (0, 1)])
def test_parts_have_every_key_of_a_row_once(left, has_left, tmp_path):
    macros = f"#define PACKED_HEADS 4\n#define HAS_LEFT {has_left}\n"
    run = built(tmp_path, "parts", macros + PARTS).run
    B, Hq, Sq, Sk, splits = 3, 8, 40, 1000, 5
    lens, found = (ctypes.c_int * B)(1000, 130, 0), (ctypes.c_int * 261)()
    m_blocks = -(-Sq // 32)
    tiles = B * Hq // 4 * m_blocks * splits
    at = ctypes.addressof(lens)
    params = PartParams(B, Hq, Sq, Sk, 2, m_blocks, tiles, left, 0, None, at)
    seen, blocks = {}, {}
    for t in range(tiles):  # in order, as a CTA takes them
        run(t, ctypes.byref(params), found)
        b, h, m0, first, last = found[:5]
        assert last - first <= -(-Sk // 64 // splits) + 1
        blocks[b] = blocks.get(b, 0) + last - first
        for i, (begin, end) in enumerate(zip(found[5::2], found[6::2])):
            query = m0 // 128 * 32 + i // 64 * 16 + i % 64 // 4
            if query < Sq and begin < end:
                keys = range(begin, end)
                assert first * 64 <= begin and end <= last * 64
                seen.setdefault((b, h + i % 4, query), []).extend(keys)
    for b, length in enumerate(lens):
        for h in range(Hq):
            for query in range(Sq):
                position = query + length - Sq
                expected = list(range(max(0, position - left), max(0, position + 1)))
                assert sorted(seen.get((b, h, query), [])) == expected
    assert blocks[1] <= 2 * m_blocks * 3 and blocks[2] == 0  # as many as there are keys


ROWS_OF = """
#define PACKED_QUERIES 1
#define IS_PAGED 1
#define HAS_WINDOW 1
#define HAS_LEFT 0
#define BLOCK_M 128
#define BLOCK_N 64
static int atomicAdd(int*, int) { return 0; }
#include "tiles.cuh"
struct Params {
  int B, Hq, Sq, Sk, section, tiles, window_left, window_right, *tile_counter, *kv_lens;
  struct { int* cu_seqlens_q; } pages;
};
static Params* p;
static int t, *to;
static Cursor cursors[32];
static void find() {
  const WorkItem item = work_item_at(*p, t, cursors[threadIdx.x]);
  if (threadIdx.x) return;
  const Tile& tile = item.tile;
  int found[8] = {tile.b, tile.h, tile.m0, tile.first, tile.queries, item.keys, item.blocks.begin, item.blocks.end};
  std::copy(found, found + 8, to);
}
extern "C" void run(int number, Params* params, int* result) {
  t = number, p = params, to = result;
  run_warp(find);
}
"""  # noqa: E501


class SequenceParams(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int) for name in "B Hq Sq Sk section tiles left right".split()
    ] + [(name, ctypes.c_void_p) for name in ("counter", "kv_lens", "cu_seqlens_q")]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_of_packed_sequences_has_a_tile(seed, splits, tmp_path):
    macros = f"#define PACKED_HEADS 4\n#define SPLITS_KEYS {int(splits > 1)}\n"
    run = built(tmp_path, "sequences", macros + ROWS_OF).run
    r = random.Random(seed)
    B, Hq, tokens = (3, 40, 70, 1)[seed], 8, 900
    borders = sorted(r.choice((5, 6, 40, 333, 600, 880)) for _ in range(B + 1))
    if seed == 2:  # entries that are less than the ones before, or outside
        borders = [r.randrange(-50, 1200) for _ in range(B + 1)]
    lens = [r.randrange(-3, 1100) for _ in range(B)]
    lens[borders.index(max(borders[:-1]))] = -(10**6)  # of a sequence that may have tokens
    cu, kv = (ctypes.c_int * (B + 1))(*borders), (ctypes.c_int * B)(*lens)
    per, row_heads, found = 32, Hq // 4, (ctypes.c_int * 8)()
    tiles = (tokens // per + B + 2) * row_heads * splits
    at = ctypes.addressof(kv), ctypes.addressof(cu)
    params = SequenceParams(B, Hq, tokens, 1000, splits, tiles, 1 << 29, 0, None, *at)
    expected, top = {}, 0
    for b, border in enumerate([*borders, tokens]):
        end = max(top, min(border, tokens))
        expected |= {token: (b - 1, top, end) for token in range(top, end)}
        top = end
    seen, ended = {}, False
    for t in range(tiles):  # in order, as a CTA takes them
        run(t, ctypes.byref(params), found)
        b, h, m0, first, queries, keys, begin, end = found
        ended = ended or m0 == -1
        assert ended == (m0 == -1)
        if ended:
            continue
        assert keys == (max(0, min(lens[b], 1000)) if 0 <= b < B else 0)
        assert end <= -(-keys // 64)
        for token in range(
            first + m0 // 128 * per, min(first + queries, first + (m0 // 128 + 1) * per)
        ):
            assert expected[token] == (b, first, first + queries)
            seen[token, h] = seen.get((token, h), 0) + 1
    assert seen == {(token, h): splits for token in range(tokens) for h in (0, 4)}


# ALiBi of packed sequences: the Hopper kernels run on the CPU. Tiles have rows and columns of
# several sequences.

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
    defines = macros(config, torch.bfloat16, ranges=True, alibi=2)
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
            defines = macros(config, torch.bfloat16, ranges=True, alibi=2)
            machine = PTX.replace("CTAS = 2, THREADS = 512", "CTAS = 1, THREADS = 384")
            call = BACKWARD.replace("KERNEL_FILE", f'"{kernel}.cu"')
            call, folder = call.replace("KERNEL(", f"{kernel}("), tmp_path_factory.mktemp(kernel)
            made[kernel] = compiled(folder, f"{kernel}.cu", call, defines, machine + FORWARD_PTX)
        return made[kernel]

    return compile


@needs_compiler
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


@needs_compiler
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
