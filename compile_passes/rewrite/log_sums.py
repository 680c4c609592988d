"""The log-sum-exp of the scores, where the model reads it beside the attention, and a sink that is
one number for each query: both take the operator's own log-sum-exp.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from compile_passes.graph.axes import Dims
from compile_passes.graph.ir import View, example, is_drawn
from compile_passes.graph.vocabulary import raw_name
from compile_passes.masks.classify import Dead, Masks
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import BiasTerm, FloorTerm
from compile_passes.report import Refused
from compile_passes.rewrite import operands
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.mask_nodes import MaskNodes


def check(site: AttentionSite, masks: Masks) -> None:
    """Raises Refused where the operator's log-sum-exp is not the model's."""
    terms = site.scores.terms
    shifted = any(isinstance(t, BiasTerm) and isinstance(t.leaf.value, float) for t in terms)
    shifted |= any(isinstance(t, FloorTerm) for t in terms)
    if shifted or site.sunk or masks.added or masks.zeroed or masks.dead is Dead.ADDED:
        raise Refused("the scores are also read by logsumexp, which is not the operator's")


def of_rows(
    site: AttentionSite, emitter: Emitter, masks: Masks, written: MaskNodes, lse: fx.Node
) -> fx.Node:
    """As eager mode has it. A row without keys has its fill, beside which the number of its keys
    vanishes; to another row comes back what its masks were reduced by.
    """
    if masks.dead is Dead.ZERO:
        return lse
    if site.sums and written.replaced is not None:
        raise Refused("the scores are also read by logsumexp, and several masks fill them")
    dead = emitter.method("squeeze", written.dead, -1)
    if written.top is None:
        return emitter.method("masked_fill", lse, dead, masks.fill)
    top, base = (emitter.method("squeeze", x, -1) for x in (written.top, written.base))
    lse = emitter.function(operator.add, lse, operands.cast(emitter, base, example(lse).dtype))
    return emitter.function(torch.where, dead, operands.cast(emitter, top, example(lse).dtype), lse)


def write(site: AttentionSite, emitter: Emitter, lse: fx.Node) -> dict[fx.Node, fx.Node]:
    """By each node that the model computes, the one that replaces it."""
    dims: Dims = (site.batch, site.heads, site.queries)
    made = {}
    for row in site.sums:
        value = row.path[-1]
        made[value.node] = emitter.arrange(operands.cast(emitter, lse, value.dtype), dims, row.dims)
    return made


def scale_by_sink(
    emitter: Emitter, result: fx.Node, lse: fx.Node, sink: fx.Node, dtype: torch.dtype
) -> fx.Node:
    """A logit more in the denominator: its share of the weights is that of a sigmoid."""
    left = emitter.method("sigmoid", emitter.function(operator.sub, lse, sink))
    left = emitter.method("unsqueeze", left, -1)
    return operands.cast(emitter, emitter.function(operator.mul, result, left), dtype)


def readers(
    site: AttentionSite, view: View, emitter: Emitter, doomed: set[fx.Node]
) -> list[fx.Node]:
    """What is computed from the log-sum-exps before the value product, and so has to move behind
    it.
    """
    out = site.core.out
    late = {row.path[-1].node for row in site.sums}
    if not late:
        return []
    first = min((view.values[node] for node in late), key=lambda value: value.index)
    found: list[fx.Node] = []
    for node, value in view.values.items():
        inside = first.index < value.index < out.index and node not in doomed
        if not inside or late.isdisjoint(node.all_input_nodes):
            continue
        if value.writes or is_drawn(value) or node.op not in ("call_function", "call_method"):
            raise Refused(f"{raw_name(node)} reads their log-sum-exp before the value product")
        found.append(node)
        late.add(node)
    used = {n for made in emitter.made for n in made.all_input_nodes}
    if late & used:
        raise Refused("the attention is made of their log-sum-exp")
    if found and view.writes_between(first, out):
        raise Refused("a tensor is written to between their log-sum-exp and the value product")
    return found


def move(nodes: list[fx.Node], behind: fx.Node) -> None:
    for node in nodes:
        behind.append(node)
        behind = node
