"""Nodes that are written in another form before attention is matched, and restored if the pass
fuses none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from torch import fx
from torch._dynamo.utils import counters
from torch.fx.node import map_arg

from compile_passes.ir.edits import NodeInserter
from compile_passes.ir.inlined_call import InlinedCall
from compile_passes.report import log


@dataclasses.dataclass
class RewrittenNodes(InlinedCall):
    """`removed` are the erased nodes with their arguments, in order; the last computed `call`,
    whose readers now read `out`. The new form stays if one of the `softmaxes` was fused.
    """

    removed: list[tuple[fx.Node, tuple, dict]] = dataclasses.field(default_factory=list)
    softmaxes: frozenset[fx.Node] = frozenset()

    def is_fused(self, fused: set[fx.Node]) -> bool:
        """Whether any of the softmaxes was fused."""
        return not fused.isdisjoint(self.softmaxes)

    def commit(self) -> None:
        """Keep the new form."""

    def undo(self, copies: dict[fx.Node, fx.Node]) -> None:
        """Restore the nodes, unless the pass has replaced an input of theirs."""
        out = copies.get(self.out, self.out)
        graph = out.graph
        left = {*graph.nodes, *(node for node, _, _ in self.removed)}
        inputs: list[fx.Node] = []
        map_arg([given[1:] for given in self.removed], inputs.append)
        if not left.issuperset(copies.get(n, n) for n in inputs):
            return
        with graph.inserting_before(out):
            for node, args, kwargs in self.removed:
                args, kwargs = map_arg((args, kwargs), lambda n: copies.get(n, n))
                copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
                copies[node].meta = node.meta
        out.replace_all_uses_with(copies.get(self.call, self.call))
        for node in reversed(self.nodes):
            graph.erase_node(copies.get(node, node))
        self.nodes.clear()


class RewrittenWrite(RewrittenNodes):
    """A write to the result of `call`, which later readers now find in `out`. The new form stays if
    an attention that reads it was fused.
    """

    def is_fused(self, fused: set[fx.Node]) -> bool:
        """Whether `out` is no longer computed."""
        return self.out not in set(self.out.graph.nodes)


def attempt(rewrite: Callable, x: object) -> RewrittenNodes | None:
    """The result of rewriting x, or None."""
    try:
        return rewrite(x)
    except Exception:  # a bug of the pass must not break the user's compilation
        log.warning("could not rewrite %s", x, exc_info=True)
        counters["fa_ops"]["internal error"] += 1
        return None


def replace(
    out: fx.Node, inserter: NodeInserter, nodes: Iterable[fx.Node], softmaxes: Iterable[fx.Node]
) -> RewrittenNodes:
    """Replace the last of `nodes`, which are given in graph order, by `out` and erase them."""
    removed = [(node, node.args, node.kwargs) for node in nodes]
    call = removed[-1][0]
    out.meta.update(call.meta)
    call.replace_all_uses_with(out)
    for node, _, _ in reversed(removed):
        node.graph.erase_node(node)
    made = frozenset(softmaxes)
    return RewrittenNodes(call, inserter.nodes, out, removed=removed, softmaxes=made)
