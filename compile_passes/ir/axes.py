"""Axes: the independent indices that the dimensions of tensors consist of, so that dimensions are
proved and never guessed from sizes.

A tensor's `Dims` holds one tuple of axes per dimension: () for a dimension of size 1, several axes
where dimensions were merged. Merging and splitting by views is followed exactly; a split refines
the axis everywhere, also in tensors that were labelled earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._sympy.functions import FloorDiv, Mod

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
    return statically_known_true(a == b) or are_equal(a, b)


def is_one(n: Size) -> bool:
    """Whether a size is 1 for all inputs."""
    return sizes_equal(n, 1)


def divides(a: Size, b: Size) -> bool:
    """Whether b is a multiple of a for all inputs."""
    if type(a) is int and type(b) is int:
        return a != 0 and b % a == 0
    return statically_known_true(b % a == 0) or divides_exactly(a, b)


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


# Equality and divisibility of symbolic sizes with divisions that leave no remainder, such as n * (m
# // n) where n divides m, as views of windows have them, and their signs.


def are_equal(a: int | SymInt, b: int | SymInt) -> bool:
    """Whether two sizes are equal once exact divisions are fractions."""
    env = _divided(a, b)
    return env is not None and sympy.cancel(_fraction(a, env) - _fraction(b, env)) == 0


def divides_exactly(a: int | SymInt, b: int | SymInt) -> bool:
    """Whether b is a multiple of a once exact divisions are fractions."""
    env = _divided(a, b)
    return env is not None and _is_whole(_fraction(b, env) / _fraction(a, env))


def is_nonnegative(n: int | SymInt) -> bool:
    """Whether an integer is 0 or more for all inputs, also where only a part of a guard says so."""
    if type(n) is int or statically_known_true(n >= 0):
        return n >= 0 if type(n) is int else True
    guards = (part for g in n.node.shape_env.guards for part in sympy.And.make_args(g.expr))
    known = (
        g.gts - g.lts for g in guards if isinstance(g, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt))
    )
    return any(sympy.expand(n.node.expr - least).is_nonnegative for least in known)


def _divided(*sizes: int | SymInt) -> ShapeEnv | None:
    """The environment of the symbols if one of the sizes has a division."""
    symbols = [n for n in sizes if isinstance(n, SymInt)]
    divided = any(n.node.expr.has(FloorDiv) for n in symbols)
    return symbols[0].node.shape_env if divided else None


def _fraction(n: int | SymInt, env: ShapeEnv) -> sympy.Expr:
    return _exact(n.node.expr, env) if isinstance(n, SymInt) else sympy.Integer(n)


def _exact(expr: sympy.Expr, env: ShapeEnv) -> sympy.Expr:
    """The expression with fractions in place of the divisions that leave no remainder."""
    if not expr.args:
        return expr
    if isinstance(expr, FloorDiv):
        exact = _exact(expr.args[0], env) / _exact(expr.args[1], env)
        return exact if _is_whole(exact) or _has_no_remainder(expr, env) else expr
    return expr.func(*(_exact(x, env) for x in expr.args))


def _is_whole(quotient: sympy.Expr) -> bool:
    """Whether a quotient is a polynomial with whole coefficients."""
    numerator, denominator = sympy.fraction(sympy.cancel(quotient))
    if denominator != 1 or numerator.has(FloorDiv):
        return False
    return all(c.is_integer for c in numerator.as_coefficients_dict().values())


def _has_no_remainder(division: FloorDiv, env: ShapeEnv) -> bool:
    """Whether a guard says so: itself, or because a view has as many elements as its input."""
    x, y = division.args
    positive = x.is_nonnegative  # torch's Mod takes no others
    if positive and statically_known_true(env.create_symboolnode(sympy.Eq(Mod(x, y), 0))):
        return True
    wanted = x / (y * division)
    equal = (guard.expr for guard in env.guards if isinstance(guard.expr, sympy.Eq))
    sizes = (e for e in equal if e.has(division) and all(s.is_positive for s in e.free_symbols))
    return any(sympy.cancel(e.lhs / e.rhs) in (wanted, 1 / wanted) for e in sizes)
