"""Writing nodes into a graph, with the metadata that later passes read."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from compile_passes.graph.axes import Axis, Dims, Group, Size, flat, resolve, resolve_dims, same
from compile_passes.graph.ir import PLACE, example, meta_key
from compile_passes.match.match_state import Leaf
from compile_passes.report import Refused


class Emitter:
    """Inserts before `anchor`. `leaves` are tensors whose dimensions tell the size of an axis."""

    def __init__(self, graph: fx.Graph, anchor: fx.Node, leaves: list[Leaf]) -> None:
        self.graph, self.anchor = graph, anchor
        self.made: list[fx.Node] = []
        self._key = meta_key(graph)
        self._leaves = leaves
        self._sizes: dict[Axis, fx.Node] = {}

    def method(self, name: str, *args, **kwargs) -> fx.Node:
        return self._make("call_method", name, args, kwargs)

    def function(self, target: Callable, *args, **kwargs) -> fx.Node:
        return self._make("call_function", target, args, kwargs)

    def _make(self, kind: str, target, args: tuple, kwargs: dict) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.create_node(kind, target, args, kwargs)
        self.made.append(node)
        for key in PLACE:
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        node.meta[self._key] = self._evaluate(kind, target, args, kwargs)
        return node

    def _evaluate(self, kind: str, target, args: tuple, kwargs: dict) -> object:
        args, kwargs = map_arg((args, kwargs), example)
        mode = getattr(example(self.anchor), "fake_mode", None)
        with mode or contextlib.nullcontext(), torch.no_grad():
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    @contextlib.contextmanager
    def before(self, anchor: fx.Node) -> Iterator[None]:
        """Insert earlier for a while, where the leaves may not exist yet to read sizes off them."""
        later = self.anchor, self._sizes, self._leaves
        self.anchor, self._sizes, self._leaves = anchor, {}, []
        try:
            yield
        finally:
            self.anchor, self._sizes, self._leaves = later

    def undo(self) -> None:
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made.clear()

    def size(self, axis: Axis) -> Size | fx.Node:
        """The axis' size as an argument: a number, or a node that reads it off a tensor."""
        if type(axis.size) is int:
            return axis.size
        if axis not in self._sizes:
            node = self._shown(axis) or self._quotient(axis)
            if node is None:
                raise Refused(f"no tensor shows the size {axis.size} that a view splits off")
            self._sizes[axis] = node
        return self._sizes[axis]

    def _shown(self, axis: Axis) -> fx.Node | None:
        for leaf in self._leaves:
            for i, group in enumerate(leaf.dims):
                if resolve(group) == resolve((axis,)) and same(leaf.value.shape[i], axis.size):
                    return self.method("size", leaf.value.node, i)
        return None

    def _quotient(self, axis: Axis) -> fx.Node | None:
        """A part's size, from those of the axis it was split off and of the other part."""
        whole = axis.whole
        if whole is None:
            return None
        (other,) = (part for part in whole.parts if part is not axis)
        known = other.size if type(other.size) is int else self._shown(other)
        total = self._shown(whole) or self._quotient(whole)
        if known is None or total is None:
            return None
        return self.function(operator.floordiv, total, known)

    def arrange(self, node: fx.Node, dims: Dims, target: Dims, full: bool = False) -> fx.Node:
        """The tensor laid out as `target`: one dimension per group.

        A group of which the tensor has a part is expanded to all of it; one of which it has nothing
        becomes a dimension of size 1, or is expanded too if `full`.
        """
        dims, target = resolve_dims(dims), resolve_dims(target)
        if set(flat(dims)) - set(flat(target)):
            raise Refused("a tensor has a dimension that the attention lacks")
        node, units = self._split(node, dims, target)
        wanted: list[list[Group]] = [_units(group, units, full) for group in target]
        node, units = self._order(node, units, [u for us in wanted for u in us])
        node = self._expand(node, wanted, units)
        for dim, group in enumerate(wanted):
            if len(group) > 1:
                node = self.method("flatten", node, dim, dim + len(group) - 1)
        return node

    def _split(self, node: fx.Node, dims: Dims, target: Dims) -> tuple[fx.Node, list[Group]]:
        """Split merged dimensions that are not one group of the target."""
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
        """Permute to the wanted order; dimensions of size 1 serve where a unit is missing."""
        have = set(units)
        spare = [i for i, u in enumerate(units) if not u]
        places = [units.index(u) if u and u in have else None for u in wanted]
        holes = [i for i, p in enumerate(places) if p is None]
        for i in holes[: len(spare)]:
            places[i] = spare.pop(0)
        for dim in reversed(spare):
            node = self.method("squeeze", node, dim)
            places = [p - 1 if p is not None and p > dim else p for p in places]
        order = [p for p in places if p is not None]
        if order != sorted(order):
            node = self._permute(node, order)
        for i, place in enumerate(places):
            if place is None:
                node = self.method("unsqueeze", node, i)
        return node, [u if u in have else () for u in wanted]

    def _permute(self, node: fx.Node, order: list[int]) -> fx.Node:
        moved = [i for i, p in enumerate(order) if i != p]
        if len(moved) == 2:
            return self.method("transpose", node, *moved)
        return self.method("permute", node, *order)

    def _expand(self, node: fx.Node, wanted: list[list[Group]], units: list[Group]) -> fx.Node:
        """Give every wanted unit that the tensor lacks its size."""
        want = [unit for group in wanted for unit in group]
        sizes = [-1 if w == u else self.size(w[0]) for w, u in zip(want, units, strict=True)]
        if all(type(s) is int and s == -1 for s in sizes):
            return node
        return self.method("expand", node, *sizes)


def _units(group: Group, units: list[Group], full: bool) -> list[Group]:
    """How the target group is put together: nothing of it, it whole, or axis by axis."""
    have = {a for u in units for a in u}
    if not group or not (full or have & set(group)):
        return [()]
    return [group] if group in units else [(a,) for a in group]


def rows_are_contiguous(node: fx.Node) -> bool:
    """Whether a row's elements stand side by side, which the operator asks for."""
    tensor: Tensor = example(node)
    return same(tensor.stride(-1), 1) or same(tensor.shape[-1], 1)
