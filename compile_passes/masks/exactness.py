"""Proofs that integer expressions are exact in a dtype, whatever the symbolic sizes are."""

from __future__ import annotations

import sympy
import torch
from torch import fx
from torch._dynamo.source import TensorPropertySource
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from compile_passes.graph.axes import Axis
from compile_passes.graph.ir import example, meta_key
from compile_passes.masks.affine import Affine

MAX_SIZE = 2**48  # of a dimension: no memory holds a larger tensor
UNBOUNDED = 2**62  # a range with a higher upper limit is torch's default, not declared
MAX_OFFSET = 2**61  # assumed limit of a tensor's integer that is added to a position
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def exact_range(dtype: torch.dtype) -> tuple[int, int] | None:
    """The lowest and highest of the consecutive integers that a dtype represents exactly."""
    if dtype in _FLOATS:
        limit = round(2 / torch.finfo(dtype).eps)
        return -limit, limit
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


class Exactness:
    """Proves that an affine expression is exact in a dtype, by interval arithmetic over the sizes.

    A position plus a tensor's integer is assumed not to overflow int64, which torch leaves
    undefined. Where a size has no known upper bound, in Dynamo's graphs its current value decides
    and a guard recompiles for larger ones; exported programs have no guards and need a proof.
    """

    def __init__(self, graph: fx.Graph) -> None:
        modes = (getattr(example(node), "fake_mode", None) for node in graph.nodes)
        self._env = next((m.shape_env for m in modes if m is not None and m.shape_env), None)
        self._may_guard = meta_key(graph) == "example_value"
        self._declared = dict(self._env.var_to_range) if self._env else {}
        self._known: dict[tuple[sympy.Expr, int], bool] = {}
        self.refused: list[torch.dtype] = []

    def is_exact(self, a: Affine, dtype: torch.dtype) -> bool:
        """Whether the dtype holds every value of the expression; a failure adds to `refused`."""
        positions = dtype == torch.int64 and any(isinstance(x, Axis) for x, _ in a.terms)
        magnitude = MAX_OFFSET if positions else 2**64
        limits, low, high = exact_range(dtype), a.bound(False, magnitude), a.bound(True, magnitude)
        known = limits is not None and low is not None and high is not None
        if known and self._at_most(high, limits[1]) and self._at_most(-low, -limits[0]):
            return True
        self.refused.append(dtype)
        return False

    def _at_most(self, expr: sympy.Expr, limit: int) -> bool:
        if expr.is_number:
            return bool(expr <= limit)
        if (expr, limit) not in self._known:
            self._known[expr, limit] = self._env is not None and self._proved(expr, limit)
        return self._known[expr, limit]

    def _proved(self, expr: sympy.Expr, limit: int) -> bool:
        ranges = {s: self._range(s) for s in expr.free_symbols}
        if bound_sympy(expr, ranges).upper <= limit:
            return True
        return all(map(self._may_narrow, expr.free_symbols)) and self._guarded(expr, limit)

    def _range(self, symbol: sympy.Symbol) -> ValueRanges:
        """The range of a symbol; the size of a tensor is limited by memory."""
        fits = ValueRanges(0, MAX_SIZE) if self._is_size(symbol) else ValueRanges.unknown_int()
        return self._env.var_to_range.get(symbol, ValueRanges.unknown_int()) & fits

    def _is_size(self, symbol: sympy.Symbol) -> bool:
        sources = self._env.var_to_sources.get(symbol, ())
        return any(isinstance(source, TensorPropertySource) for source in sources)

    def _may_narrow(self, symbol: sympy.Symbol) -> bool:
        """Whether a guard may narrow the range: torch raises if the user has declared it."""
        known = self._declared.get(symbol)
        unbounded = known is not None and known.upper >= UNBOUNDED
        return self._may_guard and (unbounded or not self._is_size(symbol))

    def _guarded(self, expr: sympy.Expr, limit: int) -> bool:
        size = self._env.create_symintnode(expr, hint=None)
        return size.node.has_hint() and size.node.hint <= limit and guard_or_false(size <= limit)
