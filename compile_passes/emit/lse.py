"""Emission of the log-sum-exp, where the model reads it beside the attention or a sink differs
between queries: both use the operator's own.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from compile_passes.emit.emitter import Emitter, cast
from compile_passes.emit.masks import MaskNodes
from compile_passes.ir.graph import GraphView, example, is_random
from compile_passes.ir.vocabulary import raw_name
from compile_passes.masks.classified_masks import ClassifiedMasks, EmptyRows
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import BiasTerm, ClampTerm
from compile_passes.report import Refused


def check_lse(site: AttentionSite, masks: ClassifiedMasks) -> None:
    """Raises Refused where the operator's log-sum-exp is not the model's."""
    terms = site.scores.terms
    shifted = any(isinstance(t, BiasTerm) and isinstance(t.leaf.value, float) for t in terms)
    shifted |= any(isinstance(t, ClampTerm) for t in terms)
    shifted |= bool(masks.added_fill or masks.zeroed_keys)
    if shifted or site.has_sink or masks.empty_rows is EmptyRows.ADDED:
        raise Refused("the scores are also read by logsumexp, which is not the operator's")


def eager_lse(
    emitter: Emitter, masks: ClassifiedMasks, emitted: MaskNodes, lse: fx.Node
) -> fx.Node:
    """The log-sum-exp of eager mode. That of an empty row is its fill, which absorbs the logarithm
    of the number of keys; to other rows what their masks were reduced by is added.
    """
    if masks.empty_rows is EmptyRows.ZERO:
        return lse
    if emitter.site.lses and emitted.filled is not None:
        raise Refused("the scores are also read by logsumexp, and several masks fill them")
    empty = emitter.method("squeeze", emitted.empty_rows, -1)
    if emitted.row_max is None:
        return emitter.method("masked_fill", lse, empty, masks.fill)
    row_max, shift = (emitter.method("squeeze", x, -1) for x in (emitted.row_max, emitted.shift))
    lse = emitter.function(operator.add, lse, cast(emitter, shift, example(lse).dtype))
    return emitter.function(torch.where, empty, cast(emitter, row_max, example(lse).dtype), lse)


def replaced_lses(emitter: Emitter, lse: fx.Node) -> dict[fx.Node, fx.Node]:
    """The replacement of each log-sum-exp that the model computes."""
    found = {}
    for row in emitter.site.lses:
        value = row.path[-1]
        node = cast(emitter, lse, value.dtype)
        found[value.node] = emitter.arrange(node, emitter.site.row_dims, row.dims)
    return found


def scale_by_sink(emitter: Emitter, result: fx.Node, lse: fx.Node, sink: fx.Node) -> fx.Node:
    """The result with the sink in its denominator: sigmoid(lse - sink) times the result."""
    share = emitter.method("sigmoid", emitter.function(operator.sub, lse, sink))
    share = emitter.method("unsqueeze", share, -1)
    return cast(emitter, emitter.function(operator.mul, result, share), emitter.site.dtype)


def lse_readers(emitter: Emitter, view: GraphView, erased: set[fx.Node]) -> list[fx.Node]:
    """The nodes that depend on a log-sum-exp and have to move behind the value product."""
    out = emitter.site.core.out
    late = {row.path[-1].node for row in emitter.site.lses}
    if not late:
        return []
    first = min((view.values[node] for node in late), key=lambda value: value.index)
    found: list[fx.Node] = []
    for node, value in view.values.items():
        between = first.index < value.index < out.index and node not in erased
        if not between or late.isdisjoint(node.all_input_nodes):
            continue
        if value.writes or is_random(value) or node.op not in ("call_function", "call_method"):
            raise Refused(f"{raw_name(node)} reads their log-sum-exp before the value product")
        found.append(node)
        late.add(node)
    if late & emitter.inputs():
        raise Refused("an input of the attention depends on their log-sum-exp")
    if found and view.writes_between(first, out):
        raise Refused("a tensor is written to between their log-sum-exp and the value product")
    return found
