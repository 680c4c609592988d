"""Values with more features than the GPU kernels take, part by part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.types import MAX_HEAD_DIM


def attend_parts(
    attend: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]], v: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """out, or (out, lse), of a call for values of any width.

    The weights do not depend on the values, so that more than 512 features are attended in calls of
    512 each, all of which compute the scores. The lse is that of the first.
    """
    if not is_limited(v.device):
        return attend(v)
    results = [attend(part) for part in v.split(MAX_HEAD_DIM, -1)]
    if len(results) == 1:
        return results[0]
    if isinstance(results[0], Tensor):
        return torch.cat(results, -1)
    return torch.cat([out for out, _ in results], -1), results[0][1]


def is_limited(device: torch.device) -> bool:
    """Whether the kernels for a device take a limited number of features."""
    return device.type == "cuda"
