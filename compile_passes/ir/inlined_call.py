"""Calls that are one node of a graph and several operations of attention: the operations are
inserted before the call. If the pass fuses them they replace the call; otherwise they are erased.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from compile_passes.ir.axes import sizes_equal
from compile_passes.ir.edits import NodeInserter
from compile_passes.ir.graph import example
from compile_passes.report import Refused, internal_error, log


@dataclasses.dataclass
class InlinedCall:
    """A call and its operations. `out` computes the call's result. If `result` is given, the call
    or the part of it that is read, its readers are those of `out` until the end of the pass.
    """

    call: fx.Node
    nodes: list[fx.Node] = dataclasses.field(default_factory=list)
    out: fx.Node | None = None
    result: fx.Node | None = None

    def is_fused(self, fused: set[fx.Node]) -> bool:
        """Whether any of its softmaxes is among the fused ones."""
        return not fused.isdisjoint(self.nodes)

    def commit(self) -> None:
        """Replace the call by its operations."""
        for part in list(self.call.users):
            part.replace_all_uses_with(self.out)
            part.graph.erase_node(part)
        self.call.graph.erase_node(self.call)

    def undo(self, copies: dict[fx.Node, fx.Node]) -> None:
        """Erase the operations; the call is left unchanged. `copies`: nodes by those that were
        erased earlier in the pass and now are restored.
        """
        if self.result is not None:
            self.out.replace_all_uses_with(self.result)
        for node in reversed(self.nodes):
            node.graph.erase_node(node)
        self.nodes.clear()


@dataclasses.dataclass
class InlinedAttention(InlinedCall):
    """A call of one attention, `operation`, with what decides whether replacing it pays."""

    softmax: fx.Node | None = None
    operation: str = ""
    has_mask: bool = False


Inlined = dict[fx.Node, InlinedAttention | str]  # of each call, or the reason why it stays


def attempt(inline: Callable[[fx.Node], InlinedAttention], call: fx.Node) -> InlinedAttention | str:
    """The inlined call, or the reason why it is left as it is."""
    try:
        return inline(call)
    except Refused as refusal:
        return str(refusal)
    except Exception as error:  # a bug of the pass must not break the user's compilation
        log.warning("could not read %s", call, exc_info=True)
        return internal_error(error)


def repeated_heads(inserter: NodeInserter, q: fx.Node, x: fx.Node) -> fx.Node:
    """Keys or values with as many heads as the query."""
    heads, kv_heads = example(q).shape[-3], example(x).shape[-3]
    if sizes_equal(heads, kv_heads):
        return x
    if type(heads) is int and type(kv_heads) is int:
        return inserter.method("repeat_interleave", x, heads // kv_heads, -3)
    sizes = (inserter.method("size", y, -3) for y in (q, x))
    repeats = inserter.function(operator.floordiv, *sizes)
    return inserter.method("repeat_interleave", x, repeats, -3)


def check_inputs(nodes: Iterable[fx.Node]) -> None:
    """Raises Refused where an input of a call is not a plain tensor."""
    for node in nodes:
        x = example(node)
        if x is None or (isinstance(x, Tensor) and not isinstance(x, FakeTensor)):
            raise Refused(f"{node.name} is not a plain tensor: {type(x).__name__}")
