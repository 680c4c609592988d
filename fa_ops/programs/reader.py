"""Reads a score_mod or mask_mod: the function is called once with stand-ins for its arguments.

Stand-ins are tensors without memory. What torch is asked to do with them becomes nodes of an
expression. Captured tensors are found where the function uses them, and stand for themselves: their
values are never read. What depends on values, or is no function of single elements, is refused.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

import torch
from torch import SymFloat, SymInt, Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from fa_ops.programs.expressions import (
    BOOL,
    FLOAT,
    FLOAT_FUNCTIONS,
    INDICES,
    INT,
    Expressions,
    Node,
    angle_of,
)
from fa_ops.programs.identity import names_of_tensors

TYPES = {torch.bool: BOOL} | dict.fromkeys(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), INT
) | dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), FLOAT)  # fmt: skip
_HERE, _TORCH = os.path.dirname(__file__), os.path.dirname(torch.__file__)


class Reading(NamedTuple):
    """What a function computes, and which tensors that it reads it made itself."""

    root: Node
    made: frozenset[int]


class _StandIn(Tensor):
    """A number of one score, or a part of a captured tensor; operations on it are written down."""

    content: Node | _Part
    session: _Session

    @staticmethod
    def __new__(cls, content, session, dtype, shape=()):
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=session.device)
        made.content, made.session = content, session
        return made

    def __repr__(self, **_):
        return f"<{self.content}>"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        session = _session_of((args, kwargs))
        return session.operation(func, args, kwargs or {})


class _Part(NamedTuple):
    """A captured tensor, indexed in some of its dimensions."""

    tensor: int
    index: tuple[Node, ...]
    is_detached: bool = False


def _session_of(arguments: object) -> _Session:
    found: list[_Session] = []

    def look(x):
        if isinstance(x, _StandIn):
            found.append(x.session)

    tree_map(look, arguments)
    return found[0]


_VALUES = {  # what reads a value on the host, with the remedy
    "__bool__": "depends on a value (if, while, and, or, not): use torch.where, &, | and ~",
    "item": "reads a number from the device by item(): leave it a tensor",
    "tolist": "reads numbers from the device by tolist(): leave it a tensor",
    "numpy": "reads a tensor as an array: use operations of torch",
    "__array__": "gives a tensor to NumPy: use operations of torch",
} | dict.fromkeys(
    ("__int__", "__float__", "__index__", "__len__", "__iter__", "__contains__"),
    "needs a value on the host (int, float, range, len): use operations of torch",
)  # fmt: skip
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "poisson", "exponential_")


class _Session(TorchFunctionMode):
    """One reading of a function."""

    def __init__(
        self, name: str, e: Expressions, device: torch.device,
        tensors: list[Tensor | SymInt | SymFloat],
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.e, self.device, self.tensors = name, e, device, tensors
        self.made: dict[int, Tensor] = {}  # by identity, kept alive
        self.where = ""  # of the function, once it has returned
        self.decomposed = ""  # the operation whose parts are computed
        self.has_gradients = torch.is_grad_enabled()

    def refuse(self, reason: str, error: type = NotImplementedError) -> NoReturn:
        """Raise with the function's name, file and line."""
        raise error(f"{self.name}{self.where or _line_of_user()} {reason}") from None

    def _is_without_gradient(self) -> bool:
        """Whether the function has gradients switched off here, as `torch.no_grad` does.

        So does an autograd.Function, whose own backward pass a program does not have.
        """
        if not self.has_gradients or torch.is_grad_enabled():
            return False
        frame = sys._getframe()
        while frame is not None and frame.f_code is not read.__code__:
            code = frame.f_code
            if code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__:
                self.refuse("calls an autograd.Function, whose backward pass programs do not have: "
                            "use operations of torch, and detach()")  # fmt: skip
            frame = frame.f_back
        return True

    # Between the function and torch: indexing, and tensors that are not stand-ins.

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name in _VALUES and args and isinstance(args[0], Tensor):
            if id(args[0]) in self.made:
                return func(*args, **kwargs)
            self.refuse(_VALUES[name])
        if name.startswith(_RANDOM):
            self.refuse(f"draws random numbers by {name}: draw them before, and capture them")
        if func is Tensor.__getitem__:
            return self._element(*args)
        if func is Tensor.__setitem__:
            self.refuse("writes to a tensor: use torch.where")
        if not self._has_others((args, kwargs)) and not self._has_stand_ins((args, kwargs)):
            result = func(*args, **kwargs)
            tree_map(lambda x: self._make(x), result)
            return result
        args, kwargs = tree_map(self.stand_in, (args, kwargs))
        return func(*args, **kwargs)

    def _has_stand_ins(self, arguments: object) -> bool:
        found = []
        tree_map(lambda x: found.append(x) if isinstance(x, _StandIn) else None, arguments)
        return bool(found)

    def _has_others(self, arguments: object) -> bool:
        """Whether a tensor is captured; those that the function made of numbers are not."""
        found = []
        tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, arguments)
        return any(not isinstance(x, _StandIn) and id(x) not in self.made for x in found)

    def _make(self, x: object) -> None:
        if isinstance(x, Tensor) and not isinstance(x, _StandIn):
            self.made[id(x)] = x

    def stand_in(self, x: object) -> object:
        """What stands for a tensor, or for a number that varies, that the function reads."""
        if isinstance(x, SymInt | SymFloat):
            dtype = _dtype_of(x)
            at = next((i for i, t in enumerate(self.tensors) if _is_same_number(t, x)), None)
            if at is None:
                at = len(self.tensors)
                self.tensors.append(x)
            return _StandIn(self.e.load(at, (), TYPES[dtype]), self, dtype)
        if not isinstance(x, Tensor) or isinstance(x, _StandIn):
            return x
        if x.dtype not in TYPES:
            self.refuse(f"reads a tensor of {str(x.dtype).removeprefix('torch.')}: cast it before")
        if id(x) in self.made and x.dim() == 0:
            return _StandIn(self.e.constant(x.item(), TYPES[x.dtype]), self, x.dtype)
        if x.device != self.device and not (x.dim() == 0 and x.device.type == "cpu"):
            self.refuse(
                f"reads a tensor on {x.device}, but query is on {self.device}: move it before",
                ValueError,
            )
        at = next((i for i, t in enumerate(self.tensors) if t is x), None)
        if at is None:
            at = len(self.tensors)
            self.tensors.append(x)
        return self._part(_Part(at, ()))

    def _part(self, part: _Part) -> _StandIn:
        t = self.tensors[part.tensor]
        shape = t.shape[len(part.index) :]
        content = part
        if not len(shape):
            content = self.e.load(part.tensor, part.index, TYPES[t.dtype])
            if part.is_detached and content.type == FLOAT:
                content = self.e.make("detach", content)
        return _StandIn(content, self, t.dtype, tuple(shape))

    def _element(self, x: Tensor, index: object) -> object:
        index = index if isinstance(index, tuple) else (index,)
        if id(x) in self.made and not self._has_stand_ins(index) and not self._has_others(index):
            result = x[index]
            self._make(result)
            return result
        x = self.stand_in(x)
        part = x.content
        if isinstance(part, Node):
            if all(i is None or i is Ellipsis for i in index):
                return x
            self.refuse("indexes a number, which has no elements")
        index = tuple(i for i in index if i is not Ellipsis or len(index) != 1)
        found = []
        for i in index:
            i = self.stand_in(i)
            if isinstance(i, _StandIn) and isinstance(i.content, Node) and i.content.type == INT:
                found.append(i.content)
            elif isinstance(i, int) and not isinstance(i, bool):
                found.append(self.e.constant(i, INT))
            elif isinstance(i, _StandIn) and isinstance(i.content, Node):
                self.refuse(f"indexes a tensor by a {i.content.type}: cast the index by .long()")
            else:
                kind = "slice" if isinstance(i, slice) else type(i).__name__.strip("_")
                self.refuse(f"indexes a tensor by a {kind}: one index for each dimension is read")
        if len(part.index) + len(found) > self.tensors[part.tensor].dim():
            self.refuse(
                f"has {len(found)} indices for a tensor of shape {tuple(x.shape)}", IndexError
            )
        part = part._replace(index=part.index + tuple(found))
        if self._is_without_gradient():
            part = part._replace(is_detached=True)
        return self._part(part)

    # Operations of ATen on stand-ins.

    def operation(self, func, args: tuple, kwargs: dict) -> object:
        """The result of an operation, as a stand-in."""
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            self.refuse(_VALUES["item"])
        given = _bound(func, args, kwargs)
        if name == "index":  # what indexing is in graphs of ATen
            return self._element(given["self"], tuple(given["indices"]))
        contents = {n: x.content if isinstance(x, _StandIn) else x for n, x in given.items()}
        if name in _SAME or name in _RESHAPED and isinstance(contents["self"], Node):
            x = args[0]  # torch wants another object from what gives a view
            return _StandIn(x.content, self, x.dtype, tuple(x.shape))
        if name == "detach" and isinstance(contents["self"], _Part):
            return self._part(contents["self"]._replace(is_detached=True))
        for x in contents.values():
            if isinstance(x, _Part):
                shape = tuple(self.tensors[x.tensor].shape[len(x.index) :])
                self.refuse(f"computes with a whole tensor of shape {shape} by {name.strip('_')}: "
                            "index it, or compute before and capture the result")  # fmt: skip
        try:
            meta = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except Exception as error:  # whatever torch raises for such arguments
            self.refuse(f"calls {name.strip('_')} wrongly: {str(error).splitlines()[0]}", TypeError)
        first = meta[0] if isinstance(meta, tuple) else meta
        if not isinstance(first, Tensor) or first.dim():
            self.refuse(f"calls {name.strip('_')}, whose result is no number")
        writes = name.endswith("_") and not name.endswith("__")
        base = name[:-1] if writes else name
        if base not in _RULES and (decomposed := _decomposition_of(func)) is not None:
            return self._decomposed(base, decomposed, args, kwargs)
        if first is not meta:
            self.refuse(f"calls {name.strip('_')}, whose result is no number")
        node = self._lowered(base, contents, meta.dtype, given)
        if node.type == FLOAT and self._is_without_gradient():
            node = self.e.make("detach", node)
        if writes:
            target = args[0]
            if target.content.op in ("load", "argument") and id(target) not in self.made:
                self.refuse("writes to a tensor: use an operation that gives a new one")
            target.content = node
            return target
        return _StandIn(node, self, meta.dtype)

    def _decomposed(self, name: str, decomposed: Callable, args: tuple, kwargs: dict) -> object:
        """The result of an operation by others, which errors do not name."""
        outer, self.decomposed = self.decomposed, self.decomposed or name
        try:
            return decomposed(*args, **kwargs)
        except Exception as error:  # whatever torch's definition raises
            if str(error).startswith(self.name):
                raise
            self.refuse(f"calls {self.decomposed.strip('_')}, which programs do not have: {error}")
        finally:
            self.decomposed = outer

    def _lowered(self, name: str, x: dict[str, Any], dtype: torch.dtype, given: dict) -> Node:
        type, rule = TYPES.get(dtype), _RULES.get(name)
        if type == INT and dtype.itemsize < 4:  # in which torch has the numbers, too
            x = {n: _in_range(value, dtype) for n, value in x.items()}
        call, base, name = _AtenCall(self.e, name, x, type, given), name, self.decomposed or name
        if type is None or rule is None:
            self.refuse(
                f"calls {name.strip('_')}, which programs do not have; they have arithmetic, "
                "comparisons, logic, where, and elementary functions"
            )
        try:
            node = rule(call)
            return _wrapped(self.e, node, dtype) if base in _OVERFLOWING else node
        except ValueError as error:
            self.refuse(
                f"calls {name.strip('_')} with arguments that programs do not have: {error}"
            )


# Operations whose results may not fit the dtype of small integers.
_OVERFLOWING = frozenset(
    """
    add sub mul rsub neg abs pow square bitwise_not __lshift__ bitwise_left_shift _to_copy to
    """.split()
)


def _wrapped(e: Expressions, node: Node, dtype: torch.dtype) -> Node:
    """An integer as it is in a dtype of fewer than 32 bits, in which torch wraps it around."""
    if TYPES[dtype] != INT or dtype.itemsize > 2:
        return node
    low, size = torch.iinfo(dtype).min, 2 ** (8 * dtype.itemsize)
    if node.op == "const":
        return e.constant(_in_range(node.value, dtype), INT)
    shifted = e.make("sub", node, e.constant(low, INT))
    return e.make("add", e.make("mod", shifted, e.constant(size, INT)), e.constant(low, INT))


def _in_range(x: object, dtype: torch.dtype) -> object:
    """A number as a dtype of small integers has it; others as they are."""
    if type(x) is not int:
        return x
    low = torch.iinfo(dtype).min
    return (x - low) % 2 ** (8 * dtype.itemsize) + low


def _dtype_of(x: SymInt | SymFloat) -> torch.dtype:
    return torch.int64 if isinstance(x, SymInt) else torch.float64


def _is_same_number(a: object, b: SymInt | SymFloat) -> bool:
    """Whether two sizes are the same expression, without a guard."""
    return type(a) is type(b) and a.node.expr == b.node.expr


def _decomposition_of(func: OpOverload) -> Callable | None:
    """Torch's own definition of an operation by others, such as that of gelu."""
    from torch._decomp import decomposition_table  # what imports this package does not pay for it

    return decomposition_table.get(func)


def _bound(func, args: tuple, kwargs: dict) -> dict[str, object]:
    """The arguments of an operation by name, with defaults."""
    bound = {}
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def _on_meta(x: object) -> object:
    if isinstance(x, _StandIn):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    if isinstance(x, Tensor) and x.device.type != "cpu":  # a number that torch has put on a GPU
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _line_of(function: Callable) -> str:
    """Where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def _line_of_user() -> str:
    """The innermost line that is neither of torch nor of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_HERE, _TORCH, "<frozen", "<eval_with_key>")):
            return f" ({os.path.basename(path)}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


class _AtenCall(NamedTuple):
    """A call of an operation of ATen: what its rule reads."""

    e: Expressions
    name: str
    x: dict[str, Any]  # nodes and numbers
    type: str  # of the result
    given: dict[str, Any]

    def node(self, name: str, type: str | None = None) -> Node:
        """An argument in a type, the result's unless given."""
        x, type = self.x[name], type or self.type
        if isinstance(x, Node):
            return self.e.cast(x, type)
        if type == INT and isinstance(x, float):
            raise ValueError(f"{name}={x}")
        return self.e.constant(x, type)

    def number(self, name: str, x: object, type: str) -> Node:
        """A number, or a node, in a type."""
        return self.e.cast(x, type) if isinstance(x, Node) else self.e.constant(x, type)

    def common(self, a: str, b: str) -> torch.dtype:
        """The dtype in which two arguments are compared."""
        return torch.result_type(*(_on_meta(self.given[name]) for name in (a, b)))


def _arithmetic(c: _AtenCall) -> Node:
    a, b = c.node("self"), c.node("other")
    op = c.name
    if c.x.get("alpha", 1) != 1:
        scaled = "self" if op == "rsub" else "other"
        factor = c.number("alpha", c.x["alpha"], c.type)
        a, b = (
            (c.e.make("mul", a, factor), b) if scaled == "self" else (a, c.e.make("mul", b, factor))
        )
    if op == "rsub":
        a, b, op = b, a, "sub"
    if c.type == BOOL:
        return c.e.make({"add": "or", "mul": "and"}[op], a, b)
    return c.e.make(op, a, b)


def _division(c: _AtenCall) -> Node:
    mode = c.x.get("rounding_mode")
    mode = "floor" if c.name == "floor_divide" else mode
    a, b = c.node("self"), c.node("other")
    if c.type == INT:
        return c.e.make({"floor": "floordiv", "trunc": "quot"}[mode], a, b)
    quotient = c.e.make("div", a, b)
    return quotient if mode is None else c.e.make(mode, quotient)


def _remainder(c: _AtenCall) -> Node:
    a, b = c.node("self"), c.node("other")
    if c.type == INT:
        return c.e.make("mod" if c.name == "remainder" else "rem", a, b)
    whole = c.e.make("floor" if c.name == "remainder" else "trunc", c.e.make("div", a, b))
    return c.e.make("sub", a, c.e.make("mul", b, whole))


def _comparison(c: _AtenCall) -> Node:
    dtype, name = c.common("self", "other"), c.name
    type = TYPES[dtype]
    if type == INT and dtype.itemsize < 4:
        c = c._replace(x={n: _in_range(value, dtype) for n, value in c.x.items()})
    a, b = c.node("self", type), c.node("other", type)
    if type == BOOL and name not in ("eq", "ne"):
        a, b = c.e.cast(a, INT), c.e.cast(b, INT)
    if name in ("gt", "ge"):
        a, b, name = b, a, {"gt": "lt", "ge": "le"}[name]
    if name == "ne":
        return c.e.make("not", c.e.make("eq", a, b))
    return c.e.make(name, a, b)


def _logic(c: _AtenCall) -> Node:
    op = c.name.strip("_").removeprefix("logical_").removeprefix("bitwise_")
    type = BOOL if c.name.startswith("logical") else c.type
    a, b = c.node("self", type), c.node("other", type)
    return c.e.make(op if type == BOOL else f"bit{op}", a, b)


def _not(c: _AtenCall) -> Node:
    if c.type == BOOL:
        return c.e.make("not", c.node("self", BOOL))
    return c.e.make("bitnot", c.node("self"))


def _shift(c: _AtenCall) -> Node:
    op = "shl" if "left" in c.name or "lshift" in c.name else "shr"
    return c.e.make(op, c.node("self"), c.node("other"))


def _where(c: _AtenCall) -> Node:
    return c.e.make("where", c.node("condition", BOOL), c.node("self"), c.node("other"))


def _masked_fill(c: _AtenCall) -> Node:
    return c.e.make("where", c.node("mask", BOOL), c.node("value"), c.node("self"))


def _clamp(c: _AtenCall) -> Node:
    """By `where`: at a limit the gradient is that of the argument, as in torch."""
    x = c.node("self")
    for name, at in (("min", 0), ("max", 1)):
        if c.x.get(name) is not None:
            limit = c.node(name)
            if c.type == INT:
                x = c.e.make("min" if at else "max", x, limit)
            else:
                outside = c.e.make("lt", *((limit, x) if at else (x, limit)))
                x = c.e.make("where", outside, limit, x)
    return x


def _extreme(c: _AtenCall) -> Node:
    return c.e.make(c.name[:3], c.node("self"), c.node("other"))


_MOST_FACTORS = 64  # of a power that is a product


def _product(e: Expressions, x: Node, count: int, one: Node) -> Node:
    """x to a power that is no negative number, by squares."""
    product = None
    while count:
        if count % 2:
            product = x if product is None else e.make("mul", product, x)
        count //= 2
        x = e.make("mul", x, x) if count else x
    return one if product is None else product


def _power(c: _AtenCall) -> Node:
    exponent, base = c.x["exponent"], c.x["self"]
    one = c.e.constant(1, c.type)
    if isinstance(exponent, int | float):
        x = c.node("self")
        if abs(exponent) == 0.5:
            return c.e.make("sqrt" if exponent > 0 else "rsqrt", x)
        if exponent == int(exponent) and -_MOST_FACTORS <= exponent <= _MOST_FACTORS:
            power = _product(c.e, x, abs(int(exponent)), one)
            if exponent >= 0:
                return power
            if c.type == FLOAT:
                return c.e.make("div", one, power)
    if base == 2 and not isinstance(base, bool | Node):
        x = c.node("exponent")
        if c.type == FLOAT:
            return c.e.make("exp2", x)
        zero = c.e.constant(0, INT)
        power = c.e.make("shl", one, c.e.make("max", x, zero))
        return c.e.make("where", c.e.make("lt", x, zero), zero, power)
    if c.type == INT:
        raise ValueError(f"an integer to the power {exponent}, cast it by .float()")
    return c.e.make("pow", c.node("self"), c.node("exponent"))


def _function(c: _AtenCall) -> Node:
    if c.type == INT:  # floor, ceil and trunc of an integer
        return c.node("self")
    return c.e.make(c.name, c.node("self", FLOAT))


def _composed(c: _AtenCall) -> Node:
    """Functions that are some operations."""
    e, x, one = c.e, c.node("self"), c.e.constant(1, c.type)
    zero = e.constant(0, c.type)
    match c.name:
        case "reciprocal":
            return e.make("div", one, x)
        case "tan":
            f = c.node("self", FLOAT)
            return e.make("div", e.make("sin", f), e.make("cos", f))
        case "square":
            return e.make("mul", x, x)
        case "relu":
            return e.make("where", e.make("lt", zero, x), x, zero)
        case "sign" | "sgn":
            negative = e.make("where", e.make("lt", x, zero), e.constant(-1, c.type), zero)
            return e.make("where", e.make("lt", zero, x), one, negative)
        case "silu":
            return e.make("mul", x, e.make("sigmoid", x))
        case "softplus":
            slope, limit = c.node("beta"), c.node("threshold")
            scaled = e.make("mul", x, slope)
            soft = e.make("div", e.make("log1p", e.make("exp", scaled)), slope)
            return e.make("where", e.make("lt", limit, scaled), x, soft)
        case "log10":
            return e.make("div", e.make("log", x), e.constant(math.log(10.0), FLOAT))
        case "isnan":
            f = c.node("self", FLOAT)
            return e.make("not", e.make("eq", f, f))
    raise ValueError(c.name)


def _inverse(c: _AtenCall) -> Node:
    """Inverses of the circular and hyperbolic functions."""
    e, x = c.e, c.node("self", FLOAT)
    one, half = e.constant(1.0, FLOAT), e.constant(0.5, FLOAT)
    more, less = e.make("add", one, x), e.make("sub", one, x)
    match c.name:
        case "atan":
            return angle_of(e, x, one)
        case "atan2":
            return angle_of(e, x, c.node("other", FLOAT))
        case "asin":
            return angle_of(e, x, e.make("sqrt", e.make("mul", more, less)))
        case "acos":
            return angle_of(e, e.make("sqrt", e.make("mul", more, less)), x)
        case "atanh":
            difference = e.make("sub", e.make("log1p", x), e.make("log1p", e.make("neg", x)))
            return e.make("mul", half, difference)
        case "acosh":
            root = e.make("sqrt", e.make("mul", more, e.make("sub", x, one)))
            return e.make("log", e.make("add", x, root))
    is_negative = e.make("lt", x, e.constant(0.0, FLOAT))  # asinh: digits of those would cancel
    size = e.make("where", is_negative, e.make("neg", x), x)
    square = e.make("mul", x, x)
    more = e.make("div", square, e.make("add", one, e.make("sqrt", e.make("add", square, one))))
    found = e.make("log1p", e.make("add", size, more))
    return e.make("where", is_negative, e.make("neg", found), found)


def _hyperbolic(c: _AtenCall) -> Node:
    e, x = c.e, c.node("self", FLOAT)
    of = "exp" if c.name == "cosh" else "expm1"
    both = e.make(of, x), e.make(of, e.make("neg", x))
    total = e.make("add" if c.name == "cosh" else "sub", *both)
    return e.make("mul", e.constant(0.5, FLOAT), total)


def _rounded(c: _AtenCall) -> Node:
    """To the nearest integer, of two the even one."""
    e, x = c.e, c.node("self")
    if c.type == INT:
        return x
    scale = e.constant(10.0 ** c.x.get("decimals", 0), FLOAT)
    x = e.make("mul", x, scale)
    half, one = e.constant(0.5, FLOAT), e.constant(1.0, FLOAT)
    down = e.make("floor", x)
    over = e.make("sub", x, down)
    halved = e.make("mul", down, half)
    is_odd = e.make("lt", e.make("floor", halved), halved)
    is_up = e.make("or", e.make("lt", half, over), e.make("and", e.make("eq", half, over), is_odd))
    return e.make("div", e.make("where", is_up, e.make("add", down, one), down), scale)


def _of_two(c: _AtenCall) -> Node:
    """Functions of two numbers that are some operations."""
    e, a, b = c.e, c.node("self"), c.node("other")
    if c.name in ("fmax", "fmin"):
        extreme = e.make(c.name[1:], a, b)
        if c.type == INT:
            return extreme
        extreme = e.make("where", e.make("eq", b, b), extreme, a)
        return e.make("where", e.make("eq", a, a), extreme, b)
    if c.name == "hypot":
        return e.make("sqrt", e.make("add", e.make("mul", a, a), e.make("mul", b, b)))
    apart = e.make("neg", e.make("abs", e.make("sub", a, b)))  # logaddexp
    larger = e.make("add", e.make("max", a, b), e.make("log1p", e.make("exp", apart)))
    middle = e.make("mul", e.constant(0.5, FLOAT), e.make("add", a, b))
    equal = e.make("add", middle, e.constant(math.log(2.0), FLOAT))
    return e.make("where", e.make("eq", a, b), equal, larger)


def _constant(c: _AtenCall) -> Node:
    number = {"zeros": 0, "ones": 1}.get(c.name.removeprefix("new_").removesuffix("_like"))
    if number is None:
        return c.node("fill_value" if "fill_value" in c.x else "s")
    return c.e.constant(number, c.type)


_SAME = frozenset("alias lift_fresh lift_fresh_copy positive".split())
_RESHAPED = frozenset("unsqueeze view _unsafe_view squeeze expand reshape".split())  # of a number
_RULES: dict[str, Callable[[_AtenCall], Node]] = (
    dict.fromkeys(("add", "sub", "mul", "rsub"), _arithmetic)
    | dict.fromkeys(("div", "true_divide", "floor_divide"), _division)
    | dict.fromkeys(("remainder", "fmod"), _remainder)
    | dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _comparison)
    | dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _logic)
    | dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), _logic)
    | dict.fromkeys(("__and__", "__or__", "__xor__"), _logic)
    | dict.fromkeys(("logical_not", "bitwise_not"), _not)
    | dict.fromkeys(
        ("__lshift__", "bitwise_left_shift", "__rshift__", "bitwise_right_shift"), _shift
    )
    | dict.fromkeys(("maximum", "minimum"), _extreme)
    | dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp)
    | dict.fromkeys(FLOAT_FUNCTIONS, _function)
    | {"detach": lambda c: _function(c) if c.type == FLOAT else c.node("self")}
    | dict.fromkeys(
        "reciprocal square relu sign sgn silu softplus isnan tan log10".split(), _composed
    )
    | dict.fromkeys("atan atan2 asin acos atanh acosh asinh".split(), _inverse)
    | dict.fromkeys(("sinh", "cosh"), _hyperbolic)
    | dict.fromkeys(("hypot", "fmax", "fmin", "logaddexp"), _of_two)
    | dict.fromkeys("zeros zeros_like new_zeros ones ones_like new_ones".split(), _constant)
    | dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _constant)
    | dict.fromkeys(("_to_copy", "to", "clone", "contiguous"), lambda c: c.node("self"))
    | dict.fromkeys(("neg", "abs"), lambda c: c.e.make(c.name, c.node("self")))
    | {"where": _where, "masked_fill": _masked_fill, "pow": _power, "round": _rounded}
)


def read(
    function: Callable, what: str, e: Expressions, device: torch.device, dtype: torch.dtype,
    tensors: list[Tensor], buffers: Sequence[Tensor] = (),
) -> Reading:  # fmt: skip
    """What a score_mod or mask_mod (`what`) computes of one score.

    `dtype` is that of the score. Tensors in `buffers` are given to it behind the indices. Those
    that it reads are added to `tensors`, to which the loads of the expression refer. A number that
    varies in a graph that is traced becomes such a tensor.

    Raises:
        NotImplementedError: it does what programs do not have.
        TypeError: its result is not of the right type.
    """
    session = _Session(_named(what, function), e, device, tensors)
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisableFuncTorch())
        arguments = [_StandIn(e.argument(n), session, torch.int32) for n in INDICES]
        if what == "score_mod":
            arguments.insert(0, _StandIn(e.argument("score"), session, dtype))
        arguments += [session.stand_in(t) for t in buffers]
        _check_parameters(function, arguments, what, session)
        with session:
            result = function(*arguments)
            session.where = _line_of(function)
            if isinstance(result, bool) and what == "mask_mod":
                result = torch.tensor(result)
        if not isinstance(result, Tensor):
            kind = type(result).__name__
            session.refuse(f"must return a tensor of one number, got a {kind}", TypeError)
        result = session.stand_in(result)
    known = names_of_tensors(function) | {id(t): f"buffers[{i}]" for i, t in enumerate(buffers)}
    e.tensor_names |= {i: known[id(t)] for i, t in enumerate(tensors) if id(t) in known}
    for i, x in enumerate(tensors):
        if isinstance(x, SymInt | SymFloat):
            tensors[i] = torch.scalar_tensor(x, dtype=_dtype_of(x), device=device)
    root = result.content
    if isinstance(root, _Part):
        shape = tuple(result.shape)
        session.refuse(f"must return one number, got a tensor of shape {shape}", TypeError)
    if what == "mask_mod" and root.type != BOOL:
        session.refuse(f"must return a bool, got {root.type}: compare it with 0", TypeError)
    if what == "score_mod":
        root = e.cast(root, FLOAT)
    return Reading(root, frozenset(i for i, t in enumerate(tensors) if id(t) in session.made))


def _named(what: str, function: Callable) -> str:
    return f"{what} {getattr(function, '__qualname__', type(function).__name__)!r}"


def name_of(what: str, function: Callable) -> str:
    """A function as errors name it: with its file and line."""
    return _named(what, function) + _line_of(function)


def _check_parameters(function: Callable, arguments: list, what: str, session: _Session) -> None:
    """Raise TypeError unless a function can be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin function
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        session.where = _line_of(function)
        names = ["score"] * (what == "score_mod") + ["b", "h", "q_idx", "kv_idx"]
        names += ["*buffers"] * (len(arguments) > len(names))
        session.refuse(f"must take ({', '.join(names)}): {error}", TypeError)
