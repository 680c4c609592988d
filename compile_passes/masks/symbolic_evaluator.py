"""Symbolic evaluation of masks: one element as an expression of its coordinates, and its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import SymFloat, SymInt, Tensor

from compile_passes.ir.axes import Axis, Dims, Size, is_nonnegative, is_one, sizes_equal
from compile_passes.ir.constants import constant_value, guarded_constant
from compile_passes.ir.graph import Value, is_tensor, only_inserts_dims, permutation, source
from compile_passes.masks.affine import (
    ZERO,
    AbsoluteValue,
    Affine,
    Coordinates,
    Element,
    Exactness,
    Opaque,
    Quotient,
    all_of,
    any_of,
    as_number,
    at_most,
    choose,
    combine,
    compare,
    convert,
    is_condition,
    literal,
    negate,
    reads_tensors,
)

# Rules for symbolic evaluation: the element of a result in terms of the elements of its inputs, or
# None where it cannot be expressed.


def broadcast_coordinates(x: Value, at: Coordinates) -> Coordinates:
    """The coordinates in x that are broadcast to those in a result."""
    trailing = at[len(at) - len(x.shape) :]
    return tuple(ZERO if is_one(n) else c for n, c in zip(x.shape, trailing, strict=True))


def _arange(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    args = value.args
    bounds = args.get("bounds", ())
    if len(bounds) > 1 or "end" in args:  # a single one is the end
        args = dict(zip(("start", "end", "step"), bounds)) | args
    first, step = evaluator.element(args.get("start", 0), ()), args.get("step", 1)
    if not isinstance(first, Affine) or type(step) is not int:
        return None
    return evaluator.convert(first.plus(at[0].times(step)), value.dtype)


def _reshape(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """Views that only insert or remove dimensions of size 1."""
    x = source(value)
    kept = [(n, c) for n, c in zip(value.shape, at, strict=True) if not is_one(n)]
    sizes = [n for n in x.shape if not is_one(n)]
    if len(kept) != len(sizes) or not all(sizes_equal(n, m) for (n, _), m in zip(kept, sizes)):
        return None
    rest = iter([c for _, c in kept])
    return evaluator.element(x, tuple(ZERO if is_one(n) else next(rest) for n in x.shape))


def _permute(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    order = permutation(value)
    if order is None:
        return None
    at = tuple(at[order.index(i)] for i in range(len(order)))
    return evaluator.element(source(value), at)


def _expand(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    return None if value.writes else evaluator.argument(value, "input", at)


def _repeat(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """Repetition along new dimensions or dimensions of size 1."""
    shape = source(value).shape
    pairs = zip(shape, value.shape[len(value.shape) - len(shape) :], strict=True)
    expands = all(is_one(n) or sizes_equal(n, m) for n, m in pairs)
    return _expand(evaluator, value, at) if expands else None


def _cast(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    return evaluator.convert(evaluator.argument(value, "input", at), value.dtype)


def _getitem(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    if only_inserts_dims(value):
        return _reshape(evaluator, value, at)
    x, index = source(value), value.args["index"]
    index = index if isinstance(index, tuple) else (index,)
    if x is None:
        return None
    if all(map(is_tensor, index)):
        return _gather(evaluator, x, index, at)
    if Ellipsis in [i for i in index if not isinstance(i, Value)]:
        cut = [i is Ellipsis for i in index].index(True)
        fill = len(x.shape) - sum(i is not None and i is not Ellipsis for i in index)
        index = (*index[:cut], *[slice(None)] * fill, *index[cut + 1 :])
    rest, result = iter(at), []
    for i in index:
        if i is None:
            next(rest)
            continue
        sliced = isinstance(i, slice)
        first = _position(i.start if sliced else i, x.shape[len(result)])
        if first is None or (sliced and i.step not in (None, 1)):
            return None
        result.append(next(rest).plus(first) if sliced else first)
    return evaluator.element(x, (*result, *rest))


def _position(index: object, n: Size) -> Affine | None:
    """The position of an index in n elements, of which a negative one counts from the end; None
    where its sign is not known or it lies before the first element.
    """
    i = index.tensor if isinstance(index, Value) else 0 if index is None else index
    if isinstance(i, bool) or not isinstance(i, (int, SymInt)):
        return None
    if is_nonnegative(i):
        return Affine.from_size(i)
    if is_nonnegative(-1 - i) and is_nonnegative(n + i):
        return Affine.from_size(n).plus(Affine.from_size(i))
    return None


def _narrow(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    x, dim, start = (value.args.get(name) for name in ("input", "dim", "start"))
    first = _position(start, x.shape[dim]) if type(dim) is int else None
    if first is None:
        return None
    moved = list(at)
    moved[dim] = at[dim].plus(first)
    return evaluator.element(x, tuple(moved))


def _gather(
    evaluator: SymbolicEvaluator, x: Value, index: Sequence[Value], at: Coordinates
) -> Element | None:
    """x[tensor, tensor, ...] with integer tensors, which broadcast against each other."""
    if any(i.dtype.is_floating_point or i.dtype in (torch.bool, torch.uint8) for i in index):
        return None  # bool and uint8 are masks
    rank = max(len(i.shape) for i in index)
    found = [evaluator.element(i, broadcast_coordinates(i, at[:rank])) for i in index]
    lows = [f.bound(False) if isinstance(f, Affine) else None for f in found]
    if not all(low is not None and low.is_nonnegative for low in lows):
        return None  # a negative index counts from the end
    return evaluator.element(x, (*found, *at[rank:]))


def _arithmetic(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """Addition, subtraction and multiplication."""
    if constant_value(value.args.get("alpha", 1)) != 1:
        return None
    if value.dtype == torch.bool:
        a, b = (evaluator.argument(value, name, at) for name in ("input", "other"))
        return {"add": any_of, "mul": all_of}[value.op](a, b) if value.op != "sub" else None
    a, b = (evaluator.operand(value, name, at, value.dtype) for name in ("input", "other"))
    return evaluator.convert(combine(value.op, a, b), value.dtype)


def _neg(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    negative = combine("sub", ZERO, evaluator.operand(value, "input", at, value.dtype))
    return evaluator.convert(negative, value.dtype)


def _abs(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    x = evaluator.argument(value, "input", at)
    return evaluator.convert(AbsoluteValue(x), value.dtype) if isinstance(x, Affine) else None


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
    """A comparison, in the dtype to which both sides are promoted."""
    dtype = _promoted(value.args.get("input"), value.args.get("other"))
    if dtype is None:
        return None
    if dtype == torch.bool:  # compared as 0 and 1
        dtype = torch.int64
    a, b = (evaluator.operand(value, name, at, dtype, False) for name in ("input", "other"))
    return None if a is None or b is None else compare(value.op, a, b)


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
    a, b = (evaluator.convert(x, torch.bool) for x in (a, b))
    if a is None or b is None:
        return None
    return (all_of if value.op == "and" else any_of)(a, b)


def _not(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    x = evaluator.convert(evaluator.argument(value, "input", at), torch.bool)
    return negate(x) if value.dtype == torch.bool and x is not None else None


def _where(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    condition = evaluator.argument(value, "condition", at)
    yes, no = (evaluator.operand(value, name, at, value.dtype) for name in ("input", "other"))
    return _choice(value, condition, yes, no)


def _masked_fill(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    mask = evaluator.argument(value, "mask", at)
    fill = guarded_constant(value.args.get("value"))
    yes = evaluator.argument(value, "value", at) if fill is None else literal(fill)
    no = evaluator.argument(value, "input", at)
    return _choice(value, mask, *(evaluator.convert(x, value.dtype) for x in (yes, no)))


def _choice(value: Value, condition: Element, yes: Element | None, no: Element | None):
    if not is_condition(condition) or yes is None or no is None:
        return None
    if value.dtype != torch.bool:
        return choose(condition, yes, no)
    if yes is True or no is True:
        return any_of(condition, no) if yes is True else any_of(negate(condition), yes)
    return any_of(all_of(condition, yes), all_of(negate(condition), no))


def _triangle(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    diagonal = evaluator.element(value.args.get("diagonal", 0), ())
    if not isinstance(diagonal, Affine):
        return None
    distance = at[-1].plus(at[-2], -1).plus(diagonal, -1)
    inside = at_most(distance if value.op == "tril" else ZERO.plus(distance, -1))
    x = evaluator.argument(value, "input", at)
    return all_of(inside, x) if value.dtype == torch.bool else choose(inside, x, ZERO)


def _pad(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """A number around a tensor whose elements are known."""
    x, widths, fill = (value.args.get(name) for name in ("input", "pad", "value"))
    mode = value.args.get("mode")
    known = isinstance(widths, (tuple, list)) and all(type(n) is int and n >= 0 for n in widths)
    fill = constant_value(0.0 if fill is None else fill)
    if not known or mode not in (None, "constant") or fill is None or len(widths) > 2 * len(at):
        return None
    moved, conditions = list(at), []
    for dim, before in enumerate(widths[::2], 1):
        moved[-dim] = at[-dim].plus(Affine.from_size(before), -1)
        last = Affine.from_size(x.shape[-dim]).plus(Affine.from_size(1), -1)
        conditions += [at_most(ZERO.plus(moved[-dim], -1)), at_most(moved[-dim].plus(last, -1))]
    inside = evaluator.element(x, tuple(moved))
    if reads_tensors(inside):
        return None  # it would be read beyond its ends
    outside = evaluator.convert(literal(fill), value.dtype)
    return _choice(value, all_of(*conditions), inside, outside)


def _diff(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """First differences along the last dimension, with one element prepended."""
    x, first = value.args.get("input"), value.args.get("prepend")
    first_order = value.args.get("n", 1) == 1 and value.args.get("append") is None
    if not first_order or value.args.get("dim", -1) not in (-1, len(value.shape) - 1):
        return None
    if not isinstance(first, Value) or not is_one(first.shape[-1]):
        return None
    before = (*at[:-1], at[-1].plus(Affine.from_size(1), -1))
    start = (*at[:-1], ZERO)
    steps = combine("sub", evaluator.element(x, at), evaluator.element(x, before))
    opening = combine("sub", evaluator.element(x, start), evaluator.element(first, start))
    steps, opening = (evaluator.convert(x, value.dtype) for x in (steps, opening))
    return steps if steps is not None and steps == opening else None


def _cumsum(evaluator: SymbolicEvaluator, value: Value, at: Coordinates) -> Element | None:
    """A cumulative sum of zeros."""
    dim = value.args.get("dim")
    if type(dim) is not int:
        return None
    anywhere = list(at)
    anywhere[dim] = Affine.variable(Axis(value.shape[dim], "any"))
    x = evaluator.argument(value, "input", tuple(anywhere))
    return ZERO if x is False or x == ZERO else None


RULES: dict[str, Callable[[SymbolicEvaluator, Value, Coordinates], Element | None]] = {
    "arange": _arange,
    "reshape": _reshape,
    "permute": _permute,
    "repeat": _repeat,
    "cast": _cast,
    "getitem": _getitem,
    "narrow": _narrow,
    "neg": _neg,
    "abs": _abs,
    "not": _not,
    "where": _where,
    "masked_fill": _masked_fill,
    "diff": _diff,
    "cumsum": _cumsum,
    "pad": _pad,
    **dict.fromkeys(("expand", "copy"), _expand),
    **dict.fromkeys(("add", "sub", "mul"), _arithmetic),
    **dict.fromkeys(("div", "floordiv"), _quotient),
    **dict.fromkeys(("and", "or"), _logic),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("eq", "ne", "le", "lt", "ge", "gt"), _comparison),
}


def coordinates(dims: Dims) -> Coordinates | None:
    """Coordinates in terms of axes; None where a merged dimension has a symbolic stride."""
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
    """Evaluates elements, memoised because masks have common parts.

    An element is the number that the tensor holds, in its own dtype: where an operation could round
    an integer or wrap it around, the element is an opaque read of the tensor.
    """

    def __init__(self, exactness: Exactness) -> None:
        self._exactness = exactness
        self._known: dict[tuple, Element] = {}
        self._inexact: dict[Value, torch.dtype] = {}

    def element(self, value: object, at: Coordinates) -> Element:
        """The element of a tensor at some coordinates, or a scalar."""
        constant = constant_value(value)
        if constant is not None:
            known = literal(constant)
            return self.convert(known, value.dtype) if is_tensor(value) else known
        if is_tensor(value):
            key = (value, at)
            if key not in self._known:
                self._known[key] = self._evaluate(value, at)
            return self._known[key]
        scalar = value.tensor if isinstance(value, Value) else value
        if isinstance(scalar, SymInt):
            return Affine.from_size(scalar)
        return Opaque(value if isinstance(value, Value) else repr(value), at)

    def _evaluate(self, value: Value, at: Coordinates) -> Element:
        rule, before = RULES.get(value.op), len(self._exactness.refused)
        found = rule(self, value, at) if rule else None
        if found is not None:
            return found
        if len(self._exactness.refused) > before:
            self._inexact[value] = self._exactness.refused[before]
        opaque = Opaque(value, at)
        integer = not value.dtype.is_floating_point and value.dtype != torch.bool
        return Affine.variable(opaque) if integer else opaque

    def inexact_dtype(self, value: object) -> torch.dtype | None:
        """The dtype in which a part of a mask may be rounded or wrap around, if any."""
        if not isinstance(value, Value):
            return None
        if value in self._inexact:
            return self._inexact[value]
        found = (self.inexact_dtype(x) for x in value.args.values())
        return next((dtype for dtype in found if dtype is not None), None)

    def argument(self, value: Value, name: str, at: Coordinates) -> Element:
        """The element of an operand that is broadcast to the result's element at `at`."""
        x = value.args.get(name)
        return self.element(x, broadcast_coordinates(x, at) if is_tensor(x) else ())

    def operand(
        self, value: Value, name: str, at: Coordinates, dtype: torch.dtype, rounds: bool = True
    ) -> Element | None:
        """An argument as an operation that computes in `dtype` reads it. Beside 16-bit tensors a
        number stays in float32; how other numbers are rounded depends on the device.
        """
        x, given = self.argument(value, name, at), value.args.get(name)
        tensor = is_tensor(given)
        if not tensor and rounds and dtype in (torch.float16, torch.bfloat16):
            return self.convert(x, torch.float32)
        result = self.convert(x, dtype)
        before, after = as_number(x), as_number(result)
        may_round = (rounds and not tensor) or (tensor and given.shape)
        return result if may_round or before is None or before == after else None

    def convert(self, x: Element | None, dtype: torch.dtype) -> Element | None:
        """x in another dtype; None where it may not be exact."""
        return convert(x, dtype, self._exactness)
