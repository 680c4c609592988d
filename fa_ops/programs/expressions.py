"""Expressions of a score and of the indices of its batch, head, query and key.

A node is an operation on other nodes. Equal nodes of one `Expressions` are one object, so that an
expression is a graph without repetition, and `is` compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

BOOL, INT, FLOAT = "bool", "int", "float"
INDICES = ("b", "h", "q", "k")  # batch, head, query, key
ARGUMENTS = {"score": FLOAT} | dict.fromkeys(INDICES, INT)
MAX_NODES = 4096

# The operations, by what they take and give.
FLOAT_FUNCTIONS = frozenset(
    """
    exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos erf floor ceil trunc detach
    """.split()
)
_NUMBERS = frozenset("add sub mul min max".split())  # of two ints, or two floats
_SIGNED = frozenset("neg abs".split())
_INTEGERS = frozenset("floordiv mod quot rem shl shr bitand bitor bitxor".split())
_COMPARISONS = frozenset("eq lt le".split())
_LOGIC = frozenset("and or xor".split())
CASTS = {"to_float": FLOAT, "to_int": INT}


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """An operation on nodes; `value` is that of a constant, or says which argument or tensor."""

    op: str
    args: tuple[Node, ...]
    type: str
    value: object = None

    def __repr__(self) -> str:
        return shown(self)


def shown(
    node: Node, names: Callable[[Node], str | None] = lambda node: None,
    tensors: Mapping[int, str] = {},
) -> str:  # fmt: skip
    """The expression as nested calls; `names` may name nodes, `tensors` those that loads read."""
    texts: dict[Node, str] = {}
    for n in order(node):
        name = names(n)
        if name is None and n.op == "load" and n.value in tensors:
            index = ", ".join(texts[a] for a in n.args)
            name = f"{tensors[n.value]}[{index}]" if n.args else tensors[n.value]
        if name is None and n.op in ("const", "argument"):
            name = literal(n.value) if n.op == "const" else n.value
        if name is None:
            label = f"{n.op}{n.value}" if n.value is not None else n.op
            name = f"{label}({', '.join(texts[a] for a in n.args)})" if n.args else label
        texts[n] = name if len(name) < 2000 else f"{name[:2000]}..."
    return texts[node]


def literal(value: object) -> str:
    """A constant as text: true, 3, 0.5, inf."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def order(*roots: Node, is_leaf: Callable[[Node], bool] = lambda node: False) -> list[Node]:
    """The nodes of expressions, each after its arguments; those of leaves are left out."""
    seen: set[Node] = set()
    ordered = []
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            ordered.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if not is_leaf(node):
                stack += [(a, False) for a in reversed(node.args)]
    return ordered


def _divided(a: int, b: int) -> int:
    return (
        int(math.trunc(a / b)) if abs(a) < 2**52 else (abs(a) // abs(b)) * (1 if a * b >= 0 else -1)
    )


_FOLDED: dict[str, Callable] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "neg": lambda a: -a, "abs": abs, "min": min, "max": max,
    "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "quot": _divided,
    "rem": lambda a, b: a - b * _divided(a, b), "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b, "bitand": lambda a, b: a & b, "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b, "eq": lambda a, b: a == b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "and": lambda a, b: a and b, "or": lambda a, b: a or b,
    "xor": lambda a, b: a != b, "not": lambda a: not a, "exp": math.exp, "log": math.log,
    "sqrt": math.sqrt, "tanh": math.tanh, "to_float": float, "to_int": int,
}  # fmt: skip


class Expressions:
    """Makes nodes: equal ones once, simplified where that changes no value."""

    def __init__(self) -> None:
        self._nodes: dict[tuple, Node] = {}
        self.tensor_names: dict[int, str] = {}  # of captured tensors, where they are known

    def shown(self, node: Node, names: Callable[[Node], str | None] = lambda node: None) -> str:
        """The expression as nested calls, captured tensors by their names."""
        return shown(node, names, self.tensor_names)

    def _node(self, op: str, args: tuple, type: str, value: object = None) -> Node:
        key = op, args, type, repr(value) if isinstance(value, float) else value
        node = self._nodes.get(key)
        if node is None:
            if len(self._nodes) >= 16 * MAX_NODES:
                raise NotImplementedError(f"it has more than {16 * MAX_NODES} operations")
            node = self._nodes[key] = Node(op, args, type, value)
        return node

    def constant(self, value: object, type: str) -> Node:
        """A number or a bool of this type."""
        kind = {BOOL: bool, INT: int, FLOAT: float}[type]
        return self._node("const", (), type, kind(value))

    def argument(self, name: str) -> Node:
        """The score, or an index."""
        return self._node("argument", (), ARGUMENTS[name], name)

    def term(self, number: int, type: str) -> Node:
        """The element of a term that belongs to a score."""
        return self._node("term", (), type, number)

    def load(self, tensor: int, index: tuple[Node, ...], type: str) -> Node:
        """An element of a captured tensor."""
        return self._node("load", index, type, tensor)

    def cast(self, node: Node, type: str) -> Node:
        """The value in another type; numbers are true where they are not 0."""
        if node.type == type:
            return node
        if type == BOOL:
            return self.make("not", self.make("eq", node, self.constant(0, node.type)))
        if node.op == "const":
            return self.constant(node.value, type)
        return self.make(f"to_{type}", node)

    def make(self, op: str, *args: Node) -> Node:
        """An operation on nodes. Raises ValueError where it does not take such arguments."""
        type = result_type(op, [a.type for a in args])
        if all(a.op == "const" for a in args) and op in _FOLDED:
            try:
                return self.constant(_FOLDED[op](*(a.value for a in args)), type)
            except (ValueError, ZeroDivisionError, OverflowError):
                pass
        if op == "where" and args[0].op == "const":
            return args[1] if args[0].value else args[2]
        simple = self._simplified(op, args, type)
        return self._node(op, args, type) if simple is None else simple

    def _simplified(self, op: str, args: tuple[Node, ...], type: str) -> Node | None:
        def is_number(node: Node, value: float) -> bool:
            return node.op == "const" and node.type != BOOL and node.value == value

        a, b = args[0], args[-1]
        pairs = ((a, b), (b, a))
        if op == "add":
            return next((y for x, y in pairs if is_number(x, 0)), None)
        if op == "sub":
            if is_number(b, 0):
                return a
            return self.constant(0, INT) if a is b and type == INT else None
        if op == "mul":
            if type == INT and any(is_number(x, 0) for x in args):
                return self.constant(0, INT)
            return next((y for x, y in pairs if is_number(x, 1)), None)
        if op in ("div", "floordiv") and is_number(b, 1):
            return a
        if op in ("min", "max", "and", "or") and a is b:
            return a
        if op in ("and", "or"):
            for x, y in pairs:
                if x.op == "const":
                    return y if x.value == (op == "and") else x
        if op == "where" and args[1] is args[2]:
            return args[1]
        if op == "not":
            return self._negated(a)
        if op == "detach":
            return a if a.op in ("const", "detach") else None
        return a.args[0] if op == "neg" and a.op == "neg" else None

    def _negated(self, a: Node) -> Node | None:
        if a.op == "not":
            return a.args[0]
        if a.op in ("lt", "le") and a.args[0].type == INT:
            return self.make("le" if a.op == "lt" else "lt", a.args[1], a.args[0])
        if a.op in ("and", "or"):
            other = "or" if a.op == "and" else "and"
            return self.make(other, *(self.make("not", x) for x in a.args))
        return None

    def replaced(self, root: Node, new: dict[Node, Node]) -> Node:
        """An expression with other nodes in place of some."""
        done = dict(new)
        for node in order(root):
            if node not in done:
                args = tuple(done[a] for a in node.args)
                done[node] = node if args == node.args else self.again(node, args)
        return done[root]

    def again(self, node: Node, args: tuple[Node, ...]) -> Node:
        """The same operation on other arguments."""
        if node.op == "load":
            return self.load(node.value, args, node.type)
        return self.make(node.op, *args)


def result_type(op: str, types: list[str]) -> str:
    """The type of an operation's result. Raises ValueError where it takes no such arguments."""
    ok, result = False, FLOAT
    first = types[0] if types else None
    if op in FLOAT_FUNCTIONS:
        ok = types == [FLOAT]
    elif op in ("div", "pow"):
        ok = types == [FLOAT, FLOAT]
    elif op in _NUMBERS:
        ok, result = types in ([INT, INT], [FLOAT, FLOAT]), first
    elif op in _SIGNED:
        ok, result = types in ([INT], [FLOAT]), first
    elif op in _INTEGERS:
        ok, result = types == [INT, INT], INT
    elif op == "bitnot":
        ok, result = types == [INT], INT
    elif op in _COMPARISONS:
        ok, result = len(types) == 2 and first == types[1] and (op == "eq" or first != BOOL), BOOL
    elif op in _LOGIC:
        ok, result = types == [BOOL, BOOL], BOOL
    elif op == "not":
        ok, result = types == [BOOL], BOOL
    elif op == "where":
        ok, result = len(types) == 3 and first == BOOL and types[1] == types[2], types[-1]
    elif op in CASTS:
        ok, result = len(types) == 1 and first != CASTS[op], CASTS[op]
    if not ok:
        raise ValueError(f"{op!r} is no operation on ({', '.join(types)})")
    return result


# What an expression depends on, and how.


def dependencies(
    roots: Iterable[Node], of_term: Callable[[Node], frozenset] = lambda term: frozenset()
) -> dict[Node, frozenset]:
    """Of each node the arguments that it depends on; `of_term` says those of a term."""
    found: dict[Node, frozenset] = {}
    for node in order(*roots):
        if node.op == "argument":
            found[node] = frozenset((node.value,))
        elif node.op == "term":
            found[node] = of_term(node)
        else:
            found[node] = frozenset().union(*(found[a] for a in node.args))
    return found


def is_natural(node: Node) -> bool:
    """Whether an integer is never negative."""
    if node.op == "argument":
        return node.value in INDICES
    if node.op == "const":
        return node.type != BOOL and node.value >= 0
    grows = node.op in ("add", "mul", "floordiv", "mod", "min", "max")
    return grows and all(is_natural(a) for a in node.args)


class Linear(NamedTuple):
    """An integer as a sum of nodes with factors, and of a constant."""

    factors: dict[Node, int]
    constant: int

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        """The sum of both, or their difference."""
        factors = dict(self.factors)
        for node, factor in other.factors.items():
            factors[node] = factors.get(node, 0) + sign * factor
        factors = {node: factor for node, factor in factors.items() if factor}
        return Linear(factors, self.constant + sign * other.constant)

    def times(self, number: int) -> Linear:
        """The product with a number."""
        factors = {node: number * factor for node, factor in self.factors.items() if number}
        return Linear(factors, number * self.constant)


def linear_forms(*roots: Node) -> dict[Node, Linear]:
    """Every integer of expressions as a sum of what is no sum itself."""
    found: dict[Node, Linear] = {}
    for node in order(*roots):
        if node.type != INT:
            continue
        forms = [found.get(a) for a in node.args]
        if node.op == "const":
            found[node] = Linear({}, node.value)
        elif node.op in ("add", "sub"):
            found[node] = forms[0].plus(forms[1], 1 if node.op == "add" else -1)
        elif node.op == "neg":
            found[node] = forms[0].times(-1)
        elif node.op == "mul" and not (forms[0].factors and forms[1].factors):
            number, other = sorted(forms, key=lambda form: len(form.factors))
            found[node] = other.times(number.constant)
        else:
            found[node] = Linear({node: 1}, 0)
    return found


# The least set of elements of which an expression without score is a function, beside b and h.
TILE, ROW, COLUMN, DISTANCE, DENSE = "tile", "row", "column", "distance", "dense"


def domains(roots: Iterable[Node]) -> dict[Node, str | None]:
    """The domain of each node; None where it depends on the score."""
    roots = list(roots)
    needs, forms = dependencies(roots), linear_forms(*roots)
    by_distance: dict[Node, bool] = {}
    found: dict[Node, str | None] = {}
    for node in order(*roots):
        indices = needs[node] & {"q", "k"}
        form = forms.get(node)
        if not indices:
            by_distance[node] = True
        elif form is not None and list(form.factors) != [node]:
            by_distance[node] = _is_of_distance(form, needs, by_distance)
        else:
            by_distance[node] = bool(node.args) and all(by_distance[a] for a in node.args)
        if "score" in needs[node]:
            found[node] = None
        elif len(indices) == 2:
            found[node] = DISTANCE if by_distance[node] else DENSE
        else:
            found[node] = {"": TILE, "q": ROW, "k": COLUMN}["".join(indices)]
    return found


def _is_of_distance(form: Linear, needs: dict, by_distance: dict) -> bool:
    """Whether a sum depends on q and k through q - k alone."""
    total = 0
    for node, factor in form.factors.items():
        if node.op == "argument" and node.value in ("q", "k"):
            total += factor
        elif not by_distance[node]:
            return False
    return total == 0


# Derivatives, by reverse accumulation.


def derivatives(e: Expressions, root: Node, leaves: list[Node]) -> list[Node]:
    """d root / d leaf of each leaf, a float, as expressions."""
    total: dict[Node, Node] = {root: e.constant(1.0, FLOAT)}
    for node in reversed(order(root)):
        grad = total.get(node)
        if grad is None or node.type != FLOAT or not node.args or node in leaves:
            continue
        for argument, partial in zip(node.args, _partials(e, node), strict=True):
            if partial is not None:
                product = e.make("mul", grad, partial)
                known = total.get(argument)
                total[argument] = product if known is None else e.make("add", known, product)
    return [total.get(leaf, e.constant(0.0, FLOAT)) for leaf in leaves]


def _partials(e: Expressions, n: Node) -> tuple[Node | None, ...]:
    """The derivatives of an operation by its arguments; None by those that are no floats."""

    def number(x: float) -> Node:
        return e.constant(x, FLOAT)

    def indicator(condition: Node) -> Node:
        return e.make("where", condition, number(1.0), number(0.0))

    def times(*factors: Node) -> Node:
        product = factors[0]
        for factor in factors[1:]:
            product = e.make("mul", product, factor)
        return product

    def over(a: Node, b: Node) -> Node:
        return e.make("div", a, b)

    a, one, half = n.args, number(1.0), number(0.5)
    match n.op:
        case "add":
            return one, one
        case "sub":
            return one, number(-1.0)
        case "neg":
            return (number(-1.0),)
        case "mul":
            return a[1], a[0]
        case "div":
            return over(one, a[1]), e.make("neg", over(n, a[1]))
        case "where":
            opposite = e.make("where", a[0], number(0.0), one)
            return None, indicator(a[0]), opposite
        case "min" | "max":  # of equal arguments each gets a half, as in torch
            smaller = [e.make("lt", a[0], a[1]), e.make("lt", a[1], a[0])]
            mine, other = smaller if n.op == "min" else smaller[::-1]
            tie = e.make("where", e.make("eq", a[0], a[1]), half, number(0.0))
            share = lambda mine: e.make("where", mine, one, tie)  # noqa: E731
            return share(mine), share(other)
        case "abs":
            negative = e.make("lt", a[0], number(0.0))
            positive = indicator(e.make("lt", number(0.0), a[0]))
            return (e.make("where", negative, number(-1.0), positive),)
        case "pow":
            base = times(a[1], e.make("pow", a[0], e.make("sub", a[1], one)))
            log = e.make("log", a[0])
            grown = e.make("where", e.make("eq", n, number(0.0)), n, times(n, log))
            return base, None if a[1].op == "const" else grown
        case "tanh":
            return (e.make("sub", one, times(n, n)),)
        case "sigmoid":
            return (times(n, e.make("sub", one, n)),)
        case "exp":
            return (n,)
        case "expm1":
            return (e.make("add", n, one),)
        case "exp2":
            return (times(n, number(math.log(2.0))),)
        case "log":
            return (over(one, a[0]),)
        case "log1p":
            return (over(one, e.make("add", a[0], one)),)
        case "log2":
            return (over(number(1.0 / math.log(2.0)), a[0]),)
        case "sqrt":
            return (over(half, n),)
        case "rsqrt":
            return (times(number(-0.5), n, n, n),)
        case "sin":
            return (e.make("cos", a[0]),)
        case "cos":
            return (e.make("neg", e.make("sin", a[0])),)
        case "erf":
            square = e.make("exp", e.make("neg", times(a[0], a[0])))
            return (times(number(2.0 / math.sqrt(math.pi)), square),)
    return (None,) * len(a)  # steps, casts, and elements of tensors


def angle_of(e: Expressions, y: Node, x: Node) -> Node:
    """atan2(y, x): of the lesser over the larger coordinate, halved twice, by its series.

    The angle is below pi / 16 then, and what the 12 terms leave out is below 1e-17.
    """

    def number(value: float) -> Node:
        return e.constant(value, FLOAT)

    zero, one = number(0.0), number(1.0)
    is_steep = e.make("lt", e.make("abs", x), e.make("abs", y))
    above, below = e.make("where", is_steep, x, y), e.make("where", is_steep, y, x)
    below = e.make("where", e.make("eq", below, zero), one, below)  # of no coordinate
    slope = e.make("div", above, below)
    for _ in range(2):
        root = e.make("sqrt", e.make("add", one, e.make("mul", slope, slope)))
        slope = e.make("div", slope, e.make("add", one, root))
    square, series = e.make("mul", slope, slope), number(1.0 / 23)
    for n in range(10, -1, -1):
        rest = e.make("mul", square, series)
        series = e.make("sub", number(1.0 / (2 * n + 1)), rest)
    angle = e.make("mul", e.make("mul", number(4.0), slope), series)
    sign = e.make("where", e.make("lt", y, zero), number(-1.0), one)
    quarter = e.make("mul", sign, number(math.pi / 2))
    half = e.make("where", e.make("lt", x, zero), e.make("mul", sign, number(math.pi)), zero)
    return e.make(
        "where", is_steep, e.make("sub", quarter, angle), e.make("add", half, angle)
    )  # fmt: skip
