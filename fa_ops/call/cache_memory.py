"""Memory of caches: whether tensors overlap, and whether a cache may be written to."""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.call import Run
from fa_ops.call.checks import need
from fa_ops.call.options import Operands

# Memory overlap of strided tensors, computed from their addresses alone.


class Runs(NamedTuple):
    """The bytes of a tensor as runs of equal length, which begin at the sums of multiples."""

    first: int  # the address of the first run
    length: int
    steps: list[tuple[int, int]]  # (bytes, count) of each dimension of runs, the smallest first

    @property
    def end(self) -> int:
        """The address behind the last run."""
        return self.first + self.length + sum((count - 1) * step for step, count in self.steps)


def has_overlaps(t: Tensor) -> bool:
    """Whether elements share memory, as in expanded and unfolded tensors."""
    extent = 1  # elements spanned by the dimensions with smaller strides
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def extent(t: Tensor) -> int:
    """The bytes from the beginning of the first element to the end of the last one."""
    if not t.numel():
        return 0
    strides = t.stride()
    return t.itemsize * (1 + sum(map(mul, t.shape, strides)) - sum(strides))


def span(t: Tensor) -> tuple[int, int]:
    """The addresses of the first byte, and behind the last one."""
    first = t.data_ptr()
    return first, first + extent(t)


def is_narrowed(part: Tensor, whole: Tensor) -> bool:
    """Whether `part` is the first numbers of each row of `whole`, or all, in the same memory."""
    *rows, width = part.shape
    if rows != [*whole.shape[:-1]] or width > whole.shape[-1]:
        return False
    steps = zip(part.shape, part.stride(), whole.stride())
    return part.data_ptr() == whole.data_ptr() and all(a == b for n, a, b in steps if n > 1)


def share_memory(read: Tensor, written: Tensor) -> bool:
    """Whether any byte belongs to elements of both; `written` has no overlaps of its own.

    Takes memory for the runs of contiguous bytes of `read`, and none that grows with `written`.
    """
    if not (read.numel() and written.numel()):
        return False
    a, b = _runs(read), _runs(written)
    if a.end <= b.first or b.end <= a.first:
        return False
    # The distance from the last byte of each run to the nearest run of `written` that begins before
    # it. Without overlaps a step is longer than all smaller ones together, so the largest multiple
    # of each step that fits leads to it.
    distance = _starts(a) + (a.first + a.length - 1 - b.first)
    distance = distance[distance >= 0]
    for step, count in reversed(b.steps):
        distance = distance - (distance // step).clamp_(max=count - 1) * step
    return bool((distance < a.length - 1 + b.length).any())


def caches_share_memory(k: Tensor, v: Tensor, is_paged: bool) -> bool:
    """Whether an element that may be written as a key may be written as a value too.

    Pages may lie in one pool, of which page numbers tell what keys and values own: pages with other
    numbers may share memory.
    """
    if is_paged and k.stride(0) == v.stride(0):
        k, v = k[:1], v[:1]
    return share_memory(k, v)


def _runs(t: Tensor) -> Runs:
    length, steps = t.itemsize, []
    for stride, size in sorted(zip(t.stride(), t.shape)):
        step = stride * t.itemsize
        if size == 1 or step == 0:  # an expanded dimension adds no bytes
            continue
        if step == length and not steps:
            length *= size
        else:
            steps.append((step, size))
    return Runs(t.data_ptr(), length, steps)


def _starts(runs: Runs) -> Tensor:
    """The beginnings of all runs, relative to the first one."""
    starts = torch.zeros(1, dtype=torch.int64)
    for step, count in runs.steps:
        starts = (starts + torch.arange(count)[:, None] * step).flatten()
    return starts


# Checks of the memory that the two caches of an append may share.


def check(k: Tensor, v: Tensor, new: Operands) -> None:
    """Raise ValueError for caches that share memory.

    Values that are the first features of the keys, as in MLA, may be written if their new values
    are those of the new keys too: then both writes are of the same numbers.
    """
    if not (k.numel() and v.numel()):
        return
    if not is_narrowed(v, k):
        message = "value_cache shares memory with key_cache, and both are written to: only {} may"
        is_shared = caches_share_memory(k, v, new.page_table is not None)
        need(not is_shared, message, f"key_cache[..., :{v.shape[-1]}]")
        return
    width = v.shape[-1]
    beginning = f"value_cache is the first {width} features of key_cache, which is written to: "
    need(new.rotary_cos is None, "{}rotary_cos, which rotates keys alone, must be None", beginning)
    message = "{}value must be the same features of key, in the same memory: pass key[..., :{}]"
    need(is_narrowed(new.new_value, new.new_key), message, beginning, width)
    scales = new.k_scale, new.v_scale
    is_same = scales[0] is scales[1] or (None not in scales and is_narrowed(scales[1], scales[0]))
    need(is_same, "{}k_scale and v_scale must be the same tensor", beginning)


def checking(run: Run, k: Tensor, v: Tensor) -> Run:
    """`run` with `check` before it, for all caches with the geometry of these.

    Fast where they lie apart, and where values are the first features of the keys.
    """
    lowest, highest = -extent(v), extent(k)
    legal: set[int] = set()  # distances of caches within each other's bounds

    def checked(q: Tensor, k: Tensor, v: Tensor, new: Operands, with_lse: bool = True):
        distance = v.data_ptr() - k.data_ptr()
        if lowest < distance < highest and (
            distance not in legal or not (distance or _begin_together(new))
        ):
            check(k, v, new)
            legal.add(distance)
        return run(q, k, v, new, with_lse)

    return checked


def _begin_together(new: Operands) -> bool:
    """Whether new values and their scales begin where new keys and theirs do.

    Then `check` finds of values in keys what it found of others with the same geometry.
    """
    scales = new.k_scale, new.v_scale
    are_same = scales[0] is scales[1] or (
        not any(t is None for t in scales) and scales[0].data_ptr() == scales[1].data_ptr()
    )
    return are_same and new.new_key.data_ptr() == new.new_value.data_ptr()
