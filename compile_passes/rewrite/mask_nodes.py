"""Emission of masks and sinks: sums of biases, conjunctions of bool masks, and the rows that they
leave empty, without keys to attend.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import torch
from torch import fx

from compile_passes.graph.ir import example, requires_grad
from compile_passes.masks.classified_masks import ClassifiedMasks, EmptyRows, KeepMask
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import (
    MAX_ROW_MASK,
    BiasTerm,
    FillTerm,
    Leaf,
    absorbing_number,
)
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.operands import (
    aligned,
    bias,
    bool_mask,
    cast,
    fill_where,
    inverted,
    only_backward,
)


@dataclasses.dataclass(frozen=True)
class MaskNodes:
    """`attn_mask` and the query for the call, and `empty_rows` (B or 1, Hq or 1, Sq or 1, 1), which
    average their keys: with a query of 0, or because the call is told so.

    A float mask also has `averaged`, the keys that an empty row averages; `filled`, the keys whose
    scores a fill replaced; `total`, the sum of all masks; `row_max`, its maximum in each row; and
    `shift`, what was subtracted from each row.
    """

    mask: fx.Node | None
    query: fx.Node
    empty_rows: fx.Node | None
    averaged: fx.Node | None = None
    filled: fx.Node | None = None
    total: fx.Node | None = None
    row_max: fx.Node | None = None
    shift: fx.Node | None = None


def emit_masks(
    emitter: Emitter,
    masks: ClassifiedMasks,
    q: fx.Node,
    empty_rows: fx.Node | None,
    conditions: list[fx.Node],
    averaging: bool,
) -> MaskNodes:
    """The masks as nodes. `empty_rows` are known already where a key interval was emitted, and
    `conditions` are bool masks. With `averaging`, the call is told which rows are empty, and its
    query remains as it is.
    """
    if masks.float_terms:
        return _emit_float_mask(emitter, masks, q, averaging)
    keeps = [_keep(emitter, mask) for mask in masks.keeps]
    keep = emitter.reduce(operator.and_, [*keeps, *conditions])
    if masks.empty_rows is not EmptyRows.ZERO and empty_rows is None:
        empty_rows = inverted(emitter, emitter.method("any", keep, dim=-1, keepdim=True))
        keep = keep if averaging else emitter.function(operator.or_, keep, empty_rows)
    if masks.empty_rows not in (EmptyRows.ZERO, EmptyRows.ADDED) and not averaging:
        q = emitter.method("masked_fill", q, empty_rows, 0.0)
    biases = [bias(emitter, term) for term in masks.biases]
    biases += [_added_fill(emitter, masks.added_fill)] if masks.added_fill else []
    total = emitter.reduce(operator.add, biases)
    if total is None and keep is not None and masks.interval:  # key_ranges permit no bool mask
        total = fill_where(emitter, keep, None, -math.inf, torch.float32)
        return MaskNodes(total, q, empty_rows)
    if total is None:
        return MaskNodes(keep, q, empty_rows)
    total = _supported_mask(emitter, total)
    if empty_rows is not None:
        total = emitter.method("masked_fill", total, empty_rows, 0.0)
    if keep is not None:
        total = emitter.method("masked_fill", total, inverted(emitter, keep), -math.inf)
    return MaskNodes(total, q, empty_rows)


def _emit_float_mask(
    emitter: Emitter, masks: ClassifiedMasks, q: fx.Node, averaging: bool
) -> MaskNodes:
    """All masks as the float that eager mode adds to each score, or replaces it by.

    A row is empty if the scores of the keys that have its maximum are lost; it averages these keys.
    In other rows a large maximum is subtracted, because the backward pass reads the weights from a
    float32 log-sum-exp.
    """
    total, filled, lost = None, None, None
    limits_differ = len({absorbing_number(t.dtype, t.rescaled) for t in masks.float_terms}) > 1
    for term in masks.float_terms:
        if isinstance(term, BiasTerm):
            one = bias(emitter, term)
            total = one if total is None else emitter.function(operator.add, total, one)
            total = cast(emitter, total, term.dtype)
            if limits_differ:
                lost = _either(emitter, lost, _absorbing(emitter, total, term))
            continue
        mask = bool_mask(emitter, term.mask, emitter.site.mask_dims)
        kept = inverted(emitter, mask) if term.where else mask
        hidden = mask if term.where else inverted(emitter, mask)
        total = fill_where(emitter, kept, total, term.value, _mask_dtype(emitter))
        if math.isfinite(term.value):
            filled = _either(emitter, filled, hidden)
    dtype = example(total).dtype
    row_max = emitter.method("amax", emitter.method("detach", total), dim=-1, keepdim=True)
    size = emitter.method("abs", row_max)
    finite = emitter.function(operator.le, size, torch.finfo(dtype).max)
    is_max = emitter.function(operator.eq, total, row_max)
    if limits_differ:
        lost = emitter.function(operator.and_, is_max, _either(emitter, lost, filled))
        empty = emitter.method("any", lost, dim=-1, keepdim=True)
    else:
        empty = _absorbing(emitter, row_max, masks.float_terms[0])
    empty = emitter.function(operator.and_, empty, finite)
    averaged = emitter.function(operator.and_, is_max, empty)
    large = emitter.function(operator.gt, size, MAX_ROW_MASK)
    large = emitter.function(operator.and_, large, finite)
    shift = fill_where(emitter, inverted(emitter, large), None, row_max, dtype)
    mask = _supported_mask(emitter, emitter.function(operator.sub, total, shift))
    mask = emitter.method("masked_fill", mask, empty, -math.inf)
    mask = _with_averages(emitter, masks, mask, averaged, total)
    q = q if averaging else emitter.method("masked_fill", q, empty, 0.0)
    return MaskNodes(mask, q, empty, averaged, filled, total, row_max, shift)


def _with_averages(
    emitter: Emitter, masks: ClassifiedMasks, mask: fx.Node, averaged: fx.Node, total: fx.Node
) -> fx.Node:
    """The mask with 0 at the keys that empty rows average, and there with the gradient of the sum
    of masks that it stands for.
    """
    if not biases_require_grad(masks):
        return emitter.method("masked_fill", mask, averaged, 0.0)
    zero = cast(emitter, only_backward(emitter, total), example(mask).dtype)
    return emitter.function(torch.where, averaged, zero, mask)


def biases_require_grad(masks: ClassifiedMasks) -> bool:
    """Whether a part of the sum of masks requires grad."""
    return any(requires_grad(t.leaf.value) for t in masks.float_terms if isinstance(t, BiasTerm))


def _absorbing(emitter: Emitter, number: fx.Node, term: BiasTerm | FillTerm) -> fx.Node:
    """Where the scores to which a term was added are lost beside this sum of masks."""
    limit = absorbing_number(term.dtype, term.rescaled)
    return emitter.function(operator.ge, emitter.method("abs", number), limit)


def _either(emitter: Emitter, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
    return emitter.reduce(operator.or_, [x for x in (a, b) if x is not None])


def _mask_dtype(emitter: Emitter) -> torch.dtype:
    return torch.float64 if emitter.site.dtype == torch.float64 else torch.float32


def _supported_mask(emitter: Emitter, mask: fx.Node) -> fx.Node:
    """The mask in a dtype that the operator supports."""
    supported = example(mask).dtype in (emitter.site.dtype, torch.float32)
    return mask if supported else emitter.method("to", mask, torch.float32)


def _added_fill(emitter: Emitter, fill: FillTerm) -> fx.Node:
    """A fill as a bias."""
    mask = bool_mask(emitter, fill.mask, emitter.site.mask_dims)
    kept = inverted(emitter, mask) if fill.where else mask
    return fill_where(emitter, kept, None, fill.value, _mask_dtype(emitter))


def zeroed_keys(emitter: Emitter, fill: FillTerm, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(key, attn_mask) where a small fill replaces the scores of some keys: these are zeroed, and
    the fill is added.
    """
    mask = bool_mask(emitter, fill.mask, (*emitter.site.key_dims, ()))
    if not fill.where:
        mask = inverted(emitter, mask)
    k = emitter.method("masked_fill", k, mask, 0.0)
    full = bool_mask(emitter, fill.mask, emitter.site.mask_dims)
    added = emitter.method("to", full, torch.float32)
    if not fill.where:
        added = emitter.function(operator.sub, 1.0, added)
    return k, emitter.function(operator.mul, added, fill.value)


def _keep(emitter: Emitter, keep: KeepMask) -> fx.Node:
    if isinstance(keep.kept_value, bool):
        mask = bool_mask(emitter, keep.leaf, emitter.site.mask_dims)
        return mask if keep.kept_value else inverted(emitter, mask)
    mask = emitter.arrange(keep.leaf.value.node, keep.leaf.dims, emitter.site.mask_dims)
    return emitter.function(operator.eq, mask, keep.kept_value)


def needs_separate_sink(site: AttentionSite, masks: ClassifiedMasks) -> bool:
    """Whether the operator cannot apply the sink: it differs by query, or rows are shifted."""
    sink = site.scores.sink
    per_query = sink is not None and not sink.axes() <= set(site.heads)
    return site.has_sink and (bool(masks.float_terms) or per_query)


def emit_sink(emitter: Emitter, q: fx.Node, separate: bool) -> fx.Node | float:
    """The sink: one logit for each query head, or broadcastable to (B, Hq, Sq) if `separate`."""
    sink = emitter.site.scores.sink or Leaf(0.0)
    if separate:
        return aligned(emitter, sink, emitter.site.row_dims)
    if isinstance(sink.value, float):
        heads = emitter.method("size", q, 1)
        return emitter.method("new_full", q, (heads,), sink.value, dtype=torch.float32)
    sinks = emitter.arrange(sink.value.node, sink.dims, (emitter.site.heads,), full=True)
    allowed = (emitter.site.dtype, torch.float32)
    return sinks if example(sinks).dtype in allowed else cast(emitter, sinks, torch.float32)
