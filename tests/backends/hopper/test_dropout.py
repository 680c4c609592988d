"""Dropout's hash in the Hopper kernels: cuda/dropout.cuh and dropout.cu, as C++ on the CPU."""

import ctypes
import struct

import pytest
import torch

from fa_ops.backends import dropout
from fa_ops.backends.hopper import masks as rows
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler

pytestmark = needs_compiler

CUDA = """
#pragma once
#include <algorithm>
using std::min, std::max;
constexpr int UNBOUNDED = 1 << 29;
typedef unsigned int u32;
typedef unsigned long long u64;
struct Index { u32 x; };
static Index blockIdx, threadIdx;
#define DEVICE inline
static bool __syncthreads_and(bool x) { return x; }  // threads come one by one: of sorted borders
#define __global__
#define __launch_bounds__(threads)
"""
CALLS = """
#include "dropout.cu"
extern "C" {
void run_row_seeds(u32 ctas, const u64* seed, const int* ends_q, const int* ends_k, u32* keys,
                  int sequences, int heads, u32 rows, u32 count) {
  for (blockIdx.x = 0; blockIdx.x < ctas; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++)
      row_seeds(seed, ends_q, ends_k, keys, sequences, heads, rows, count);
}
void is_dropped(const u32* keys, int count, u32 columns, u32 threshold, unsigned char* to) {
  for (int i = 0; i < count; i++)
    for (u32 j = 0; j < columns; j++)
      to[i * columns + j] = comparable_hash(keys[i] + j * COLUMN_STEP, threshold) < threshold;
}
u32 hash_of(u32 key) { return mix(key); }
u32 compared_of(u32 key, u32 threshold) { return comparable_hash(key, threshold); }
u32 column_step() { return COLUMN_STEP; }
int parameter_bytes() { return sizeof(Dropout); }
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropout")
    lib = built(folder, "dropout", CALLS, CUDA)
    for name in ("hash_of", "compared_of", "column_step"):
        getattr(lib, name).restype = ctypes.c_uint32
    return lib


@pytest.fixture
def launched(source, driver):
    """The launches of `row_seeds` run the source."""
    fields = rows._ROW_SEEDS.fields.values()

    def launch(name, pointers):
        assert name == "row_seeds"
        params = (ctypes.string_at(pointers[i], field.size) for i, field in enumerate(fields))
        values = (struct.unpack("<" + f.format, data)[0] for f, data in zip(fields, params))
        kinds = [ctypes.c_uint64] * 4 + [ctypes.c_int] * 2 + [ctypes.c_uint32] * 2
        return [kind(value) for kind, value in zip(kinds, values)]

    driver.read = launch
    return source


def row_seeds(source, driver, shape, seed, *cu_seqlens):
    """The seeds that the kernel writes for queries of this shape, or packed ones."""
    sequences = len(cu_seqlens[0]) - 1 if cu_seqlens else None
    ends = [t.data_ptr() for t in cu_seqlens] or (0, 0)
    found = rows.RowSeeds(*shape, None, sequences).run(0, seed.data_ptr(), *ends)
    (ctas, _), params = driver.last("row_seeds")
    source.run_row_seeds(ctas, *params)
    return found


SEEDS = (0, 1, 2**31, 2**32 + 5, 2**62 + 987654321)
PROBABILITIES = (0.1, 0.5, 0.25, 0.9, 2.0**-20, 1 - 2.0**-33)


def dropped(source, keys, columns, p):
    """bool (*keys.shape, columns)"""
    keys = keys.contiguous()
    found = torch.empty((*keys.shape, columns), dtype=torch.bool)
    threshold = ctypes.c_uint32(dropout.threshold(p))
    where, to = (ctypes.c_void_p(t.data_ptr()) for t in (keys, found))
    source.is_dropped(where, keys.numel(), columns, threshold, to)
    return found


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_dropped_as_keep_mask_drops_them(seed, p, launched, driver):
    B, Hq, Sq, Sk = 3, 4, 70, 130
    seed = torch.tensor([seed])
    keys = row_seeds(launched, driver, (B, Hq, Sq), seed)
    assert keys.shape == (B * Hq, 128)
    heads, i, j = (
        torch.arange(B * Hq).view(-1, 1, 1),
        torch.arange(Sq).view(-1, 1),
        torch.arange(Sk),
    )
    expected = dropout.keep_mask(seed, heads, i, j, p)
    assert torch.equal(~dropped(launched, keys[:, :Sq], Sk, p), expected)


@pytest.mark.parametrize("margin", [0, 7])
def test_packed_sequences(margin, launched, driver):
    lengths_q, lengths_k, Hq, p = (5, 0, 90, 1, 33), (0, 9, 40, 77, 3), 3, 0.3
    seed = torch.tensor([12345])
    ends = [
        (torch.tensor([0, *lengths]).cumsum(0) + margin).int() for lengths in (lengths_q, lengths_k)
    ]
    Tq, Tk = (int(x[-1]) + margin for x in ends)
    keys = row_seeds(launched, driver, (1, Hq, Tq), seed, *ends)
    found = ~dropped(launched, keys[:, :Tq], Tk, p)
    for b, (nq, nk) in enumerate(zip(lengths_q, lengths_k)):
        q0, k0 = (int(x[b]) for x in ends)
        heads = torch.arange(Hq).view(-1, 1, 1) + b * Hq
        expected = dropout.keep_mask(seed, heads, torch.arange(nq).view(-1, 1), torch.arange(nk), p)
        assert torch.equal(found[:, q0 : q0 + nq, k0 : k0 + nk], expected)


def inverse(y: int) -> int:
    """The key whose hash is y."""
    for shift, factor in ((16, 0x846CA68B), (15, 0x7FEB352D)):
        y ^= y >> shift ^ (y >> 2 * shift)
        y = y * pow(factor, -1, 2**32) % 2**32
    return y ^ y >> 16


@pytest.mark.parametrize("threshold", [0x19999999, 0x80000000, 0x00010000, 0xFFFFFFFF, 0x12340001])
def test_on_either_side_of_the_threshold(threshold, source):
    """What random keys meet once in 2^32, and keys that share the threshold's upper half."""
    lower = torch.randint(2**16, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    hashes = [threshold - 1, threshold, min(threshold + 1, 2**32 - 1), 0, 2**32 - 1]
    hashes += [threshold & 0xFFFF0000 | low for low in lower]
    for y in hashes:
        key = ctypes.c_uint32(inverse(y))
        assert source.hash_of(key) == y
        assert (source.compared_of(key, ctypes.c_uint32(threshold)) < threshold) == (y < threshold)


def test_packed_parameters_are_those_of_the_kernel(source):
    keys = torch.zeros(2, 64, dtype=torch.int32)
    packed = ctypes.create_string_buffer(rows._PARAMS.size)
    rows.write_parameters(packed, 0, keys, 0.5)
    assert len(packed) == source.parameter_bytes()
    address, count, threshold, scale, kept, column = rows._PARAMS.unpack(packed)
    assert (address, count, threshold) == (keys.data_ptr(), 64, 2**31)
    assert (scale, kept, column) == (2.0, 0.5, source.column_step())
