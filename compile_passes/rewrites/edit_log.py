"""The edits of a graph before matching: all are recorded, and undone if they led to no fusion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.fx.node import map_arg

from compile_passes.ir.graph import NodeInserter, example
from compile_passes.ir.vocabulary import MAYBE_VIEWS, operation
from compile_passes.report import Refusal, internal_error
from compile_passes.report import log as logger


class ErasedNode(NamedTuple):
    """A node that was erased, with its arguments and the node that followed it."""

    node: fx.Node
    args: tuple
    kwargs: dict
    following: fx.Node


class ChangedNode(NamedTuple):
    """What a node computed before it was changed in place."""

    node: fx.Node
    op: str
    target: Callable | str
    args: tuple
    kwargs: dict


class ChangedReaders(NamedTuple):
    """The readers of a node that read another node now."""

    old: fx.Node
    new: fx.Node
    readers: tuple[fx.Node, ...]


class Edit(NodeInserter):
    """One rewrite of a graph: the `nodes` that it inserted, and its other `steps` in order.

    With `tidies` it only removes what hides attention, and stays if anything in the graph was
    fused. With `writes` it replaced a write to memory.
    """

    def __init__(self, graph: fx.Graph, anchor: fx.Node, tidies: bool, writes: bool) -> None:
        super().__init__(graph, anchor)
        self.tidies, self.writes = tidies, writes
        self.steps: list[ErasedNode | ChangedNode | ChangedReaders] = []
        self.superseded: list[fx.Node] = []

    def erase(self, node: fx.Node) -> None:
        """Erase a node without readers."""
        if node in self.nodes:
            self.nodes.remove(node)
        else:
            self.steps.append(ErasedNode(node, node.args, node.kwargs, node.next))
        self.graph.erase_node(node)

    def change(self, node: fx.Node, op: str, target: Callable | str, args, kwargs) -> None:
        """Let a node compute something else."""
        self.steps.append(ChangedNode(node, node.op, node.target, node.args, node.kwargs))
        node.op, node.target, node.args, node.kwargs = op, target, args, kwargs

    def redirect(
        self, old: fx.Node, new: fx.Node, readers: Iterable[fx.Node] | None = None
    ) -> None:
        """Let the readers of `old`, or some of them, read `new`."""
        readers = tuple(old.users if readers is None else readers)
        self.steps.append(ChangedReaders(old, new, readers))
        for reader in readers:
            reader.replace_input_with(old, new)

    def replace(self, out: fx.Node, nodes: Iterable[fx.Node]) -> Edit:
        """Replace the last of `nodes`, which are given in graph order, by `out` and erase them."""
        nodes = list(nodes)
        out.meta.update(nodes[-1].meta)
        self.redirect(nodes[-1], out)
        for node in reversed(nodes):
            self.erase(node)
        return self

    def supersede(self, call: fx.Node, out: fx.Node) -> None:
        """Let the readers of a call, or of its first result, read `out`. The call stays in the
        graph until it is known whether the edit stays.
        """
        parts = [] if isinstance(example(call), Tensor) else list(call.users)
        self.superseded += [call, *parts]
        for result in [part for part in parts if part.args[1] == 0] if parts else [call]:
            out.meta.update(result.meta)  # the example has the strides of the result
            self.redirect(result, out)


class AttentionCall(NamedTuple):
    """A call of torch that is one attention, written out: `operation` is its name, `nodes` are its
    operations and `softmax` is one of them.
    """

    call: fx.Node
    operation: str
    nodes: list[fx.Node]
    softmax: fx.Node
    has_mask: bool


class EditLog:
    """All edits of a graph before it is matched.

    Attributes:
        graph: the graph.
        edits: the edits in order.
        calls: the calls of one attention that are written out now, by their softmax.
        left: the calls that stay, with the reason and the name of the operation.
        order: the positions of the nodes once all rewrites have run.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.edits: list[Edit] = []
        self.calls: dict[fx.Node, AttentionCall] = {}
        self.left: dict[fx.Node, tuple[str, str]] = {}
        self.order: dict[fx.Node, int] = {}
        self._present: set[fx.Node] = set()
        self._restored: dict[fx.Node, fx.Node] = {}  # nodes by those that were erased

    def edit(self, anchor: fx.Node, tidies: bool = False, writes: bool = False) -> Edit:
        """A new edit, which inserts before `anchor`."""
        self.edits.append(Edit(self.graph, anchor, tidies, writes))
        return self.edits[-1]

    def attempt(self, rewrite: Callable, *nodes: fx.Node) -> Edit | None:
        """The result of `rewrite(log, *nodes)`. None, with the graph as before, where it fails."""
        before = len(self.edits)
        try:
            return rewrite(self, *nodes)
        except Exception:  # a bug of the pass must not break the user's compilation
            logger.warning("%s failed on %s", rewrite.__name__, nodes or "a graph", exc_info=True)
            counters["fa_ops"]["internal error"] += 1
            self._abandon(before)
            return None

    def write_out(self, call: fx.Node, rewrite: Callable, name: str) -> None:
        """Write a call of attention out by `rewrite(log, call)`. A call that is refused stays, with
        the reason; `name` is that of the operation in reports.
        """
        before = len(self.edits)
        try:
            rewrite(self, call)
        except Refusal as refusal:
            self.left[call] = str(refusal), name
        except Exception as error:  # a bug of the pass must not break the user's compilation
            logger.warning("could not read %s", call, exc_info=True)
            self.left[call] = internal_error(error), name
        if call in self.left:
            self._abandon(before)

    def close(self) -> None:
        """No further edits: what is inserted now replaces attention."""
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}

    def finish(self, fused: bool) -> None:
        """Undo the edits that led to no fusion, the last first. `fused`: whether anything was.

        An edit stays if fusion has erased one of its nodes, or what the erased nodes would read.
        """
        self._present = {*self.graph.nodes}
        for edit in reversed(self.edits):
            if (edit.tidies and fused) or not self._can_undo(edit):
                for node in reversed(edit.superseded):
                    self._erase(node)
            else:
                self._undo(edit)

    def _abandon(self, index: int) -> None:
        """Undo the edits from an index on, while rewriting."""
        self._present = {*self.graph.nodes}
        for edit in reversed(self.edits[index:]):
            for node in edit.nodes:
                self.calls.pop(node, None)
            self._undo(edit)
        del self.edits[index:]

    def _can_undo(self, edit: Edit) -> bool:
        erased = {step.node for step in edit.steps if isinstance(step, ErasedNode)}
        needed: set[fx.Node] = {*edit.nodes, *edit.superseded}
        for step in edit.steps:
            if isinstance(step, ChangedReaders):
                needed.add(step.old)
                continue
            map_arg((step.args, step.kwargs), needed.add)
            if isinstance(step, ChangedNode):
                needed.add(step.node)
        present = all(self._now(node) in self._present for node in needed - erased)
        return present and not (edit.writes and self._feeds_fused(edit))

    def _feeds_fused(self, edit: Edit) -> bool:
        """Whether what replaced an attention reads the memory that the edit is about, which holds
        something else where it runs once writes are restored.
        """
        known = {*self.order, *self._restored.values()}
        names = [step.old for step in edit.steps if isinstance(step, ChangedReaders)]
        pending = [self._now(node) for node in (*names, *edit.nodes)]
        for node in pending:
            for reader in node.users:
                if reader not in known:
                    return True
                if operation(reader)[0] in MAYBE_VIEWS and reader not in pending:
                    pending.append(reader)
        return False

    def _undo(self, edit: Edit) -> None:
        for step in reversed(edit.steps):
            if isinstance(step, ErasedNode):
                self._restore(step)
            elif isinstance(step, ChangedNode):
                node = self._now(step.node)
                node.op, node.target = step.op, step.target
                node.args, node.kwargs = map_arg((step.args, step.kwargs), self._now)
            else:
                old, new = self._now(step.old), self._now(step.new)
                for reader in map(self._now, step.readers):
                    if reader in self._present:
                        reader.replace_input_with(new, old)
        inserted = {self._now(node) for node in edit.nodes}
        for step in edit.steps:
            if isinstance(step, ChangedReaders) and self._now(step.new) in inserted:
                old, new = self._now(step.old), self._now(step.new)
                new.replace_all_uses_with(old, lambda reader: reader not in inserted)
        for node in reversed(edit.nodes):
            self._erase(self._now(node))
        edit.nodes.clear()
        edit.steps.clear()
        edit.superseded.clear()

    def _now(self, node: fx.Node) -> fx.Node:
        """The node itself, or the one that restored it."""
        return self._restored.get(node, node)

    def _restore(self, step: ErasedNode) -> None:
        """Make an erased node again, with its name and in its place."""
        following = self._now(step.following)
        while following not in self._present:
            following = self._now(following.next)  # where the erased node was
        args, kwargs = map_arg((step.args, step.kwargs), self._now)
        node = step.node
        with self.graph.inserting_before(following):
            made = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        made.name, made.meta = node.name, node.meta
        self._restored[node] = made
        self._present.add(made)

    def _erase(self, node: fx.Node) -> None:
        self.graph.erase_node(node)
        self._present.discard(node)
