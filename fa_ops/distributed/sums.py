"""Sums of results that each belong to some of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

Place = tuple[slice, slice]  # rows of the batch, and tokens


class Covered:
    """The tokens that have been written so far."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int]] = []

    def add(self, place: Place) -> bool:
        """Whether the place is new, and shares no token with those before."""
        batches, rows = place
        b, start, stop = batches.start or 0, rows.start or 0, rows.stop
        is_new = all(a != b or c <= start or stop <= low for a, low, c in self.places)
        self.places.append((b, start, stop))
        return is_new


class TokenSum:
    """A sum of tensors (B, H, rows, D) over some tokens each, rounded once.

    A sum of two is rounded once in any dtype. More are summed in float32.
    """

    def __init__(self, like: Tensor, terms: int) -> None:
        """`terms` is the largest number of tensors that share a token."""
        self.like, self.total, self.covered = like, None, Covered()
        self.wide = sum_dtype(like) if terms > 2 else like.dtype

    def add(self, place: Place, x: Tensor) -> None:
        """Add a tensor, which becomes the sum if it has all tokens and the layout of `like`."""
        is_new, like = self.covered.add(place), self.like
        if self.total is None:
            wide = torch.promote_types(self.wide, x.dtype)
            if x.shape == like.shape and x.stride() == like.stride():
                self.total = x.to(wide)
                return
            allocate = torch.empty_like if x.shape == like.shape else torch.zeros_like
            self.total = allocate(like, dtype=wide)
        there = self.total[place[0], :, place[1]]
        if is_new:
            there.copy_(x)
        else:
            there.add_(x)

    def result(self) -> Tensor:
        """The sum, in the dtype of `like`."""
        if self.total is None:
            return torch.zeros_like(self.like)
        return self.total.to(self.like.dtype)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which partial results are summed."""
    return torch.promote_types(x.dtype, torch.float32)
