"""Reading a mask's element off the graph: `element(value, coordinates)` follows the operations that
masks are written with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import SymFloat, SymInt, Tensor

from compile_passes.graph import layout
from compile_passes.graph.axes import Axis, Dims, is_one, same
from compile_passes.graph.constants import number, specialised
from compile_passes.graph.ir import Value
from compile_passes.masks.affine import (
    Affine,
    Distance,
    Element,
    Opaque,
    Quotient,
    all_of,
    any_of,
    at_most,
    choose,
    negate,
)
from compile_passes.masks.arithmetic import (
    ONE,
    ZERO,
    as_number,
    combined,
    compared,
    converted,
    is_condition,
    plain,
)
from compile_passes.masks.exactness import Exactness

Coordinates = tuple[Affine, ...]
_HALVES = (torch.float16, torch.bfloat16)


def coordinates(dims: Dims) -> Coordinates | None:
    """A tensor's coordinates in terms of its axes; None where a merged dimension has a symbolic
    stride.
    """
    result = []
    for group in dims:
        at, stride = ZERO, 1
        for axis in reversed(group):
            if type(stride) is not int:
                return None
            at = at.plus(Affine.variable(axis).times(stride))
            stride = stride * axis.size
        result.append(at)
    return tuple(result)


class SymbolicEvaluator:
    """Memoises elements: masks share their parts.

    An element is what the tensor holds, in its own dtype: where an operation could round an integer
    or wrap it around, its result is an opaque read of the tensor that eager mode computes.
    """

    def __init__(self, exact: Exactness) -> None:
        self._exact = exact
        self._known: dict[tuple, Element] = {}
        self._inexact: dict[Value, torch.dtype] = {}

    def element(self, value: object, at: Coordinates) -> Element:
        constant = number(value)
        if constant is not None:
            known = plain(constant)
            return self.converted(known, value.dtype) if _tensor(value) else known
        if isinstance(value, SymInt):
            return Affine.of(value)
        if not isinstance(value, Value):
            return Opaque(repr(value), at)
        if not isinstance(value.tensor, Tensor):
            return (
                Affine.of(value.tensor) if isinstance(value.tensor, SymInt) else Opaque(value, at)
            )
        key = (value, at)
        if key not in self._known:
            handler, before = HANDLERS.get(value.op), len(self._exact.refused)
            found = handler(self, value, at) if handler else None
            if found is None and len(self._exact.refused) > before:
                self._inexact[value] = self._exact.refused[before]
            self._known[key] = _opaque(value, at) if found is None else found
        return self._known[key]

    def inexact(self, value: object) -> torch.dtype | None:
        """The dtype in which something that a mask is made of may be rounded or wrap around."""
        if not isinstance(value, Value):
            return None
        if value in self._inexact:
            return self._inexact[value]
        found = (self.inexact(x) for x in value.args.values())
        return next((dtype for dtype in found if dtype is not None), None)

    def argument(self, value: Value, name: str, at: Coordinates) -> Element:
        """An operand's element where the result's is at `at`: size-1 dimensions broadcast."""
        x = value.args.get(name)
        if _tensor(x):
            return self.element(x, broadcast(x, at))
        return self.element(x, ())

    def operand(
        self, value: Value, name: str, at: Coordinates, dtype: torch.dtype, rounds: bool = True
    ) -> Element | None:
        """An argument as an operation that computes in `dtype` reads it. A number beside 16-bit
        tensors stays in float32; what other numbers are rounded to depends on the device.
        """
        x, given = self.argument(value, name, at), value.args.get(name)
        tensor = _tensor(given)
        if not tensor and rounds and dtype in _HALVES:
            return self.converted(x, torch.float32)
        result = self.converted(x, dtype)
        before, after = as_number(x), as_number(result)
        may_round = (rounds and not tensor) or (tensor and given.shape)
        return result if may_round or before is None or before == after else None

    def converted(self, x: Element | None, dtype: torch.dtype) -> Element | None:
        return converted(x, dtype, self._exact)


def _tensor(x: object) -> bool:
    return isinstance(x, Value) and isinstance(x.tensor, Tensor)


def broadcast(x: Value, at: Coordinates) -> Coordinates:
    behind = at[len(at) - len(x.shape) :]
    return tuple(ZERO if is_one(n) else c for n, c in zip(x.shape, behind, strict=True))


def _opaque(value: Value, at: Coordinates) -> Element:
    read = Opaque(value, at)
    integer = not value.dtype.is_floating_point and value.dtype != torch.bool
    return Affine.variable(read) if integer else read


def _arange(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    args = value.args
    bounds = args.get("bounds", ())
    if len(bounds) > 1 or "end" in args:  # a single one is the end
        args = dict(zip(("start", "end", "step"), bounds)) | args
    first, step = evaluator.element(args.get("start", 0), ()), args.get("step", 1)
    if not isinstance(first, Affine) or type(step) is not int:
        return None
    return evaluator.converted(first.plus(at[0].times(step)), value.dtype)


def _reshape(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """Views that only insert or remove dimensions of size 1."""
    x = layout.source(value)
    kept = [(n, c) for n, c in zip(value.shape, at, strict=True) if not is_one(n)]
    sizes = [n for n in x.shape if not is_one(n)]
    if len(kept) != len(sizes) or not all(same(n, m) for (n, _), m in zip(kept, sizes)):
        return None
    rest = iter([c for _, c in kept])
    return evaluator.element(x, tuple(ZERO if is_one(n) else next(rest) for n in x.shape))


def _permute(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    order = layout.permutation(value)
    if order is None:
        return None
    return evaluator.element(
        layout.source(value), tuple(at[order.index(i)] for i in range(len(order)))
    )


def _expand(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    return None if value.writes else evaluator.argument(value, "input", at)


def _repeat(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """Repeated along dimensions that it lacks or has once."""
    shape = layout.source(value).shape
    pairs = zip(shape, value.shape[len(value.shape) - len(shape) :], strict=True)
    return _expand(evaluator, value, at) if all(is_one(n) or same(n, m) for n, m in pairs) else None


def _cast(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    return evaluator.converted(evaluator.argument(value, "input", at), value.dtype)


def _getitem(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    if layout.only_inserts(value):
        return _reshape(evaluator, value, at)
    x, index = layout.source(value), value.args["index"]
    index = index if isinstance(index, tuple) else (index,)
    if x is None:
        return None
    if all(isinstance(i, Value) and isinstance(i.tensor, Tensor) for i in index):
        return _gather(evaluator, x, index, at)
    if Ellipsis in [i for i in index if not isinstance(i, Value)]:
        cut = [i is Ellipsis for i in index].index(True)
        fill = len(x.shape) - sum(i is not None and i is not Ellipsis for i in index)
        index = (*index[:cut], *[slice(None)] * fill, *index[cut + 1 :])
    place, result = iter(at), []
    for i in index:
        if i is None:
            next(place)
        elif isinstance(i, slice) and i.step in (None, 1):
            start = 0 if i.start is None else i.start
            if type(start) is not int or start < 0:
                return None
            result.append(next(place).plus(Affine.of(start)))
        elif type(i) is int and i >= 0:
            result.append(Affine.of(i))
        else:
            return None
    return evaluator.element(x, (*result, *place))


def _gather(
    evaluator: SymbolicEvaluator, x: Value, index: Sequence[Value], at: Coordinates
) -> Element | None:
    """x[tensor, tensor, ...]: integer tensors that broadcast against each other."""
    if any(i.dtype.is_floating_point or i.dtype in (torch.bool, torch.uint8) for i in index):
        return None  # the last two are masks
    rank = max(len(i.shape) for i in index)
    found = [evaluator.element(i, broadcast(i, at[:rank])) for i in index]
    if not all(isinstance(f, Affine) and _nonnegative(f) for f in found):
        return None
    return evaluator.element(x, (*found, *at[rank:]))


def _nonnegative(a: Affine) -> bool:
    """A negative index would count from the end."""
    lowest = a.bound(False)
    return lowest is not None and bool(lowest.is_nonnegative)


def _add(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    if number(value.args.get("alpha", 1)) != 1:
        return None
    if value.dtype == torch.bool:
        a, b = (evaluator.argument(value, name, at) for name in ("input", "other"))
        return any_of(a, b) if value.op == "add" else None
    return _arithmetic(evaluator, value, at)


def _mul(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    if value.dtype == torch.bool:
        return all_of(*(evaluator.argument(value, name, at) for name in ("input", "other")))
    return _arithmetic(evaluator, value, at)


def _arithmetic(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    a, b = (evaluator.operand(value, name, at, value.dtype) for name in ("input", "other"))
    return evaluator.converted(combined(value.op, a, b), value.dtype)


def _neg(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    negative = combined("sub", ZERO, evaluator.operand(value, "input", at, value.dtype))
    return evaluator.converted(negative, value.dtype)


def _abs(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    x = evaluator.argument(value, "input", at)
    return evaluator.converted(Distance(x), value.dtype) if isinstance(x, Affine) else None


def _quotient(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """Division rounded down."""
    if value.op == "div" and value.args.get("rounding_mode") != "floor":
        return None
    a, n = (evaluator.operand(value, name, at, value.dtype, False) for name in ("input", "other"))
    n = as_number(n)
    if not isinstance(a, Affine) or type(n) is not int or n < 1:
        return None
    return a if n == 1 else Affine.variable(Quotient(a, n))


def _comparison(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """In the dtype that both sides are promoted to."""
    dtype = _promoted(value.args.get("input"), value.args.get("other"))
    if dtype is None:
        return None
    if dtype == torch.bool:  # ordered as 0 and 1
        dtype = torch.int64
    a, b = (evaluator.operand(value, name, at, dtype, False) for name in ("input", "other"))
    return None if a is None or b is None else compared(value.op, a, b)


def _promoted(a: object, b: object) -> torch.dtype | None:
    examples = [_example(x) for x in (a, b)]
    known = all(isinstance(x, (Tensor, bool, int, float)) for x in examples)
    return torch.result_type(*examples) if known else None


def _example(x: object) -> object:
    x = x.tensor if isinstance(x, Value) else x
    return 0 if isinstance(x, SymInt) else 0.0 if isinstance(x, SymFloat) else x


def _logic(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    a, b = (evaluator.argument(value, name, at) for name in ("input", "other"))
    if value.dtype != torch.bool:
        return None
    a, b = (evaluator.converted(x, torch.bool) for x in (a, b))
    if a is None or b is None:
        return None
    return (all_of if value.op == "and" else any_of)(a, b)


def _not(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    x = evaluator.converted(evaluator.argument(value, "input", at), torch.bool)
    return negate(x) if value.dtype == torch.bool and x is not None else None


def _where(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    condition = evaluator.argument(value, "condition", at)
    yes, no = (evaluator.operand(value, name, at, value.dtype) for name in ("input", "other"))
    return _choice(value, condition, yes, no)


def _masked_fill(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    mask = evaluator.argument(value, "mask", at)
    fill = specialised(value.args.get("value"))
    yes = evaluator.argument(value, "value", at) if fill is None else plain(fill)
    no = evaluator.argument(value, "input", at)
    return _choice(value, mask, *(evaluator.converted(x, value.dtype) for x in (yes, no)))


def _choice(value: Value, condition: Element, yes: Element | None, no: Element | None):
    if not is_condition(condition) or yes is None or no is None:
        return None
    if value.dtype == torch.bool:
        return any_of(all_of(condition, yes), all_of(negate(condition), no))
    return choose(condition, yes, no)


def _triangle(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    diagonal = evaluator.element(value.args.get("diagonal", 0), ())
    if not isinstance(diagonal, Affine):
        return None
    distance = at[-1].plus(at[-2], -1).plus(diagonal, -1)
    inside = at_most(distance if value.op == "tril" else ZERO.plus(distance, -1))
    x = evaluator.argument(value, "input", at)
    return all_of(inside, x) if value.dtype == torch.bool else choose(inside, x, ZERO)


def _diff(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """First differences along the last dimension, with one element put in front."""
    x, first = value.args.get("input"), value.args.get("prepend")
    plain = value.args.get("n", 1) == 1 and value.args.get("append") is None
    if not plain or value.args.get("dim", -1) not in (-1, len(value.shape) - 1):
        return None
    if not isinstance(first, Value) or not is_one(first.shape[-1]):
        return None
    before = (*at[:-1], at[-1].plus(ONE, -1))
    start = (*at[:-1], ZERO)
    steps = combined("sub", evaluator.element(x, at), evaluator.element(x, before))
    opening = combined("sub", evaluator.element(x, start), evaluator.element(first, start))
    steps, opening = (evaluator.converted(x, value.dtype) for x in (steps, opening))
    return steps if steps is not None and steps == opening else None


def _cumsum(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """Sums of nothing but zeros."""
    dim = value.args.get("dim")
    if type(dim) is not int:
        return None
    anywhere = list(at)
    anywhere[dim] = Affine.variable(Axis(value.shape[dim], "any"))
    x = evaluator.argument(value, "input", tuple(anywhere))
    return ZERO if x is False or x == ZERO else None


HANDLERS: dict[str, Callable[[SymbolicEvaluator, Value, Coordinates], Element | None]] = {
    "arange": _arange,
    "reshape": _reshape,
    "permute": _permute,
    "expand": _expand,
    "repeat": _repeat,
    "copy": _expand,
    "cast": _cast,
    "getitem": _getitem,
    "add": _add,
    "sub": _add,
    "mul": _mul,
    "neg": _neg,
    "div": _quotient,
    "floordiv": _quotient,
    "abs": _abs,
    "and": _logic,
    "or": _logic,
    "not": _not,
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle,
    "triu": _triangle,
    "diff": _diff,
    "cumsum": _cumsum,
} | dict.fromkeys(("eq", "ne", "le", "lt", "ge", "gt"), _comparison)
