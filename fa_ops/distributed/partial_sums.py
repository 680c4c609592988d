"""Sums of results that each belong to some of the tokens."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

Place = tuple[slice, slice]  # rows of the batch, and tokens
Parts = tuple[tuple[int, int, int], ...]  # (start, stop, how many tensors are added there)


def parts_of(ranges: list[tuple[int, int]], tokens: int) -> Parts:
    """How many of the ranges contain each token."""
    ends = sorted({0, tokens, *(end for pair in ranges for end in pair)})
    found: list[tuple[int, int, int]] = []
    for start, stop in zip(ends, ends[1:]):
        count = sum(low <= start and stop <= high for low, high in ranges)
        if found and found[-1][2] == count:
            start = found.pop()[0]
        found.append((start, stop, count))
    return tuple(found)


class Covered:
    """The tokens that have been written so far."""

    def __init__(self) -> None:
        self.places: list[tuple[int | None, int, int]] = []  # None: all rows of the batch

    def add(self, place: Place) -> bool:
        """Whether the place is new, and shares no token with those before."""
        batches, rows = place
        b, start, stop = batches.start, rows.start, rows.stop
        is_new = all(
            (a != b and a is not None and b is not None) or high <= start or stop <= low
            for a, low, high in self.places
        )
        self.places.append((b, start, stop))
        return is_new


class TokenSum:
    """A sum of tensors (B, H, rows, D) over some tokens each, rounded once.

    A sum of two is rounded once in any dtype. More are summed in float32.
    """

    def __init__(self, like: Tensor, parts: Parts) -> None:
        self.like = like
        if max((count for _, _, count in parts), default=0) <= 2:
            parts = ((0, like.shape[2], 2),)
        self.sums = [(a, b, _Sum(like[:, :, a:b], count)) for a, b, count in parts]

    def add(self, place: Place, x: Tensor) -> None:
        """Add a tensor, which belongs to the sum from now on."""
        batches, rows = place
        for start, stop, total in self.sums:
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                piece = x[:, :, low - rows.start : high - rows.start]
                total.add((batches, slice(low - start, high - start)), piece)

    def result(self) -> Tensor:
        """The sum, in the dtype and with the strides of `like`."""
        like = self.like
        if len(self.sums) == 1:
            total = self.sums[0][2].result()
            if total.dtype == like.dtype and total.stride() == like.stride():
                return total
        out = torch.empty_like(like)
        for start, stop, total in self.sums:
            out[:, :, start:stop].copy_(total.result())
        return out


class _Sum:
    """The sum of tensors in one dtype. The first one with all tokens becomes the sum."""

    def __init__(self, like: Tensor, count: int) -> None:
        self.like, self.total, self.covered = like, None, Covered()
        self.wide = sum_dtype(like) if count > 2 else like.dtype
        self.first: tuple[Place, Tensor] | None = None  # waits for one that has all tokens

    def add(self, place: Place, x: Tensor) -> None:
        if self.total is not None:
            self._add(place, x)
        elif x.shape == self.like.shape:
            self._begin(x)
        elif self.first is None:
            self.first = place, x
        else:
            self._begin(None)
            self._add(place, x)

    def result(self) -> Tensor:
        if self.total is None:
            self._begin(None)
        return self.total

    def _begin(self, whole: Tensor | None) -> None:
        like, first = self.like, self.first
        given = [x for x in (whole, first and first[1]) if x is not None]
        wide = functools.reduce(torch.promote_types, (x.dtype for x in given), self.wide)
        if whole is None:
            self.total = torch.zeros_like(like, dtype=wide)
        else:
            self.total = whole.to(wide)
            self.covered.add((slice(None), slice(0, like.shape[2])))
        if first is not None:
            self._add(*first)

    def _add(self, place: Place, x: Tensor) -> None:
        there = self.total[place[0], :, place[1]]
        if self.covered.add(place):
            there.copy_(x)
        else:
            there.add_(x)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which partial results are summed."""
    return torch.promote_types(x.dtype, torch.float32)
