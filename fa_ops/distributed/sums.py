"""Sums of results that each belong to some of the tokens."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

Place = tuple[slice, slice]  # rows of the batch, and tokens


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

    A sum of two is rounded once in any dtype. More are summed in float32. The first tensor with all
    tokens becomes the sum, without a copy if it has the layout of `like`.
    """

    def __init__(self, like: Tensor, terms: int) -> None:
        """`terms` is the largest number of tensors that share a token."""
        self.like, self.total, self.covered = like, None, Covered()
        self.wide = sum_dtype(like) if terms > 2 else like.dtype
        self.first: tuple[Place, Tensor] | None = None  # waits for one that has all tokens

    def add(self, place: Place, x: Tensor) -> None:
        """Add a tensor, which belongs to the sum from now on."""
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
        """The sum, in the dtype of `like`."""
        if self.total is None:
            self._begin(None)
        return self.total.to(self.like.dtype)

    def _begin(self, whole: Tensor | None) -> None:
        like, first = self.like, self.first
        given = [x for x in (whole, first and first[1]) if x is not None]
        wide = functools.reduce(torch.promote_types, (x.dtype for x in given), self.wide)
        if whole is None:
            self.total = torch.zeros_like(like, dtype=wide)
        elif whole.stride() == like.stride():
            self.total = whole.to(wide)
        else:
            self.total = torch.empty_like(like, dtype=wide).copy_(whole)
        if whole is not None:
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
