"""Distribute the tokens of a sequence over the processes of a group.

In zigzag order a sequence is split into `2 n` chunks, and process `r` of `n` holds chunks `r` and
`2 n - 1 - r`, concatenated. Under a causal mask early chunks attend few keys and late chunks many,
so this balances the work of the processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def members(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process in the group, and the size of the group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "sequences are distributed over the processes of torch.distributed, which is not "
            "initialised: call init_process_group first"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group must contain this process, rank {dist.get_rank()}")
    return rank, dist.get_world_size(group)


def shard(
    x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2, zigzag: bool = True
) -> Tensor:
    """The part of a sequence that this process holds. Differentiable.

    Args:
        x: the whole sequence, any shape; its length along `dim` must be a multiple of the number
            of processes, in zigzag order of twice that number.
        group: ``None``: all processes.
        dim: the dimension of the sequence, 2 for ``(B, H, S, D)``.
        zigzag: whether tokens are in zigzag order; else parts are contiguous.

    Raises:
        ValueError: the length is not such a multiple.
    """
    rank, size = members(group)
    chunks = _chunks(x, dim, size, zigzag)
    return torch.cat([chunks[i] for i in _chunk_indices(rank, size, zigzag)], dim)


def unshard(
    x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2, zigzag: bool = True
) -> Tensor:
    """Gather the whole sequence from the parts of :func:`shard`. Not differentiable."""
    _, size = members(group)
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x, group)
    chunks = {}
    for rank, part in enumerate(parts):
        indices = _chunk_indices(rank, size, zigzag)
        chunks |= dict(zip(indices, part.chunk(len(indices), dim)))
    return torch.cat([chunks[i] for i in sorted(chunks)], dim)


def _chunk_indices(rank: int, size: int, zigzag: bool) -> tuple[int, ...]:
    """The chunks that a process holds."""
    return (rank, 2 * size - 1 - rank) if zigzag else (rank,)


def _chunks(x: Tensor, dim: int, size: int, zigzag: bool) -> tuple[Tensor, ...]:
    count = 2 * size if zigzag else size
    if x.shape[dim] % count:
        raise ValueError(
            f"x must have a multiple of {count} tokens along dim {dim} for {size} processes, got "
            f"{x.shape[dim]}"
        )
    return x.chunk(count, dim) if x.shape[dim] else (x,) * count
