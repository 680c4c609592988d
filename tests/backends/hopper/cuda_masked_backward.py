"""Runs the Hopper backward kernels under a dense mask on the CPU, by `cuda_cluster`."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import BackwardConfig
from fa_ops.backends.hopper.kernel_plan import macros
from tests.backends.hopper.cuda_cluster import PTX, compiled
from tests.backends.hopper.cuda_forward import FORWARD_PTX
from tests.backends.hopper.cuda_masks import SIZES, bias_of, bits_of, sizes_of

CALL = (
    f"#include KERNEL_FILE\n{SIZES}"
    + r"""
static BackwardParams params;
static void body_of_thread() { KERNEL(params); }
extern "C" const char* run(u16** data, const Sizes* n, float* lse, float* delta, float* sums,
                           u32* notes, unsigned char** bits, const int* lists, const int* lens) {
  BackwardParams& p = params;
  static Tensor tensors[TENSORS + 1];
  TensorMap* maps[TENSORS] = {&p.q, &p.k, &p.v, &p.grad_out, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < TENSORS; i++) {
    const bool of_keys = i == K || i == V || i == DK || i == DV;
    tensors[i] = {data[i], n->D, of_keys ? n->Sk : n->Sq, of_keys ? n->Hkv : n->Hq, n->B};
    maps[i]->words[0] = (u64)&tensors[i];
  }
  static int counter;
  counter = 0, p.counter = &counter;
  p.lse = lse, p.delta = delta, p.sums = sums, p.nonfinite = notes, p.kv_lens = lens;
  p.B = n->B, p.Hq = n->Hq, p.Hkv = n->Hkv, p.group = n->Hq / n->Hkv, p.Sq = n->Sq, p.Sk = n->Sk;
  p.window_left = UNBOUNDED, p.window_right = n->right;
  p.m_blocks = (n->Sq + 63) / 64, p.n_blocks = (n->Sk + BLOCK_N - 1) / BLOCK_N;
  p.section = n->B * n->Hkv, p.query_section = n->B * n->Hq, p.parts = 1, p.part_heads = p.group;
  p.D = p.Dv = n->D, p.scale = 0.25f, p.scale_log2 = BIAS_BITS ? LOG2E : 0.25f * LOG2E;
  const int *m = n->mask, *pitch = n->pitch;
  const int keys = m[3], queries = m[2];
  p.by_key = {bits[0], (m[0] > 1) * m[1] * keys * pitch[0], (m[1] > 1) * keys * pitch[0], pitch[0],
              pitch[0] - 8};
  p.by_query = {bits[1], (m[0] > 1) * m[1] * queries * pitch[1], (m[1] > 1) * queries * pitch[1],
                (queries > 1) * pitch[1], pitch[1] - 8};
  p.mask_block = queries > 1 ? BLOCK_M / 8 : 0;
  p.bias.blocks = blocks_of(lists, n);
#if BIAS_BITS
  read_bias(p.bias, &tensors[TENSORS], bits[0], m);
#endif
  return run_ctas(body_of_thread, n);
}
"""
)


def emulated_backward(
    folder: Path, kernel: str = "backward", bias_bits: int = 0, **features: bool
) -> ctypes.CDLL:
    """A kernel for 16 features under a mask: `backward`, with dQ, or `backward_queries`."""
    config = BackwardConfig(16, 16, adds_dq=kernel == "backward", bias_bits=bias_bits)
    config = dataclasses.replace(config, skips_tiles=True)
    defines = macros(config, torch.bfloat16, mask=not bias_bits, **features)
    machine = PTX.replace("CTAS = 2, THREADS = 512", "CTAS = 1, THREADS = 384")
    call = CALL.replace("KERNEL_FILE", f'"{kernel}.cu"').replace("KERNEL(", f"{kernel}(")
    return compiled(folder, f"{kernel}.cu", call, defines, machine + FORWARD_PTX)


def run_backward(
    library: ctypes.CDLL, tensors: list[Tensor], lse: Tensor, delta: Tensor, mask: Tensor,
    read: Tensor, blocks: Tensor, ctas: int, *, seed: int, is_causal: bool = False,
    lens: list[int] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq by its sums, and dq, dk and dv as they are stored; tensors: q, k, v, grad_out.

    lse and delta are (B, Hq, Sq), lse natural and -inf in rows without keys. `read` is what the
    kernel reads in place of the mask.
    """
    q, k, v, grad_out = tensors
    (B, Hq, Sq, D), (_, Hkv, Sk, _) = q.shape, k.shape
    is_bool = mask.dtype == torch.bool
    sizes = sizes_of(q, k, mask, blocks, ctas, seed, is_causal)
    if is_bool:
        held = []
        for i, (x, whole) in enumerate(((read.mT, mask.mT), (read, mask))):
            if mask.shape[2] == 1 and i == 0:  # a block of queries that share the mask
                x, whole = (y.expand(*y.shape[:3], 64) for y in (x, whole))
            bits, sizes.pitch[i] = bits_of(x, whole)
            held.append(bits)
    else:
        held = [bias_of(read)] * 2
    padded = -(-Sq // 64) * 64
    unit = 1.4426950408889634 if is_bool else 1.0
    pad = [0, padded - Sq]
    lse = torch.where(lse > -torch.inf, lse * unit, torch.inf)
    lse = torch.nn.functional.pad(lse, pad, value=torch.inf).contiguous()
    delta = torch.nn.functional.pad(delta, pad).contiguous()
    sums = torch.zeros(B * Hq * padded * D)
    notes = torch.zeros(4 * (B * Hkv * (Sk // 16 + 8) + B * Hq * (padded // 16)), dtype=torch.int32)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    data = (ctypes.c_void_p * 7)(*(x.data_ptr() for x in (*tensors, *grads)))
    bits = (ctypes.c_void_p * 2)(*(x.data_ptr() for x in held))
    given = (ctypes.c_int * B)(*(lens or [Sk] * B))
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (lse, delta, sums, notes))
    at = ctypes.c_void_p(blocks.data_ptr())
    error = library.run(data, ctypes.byref(sizes), *pointers, bits, at, given)
    assert error is None, error.decode()
    # by block of 64 queries: four elements, warp, row, pair of columns, second row, column
    x = sums.view(B * Hq * padded // 64, 2, 4, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)
    return x.reshape(B, Hq, padded, D)[:, :, :Sq] * 0.25, *(x.float() for x in grads)
