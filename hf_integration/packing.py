"""Documents packed into one row, found from position_ids where transformers does not look.

transformers looks for packing only if there is neither an attention mask nor a cache, and by
default there is a cache. Without this, documents of such a batch would attend each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_integration.hidden import is_hidden
from hf_integration.latest import Latest


class Documents(NamedTuple):
    """Sequences packed into one row: where each ends among the queries and among the keys."""

    q_ends: Tensor  # int32 (documents + 1,), from 0
    k_ends: Tensor
    longest_q: int | None = None
    longest_k: int | None = None


_latest = Latest()


def documents(
    position_ids: Tensor | None, query: Tensor, key: Tensor, layer: nn.Module
) -> Documents | None:
    """The documents of one row (1, S) of positions, or None where it is a single one.

    A document begins wherever a position is not its predecessor plus one, as transformers has it.
    Reads the device once per forward pass; looks only where queries and keys are the same tokens.
    """
    S = query.shape[2]
    if position_ids is None or S < 2 or key.shape[2] != S or torch.compiler.is_compiling():
        return None
    if query.shape[0] != 1 or tuple(position_ids.shape) != (1, S) or is_hidden(position_ids):
        return None
    return _latest.of(position_ids, layer, lambda: _find(position_ids[0]))


def _find(positions: Tensor) -> Documents | None:
    breaks = positions.diff() != 1
    starts = (breaks.nonzero()[:, 0] + 1).tolist()
    if not starts:
        return None
    ends = [0, *starts, positions.shape[0]]
    longest = max(b - a for a, b in zip(ends, ends[1:], strict=False))
    on_device = torch.tensor(ends, dtype=torch.int32, device=positions.device)
    return Documents(on_device, on_device, longest, longest)
