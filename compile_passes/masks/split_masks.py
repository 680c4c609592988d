"""Masks of which a part is a window or an interval of keys, such as a causal mask with padding: the
part becomes a flag or key ranges, so that masked tiles are skipped, and the rest stays a mask,
of the keys alone where it does not depend on the query.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from compile_passes.graph.axes import Axis, Group
from compile_passes.masks.affine import (
    Affine,
    All,
    Any,
    AtMost,
    Condition,
    Not,
    Opaque,
    Quotient,
    all_of,
    sort_key,
)
from compile_passes.masks.key_intervals import KeyInterval, key_interval
from compile_passes.masks.mask_terms import MaskEffect, Window, common_window, single_axis
from compile_passes.match.attention_site import AttentionSite


class SplitMask(NamedTuple):
    """The window and interval of a mask, and the conditions that they leave; `on_keys` if these are
    the same for every query.
    """

    window: Window
    interval: KeyInterval | None
    rest: tuple[Condition, ...]
    on_keys: bool


def split_mask(keep: Condition, site: AttentionSite) -> SplitMask | None:
    """The parts of a condition on query and key; None where no part is a window or interval."""
    i, j = single_axis(site.queries), single_axis(site.keys)
    if j is None or not isinstance(keep, All):
        return None
    conditions = sorted(keep.conditions, key=sort_key)
    banded = [c for c in conditions if _is_band(c, site)]
    window = common_window([MaskEffect(c, 0.0) for c in banded], site)
    others = [c for c in conditions if c not in banded]
    ranged = [c for c in others if key_interval(c, j) is not None]
    rest = tuple(c for c in others if c not in ranged)
    interval = key_interval(all_of(*ranged), j) if ranged else None
    if not banded and not ranged:
        return None
    return SplitMask(window or (None, None), interval, rest, i is None or not depends(rest, (i,)))


def _is_band(c: Condition, site: AttentionSite) -> bool:
    """Whether a condition alone is a window."""
    if single_axis(site.queries) is None:
        return False
    return common_window([MaskEffect(c, 0.0)], site) is not None


def depends(x: object, axes: Group) -> bool:
    """Whether an expression, or one of several, varies along any of the axes."""
    if isinstance(x, Axis):
        return x in axes
    if isinstance(x, (Quotient, AtMost)):
        return depends(x.a, axes)
    if isinstance(x, Affine):
        return any(depends(y, axes) for y, _ in x.terms)
    if isinstance(x, Opaque):
        return depends(x.coordinates, axes)
    if isinstance(x, Not):
        return depends(x.condition, axes)
    if isinstance(x, (All, Any)):
        return depends(x.conditions, axes)
    return isinstance(x, Iterable) and any(depends(y, axes) for y in x)
