"""Equality and divisibility of symbolic sizes with divisions that leave no remainder, such as
n * (m // n) where n divides m, as views of windows have them, and their signs.
"""

from __future__ import annotations

import sympy
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._sympy.functions import FloorDiv, Mod


def are_equal(a: int | SymInt, b: int | SymInt) -> bool:
    """Whether two sizes are equal once exact divisions are fractions."""
    env = _divided(a, b)
    return env is not None and sympy.cancel(_fraction(a, env) - _fraction(b, env)) == 0


def divides(a: int | SymInt, b: int | SymInt) -> bool:
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
