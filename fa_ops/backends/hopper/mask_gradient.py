"""The gradient of a float mask: a separate kernel that sums broadcast elements in fixed order."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import BackwardConfig, MaskGradientConfig
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import kernel, pointers_to

_PARAMS = struct_layout("backward_mask.cu", "MaskGradientParams").packer()
_CTAS_A_PROCESSOR = 4


def mask_gradient(
    mask: Tensor, q: Tensor, k: Tensor, backward: BackwardConfig, defines: tuple,
    params: ctypes.Array, stream: int,
) -> Tensor:  # fmt: skip
    """The gradient in the mask's shape and dtype; `params` are those of the backward's kernels.

    Where few tiles of the mask stand for many of the scores, more CTAs than tiles sum a part each,
    and their sums are added here.
    """
    config = MaskGradientConfig(backward)
    whole = (*q.shape[:3], k.shape[2])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    summed = tuple(size == 1 for size in shape)
    blocks = *whole[:2], -(-whole[2] // config.rows), -(-whole[3] // config.columns)
    tiles = loop = 1
    for count, one in zip(blocks, summed):
        tiles, loop = (tiles, loop * count) if one else (tiles * count, loop)
    index = q.device.index
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    steps = -(-loop // max(1, min(loop, _CTAS_A_PROCESSOR * sms // tiles)))
    splits = -(-loop // steps)
    # a sum over queries or keys leaves those of one tile apart
    tile = 1, 1, config.rows, config.columns
    sizes = [(n, size)[not one] for n, size, one in zip(tile, shape, summed)]
    is_whole = splits == 1 and sizes == list(shape)
    if is_whole:
        sums = torch.empty_like(mask)
        strides = 0, *sums.view(shape).stride()
    else:
        sums = torch.empty((splits, *sizes), dtype=torch.float32, device=q.device)
        strides = sums.stride()
    steps_of = [0 if size == 1 else stride for size, stride in zip(sizes, strides[1:])]
    packed = _PARAMS.pack(
        *(sums.data_ptr(), strides[0], *steps_of[:2], *strides[3:]),
        *(*map(int, summed), steps, sums.dtype != torch.float32),
    )
    entry = kernel(
        "mask_gradient", "mask_gradient", index, config.threads, config.shared_bytes,
        tuple((dict(defines) | config.defines()).items()),
    )  # fmt: skip
    own = ctypes.create_string_buffer(packed)
    entry.launch((splits * tiles, 1), stream, pointers_to(params, own))
    if is_whole:
        return sums
    sums = sums.sum([0, *(dim + 1 for dim in (2, 3) if summed[dim])], keepdim=True)
    return torch.empty_like(mask).copy_(sums.view(mask.shape))
