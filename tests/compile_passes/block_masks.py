"""BlockMasks of any lists, and what they keep."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attention of the elements that are kept; rows without any give 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~keep, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def kept_elements(block_mask: BlockMask) -> Tensor:
    """What the lists of a BlockMask and its mask_mod keep: (B or 1, H or 1, Sq, Sk)."""
    B, H = block_mask.kv_num_blocks.shape[:2]
    device = block_mask.kv_num_blocks.device
    of_rows, of_keys = block_mask.BLOCK_SIZE
    i, j = (torch.arange(n, device=device) for n in block_mask.seq_lengths)
    i = i[:, None]
    keep = torch.zeros(B, H, len(i), len(j), dtype=torch.bool, device=device)
    for b, h, row in itertools.product(range(B), range(H), range(-(-len(i) // of_rows))):
        for full in (False, True):
            counts = block_mask.full_kv_num_blocks if full else block_mask.kv_num_blocks
            lists = block_mask.full_kv_indices if full else block_mask.kv_indices
            for n in lists[b, h, row, : counts[b, h, row]] if counts is not None else ():
                inside = (i // of_rows == row) & (j // of_keys == n)
                given = (torch.tensor(x, device=device) for x in (b, h))
                keep[b, h] |= inside & (full | block_mask.mask_mod(*given, i, j))
    return keep


def random_block_mask(mask_mod, S: int, block=32, B=None, H=None, full=True, seed=0, **options):
    """A BlockMask whose lists have nothing to do with its mask_mod, and numbers behind their ends
    that mean nothing. No block is listed twice if `distinct`.
    """
    device, distinct = options.get("device", "cpu"), options.get("distinct", False)
    g = torch.Generator().manual_seed(seed)
    sizes = (block, block) if isinstance(block, int) else block
    rows, columns = (-(-S // n) for n in sizes)
    shape = (B or 1, H or 1, rows)
    most = columns // 2 if distinct else columns
    counts = torch.randint(0, most + 1, (2, *shape), generator=g, dtype=torch.int32)
    lists = torch.randint(0, columns, (2, *shape, columns), generator=g, dtype=torch.int32)
    if distinct:
        order = torch.rand(*shape, columns, generator=g).argsort(-1).int()
        lists = torch.stack([order, order.flip(-1)])
    given = [x for pair in zip(counts, lists, strict=True) for x in pair]
    given = [x.to(device) for x in given[: 4 if full else 2]]
    return BlockMask.from_kv_blocks(*given, BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=(S, S))
