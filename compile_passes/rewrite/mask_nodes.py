"""Writing masks: biases added up, bool masks joined, and which rows they leave without keys."""

from __future__ import annotations

import dataclasses
import math
import operator

import torch
from torch import fx

from compile_passes.graph.ir import example
from compile_passes.masks.classify import Dead, Keep, Masks
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import LARGEST_SUM, VANISHING, BiasTerm, FillTerm, Leaf
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.operands import aligned, bias, cast, filled, inverted


@dataclasses.dataclass(frozen=True)
class MaskNodes:
    """Nodes: `attn_mask` and the query for the call; `dead` (B or 1, Hq or 1, Sq or 1, 1), rows
    without keys, which get a query of 0 and keys to average.

    With levels, `best` are the keys that a dead row averages, `replaced` those whose scores a fill
    replaced, `total` the sum of all masks, `top` its maximum per row and `base` what was subtracted
    from a row.
    """

    mask: fx.Node | None
    query: fx.Node
    dead: fx.Node | None
    best: fx.Node | None = None
    replaced: fx.Node | None = None
    total: fx.Node | None = None
    top: fx.Node | None = None
    base: fx.Node | None = None


def write(
    site: AttentionSite, masks: Masks, emitter: Emitter, q: fx.Node, dead: fx.Node | None
) -> MaskNodes:
    """The masks as nodes. `dead` are the rows without keys, if a key interval has shown them."""
    if masks.levels:
        return _levels(site, masks, emitter, q)
    keep = added = None
    for one in masks.keeps:
        mask = _keep(site, emitter, one)
        keep = mask if keep is None else emitter.function(operator.and_, keep, mask)
    if masks.dead is not Dead.ZERO and dead is None:
        alive = emitter.method("any", keep, dim=-1, keepdim=True)
        dead = inverted(emitter, alive)
        keep = emitter.function(operator.or_, keep, dead)
    if masks.dead not in (Dead.ZERO, Dead.ADDED):
        q = emitter.method("masked_fill", q, dead, 0.0)
    parts = [bias(site, emitter, term) for term in masks.biases]
    parts += [_added(site, emitter, masks.added)] if masks.added else []
    for one in parts:
        added = one if added is None else emitter.function(operator.add, added, one)
    if added is None:
        return MaskNodes(keep, q, dead)
    added = _accepted(site, emitter, added)
    if dead is not None:
        added = emitter.method("masked_fill", added, dead, 0.0)
    if keep is not None:
        added = emitter.method("masked_fill", added, inverted(emitter, keep), -math.inf)
    return MaskNodes(added, q, dead)


def _levels(site: AttentionSite, masks: Masks, emitter: Emitter, q: fx.Node) -> MaskNodes:
    """All masks as the float that eager mode adds to a score, or replaces it by. A dead row is one
    whose greatest is so far below 0, or above, that real scores vanish beside it; it averages the
    keys that have it. From other rows a greatest that is large is subtracted, because the backward
    pass reads the weights from a float32 log-sum-exp.
    """
    total, replaced = None, None
    for term in masks.levels:
        if isinstance(term, BiasTerm):
            one = bias(site, emitter, term)
            total = one if total is None else emitter.function(operator.add, total, one)
            total = cast(emitter, total, term.dtype)
            continue
        hidden = emitter.arrange(term.mask.value.node, term.mask.dims, site.mask_dims)
        kept = inverted(emitter, hidden) if term.where else hidden
        hidden = hidden if term.where else inverted(emitter, hidden)
        total = filled(emitter, kept, total, term.value, _wide(site))
        if math.isfinite(term.value):
            replaced = (
                hidden if replaced is None else emitter.function(operator.or_, replaced, hidden)
            )
    dtype = example(total).dtype
    info = torch.finfo(dtype)
    top = emitter.method("amax", emitter.method("detach", total), dim=-1, keepdim=True)
    size = emitter.method("abs", top)
    finite = emitter.function(operator.le, size, info.max)
    far = emitter.function(operator.ge, size, VANISHING / info.eps)
    dead = emitter.function(operator.and_, far, finite)
    best = emitter.function(operator.and_, emitter.function(operator.eq, total, top), dead)
    large = emitter.function(operator.gt, size, LARGEST_SUM)
    large = emitter.function(operator.and_, large, finite)
    base = filled(emitter, inverted(emitter, large), None, top, dtype)
    mask = emitter.function(operator.sub, total, base)
    mask = emitter.method("masked_fill", _accepted(site, emitter, mask), dead, -math.inf)
    mask = emitter.method("masked_fill", mask, best, 0.0)
    q = emitter.method("masked_fill", q, dead, 0.0)
    return MaskNodes(mask, q, dead, best, replaced, total, top, base)


def _wide(site: AttentionSite) -> torch.dtype:
    return torch.float64 if site.dtype == torch.float64 else torch.float32


def _accepted(site: AttentionSite, emitter: Emitter, mask: fx.Node) -> fx.Node:
    """In a dtype that the operator takes."""
    known = example(mask).dtype in (site.dtype, torch.float32)
    return mask if known else emitter.method("to", mask, torch.float32)


def _added(site: AttentionSite, emitter: Emitter, fill: FillTerm) -> fx.Node:
    """A fill as a bias."""
    mask = emitter.arrange(fill.mask.value.node, fill.mask.dims, site.mask_dims)
    kept = inverted(emitter, mask) if fill.where else mask
    return filled(emitter, kept, None, fill.value, _wide(site))


def zeroed_keys(
    site: AttentionSite, fill: FillTerm, emitter: Emitter, k: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """(key, attn_mask) for scores that one small number replaces, whatever the query."""
    dims = (site.batch, site.kv_heads, site.keys, ())
    mask = emitter.arrange(fill.mask.value.node, fill.mask.dims, dims)
    if not fill.where:
        mask = inverted(emitter, mask)
    k = emitter.method("masked_fill", k, mask, 0.0)
    full = emitter.arrange(fill.mask.value.node, fill.mask.dims, site.mask_dims)
    added = emitter.method("to", full, torch.float32)
    if not fill.where:
        added = emitter.function(operator.sub, 1.0, added)
    return k, emitter.function(operator.mul, added, fill.value)


def _keep(site: AttentionSite, emitter: Emitter, keep: Keep) -> fx.Node:
    mask = emitter.arrange(keep.leaf.value.node, keep.leaf.dims, site.mask_dims)
    if keep.kept is True:
        return mask
    if keep.kept is False:
        return inverted(emitter, mask)
    return emitter.function(operator.eq, mask, keep.kept)


def sinks_beside(site: AttentionSite, masks: Masks) -> bool:
    """Whether a sink cannot be the operator's: it is one for each query, or rows are shifted."""
    column = site.scores.column
    return bool(masks.levels) or bool(column and not column.axes() <= set(site.heads))


def sink(site: AttentionSite, emitter: Emitter, q: fx.Node, beside: bool) -> fx.Node | float:
    """One logit per query head, or broadcastable to (B, Hq, Sq) where it joins `beside` the call:
    it is one for each query, or the call's own log-sum-exp is not the row's.
    """
    column = site.scores.column or Leaf(0.0)
    if beside:
        return aligned(emitter, column, (site.batch, site.heads, site.queries))
    if isinstance(column.value, float):
        heads = emitter.method("size", q, 1)
        return emitter.method("new_full", q, (heads,), column.value, dtype=torch.float32)
    sinks = emitter.arrange(column.value.node, column.dims, (site.heads,), full=True)
    allowed = (site.dtype, torch.float32)
    return sinks if example(sinks).dtype in allowed else cast(emitter, sinks, torch.float32)
