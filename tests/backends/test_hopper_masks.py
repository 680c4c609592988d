"""Bool masks as bits: the kernels of cuda/mask.cu, as C++ on the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fa_ops.backends import hopper
from fa_ops.backends.hopper import mask as masks
from fa_ops.backends.hopper.problem import shared_strides

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

# What the source takes from CUDA. Lanes run one after another, twice: votes do not depend on other
# votes, so that the second time all of them are known.
CUDA = """
#include <vector>
typedef unsigned int u32;
struct uint4 { u32 x, y, z, w; };
struct Index { int x, y; };
static Index blockIdx, gridDim, threadIdx;
static std::vector<u32> votes;
static u32 vote;
static u32 __ballot_sync(u32, bool yes) {
  if (vote == votes.size()) votes.push_back(0);
  votes[vote] |= (u32)yes << (threadIdx.x & 31);
  return votes[vote++];
}
#define DEVICE inline
#define __global__
#define __launch_bounds__(threads)
"""
LAUNCH = """
extern "C" void launch(int words, Index* grid, const unsigned char* mask, unsigned char* bits,
                       Steps* s, const int* n) {
  gridDim = *grid;
  for (blockIdx.y = 0; blockIdx.y < grid->y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid->x; blockIdx.x++)
      for (int warp = 0; warp < 8; warp++) {
        votes.clear();
        for (int lane = 0; lane < 64; lane++) {
          threadIdx.x = warp * 32 + lane % 32, vote = 0;
          (words ? pack_words : pack_rows)(mask, bits, *s, n[0], n[1], n[2], n[3], n[4]);
        }
      }
}
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask")
    kernels = Path(hopper.__file__).parent / "cuda/mask.cu"
    (folder / "mask.cpp").write_text(CUDA + kernels.read_text() + LAUNCH)
    library = folder / "mask.so"
    subprocess.run(
        ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", folder / "mask.cpp", "-o", library],
        check=True,
    )
    return ctypes.CDLL(str(library)).launch


@pytest.fixture
def packed(launch, monkeypatch):
    """The names of the kernels that ran."""
    ran = []

    def pack(mask):
        kernel, grid, steps, sizes = masks.Geometry.of(mask)
        ran.append(kernel)
        bits = torch.full((*mask.shape[:3], sizes[-1]), 0xA5, dtype=torch.uint8)
        launch(
            kernel == "pack_words",
            (ctypes.c_int * 2)(*grid),
            *(ctypes.c_void_p(t.data_ptr()) for t in (mask, bits)),
            (ctypes.c_int64 * 4)(*steps),
            (ctypes.c_int * 5)(*sizes),
        )
        return bits

    monkeypatch.setattr(masks, "_packed", pack)
    return ran


def random(*shape):
    return torch.rand(shape) > 0.4


BYTES = torch.tensor([0, 1, 2, 128, 255, 0, 64, 0] * 8, dtype=torch.uint8)
# Each with the kernels that pack it by query and by key.
FORMS = {
    "rows of 16 bytes": (random(2, 3, 70, 144), "pack_rows", "pack_words"),
    "any rows": (random(2, 3, 70, 131), "pack_words", "pack_words"),
    "one for all": (random(200, 333), "pack_words", "pack_words"),
    "padding": (random(3, 1, 1, 301), "pack_words", "pack_words"),
    "padding, expanded": (random(3, 1, 1, 300).expand(3, 4, 65, 300), "pack_words", "pack_words"),
    "of queries": (random(2, 1, 70, 1), "pack_words", "pack_words"),
    "of queries, rows of 16 bytes": (random(2, 1, 96, 1), "pack_words", "pack_rows"),
    "one element": (random(1, 1, 1, 1), "pack_words", "pack_words"),
    "transposed": (random(2, 3, 131, 70).mT, "pack_words", "pack_words"),
    "transposed, rows of 16 bytes": (random(2, 3, 131, 80).mT, "pack_words", "pack_rows"),
    "heads before batches": (random(3, 2, 33, 48).transpose(0, 1), "pack_rows", "pack_words"),
    "aligned slice": (random(2, 64, 320)[..., :300], "pack_rows", "pack_words"),
    "odd slice": (random(2, 64, 320)[:, 1:, 3:300], "pack_words", "pack_words"),
    "every second": (random(2, 1, 64, 320)[..., ::2, ::2], "pack_words", "pack_words"),
    "bytes above 1": (BYTES.view(torch.bool).expand(64, 64), "pack_rows", "pack_words"),
}  # fmt: skip


def four(mask):
    return mask[(None,) * (4 - mask.dim())]


def shown(bits, columns):
    """As bool, and what follows the columns."""
    found = (bits[..., None] >> torch.arange(8) & 1).bool().flatten(-2)
    return found[..., :columns], found[..., columns:]


@pytest.mark.parametrize("form", FORMS)
def test_by_query(form, packed):
    mask, kernel, _ = FORMS[form]
    Sk = 300 if mask.shape[-1] == 1 else mask.shape[-1]
    bits = masks.bits_by_query(mask, Sk)
    kept, rest = shown(bits, Sk)
    expected = (four(mask).view(torch.uint8) != 0).expand(*four(mask).shape[:3], Sk)
    assert torch.equal(kept.expand_as(expected), expected) and not rest.any()
    assert packed == [kernel]
    assert bits.shape[-1] % 16 == 0
    for block in (64, 80, 112, 128):  # what a block reads is in its row
        assert -(-Sk // block) * block <= 8 * bits.shape[-1]


@pytest.mark.parametrize("form", FORMS)
def test_by_key(form, packed):
    mask, _, kernel = FORMS[form]
    expected = (four(mask).view(torch.uint8) != 0).mT
    bits = masks.bits_by_key(mask)
    Sq = expected.shape[-1]
    if masks.queries_share(mask):
        kept, rest = shown(bits, 64)
        assert torch.equal(kept, expected[:, :1, :, :1].expand_as(kept))
    else:
        kept, rest = shown(bits, Sq)
        assert torch.equal(kept.expand_as(expected), expected)
    assert packed == [kernel] and not rest.any()


def test_what_is_shared_is_packed_once(packed):
    padding = random(3, 1, 1, 300).expand(3, 8, 500, 300)
    assert masks.bits_by_query(padding, 300).shape[:3] == (3, 1, 1)
    assert masks.bits_by_key(padding).shape == (3, 1, 300, 32)
    assert shared_strides(masks.bits_by_query(padding, 300)) == (64, 0, 0)
