"""Masks on the Hopper backend without a GPU: bits, float masks, tiles that `mask_blocks` skip."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from fa_ops.backends import mask_blocks, reference
from fa_ops.backends.hopper import backward, forward, masks
from fa_ops.backends.hopper import backward as gradients
from fa_ops.backends.hopper.configs import MaskGradientConfig, backward_config
from fa_ops.backends.hopper.masks import ROWS, Bias, MaskLayout, MaskPacker, bits_of
from fa_ops.backends.hopper.runtime import launch, structs
from fa_ops.backends.mask_blocks import EMPTY, FULL
from fa_ops.call.call import Saved, attention_call
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler
from tests.backends.hopper.cuda_forward import emulated_forward, run_forward
from tests.backends.hopper.cuda_masked_backward import emulated_backward, run_backward

# In place of `ptx.cuh`. The threads of a CTA are coroutines: one that exchanges a value continues
# when its warp has, and one at a barrier when all threads have come.
CUDA = """
#pragma once
#include <algorithm>
#include <ucontext.h>
using std::min, std::max;
typedef unsigned int u32;
typedef unsigned long long u64;
static bool is_misaligned;
struct uint4 {
  u32 x, y, z, w;
  uint4(const uint4& from) : x(from.x), y(from.y), z(from.z), w(from.w) {
    is_misaligned |= (u64)&from & 15;
  }
};
struct int2 { int x, y; };
struct Index { int x, y; };
static Index blockIdx, gridDim, threadIdx;

constexpr int CTA_THREADS = 512;
enum State { EXCHANGES, AT_BARRIER, ENDED };
static ucontext_t scheduler, threads[CTA_THREADS];
static char stacks[CTA_THREADS][1 << 14];
static State state[CTA_THREADS];
static int given[CTA_THREADS], seen[32];
static void (*body)();
static void thread_main() { body(), state[threadIdx.x] = ENDED; }
static void leave(State s) {
  const int i = threadIdx.x;
  state[i] = s, swapcontext(&threads[i], &scheduler);
}
static void __syncthreads() { leave(AT_BARRIER); }
static const int* exchange(int x) { given[threadIdx.x] = x, leave(EXCHANGES); return seen; }
static void run_cta(void (*f)()) {
  body = f;
  for (int i = 0; i < CTA_THREADS; i++) {
    getcontext(&threads[i]), state[i] = EXCHANGES;
    threads[i].uc_stack.ss_sp = stacks[i], threads[i].uc_stack.ss_size = sizeof stacks[i];
    threads[i].uc_link = &scheduler, makecontext(&threads[i], thread_main, 0);
  }
  do {  // each warp up to its next barrier
    for (int warp = 0; warp < CTA_THREADS; warp += 32) {
      do {
        std::copy(given + warp, given + warp + 32, seen);
        for (int i = warp; i < warp + 32; i++)
          if (threadIdx.x = i; state[i] != ENDED) swapcontext(&scheduler, &threads[i]);
      } while (state[warp] == EXCHANGES);
    }
  } while (state[0] == AT_BARRIER);
}
static u32 __ballot_sync(u32, bool yes) {
  const int* x = exchange(yes);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= (u32)x[i] << i;
  return bits;
}
static int __reduce_min_sync(u32, int x) {
  const int* y = exchange(x);
  return *std::min_element(y, y + 32);
}
static int __reduce_max_sync(u32, int x) {
  const int* y = exchange(x);
  return *std::max_element(y, y + 32);
}
static int warp_uniform(int x) { return x; }
static void atomicMin(int* x, int y) { *x = min(*x, y); }
static void atomicMax(int* x, int y) { *x = max(*x, y); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
static int __clz(u32 x) { return __builtin_clz(x); }
static int2 make_int2(int x, int y) { return {x, y}; }
#define DEVICE inline
constexpr int UNBOUNDED = 1 << 29;
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)
"""
LAUNCH = """
#define ENTRY_pack_rows 1
#define ENTRY_pack_columns 1
#include "mask.cu"
static_assert(THREADS == CTA_THREADS);
static MaskParams params;
static bool run(Index* grid, MaskParams* p, void (*body)()) {
  params = *p, gridDim = *grid;
  for (blockIdx.y = 0; blockIdx.y < grid->y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid->x; blockIdx.x++) run_cta(body);
  return is_misaligned;
}
extern "C" {
bool run_pack_rows(Index* grid, MaskParams* p) { return run(grid, p, [] { pack_rows(params); }); }
bool run_pack_columns(Index* grid, MaskParams* p) {
  return run(grid, p, [] { pack_columns(params); });
}
}
"""


@pytest.fixture(scope="module")
def packers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask")
    return built(folder, "mask", LAUNCH, CUDA)


@pytest.fixture
def launched(packers, monkeypatch):
    """The names of the kernels that ran."""
    names = []

    def kernel(kind, name, device, threads):
        assert (kind, threads) == ("mask", 512)

        def run(grid, stream, pointers):
            names.append(name)
            body = getattr(packers, f"run_{name}")
            body.restype = ctypes.c_bool
            assert not body((ctypes.c_int * 2)(*grid), ctypes.c_void_p(pointers[0])), "misaligned"

        return SimpleNamespace(launch=run)

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype).fill_(0xAA)

    monkeypatch.setattr(masks, "kernel", kernel)
    monkeypatch.setattr(launch, "empty", empty)
    return names


def random(*shape):
    return torch.rand(shape) > 0.4


BYTES = torch.tensor([0, 1, 2, 128, 255, 0, 64, 0] * 8, dtype=torch.uint8)
# Each with the kernels that pack it by query and by key.
PACK_ROWS, PACK_COLUMNS = "pack_rows", "pack_columns"
FORMS = {
    "rows of 16 bytes": (random(2, 3, 70, 144), PACK_ROWS, PACK_COLUMNS),
    "any rows": (random(2, 3, 70, 131), PACK_ROWS, PACK_COLUMNS),
    "one for all": (random(200, 333), PACK_ROWS, PACK_COLUMNS),
    "long rows": (random(1, 2, 3, 2600), PACK_ROWS, PACK_COLUMNS),
    "long rows of 16 bytes": (random(1, 2, 3, 2608), PACK_ROWS, PACK_COLUMNS),
    "a row for each CTA": (random(1, 1, 2, 35000), PACK_ROWS, PACK_COLUMNS),
    "padding": (random(3, 1, 1, 301), PACK_ROWS, PACK_ROWS),
    "padding, expanded": (random(3, 1, 1, 300).expand(3, 4, 65, 300), PACK_ROWS, PACK_ROWS),
    "padding, every second": (random(3, 1, 1, 602)[..., ::2], PACK_ROWS, PACK_ROWS),
    "of queries": (random(2, 1, 70, 1), PACK_ROWS, PACK_ROWS),
    "of queries, rows of 16 bytes": (random(2, 1, 96, 1), PACK_ROWS, PACK_ROWS),
    "of heads": (random(2, 3, 1, 1).expand(2, 3, 40, 50), PACK_ROWS, PACK_ROWS),
    "one element": (random(1, 1, 1, 1), PACK_ROWS, PACK_ROWS),
    "transposed": (random(2, 3, 131, 70).mT, PACK_COLUMNS, PACK_ROWS),
    "transposed, rows of 16 bytes": (random(2, 3, 131, 80).mT, PACK_COLUMNS, PACK_ROWS),
    "heads before batches": (random(3, 2, 33, 48).transpose(0, 1), PACK_ROWS, PACK_COLUMNS),
    "aligned slice": (random(2, 64, 320)[..., :300], PACK_ROWS, PACK_COLUMNS),
    "odd slice": (random(2, 64, 320)[:, 1:, 3:300], PACK_ROWS, PACK_COLUMNS),
    "overlapping rows": (random(400).unfold(0, 300, 1), PACK_ROWS, PACK_ROWS),
    "causal": (torch.ones(90, 200).tril(40).bool(), PACK_ROWS, PACK_COLUMNS),
    "none": (torch.zeros(3, 1, 5, 64).bool(), PACK_ROWS, PACK_COLUMNS),
    "every second": (random(2, 1, 64, 320)[..., ::2, ::2], PACK_ROWS, PACK_COLUMNS),
    "bytes above 1": (BYTES.view(torch.bool).expand(64, 64), PACK_ROWS, PACK_ROWS),
    "rows of bytes above 1": (BYTES.repeat(2, 17).view(torch.bool), PACK_ROWS, PACK_COLUMNS),
}  # fmt: skip


def four(mask):
    return mask[(None,) * (4 - mask.dim())]


def unpacked(packer, mask, shape):
    """The bits as kernels read them, as bool of this shape, after a look at what follows a row."""
    *strides, at = packer.bits_layout
    assert at % 16 == 8
    bits = packer.run(0, mask.data_ptr())
    rows = bits.as_strided((*shape[:3], at + 8), (*strides, 1))
    found = (rows[..., :at, None] >> torch.arange(8, device=mask.device) & 1).bool().flatten(-2)
    assert not found[..., shape[3] :].any()
    kept = found[..., : shape[3]]
    ranges = rows[..., at:].contiguous().view(torch.int32)
    columns = torch.arange(shape[3], device=mask.device)
    first = columns.where(kept, 1 << 29).amin(-1, keepdim=True)
    end = (columns + 1).where(kept, 0).amax(-1, keepdim=True)
    assert torch.equal(ranges, torch.cat([first, end], -1).int())
    return kept


def by_query(mask):
    """(found, expected) keys of each query; a mask of queries alone is one of 300 keys."""
    Sk = 300 if mask.shape[-1] == 1 else mask.shape[-1]
    shape = *four(mask).shape[:3], Sk
    packer = MaskPacker.by_query(MaskLayout.of(mask), Sk, mask.device.index)
    for block in (64, 80, 112, 128):  # what a block reads is in its row
        assert -(-Sk // block) * block <= 8 * packer.bits_layout[3]
    return unpacked(packer, mask, shape), (four(mask).view(torch.uint8) != 0).expand(shape)


def by_key(mask):
    """(found, expected) queries of each key, or their one block."""
    layout, expected = MaskLayout.of(mask), (four(mask).view(torch.uint8) != 0).mT
    if layout.queries_share:
        expected = expected[..., :1].expand(*expected.shape[:3], 64)
    packer = MaskPacker.by_key(layout, mask.device.index)
    return unpacked(packer, mask, expected.shape), expected


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_masks_are_packed_for_queries(form, launched):
    mask, kernel, _ = FORMS[form]
    found, expected = by_query(mask)
    assert torch.equal(found, expected)
    assert launched == [kernel]


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_masks_are_packed_for_keys(form, launched):
    mask, _, kernel = FORMS[form]
    found, expected = by_key(mask)
    assert torch.equal(found, expected)
    assert launched == [kernel]


@needs_compiler
def test_a_cta_packs_several_heads(launched, monkeypatch):
    monkeypatch.setattr(masks, "_MAX_GRID_HEADS", 2)
    for mask in (random(3, 2, 40, 50), random(3, 2, 50, 40).mT):
        for found, expected in (by_query(mask), by_key(mask)):
            assert torch.equal(found, expected)
    assert launched == [PACK_ROWS, PACK_COLUMNS, PACK_COLUMNS, PACK_ROWS]


@needs_compiler
def test_what_is_shared_is_packed_once(launched):
    layout = MaskLayout.of(random(3, 1, 1, 300).expand(3, 8, 500, 300))
    packer = MaskPacker.by_query(layout, 300, None)
    assert packer.bits_layout == (80, 0, 0, 72) and packer.layout[0] == (3 * 80,)
    packer = MaskPacker.by_key(layout, None)
    assert packer.bits_layout == (300 * 48, 0, 48, 40) and packer.layout[0] == (3 * 300 * 48,)


# Float masks on the Hopper backend without a GPU: what kernels read, how a gradient is summed.

SIZES = (2, 3, 70, 144)
MASKS = {
    "rows of 16 bytes": (torch.randn(2, 3, 70, 144), True),
    "one for all": (torch.randn(70, 144), True),
    "heads before batches": (torch.randn(3, 2, 70, 144).transpose(0, 1), True),
    "aligned slice": (torch.randn(2, 3, 80, 160)[:, :, 3:73, 8:152], True),
    "expanded": (torch.randn(2, 1, 70, 144).expand(2, 3, 70, 144), True),
    "odd slice": (torch.randn(2, 3, 80, 160)[:, :, 3:73, 7:151], False),
    "transposed": (torch.randn(2, 3, 144, 70).mT, False),
    "every second": (torch.randn(70, 288)[:, ::2], False),
    "of keys": (torch.randn(2, 1, 1, 144), False),
    "of queries": (torch.randn(1, 3, 70, 1), False),
    "expanded padding": (torch.randn(2, 1, 1, 144).expand(2, 3, 70, 144), False),
    "one element": (torch.randn(1), False),
    "16 bits": (torch.randn(70, 144).bfloat16(), True),
    "16 bits, odd rows": (torch.randn(70, 148).bfloat16()[:, :144], False),
}  # fmt: skip


@pytest.mark.parametrize("form", MASKS)
def test_what_kernels_read(form):
    mask, in_place = MASKS[form]
    bias, held = Bias.of(mask)
    assert (held.data_ptr() == mask.data_ptr()) == in_place
    assert bits_of(mask) == held.element_size() * 8
    assert bias.shape == held.shape and bias.strides == held.stride()
    b, h, i, j = torch.meshgrid(*map(torch.arange, SIZES), indexing="ij")
    found = held[tuple(x * step for x, step in zip((b, h, i, j), bias.steps))]
    assert torch.equal(found, mask.expand(SIZES))
    # what a tile reads that stands for all lies in it, and so does a pair at the last column
    assert bias.steps[2] or held.shape[2] == ROWS
    assert bias.steps[3] or held.shape[3] == 128
    assert held.shape[3] - 2 <= bias.last_column < held.shape[3]
    assert held.data_ptr() % 16 == 0
    unit = 16 // held.element_size()
    assert all(s % unit == 0 for n, s in zip(held.shape[:3], held.stride()) if n > 1)


def test_missing_and_bool_masks_are_no_bias():
    assert bits_of(None) == bits_of(torch.ones(3, 3, dtype=torch.bool)) == 0


def test_packed_parameters_are_those_of_the_kernel():
    mask = torch.randn(2, 1, 70, 144)
    bias, held = Bias.of(mask, reference.mask_blocks(mask))
    packed = bias.packed({4096: b"m" * 128}, 4096, 8192, unit=0.25)
    steps = held.stride(0) * 4, 0, 144 * 4
    lists = 8192, 4 * (1 * 3 + 2 * 2), 0, 1, 2  # address, strides, tiles
    fields = 4096, *steps, 1, 0, 1, 1, 142, 0.25, *lists
    assert packed[128:] == struct.pack("<QqqqiiiiifQqqii40x", *fields)
    assert len(packed) == 256


class FakeKernel:
    """cuda/backward_mask.cu, given every score's gradient: sums of tiles, from memory to memory."""

    def __init__(self, scores, config):
        self.scores, self.rows, self.columns = scores, config.rows, config.columns

    def launch(self, grid, stream, pointers):
        to, split_step, b, h, row, column, *ints = struct.unpack(
            "<Q5q6i", ctypes.string_at(pointers[1], 72)
        )
        *sums, steps, narrow = ints
        self.grid, self.steps = grid[0], steps
        B, H, Sq, Sk = self.scores.shape
        counts = (B, H, -(-Sq // self.rows), -(-Sk // self.columns))
        tiles, loop = (
            torch.tensor([n for n, s in zip(counts, sums) if bool(s) == kept]).prod().int().item()
            for kept in (False, True)
        )
        kind, size = ("e", 2) if narrow else ("f", 4)
        for cta in range(grid[0]):
            split, tile = divmod(cta, tiles)
            total = torch.zeros(self.rows, self.columns)
            for step in range(split * steps, min(loop, split * steps + steps)):
                at = self.digits(counts, sums, tile, step)
                part = self.scores[at[0], at[1]][self.span(at[2], self.rows)]
                part = part[:, self.span(at[3], self.columns)]
                total[: part.shape[0], : part.shape[1]] += part
            at = self.digits(counts, sums, tile, split * steps)
            i0 = 0 if sums[2] else at[2] * self.rows
            j0 = 0 if sums[3] else at[3] * self.columns
            for i in range(self.rows):
                for j in range(self.columns):
                    if (sums[2] or i0 + i < Sq) and (sums[3] or j0 + j < Sk):
                        index = split * split_step + at[0] * b + at[1] * h
                        index += (i0 + i) * row + (j0 + j) * column
                        value = struct.pack(kind, total[i, j].item())
                        ctypes.memmove(to + index * size, value, size)

    @staticmethod
    def span(block, size):
        return slice(block * size, block * size + size)

    @staticmethod
    def digits(counts, sums, tile, step):
        found = [0, 0, 0, 0]
        for dim in (3, 2, 1, 0):
            if sums[dim]:
                step, found[dim] = divmod(step, counts[dim])
            else:
                tile, found[dim] = divmod(tile, counts[dim])
        return found


@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize("shape", [(2, 3, 150, 70), (150, 70), (2, 1, 1, 70), (3, 150, 1), (1,)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_gradients_are_summed(shape, layout, processors, monkeypatch):
    mask = torch.zeros(shape, dtype=torch.float16)
    if layout == "transposed" and len(shape) > 1:
        mask = mask.mT.contiguous().mT
    scores = torch.randint(-4, 5, (2, 3, 150, 70)).float()
    fake = FakeKernel(scores, MaskGradientConfig(backward_config(64, 64)))
    monkeypatch.setattr(gradients, "kernel", lambda *_: fake)
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    q, k = torch.empty(2, 3, 150, 64), torch.empty(2, 3, 70, 64)
    params = ctypes.create_string_buffer(8)
    found = gradients.mask_gradient(mask, q, k, backward_config(64, 64), (), params, 0)
    assert found.dtype == mask.dtype and found.stride() == torch.empty_like(mask).stride()
    assert torch.equal(found, scores.sum_to_size(shape).half())


@pytest.mark.parametrize(
    "kernel, source", [("forward", "forward_rows.cuh"), ("backward", "backward_tiles.cuh")]
)
def test_kernels_find_the_mask_in_their_parameters(driver, kernel, source):
    name = f"{kernel.title()}Params"
    layout = structs.struct_layout(source, name)
    driver.struct_bytes = layout.size
    q, mask = torch.randn(1, 2, 40, 64).half(), torch.randn(40, 40).half()
    blocks = reference.mask_blocks(mask[None, None])
    call = attention_call(q, q, q, attn_mask=mask[None, None], mask_blocks=blocks)
    out, lse = forward.forward(call)
    if kernel == "backward":
        backward.backward(call._replace(saved=Saved(out, None, out, lse, False)))
    data = driver.last(kernel)[1][layout.fields["bias"].offset :]
    address, steps = struct.unpack_from("<Q", data), struct.unpack_from("<Q3q", data, 128)
    assert address == (mask.data_ptr(),) and steps == (mask.data_ptr(), 0, 0, 80)
    lists = structs.struct_layout("masks.cuh", "Bias").fields["blocks"].offset
    assert struct.unpack_from("<Q2q2i", data, lists) == (blocks.data_ptr(), 0, 0, 1, 1)


# Forward and backward kernels skip the tiles that `mask_blocks` do not list, run on the CPU.

TILE = 128


@pytest.fixture(scope="module")
def forward_kernels(tmp_path_factory):
    """The kernel with some options, by the arguments of `emulated_forward`."""
    made = {}

    def compile(**options):
        key = tuple(options.items())
        if key not in made:
            made[key] = emulated_forward(tmp_path_factory.mktemp("forward"), **options)
        return made[key]

    return compile


def masks_of(states, Sq, Sk, g, is_float):
    """A mask with tiles of these states, and one that holds other values in full and empty ones."""
    wide = states.repeat_interleave(TILE, 2)[:, :, :Sq]
    if states.shape[2] == 1:
        wide = wide[:, :, :1]
    wide = wide.repeat_interleave(TILE, 3)[..., :Sk]
    kept = torch.rand(wide.shape, generator=g) > 0.4
    if not is_float:
        mask = kept.where(wide > FULL, wide == FULL)
        return mask, kept.where(wide > FULL, wide == EMPTY)
    bias = torch.randn(wide.shape, generator=g).masked_fill(~kept, -torch.inf)
    mask = bias.where(wide > FULL, 0.0).masked_fill(wide == EMPTY, -torch.inf)
    return mask.bfloat16(), bias.where(wide > FULL, 3.0).bfloat16()


def attended(q, k, v, mask, is_causal, lens):
    """out and lse, written by hand."""
    Sq, Sk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * 0.25
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    ends = torch.tensor(lens or [Sk] * q.shape[0]).view(-1, 1, 1, 1)
    keys = torch.arange(Sk)
    scores = scores.masked_fill(keys >= ends, -torch.inf)
    if is_causal:
        last = torch.arange(Sq).view(Sq, 1) + ends - Sq
        scores = scores.masked_fill(keys > last, -torch.inf)
    lse = scores.logsumexp(-1)
    dead = (lse == -torch.inf).unsqueeze(-1)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return weights @ v, lse


def draw_states(g, *shape):
    states = torch.randint(3, shape, generator=g)
    states[0, 0, 0] = EMPTY  # queries without keys
    if shape[2] > 1:
        states[-1, -1, -1, 1:] = EMPTY
    return states


BOUNDED = {"window": True, "kv_lens": True}
HALF = {"bias_bits": 16, "block_n": 64} | BOUNDED
# shapes, options of the kernel and of the call
CASES = {
    "bool": (260, 520, BOUNDED, {}),
    "bool, queries share": (200, 500, BOUNDED, {}),
    "bool, causal lengths": (300, 600, BOUNDED, {"lens": [550, 200]}),
    "float": (260, 400, HALF, {}),
    "float, queries share": (200, 500, HALF, {}),
    "float, causal lengths": (300, 500, HALF, {"lens": [450, 130]}),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_forward(name, forward_kernels):
    Sq, Sk, options, call = CASES[name]
    seed = list(CASES).index(name)  # odd ones compute products late
    g = torch.Generator().manual_seed(seed)
    B, Hq, Hkv = 2, 2, 1
    q, k, v = (
        torch.randn(B, H, S, 16, generator=g).bfloat16()
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk))
    )
    rows = 1 if "share" in name else -(-Sq // TILE)
    states = draw_states(g, 1 + seed % 2, Hq, rows, -(-Sk // TILE))
    mask, read = masks_of(states, Sq, Sk, g, is_float="float" in name)
    blocks = mask_blocks.mask_blocks(mask)
    is_causal = "causal" in name
    ctas = 1 + seed // 2 % 2  # of which each has several tiles
    arguments = {"seed": seed, "ctas": ctas, "is_causal": is_causal} | call
    out, lse = run_forward(forward_kernels(**options), q, k, v, mask, blocks, read, **arguments)
    expected, expected_lse = attended(q, k, v, mask, is_causal, call.get("lens"))
    rows = expected_lse > -torch.inf
    assert rows.any() and not rows.all()
    assert torch.equal(lse == -torch.inf, ~rows) and (out[~rows] == 0).all()
    torch.testing.assert_close(lse[rows], expected_lse[rows], atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(out[rows].float(), expected[rows], atol=2e-2, rtol=2e-2)


BACKWARD = {
    "bool": (200, 300, {}, {}),
    "bool, queries share": (200, 300, {}, {}),
    "float, causal lengths": (200, 300, {"bias_bits": 16}, {"lens": [300, 170]}),
    "dQ alone, bool": (300, 500, {"kernel": "backward_queries"}, {}),
    "dQ alone, bool, causal lengths": (
        300, 500, {"kernel": "backward_queries"}, {"lens": [470, 200]}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def backward_kernels(tmp_path_factory):
    made = {}

    def compile(**options):
        key = tuple(options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("backward")
            made[key] = emulated_backward(folder, **options, **BOUNDED)
        return made[key]

    return compile


@needs_compiler
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name, backward_kernels):
    Sq, Sk, options, call = BACKWARD[name]
    seed, is_causal = list(BACKWARD).index(name), "causal" in name
    g = torch.Generator().manual_seed(seed)
    B, Hq, Hkv = 2, 2, 1
    tensors = [
        torch.randn(B, H, S, 16, generator=g).bfloat16()
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk), (Hq, Sq))
    ]
    states = draw_states(g, 1, Hq, 1 if "share" in name else -(-Sq // TILE), -(-Sk // TILE))
    mask, read = masks_of(states, Sq, Sk, g, is_float="float" in name)
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    out, lse = attended(*leaves, mask, is_causal, call.get("lens"))
    delta = (out * tensors[3]).sum(-1).detach()
    expected = torch.autograd.grad(out, leaves, tensors[3].float())
    of_queries = "kernel" in options
    ctas = 2 if not of_queries else B * Hq * -(-Sq // TILE)
    blocks = mask_blocks.mask_blocks(mask)
    dq, *stored = run_backward(
        backward_kernels(**options), tensors, lse.detach(), delta, mask, read, blocks, ctas,
        seed=seed, is_causal=is_causal, **call,
    )  # fmt: skip
    found = {"dq": stored[0]} if of_queries else {"dq": dq, "dk": stored[1], "dv": stored[2]}
    for (name, x), y in zip(found.items(), expected):
        assert x.isfinite().all(), name
        assert (x - y).abs().max() <= 2e-2 * max(y.abs().max(), 0.5), name


WALK = """
#include "masks.cuh"
static MaskBlocks blocks;
static int position, last, bounded, count;
static int* found;
template <int BLOCK, bool OF_KEYS> static void walk() {
  TileWalk<BLOCK> walk;
  const TileList list = tile_list<OF_KEYS>(blocks, 0, 0, position);
  bounded ? walk.template start<true>(list, last) : walk.template start<false>(list, last);
  if (threadIdx.x) return;
  count = 0;
  for (int block = walk.seek(last); block >= 0; block = walk.seek(block - 1))
    found[count++] = 2 * block + walk.is_full(block);
}
static ListedBlocks bits;
template <int BLOCK, bool OF_KEYS> static void list() {
  bits = listed_blocks<BLOCK>(tile_list<OF_KEYS>(blocks, 0, 0, position), last);
}
extern "C" void listed(const int* lists, int rows, int columns, bool of_keys, int block, int at,
                       int base, u32* to) {
  blocks = {lists, 0, 0, rows, columns}, position = at, last = base;
  if (block == 64) run_warp(of_keys ? list<64, true> : list<64, false>);
  else run_warp(of_keys ? list<128, true> : list<128, false>);
  to[0] = bits.some, to[1] = bits.full;
}
template <int BLOCK> static void run(bool of_keys) {
  run_warp(of_keys ? walk<BLOCK, true> : walk<BLOCK, false>);
}
extern "C" int steps(const int* lists, int rows, int columns, bool of_keys, int block, int at,
                     int from, bool is_bounded, int* to) {
  blocks = {lists, 0, 0, rows, columns}, found = to;
  position = at, last = from, bounded = is_bounded;
  block == 64 ? run<64>(of_keys) : block == 96 ? run<96>(of_keys) : run<128>(of_keys);
  return count;
}
"""


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    library = built(tmp_path_factory.mktemp("walk"), "walk", WALK)

    def listed(lists, tiles, of_keys, block, position, base):
        """Of 32 blocks from `base` on: which are listed, and which are full."""
        to = (ctypes.c_uint * 2)()
        at = ctypes.c_void_p(lists.data_ptr())
        library.listed(at, *tiles, of_keys, block, position, base, to)
        return tuple([i for i in range(32) if bits >> i & 1] for bits in to)

    def steps(lists, tiles, of_keys, block, position, last, is_bounded):
        """(block, whether it is full) for each step."""
        to = (ctypes.c_int * (last + 2))()
        at = ctypes.c_void_p(lists.data_ptr())
        count = library.steps(at, *tiles, of_keys, block, position, last, is_bounded, to)
        return [(x >> 1, bool(x & 1)) for x in to[:count]]

    steps.listed = listed
    return steps


@needs_compiler
@pytest.mark.parametrize("block", [64, 96, 128])
@pytest.mark.parametrize("tiles", [(3, 150), (150, 2), (1, 40), (40, 1)])
def test_walks(tiles, block, walk):
    g = torch.Generator().manual_seed(tiles[0])
    states = torch.randint(3, tiles, generator=g)
    states[:, tiles[1] // 3 : tiles[1] // 2] = EMPTY
    lists = [mask_blocks._lists(x[None, None]).flatten() for x in (states, states.T)]
    lists = torch.cat(lists)
    for of_keys, rows in ((True, states), (False, states.T)):
        lines, listed = rows.shape
        length = listed if listed > 1 else 5  # one tile is that of all positions
        blocks = -(-length * TILE // block)
        for line in {0, lines // 2, lines - 1}:
            tile_of = rows[line].expand(length) if listed == 1 else rows[line]
            ends = ((i * block, i * block + block - 1) for i in range(blocks))
            of_block = [{int(tile_of[min(x // TILE, length - 1)]) for x in pair} for pair in ends]
            whole = [(i, x == {FULL}) for i, x in enumerate(of_block) if x != {EMPTY}][::-1]
            for base in range(0, blocks if block != 96 else 0, 15):
                found = walk.listed(lists, tiles, of_keys, block, line * TILE, base)
                near = [(i - base, full) for i, full in whole[::-1] if base <= i < base + 32]
                exists = [[i for i in bits if base + i < blocks] for bits in found]
                assert exists == [[i for i, _ in near], [i for i, full in near if full]]
            for last in {blocks - 1, blocks // 2, 0}:
                expected = [x for x in whole if x[0] <= last]
                found = walk(lists, tiles, of_keys, block, line * TILE + 5, last, True)
                assert found == expected
                if last == blocks - 1:
                    assert walk(lists, tiles, of_keys, block, line * TILE, last, False) == expected


@needs_compiler
@pytest.mark.parametrize("seed", range(5))
def test_walks_of_any_numbers_end(seed, walk):
    m, n = 2, 40
    g = torch.Generator().manual_seed(seed)
    scale = (2, 100, 1 << 31)[seed % 3]
    lists = torch.randint(-scale, scale, (m * (n + 1) + n * (m + 1),), generator=g).int()
    for of_keys, is_bounded in ((True, True), (True, False), (False, True)):
        found = walk(lists, (m, n), of_keys, 96, 10_000, 51, is_bounded)
        steps = [block for block, _ in found]
        assert steps == sorted(set(steps), reverse=True) and all(0 <= x <= 51 for x in steps)
