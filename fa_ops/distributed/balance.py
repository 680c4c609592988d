"""Layouts that give all processes equal work under any mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa_ops.argument_types import Window, need_bool, need_int, sides
from fa_ops.distributed import plans
from fa_ops.distributed.layout import SequenceLayout, merged, whole_group
from fa_ops.distributed.masks import Mask, Ranges, check_masks, on_host, visible
from fa_ops.distributed.plans import StepProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def balanced_layout(
    tokens: int,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunks: int | None = None,
) -> SequenceLayout:
    """Distribute a sequence so that all processes attend about equally many keys.

    The sequence is split into chunks of equal length, or into its documents. In order of the pairs
    of queries and keys that they have, the largest first, each goes to the process with the fewest
    pairs so far, until a process has its share of tokens; documents may be split then. Whole
    documents need no keys of other processes, chunks balance better: the layout with the lower
    estimate of both costs is returned. All processes get equally many tokens, and compute the same
    layout, if they pass the same masks.

    Args:
        tokens: the length of the whole sequence.
        mesh_or_group: as in :func:`context_parallel_attention`.
        is_causal: as in the call, and so are the following masks, of the whole sequence.
        window: ``(left, right)``.
        kv_lens: int32 ``(B,)``, or a length per document with `cu_seqlens`.
        key_ranges: int32 ``(B or 1, Hq or 1, tokens or 1, 2)``.
        cu_seqlens: int32 ``(documents + 1,)``.
        chunks: chunks of each process, of which the layout is made then; ``None``: 8, or as many
            below as divide the tokens. More chunks balance better, and make more and smaller steps.

    Returns:
        A :class:`SequenceLayout`, to be passed to :func:`shard` and to
        :func:`context_parallel_attention`.

    Raises:
        ValueError, TypeError: tokens that the processes, or their chunks, do not divide; masks
            that are not such tensors.
    """
    _, _, size = whole_group(mesh_or_group)
    _check(tokens, is_causal, chunks)
    check_masks(tokens, kv_lens, key_ranges, cu_seqlens)
    is_free = chunks is None
    if chunks is None:
        chunks = next((n for n in (8, 6, 5, 4, 3, 2) if tokens % (n * size) == 0), 1)
    if chunks < 1 or tokens % (chunks * size):
        raise ValueError(
            f"tokens must be a multiple of {max(1, chunks) * size}, {chunks} chunks for each of "
            f"{size} processes, got {tokens}"
        )
    left, right = sides(window)
    ranges = on_host(key_ranges)
    mask = Mask(
        tokens, tokens, is_causal, left, right, on_host(kv_lens),
        None if ranges is None else ranges.clamp(0, tokens), on_host(cu_seqlens),
    )  # fmt: skip
    attended = visible(mask, torch.arange(mask.queries, device="cpu"))
    pairs = (attended.hi - attended.lo).double().mean((0, 1))
    before = torch.cat([pairs.new_zeros(1), pairs.cumsum(0)])  # pairs of the tokens before each
    found = [_of_chunks(before, size, chunks)]
    if is_free and size > 1 and mask.cu_seqlens is not None and mask.queries:
        ends, local = mask.cu_seqlens.tolist(), mask.queries // size
        found += [
            _of_documents(before, ends, size, most)
            for most in (local, max(1, local // 2), max(1, local // 4))
        ]
    costs = [_cost(mask, layout, attended, before) for layout in found] if found[1:] else [0.0]
    return found[costs.index(min(costs))]


def _check(tokens: int, is_causal: bool, chunks: int | None) -> None:
    if need_int("tokens", tokens) < 0:
        raise ValueError(f"tokens must be 0 or more, got {tokens}")
    need_bool("is_causal", is_causal)
    if chunks is not None:
        need_int("chunks", chunks)


# Pairs that are attended in the time in which a token's keys and values are received: 32 query and
# 8 key heads of 128 features on an H200, with NVLink at 280 GB/s.
_PAIRS_PER_KEY = 500


def _cost(mask: Mask, layout: SequenceLayout, attended: Ranges, before: Tensor) -> float:
    """The time of the slowest process, in pairs."""

    def of_process(rank: int) -> Ranges:
        held = layout.segments[rank]
        return Ranges(*(torch.cat([x[..., a:b] for a, b in held], -1) for x in attended))

    needs = plans.requests(StepProblem(mask, layout, layout, False, 1), of_process)
    slowest = 0.0
    for rank, held in enumerate(layout.segments):
        segments = [part for other, part in enumerate(needs[rank]) if other != rank]
        received = sum(stop - start for part in segments for start, stop in part)
        work = sum(float(before[stop] - before[start]) for start, stop in held)
        slowest = max(slowest, work + _PAIRS_PER_KEY * received)
    return slowest


def _of_chunks(before: Tensor, size: int, chunks: int) -> SequenceLayout:
    tokens = len(before) - 1
    length = tokens // (chunks * size)
    work = before[:: max(1, length)].diff().tolist() if length else [0.0] * chunks * size
    loads, held = [0.0] * size, [[] for _ in range(size)]
    for chunk in sorted(range(chunks * size), key=lambda c: (-work[c], c)):
        free = [r for r in range(size) if len(held[r]) < chunks]
        rank = min(free, key=lambda r: (loads[r], r))
        loads[rank] += work[chunk]
        held[rank].append((chunk * length, (chunk + 1) * length))
    return SequenceLayout(tokens, tuple(merged(sorted(part)) for part in held))


def _of_documents(before: Tensor, ends: list[int], size: int, most: int) -> SequenceLayout:
    """Documents in parts of at most `most` tokens, split further where no process has room."""
    tokens = len(before) - 1
    boundaries = {0, *ends, tokens}
    for start, stop in zip(ends, ends[1:]):
        boundaries.update(range(start, stop, most))
    boundaries = sorted(boundaries)
    pairs = before.tolist()
    waiting = sorted(
        zip(boundaries, boundaries[1:]), key=lambda part: (pairs[part[0]] - pairs[part[1]], part)
    )
    loads, room, held = [0.0] * size, [tokens // size] * size, [[] for _ in range(size)]
    for start, stop in waiting:
        while start < stop:
            free = [r for r in range(size) if room[r] >= stop - start]
            free = free or [r for r in range(size) if room[r]]
            rank = min(free, key=lambda r: (loads[r], r))
            at = max(start, stop - room[rank])
            held[rank].append((at, stop))
            loads[rank] += pairs[stop] - pairs[at]
            room[rank] -= stop - at
            stop = at
    return SequenceLayout(tokens, tuple(merged(sorted(part)) for part in held))
