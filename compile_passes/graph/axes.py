"""Axes: the independent indices that the dimensions of tensors consist of, so that dimensions are
proved and never guessed from sizes.

A tensor's `Dims` holds one tuple of axes per dimension: () for a dimension of size 1, several axes
where dimensions were merged. Merging and splitting by views is followed exactly; a split refines
the axis everywhere, also in tensors that were labelled earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import SymInt
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_passes.graph import exact_sizes

Size = int | SymInt


class Axis:
    """One independent index. `parts` is set once a view has split it, `parent` on each part."""

    __slots__ = ("name", "size", "parts", "parent")

    def __init__(self, size: Size, name: str = "", parent: Axis | None = None) -> None:
        fixed = isinstance(size, SymInt) and size.node.expr.is_number
        self.size: Size = int(size.node.expr) if fixed else size
        self.name = name
        self.parts: tuple[Axis, ...] | None = None
        self.parent = parent

    def __repr__(self) -> str:
        return f"{self.name or 'axis'}:{self.size}"


Group = tuple[Axis, ...]
Dims = tuple[Group, ...]


def sizes_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all inputs, without adding a guard."""
    if type(a) is int and type(b) is int:
        return a == b
    return statically_known_true(a == b) or exact_sizes.are_equal(a, b)


def is_one(n: Size) -> bool:
    """Whether a size is 1 for all inputs."""
    return sizes_equal(n, 1)


def divides(a: Size, b: Size) -> bool:
    """Whether b is a multiple of a for all inputs."""
    if type(a) is int and type(b) is int:
        return a != 0 and b % a == 0
    return statically_known_true(b % a == 0) or exact_sizes.divides(a, b)


def resolve(group: Iterable[Axis]) -> Group:
    """The group with each split axis replaced by its parts."""
    return tuple(part for a in group for part in (resolve(a.parts) if a.parts else (a,)))


def resolve_dims(dims: Sequence[Group]) -> Dims:
    """`resolve` for each dimension."""
    return tuple(resolve(group) for group in dims)


def all_axes(dims: Sequence[Group]) -> Group:
    """The axes of all dimensions, in order."""
    return resolve(a for group in dims for a in group)


def broadcast_dims(shape: Sequence[Size], dims: Dims) -> Dims:
    """Dims of a tensor of this shape that broadcasts against `dims` without enlarging it."""
    trailing = dims[len(dims) - len(shape) :]
    return tuple(() if is_one(n) else group for n, group in zip(shape, trailing, strict=True))


def regroup(dims: Dims, shape: Sequence[Size]) -> Dims | None:
    """Dims after a view to `shape`; None where its dimensions do not consist of whole axes."""
    pending = list(all_axes(dims))
    splits: list[tuple[Axis, Group]] = []
    result = []
    for n in shape:
        group = None if is_one(n) else _take_axes(pending, n, splits)
        if group is None and not is_one(n):
            return None
        result.append(group or ())
    if pending:
        return None
    for axis, parts in splits:
        axis.parts = parts
    return resolve_dims(result)


def _take_axes(pending: list[Axis], n: Size, splits: list) -> Group | None:
    """Remove axes of total size n from the front of `pending`; the last is split if necessary."""
    group: list[Axis] = []
    total: Size = 1
    while not sizes_equal(total, n):
        if not pending:
            return None
        axis = pending.pop(0)
        if divides(total * axis.size, n):
            group.append(axis)
            total = total * axis.size
            continue
        if not divides(total, n):
            return None
        front = n // total
        rest = axis.size // front if divides(front, axis.size) else None
        if rest is None or not sizes_equal(front * rest, axis.size):
            return None
        parts = (Axis(front, axis.name, axis), Axis(rest, axis.name, axis))
        splits.append((axis, parts))
        pending.insert(0, parts[1])
        group.append(parts[0])
        total = n
    return tuple(group)
