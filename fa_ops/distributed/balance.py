"""Layouts that give all processes equal work under any mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa_ops import api
from fa_ops.distributed.layout import SequenceLayout, merged, whole_group
from fa_ops.distributed.masks import Mask, on_host, visible

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def balanced_layout(
    tokens: int,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None,
    *,
    is_causal: bool = False,
    window: api.Window | None = None,
    kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunks: int | None = None,
) -> SequenceLayout:
    """Distribute a sequence so that all processes attend about equally many keys.

    The sequence is split into chunks of equal length. In order of the pairs of queries and keys
    that they have, the largest first, each goes to the process with the fewest pairs so far, until
    a process has its share of chunks. All processes get equally many tokens, and compute the same
    layout, if they pass the same masks.

    Args:
        tokens: the length of the whole sequence.
        mesh_or_group: as in :func:`context_parallel_attention`.
        is_causal: as in the call, and so are the following masks, of the whole sequence.
        window: ``(left, right)``.
        kv_lens: int32 ``(B,)``, or a length per document with `cu_seqlens`.
        key_ranges: int32 ``(B or 1, Hq or 1, tokens or 1, 2)``.
        cu_seqlens: int32 ``(documents + 1,)``.
        chunks: chunks of each process; ``None``: 8, or as many below as divide the tokens. More
            chunks balance better, and make more and smaller steps.

    Returns:
        A :class:`SequenceLayout`, to be passed to :func:`shard` and to
        :func:`context_parallel_attention`.

    Raises:
        ValueError: tokens that the processes, or their chunks, do not divide.
    """
    _, _, size = whole_group(mesh_or_group)
    if chunks is None:
        chunks = next((n for n in (8, 6, 5, 4, 3, 2) if tokens % (n * size) == 0), 1)
    if chunks < 1 or tokens % (chunks * size):
        raise ValueError(
            f"tokens must be a multiple of {max(1, chunks) * size}, {chunks} chunks for each of "
            f"{size} processes, got {tokens}"
        )
    left, right = (-1, -1) if window is None else api.sides(window)
    ranges = on_host(key_ranges)
    mask = Mask(
        tokens, tokens, is_causal, left, right, on_host(kv_lens),
        None if ranges is None else ranges.clamp(0, tokens), on_host(cu_seqlens),
    )  # fmt: skip
    return _assigned(mask, size, chunks)


def _assigned(mask: Mask, size: int, chunks: int) -> SequenceLayout:
    length = mask.queries // (chunks * size)
    attended = visible(mask, torch.arange(mask.queries, device="cpu"))
    pairs = (attended.hi - attended.lo).double().mean((0, 1))
    work = pairs.view(chunks * size, length).sum(1).tolist() if length else [0.0] * chunks * size
    loads, held = [0.0] * size, [[] for _ in range(size)]
    for chunk in sorted(range(chunks * size), key=lambda c: (-work[c], c)):
        free = [r for r in range(size) if len(held[r]) < chunks]
        rank = min(free, key=lambda r: (loads[r], r))
        loads[rank] += work[chunk]
        held[rank].append((chunk * length, (chunk + 1) * length))
    return SequenceLayout(mask.queries, tuple(merged(sorted(part)) for part in held))
