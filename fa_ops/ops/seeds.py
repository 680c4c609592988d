"""fa::dropout_seed: draws the seed of dropout where a call is recorded, to be run later.

Recorded as a random operator of torch, a seed is drawn again in the backward pass wherever the
partitioner of torch.compile recomputes it (with a memory budget below 1), and the two passes drop
different weights. The partitioner knows no operator that it may never recompute, only nodes: so
each node of this operator is marked as it is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.ops import library
from fa_ops.ops.library import after_import

DROPOUT_SEED = torch.ops.fa.dropout_seed.default


def record_draw(device: torch.device) -> Tensor:
    """A seed (1,) of torch's generator of the device, drawn when the recorded graph runs."""
    # A new tensor for each: equal calls of operators are merged, except those of empty.
    return DROPOUT_SEED(torch.empty(0, device=device))


def _dropout_seed(like: Tensor, count: int = 1) -> Tensor:
    return torch.randint(2**63 - 1, (count,), device=like.device)


def _fake(like: Tensor, count: int = 1) -> Tensor:
    return like.new_empty(count, dtype=torch.int64)


def _vmapped(like: Tensor, count: int = 1) -> Tensor:
    """One seed for all samples or one for each, as torch's own random operators have it."""

    def draw(samples: int) -> Tensor:
        seeds = DROPOUT_SEED(torch.empty(0, device=like.device), samples * count)
        return seeds.view(samples, count)

    return library.run_vmap_randomly(draw)


library.register("dropout_seed", _dropout_seed, _fake)
library.lib.impl("dropout_seed", _vmapped, "FuncTorchVmapMode")
after_import(library.PROXY_MODULE, lambda: library.never_redraw(DROPOUT_SEED))
after_import("torch.utils.checkpoint", lambda: library.hide_from_policies(DROPOUT_SEED))
