"""What is known of the elements of a tensor: all are one number, 0 or 1, or bounded."""

from __future__ import annotations

import math

import torch

from compile_passes.ir.axes import sizes_equal
from compile_passes.ir.graph import Value, is_tensor, same_contents
from compile_passes.ir.vocabulary import LAYOUT

FILLS = dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0.0)
FILLS |= dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0)
_UNARY = {
    "neg": lambda x: -x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "exp": math.exp,
    "log": math.log,
}
_BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
}


def constant_value(x: object, depth: int = 8) -> float | int | bool | None:
    """The number that every element of x is, as its dtype stores it; None if it is not known."""
    if isinstance(x, (bool, int, float)):
        return x
    if not isinstance(x, Value) or depth == 0:
        return None
    if not is_tensor(x):
        return _scalar(x.tensor)
    try:
        return stored_value(_compute(x, depth - 1), x.dtype)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def guarded_constant(x: object) -> float | int | bool | None:
    """As `constant_value`, but a symbolic float becomes its current number, with a guard: dropout
    probabilities, mask fills and scales of masks rarely change.
    """
    known = constant_value(x)
    if known is None and isinstance(x, Value) and x.op in ("tensor", "scalar_tensor"):
        return guarded_constant(x.args.get("data"))
    if known is None and isinstance(x, Value) and isinstance(x.tensor, torch.SymFloat):
        return float(x.tensor) if x.tensor.node.has_hint() else None
    return known


def _scalar(x: object) -> float | int | bool | None:
    """A number, or a symbol that tracing has fixed to one."""
    if isinstance(x, (torch.SymInt, torch.SymFloat)) and x.node.expr.is_number:
        return int(x.node.expr) if isinstance(x, torch.SymInt) else float(x.node.expr)
    return x if isinstance(x, (bool, int, float)) else None


def _compute(x: Value, depth: int) -> float | int | bool | None:
    if x.op == "fill":
        return constant_value(x.args.get("other", x.args.get("value")), depth)
    if x.writes:
        return None
    if x.op in FILLS:
        return FILLS[x.op]
    if x.op in ("full", "full_like", "new_full"):
        return constant_value(x.args.get("fill_value"), depth)
    if x.op in ("tensor", "scalar_tensor"):
        data = x.args.get("data")
        return data if isinstance(data, (bool, int, float)) else None
    if x.op in LAYOUT:
        return constant_value(x.args.get("input"), depth)
    if x.op in _UNARY and len(x.args) == 1:
        value = constant_value(x.args.get("input"), depth)
        return None if value is None else _UNARY[x.op](value)
    if x.op in _BINARY and set(x.args) == {"input", "other"}:
        a, b = (constant_value(x.args[name], depth) for name in ("input", "other"))
        return None if a is None or b is None else _BINARY[x.op](a, b)
    return None


def stored_value(value: float | None, dtype: torch.dtype) -> float | int | bool | None:
    """The number that a tensor of this dtype holds once `value` is written to it."""
    if value is None or dtype.is_complex:
        return None
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return int(value) if limits.min <= value <= limits.max else None
    nearest = round_to(value, dtype)
    return nearest if nearest is None or math.isinf(nearest) else float(value)


_MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def round_to(value: float, dtype: torch.dtype) -> float | None:
    """The nearest number of a floating point dtype; as in torch, 16-bit dtypes round twice."""
    if dtype not in _MANTISSA_BITS:
        return None
    limit = torch.finfo(dtype).max
    if abs(value) >= 2 * limit:
        return math.copysign(math.inf, value)
    wide = dtype in (torch.float64, torch.float32)
    value = float(value) if wide else round_to(value, torch.float32)
    if not math.isfinite(value) or value == 0 or dtype == torch.float64:
        return value
    exponent = max(math.frexp(value)[1], math.frexp(torch.finfo(dtype).tiny)[1])
    step = math.ldexp(1.0, exponent - _MANTISSA_BITS[dtype])
    nearest = round(value / step) * step
    return math.copysign(math.inf, value) if abs(nearest) > limit else nearest


# The elements of the result are elements of the input.
_MOVES = LAYOUT | set("repeat repeat_interleave index_select gather tril triu flip".split())
# The result is bounded if all tensor arguments are.
_OF_BOUNDED = frozenset("cumsum arange cat stack zeros ones zeros_like ones_like".split())
_BOUNDED = frozenset("tanh sigmoid sin cos".split())  # whatever their input is
# The same, but numbers among the arguments become elements too.
_NUMERIC = frozenset(
    "add sub mul neg abs clamp minimum maximum where masked_fill pad full tensor "
    "scalar_tensor".split()
)
# Layers of a network, whose results are not used as masks.
_ACTIVATIONS = frozenset("linear matmul einsum embedding layer_norm conv1d conv2d".split())


def is_bounded(x: object, limit: float, depth: int = 24) -> bool:
    """Whether a tensor is no mask: it is made of outputs of layers, parameters that require grad,
    and constants below the limit, and contains no integers of unknown size.
    """
    if isinstance(x, (tuple, list)):
        return all(is_bounded(y, limit, depth) for y in x)
    if not is_tensor(x):
        x = x.tensor if isinstance(x, Value) else x
        if isinstance(x, torch.SymFloat):
            x = x.node.hint if x.node.has_hint() else math.inf
        return not isinstance(x, float) or abs(x) < limit
    if depth == 0 or x.dtype == torch.bool:
        return depth != 0
    if not x.dtype.is_floating_point and torch.iinfo(x.dtype).max < limit:
        return True
    if x.node.op in ("placeholder", "get_attr"):
        return x.tensor.requires_grad and isinstance(x.tensor, torch.nn.Parameter)
    if x.op in _ACTIVATIONS or (x.op in _BOUNDED and not x.writes):
        return True
    if x.op in _MOVES:
        return not x.writes and is_bounded(x.args.get("input"), limit, depth - 1)
    if x.op in _NUMERIC and not all(abs(y) < limit for y in x.args.values() if type(y) is int):
        return False
    if x.op == "div":
        known = constant_value(x.args.get("other"))
        near = known and abs(known) * limit > 1
        return bool(near) and _all_args_bounded(x, limit, depth)
    return x.op in _OF_BOUNDED | _NUMERIC and not x.writes and _all_args_bounded(x, limit, depth)


def _all_args_bounded(x: Value, limit: float, depth: int) -> bool:
    return all(is_bounded(y, limit, depth - 1) for y in x.args.values())


# Masks written as arithmetic with tensors of 0 and 1: scores * b + c * (1 - b).


def is_zero_or_one(x: object, depth: int = 12) -> bool:
    """Whether every element of a tensor is provably 0 or 1."""
    if not is_tensor(x) or depth == 0 or x.dtype.is_complex:
        return constant_value(x) in (0, 1)
    if x.dtype == torch.bool or constant_value(x) in (0, 1):
        return True
    if x.writes:
        return False
    given = x.args.get("input")
    if x.op in (*LAYOUT, "tril", "triu"):
        return is_tensor(given) and is_zero_or_one(given, depth - 1)
    other = x.args.get("other")
    if x.op == "sub" and constant_value(x.args.get("alpha", 1)) == 1:
        return constant_value(given) == 1 and is_zero_or_one(other, depth - 1)
    if x.op in ("mul", "where"):
        return is_zero_or_one(given, depth - 1) and is_zero_or_one(other, depth - 1)
    return False


def number_beside_zeros(x: object, factor: Value) -> float | None:
    """The number c if x = c * (1 - factor), which is added to scores that were multiplied by the
    factor; None if it is something else.
    """
    if not is_tensor(x) or len(x.shape) != len(factor.shape):
        return None
    if not all(sizes_equal(m, n) for m, n in zip(x.shape, factor.shape, strict=True)):
        return None
    line = _line(x, factor)
    return line[0] if line and line[0] + line[1] == 0 else None


def _line(x: object, b: object, depth: int = 8) -> tuple[float, float] | None:
    """(c, d) if x = c + d * b with numbers c and d."""
    if depth == 0:
        return None
    known = guarded_constant(x)
    if known is not None:
        return float(known), 0.0
    if not is_tensor(x):
        return None
    if same_contents(x, b):
        return 0.0, 1.0
    if x.writes or constant_value(x.args.get("alpha", 1)) != 1:
        return None
    if x.op in ("cast", "copy"):
        return _line(x.args.get("input"), b, depth - 1)
    if x.op == "neg":
        line = _line(x.args.get("input"), b, depth - 1)
        return line and (-line[0], -line[1])
    if x.op not in ("add", "sub", "mul"):
        return None
    lines = [_line(x.args.get(name), b, depth - 1) for name in ("input", "other")]
    if None in lines:
        return None
    (c, d), (e, f) = lines
    if x.op == "mul":
        return (c * e, c * f + d * e) if 0.0 in (d, f) else None
    return (c + e, d + f) if x.op == "add" else (c - e, d - f)
