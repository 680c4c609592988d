"""Which tokens of a sequence a process of a group holds.

In zigzag order a sequence is cut into `2 n` chunks, of which process `r` of `n` holds the `r`-th
and the `r`-th from the end, one behind the other. Under a causal mask early chunks attend few keys
and late ones many, so all processes then have as much to do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def members(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's number in the group and how many there are.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "a sequence is shared by the processes of torch.distributed, which is not initialised: "
            "call init_process_group first"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group must contain this process, {dist.get_rank()}, and does not")
    return rank, dist.get_world_size(group)


def shard(
    x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2, zigzag: bool = True
) -> Tensor:
    """The part of `x`, which every process has whole, that is this process's. Differentiable.

    Args:
        x: any shape; its length along `dim` a multiple of the number of processes, in zigzag order
            of twice that.
        group: ``None``: all processes.
        dim: the sequence's dimension, 2 for ``(B, H, S, D)``.
        zigzag: whether in zigzag order; else contiguous parts.

    Raises:
        ValueError: the length cannot be cut so.
    """
    rank, size = members(group)
    chunks = _chunks(x, dim, size, zigzag)
    return torch.cat([chunks[i] for i in _held(rank, size, zigzag)], dim)


def unshard(
    x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2, zigzag: bool = True
) -> Tensor:
    """The whole of what :func:`shard` cuts, in every process. No gradient."""
    _, size = members(group)
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x, group)
    placed = {}
    for rank, part in enumerate(parts):
        held = _held(rank, size, zigzag)
        placed |= dict(zip(held, part.chunk(len(held), dim)))
    return torch.cat([placed[i] for i in sorted(placed)], dim)


def _held(rank: int, size: int, zigzag: bool) -> tuple[int, ...]:
    return (rank, 2 * size - 1 - rank) if zigzag else (rank,)


def _chunks(x: Tensor, dim: int, size: int, zigzag: bool) -> tuple[Tensor, ...]:
    count = 2 * size if zigzag else size
    if x.shape[dim] % count:
        raise ValueError(
            f"x must have a multiple of {count} tokens along dim {dim} for {size} processes, got "
            f"{x.shape[dim]}"
        )
    return x.chunk(count, dim) if x.shape[dim] else (x,) * count
