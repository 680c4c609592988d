"""Symbolic evaluation of masks: one element of a tensor as an expression of its coordinates."""

from __future__ import annotations

import torch
from torch import SymInt

from compile_passes.graph.axes import Dims
from compile_passes.graph.constants import constant_value
from compile_passes.graph.ir import Value, is_tensor
from compile_passes.masks.affine import Affine, Coordinates, Element, Opaque
from compile_passes.masks.arithmetic import ZERO, as_number, convert, literal
from compile_passes.masks.exactness import Exactness
from compile_passes.masks.symbolic_rules import RULES, broadcast_coordinates


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
