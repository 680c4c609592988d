"""mask_blocks of the dense masks that transformers or users make."""

from __future__ import annotations

import torch
from torch import nn

import fa_ops
from fa_ops import dispatch
from fa_ops.tracing import is_compiling
from fa_ops.types import MASK_BLOCK
from hf_integration.encodings import MaskArguments
from hf_integration.memo import PerTensorMemo

_memo = PerTensorMemo()
_skips_tiles = torch.compiler.assume_constant_result(dispatch.skips_tiles)


def with_mask_blocks(found: MaskArguments, queries: int, layer: nn.Module) -> MaskArguments:
    """The same with `mask_blocks` of a dense mask, made once for the layers that share the mask."""
    mask = found.attn_mask
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return found
    # queries are not compared in compiled code, which would be compiled again for short prompts
    pays = is_compiling() or queries >= MASK_BLOCK
    if not (pays and _skips_tiles(mask.device.type)):
        return found
    blocks = _memo.get(mask, layer, lambda: fa_ops.mask_blocks(mask))
    return found._replace(mask_blocks=blocks)
