"""What the emulated kernels under a dense mask have in common: sizes, masks and biases."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fa_ops.backends.hopper.masks import _row_bytes

# After a kernel's own source.
SIZES = r"""
struct Sizes {
  int B, Hq, Hkv, Sq, Sk, D, ctas, seed, right;
  int mask[4];    // sizes of the mask, 1 where it is shared
  int pitch[2];   // of its bits: of the forward pass, or by key and by query
  int tiles[2], lists[2];  // of its lists: rows, columns; their strides in bytes
};
static MaskBlocks blocks_of(const int* lists, const Sizes* n) {
  return {lists, n->lists[0], n->lists[1], n->tiles[0], n->tiles[1]};
}
template <class Bias>
static void read_bias(Bias& bias, Tensor* tensor, unsigned char* data, const int* m) {
  const int rows = m[2] > 1 ? m[2] : 64;  // a block of queries that share the mask
  *tensor = {(u16*)data, m[3], rows, m[1], m[0]};
  bias.map.words[0] = (u64)tensor;
  bias.data = (char*)data, bias.last_column = (m[3] - 1) / 2 * 2;
  bias.row = 2 * m[3] * (m[2] > 1), bias.h = 2 * rows * m[3] * (m[1] > 1);
  bias.b = 2 * m[1] * rows * m[3] * (m[0] > 1);
  bias.step_b = m[0] > 1, bias.step_h = m[1] > 1;
  bias.step_row = m[2] > 1, bias.step_column = 1, bias.unit = 0.25f;
}
static const char* run_ctas(void (*body)(), const Sizes* n) {
  gridDim.x = n->ctas;
  for (int i = 0; i < n->ctas; i++)
    if (const char* found = run_cluster(body, i, n->seed + i)) return found;
  return nullptr;
}
"""


class Sizes(ctypes.Structure):
    """The same struct."""

    _fields_ = [
        *((name, ctypes.c_int) for name in "B Hq Hkv Sq Sk D ctas seed right".split()),
        ("mask", ctypes.c_int * 4), ("pitch", ctypes.c_int * 2),
        ("tiles", ctypes.c_int * 2), ("lists", ctypes.c_int * 2),
    ]  # fmt: skip


def sizes_of(
    q: Tensor, k: Tensor, mask: Tensor, blocks: Tensor, ctas: int, seed: int, is_causal: bool
) -> Sizes:
    """All but the pitches. mask: (B|1, H|1, Sq|1, Sk)."""
    (B, Hq, Sq, D), (_, Hkv, Sk, _) = q.shape, k.shape
    sizes = Sizes(B, Hq, Hkv, Sq, Sk, D, ctas, seed, 0 if is_causal else 1 << 29)
    sizes.mask[:] = mask.shape
    sizes.tiles[:] = [-(-n // 128) for n in mask.shape[2:]]
    b, h, _ = blocks.stride()
    sizes.lists[:] = [4 * b * (blocks.shape[0] > 1), 4 * h * (blocks.shape[1] > 1)]
    return sizes


def bits_of(mask: Tensor, whole: Tensor) -> tuple[Tensor, int]:
    """A bool mask (B|1, H|1, Sq|1, Sk) as cuda/mask.cu packs it, and the bytes of a row.

    The ranges behind the bits are those of `whole`, the mask before some of it was overwritten.
    """
    columns = torch.arange(mask.shape[3])
    first = columns.where(whole, 1 << 29).amin(-1, keepdim=True)
    end = (columns + 1).where(whole, 0).amax(-1, keepdim=True)
    ranges = torch.cat([first, end], -1).int().view(torch.uint8)
    pitch = _row_bytes(mask.shape[3])
    padded = torch.nn.functional.pad(mask, (0, 8 * (pitch - 8) - mask.shape[3]))
    bits = (padded.unflatten(-1, (-1, 8)).int() << torch.arange(8)).sum(-1).to(torch.uint8)
    return torch.cat([bits, ranges], -1).contiguous(), pitch


def bias_of(read: Tensor) -> Tensor:
    """A float mask as kernels read it; one row stands for a block of queries that share it."""
    rows = 64 if read.shape[2] == 1 else read.shape[2]
    return read.expand(*read.shape[:2], rows, read.shape[3]).contiguous()
