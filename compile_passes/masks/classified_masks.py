"""Classified masks: arguments of the operator, and the treatment of rows without keys."""

from __future__ import annotations

import dataclasses
import enum

import torch

from compile_passes.ir.graph import Value
from compile_passes.masks.affine import Condition
from compile_passes.masks.key_intervals import KeyInterval
from compile_passes.match.match_state import BiasTerm, FillTerm, Leaf


class EmptyRows(enum.Enum):
    """The result of eager mode for an empty row, one whose keys are all masked."""

    ZERO = "NaN, for which the operator gives 0"
    UNIFORM = "the mean of the values: the fill replaces the scores"
    ABSORBED = "the mean of the values, but gradients reach the scores, which the fill absorbs"
    ADDED = "as without a mask: the fill is added to the whole row"


@dataclasses.dataclass(frozen=True)
class KeepMask:
    """Scores are kept where the leaf equals `kept_value`: a bool, or 0 for an additive mask."""

    leaf: Leaf
    kept_value: bool | float


@dataclasses.dataclass(frozen=True)
class ClassifiedMasks:
    """The arguments that the masks become.

    `left` and `right` are the window around the bottom-right diagonal, unbounded where None; with
    right = 0 it is causal. `biases` and `keeps` are a dense mask.
    """

    left: int | None = None
    right: int | None = None
    biases: tuple[BiasTerm, ...] = ()
    keeps: tuple[KeepMask, ...] = ()
    empty_rows: EmptyRows = EmptyRows.ZERO
    fill: float | None = None  # of the one mask that makes rows empty
    grad_share: float = 1.0  # of an absorbed row's gradient that reaches its scores
    interval: KeyInterval | None = None  # becomes kv_lens or key_ranges
    # (a mask, the conditions on keys alone that are left of it beside a window or interval)
    conditions: tuple[Value, tuple[Condition, ...]] | None = None
    added_fill: FillTerm | None = None  # becomes a bias that absorbs the scores
    zeroed_keys: FillTerm | None = None  # becomes keys of 0 and a bias
    float_terms: tuple[BiasTerm | FillTerm, ...] = ()  # become one float mask
    alibi: tuple[Leaf, float] | None = None  # slopes of the heads, and their factor
    inexact_dtype: torch.dtype | None = None  # why a mask of positions stays dense

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors from which the masks are emitted."""
        terms = (*self.biases, *self.keeps, *self.float_terms)
        slopes = [self.alibi[0]] if self.alibi else []
        return [*(t.mask if isinstance(t, FillTerm) else t.leaf for t in terms), *slopes]

    @property
    def is_dense(self) -> bool:
        """Whether the call has an attn_mask."""
        given = (self.biases, self.keeps, self.zeroed_keys, self.added_fill, self.float_terms)
        given += (self.conditions,)
        return any(given)
