"""fa::mask_blocks: what attention may skip of a dense mask, and where it need not read it."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import backend_option, checks
from fa_ops.call.options import mask_blocks_shape
from fa_ops.ops import library
from fa_ops.plans import dispatch, outputs

MASK_BLOCKS = torch.ops.fa.mask_blocks.default


def _mask_blocks(attn_mask: Tensor) -> Tensor:
    checks.attn_mask(attn_mask)
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if not mask.numel():
        return outputs.no_blocks(mask)
    name = backend_option.chosen() or "auto"
    backend = dispatch.choose_for(name, mask.device, lambda b: b.mask_blocks_error(mask))
    return backend.mask_blocks(mask)


def _fake(attn_mask: Tensor) -> Tensor:
    checks.given(attn_mask=attn_mask)
    checks.attn_mask(attn_mask)
    return attn_mask.new_empty(mask_blocks_shape(attn_mask), dtype=torch.int32)


library.register("mask_blocks", _mask_blocks, _fake)
