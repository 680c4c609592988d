"""The nodes that replace an attention: their insertion, sizes of axes, layouts, and operands."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, fx

from compile_passes.ir.axes import (
    Axis,
    Dims,
    Group,
    Size,
    all_axes,
    resolve,
    resolve_dims,
    sizes_equal,
)
from compile_passes.ir.graph import NodeInserter, Value, example, is_tensor
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.states import BiasTerm, Leaf
from compile_passes.report import Refusal

# Insertion of the nodes that replace an attention: sizes of axes, and changes of layout.


class Emitter(NodeInserter):
    """Inserts the nodes that replace the attention at `site`, before its value product. Sizes of
    axes are read from the tensors in `leaves`.
    """

    def __init__(self, graph: fx.Graph, site: AttentionSite, leaves: list[Leaf]) -> None:
        super().__init__(graph, site.core.out.node)
        self.site = site
        self._leaves = [leaf for leaf in leaves if is_tensor(leaf.value)]
        self._sizes: dict[Axis, fx.Node] = {}

    def reduce(self, target: Callable, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """Combine the nodes by calls of a binary function; None if there are no nodes."""
        nodes = iter(nodes)
        first = next(nodes, None)
        return functools.reduce(lambda a, b: self.function(target, a, b), nodes, first)

    def inputs(self) -> set[fx.Node]:
        """The inputs of all inserted nodes."""
        return {node for inserted in self.nodes for node in inserted.all_input_nodes}

    @contextlib.contextmanager
    def before(self, anchor: fx.Node) -> Iterator[None]:
        """Insert before an earlier node, where the leaves need not exist yet."""
        saved = self.anchor, self._sizes, self._leaves
        self.anchor, self._sizes, self._leaves = anchor, {}, []
        try:
            yield
        finally:
            self.anchor, self._sizes, self._leaves = saved

    def size(self, axis: Axis) -> Size | fx.Node:
        """The size of an axis as an argument: a number, or a node that reads it from a tensor."""
        if type(axis.size) is int:
            return axis.size
        if axis not in self._sizes:
            node = self._read_size(axis) or self._quotient(axis)
            if node is None:
                raise Refusal(f"no tensor has the size {axis.size} that a view splits off")
            self._sizes[axis] = node
        return self._sizes[axis]

    def _read_size(self, axis: Axis) -> fx.Node | None:
        for leaf in self._leaves:
            for i, group in enumerate(leaf.dims):
                whole = resolve(group) == resolve((axis,))
                if whole and sizes_equal(leaf.value.shape[i], axis.size):
                    return self.method("size", leaf.value.node, i)
        return None

    def _quotient(self, axis: Axis) -> fx.Node | None:
        """The size of a part, as the size of the split axis divided by that of the other part."""
        parent = axis.parent
        if parent is None:
            return None
        (other,) = (part for part in parent.parts if part is not axis)
        known = other.size if type(other.size) is int else self._read_size(other)
        total = self._read_size(parent) or self._quotient(parent)
        if known is None or total is None:
            return None
        return self.function(operator.floordiv, total, known)

    def arrange(self, node: fx.Node, dims: Dims, target: Dims, full: bool = False) -> fx.Node:
        """The tensor laid out as `target`: one dimension per group.

        A group of which the tensor has some axes is expanded to all of them; one of which it has
        none becomes a dimension of size 1, or is expanded too if `full`.
        """
        dims, target = resolve_dims(dims), resolve_dims(target)
        if set(all_axes(dims)) - set(all_axes(target)):
            raise Refusal("a tensor has a dimension that the attention lacks")
        node, units = self._split(node, dims, target)
        wanted: list[list[Group]] = [_units(group, units, full) for group in target]
        node, units = self._order(node, units, [u for us in wanted for u in us])
        node = self._expand(node, wanted, units)
        for dim, group in enumerate(wanted):
            if len(group) > 1:
                node = self.method("flatten", node, dim, dim + len(group) - 1)
        return node

    def _split(self, node: fx.Node, dims: Dims, target: Dims) -> tuple[fx.Node, list[Group]]:
        """Split merged dimensions that are not a group of the target."""
        units: list[Group] = []
        for group in dims:
            if len(group) < 2 or group in target:
                units.append(group)
                continue
            symbolic = [a for a in group if type(a.size) is not int]
            left_out = symbolic[-1] if symbolic else None
            sizes = [-1 if a is left_out else self.size(a) for a in group]
            node = self.method("unflatten", node, len(units), tuple(sizes))
            units += [(a,) for a in group]
        return node, units

    def _order(
        self, node: fx.Node, units: list[Group], wanted: list[Group]
    ) -> tuple[fx.Node, list[Group]]:
        """Permute to the wanted order, with dimensions of size 1 where the tensor lacks a unit."""
        have = set(units)
        spare = [i for i, u in enumerate(units) if not u]
        positions = [units.index(u) if u and u in have else None for u in wanted]
        holes = [i for i, p in enumerate(positions) if p is None]
        for i in holes[: len(spare)]:
            positions[i] = spare.pop(0)
        for dim in reversed(spare):
            node = self.method("squeeze", node, dim)
            positions = [p - 1 if p is not None and p > dim else p for p in positions]
        order = [p for p in positions if p is not None]
        if order != sorted(order):
            moved = [i for i, p in enumerate(order) if i != p]
            name, dims = ("transpose", moved) if len(moved) == 2 else ("permute", order)
            node = self.method(name, node, *dims)
        for i, position in enumerate(positions):
            if position is None:
                node = self.method("unsqueeze", node, i)
        return node, [u if u in have else () for u in wanted]

    def _expand(self, node: fx.Node, wanted: list[list[Group]], units: list[Group]) -> fx.Node:
        """Expand the dimensions of units that the tensor lacks."""
        want = [unit for group in wanted for unit in group]
        sizes = [-1 if w == u else self.size(w[0]) for w, u in zip(want, units, strict=True)]
        if all(type(s) is int and s == -1 for s in sizes):
            return node
        return self.method("expand", node, *sizes)


def _units(group: Group, units: list[Group], full: bool) -> list[Group]:
    """The dimensions of a target group: one of size 1, one merged, or one for each axis."""
    have = {a for u in units for a in u}
    if not group or not (full or have & set(group)):
        return [()]
    return [group] if group in units else [(a,) for a in group]


def has_contiguous_rows(node: fx.Node) -> bool:
    """Whether the last dimension is contiguous, as the operator requires."""
    tensor: Tensor = example(node)
    return sizes_equal(tensor.stride(-1), 1) or sizes_equal(tensor.shape[-1], 1)


# Emission of the operands of an attention: tensors laid out for the call.


def operand(emitter: Emitter, leaf: Leaf, dims: Dims, dtype: torch.dtype) -> fx.Node:
    """Query, key or value, laid out as `dims`."""
    node = emitter.arrange(leaf.value.node, leaf.dims, dims, full=True)
    return cast(emitter, node, dtype)


def cast(emitter: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The tensor in another dtype."""
    return node if example(node).dtype == dtype else emitter.method("to", node, dtype)


def contiguous_rows(emitter: Emitter, node: fx.Node) -> fx.Node:
    """The tensor, copied unless its last dimension is contiguous."""
    return node if has_contiguous_rows(node) else emitter.method("contiguous", node)


def aligned(emitter: Emitter, leaf: Leaf, dims: Dims) -> fx.Node | float:
    """A leaf as a number or a tensor that broadcasts against `dims`."""
    if not isinstance(leaf.value, Value):
        return leaf.value
    node = leaf.value.node
    if not is_tensor(leaf.value):
        return node
    if not leaf.axes():
        return emitter.method("reshape", node, ()) if leaf.dims else node
    return emitter.arrange(node, leaf.dims, dims)


def bias(emitter: Emitter, term: BiasTerm) -> fx.Node:
    """A bias times its coefficient, floating point, (B or 1, Hq or 1, Sq or 1, Sk or 1)."""
    if not is_tensor(term.leaf.value):
        raise Refusal("a symbolic number is added to the scores")
    node = emitter.arrange(term.leaf.value.node, term.leaf.dims, emitter.site.mask_dims)
    if not example(node).dtype.is_floating_point:
        node = emitter.method("to", node, torch.float32)
    if term.coefficient != 1.0:
        node = emitter.function(operator.mul, node, term.coefficient)
    return node


def bool_mask(emitter: Emitter, leaf: Leaf, dims: Dims) -> fx.Node:
    """A mask of bools, or of 0 and 1, as bools that broadcast against `dims`."""
    return cast(emitter, emitter.arrange(leaf.value.node, leaf.dims, dims), torch.bool)


def fill_where(
    emitter: Emitter, kept: fx.Node, before: fx.Node | None, fill: float, dtype: torch.dtype
) -> fx.Node:
    """`before` where kept, or zeros of the dtype if it is None, and `fill` elsewhere."""
    if before is None:
        before = emitter.function(torch.zeros, (), dtype=dtype, device=example(kept).device)
    return emitter.function(torch.where, kept, before, fill)


def inverted(emitter: Emitter, mask: fx.Node) -> fx.Node:
    """not mask"""
    return emitter.function(torch.logical_not, mask)


def only_backward(emitter: Emitter, x: fx.Node) -> fx.Node:
    """0 with the gradient of x."""
    return emitter.function(operator.sub, x, emitter.method("detach", x))
