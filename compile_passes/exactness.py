"""Which integers a dtype holds exactly, and whether an expression stays among them whatever the
symbolic sizes turn out to be.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx
from torch._dynamo.source import TensorPropertySource
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from compile_passes.expressions import Affine
from compile_passes.ir import example, meta_key

LARGEST_SIZE = 2**48  # of a tensor's dimension: no memory holds more
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def exact_range(dtype: torch.dtype) -> tuple[int, int] | None:
    """The least and the greatest of the consecutive integers that a dtype holds exactly."""
    if dtype in _FLOATS:
        limit = round(2 / torch.finfo(dtype).eps)
        return -limit, limit
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


class Exactness:
    """Proves that an affine expression is exact in a dtype, by interval arithmetic over the sizes.

    Where a size has no known upper bound and the graph is Dynamo's, the sizes at hand decide, and a
    guard recompiles for larger ones. An exported program has no guards: there only a proof counts.
    """

    def __init__(self, graph: fx.Graph) -> None:
        modes = (getattr(example(node), "fake_mode", None) for node in graph.nodes)
        self._env = next((m.shape_env for m in modes if m is not None and m.shape_env), None)
        self._may_guard = meta_key(graph) == "example_value"
        self._known: dict[tuple[sympy.Expr, int], bool] = {}
        self.failures: set[str] = set()

    def holds(self, a: Affine, dtype: torch.dtype) -> bool:
        limits, low, high = exact_range(dtype), a.bound(False), a.bound(True)
        if limits is None or low is None or high is None:
            return False
        return self._at_most(high, limits[1]) and self._at_most(-low, -limits[0])

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
        unbounded = all(self._env.var_to_range[s].upper == int_oo for s in expr.free_symbols)
        return unbounded and self._may_guard and self._guarded(expr, limit)

    def _range(self, symbol: sympy.Symbol) -> ValueRanges:
        known = self._env.var_to_range.get(symbol, ValueRanges.unknown_int())
        sources = self._env.var_to_sources.get(symbol, ())
        if any(isinstance(source, TensorPropertySource) for source in sources):
            known = known & ValueRanges(0, LARGEST_SIZE)
        return known

    def _guarded(self, expr: sympy.Expr, limit: int) -> bool:
        """A range that the user or another guard has set is not narrowed: torch would raise for a
        dimension that was marked dynamic within it.
        """
        size = self._env.create_symintnode(expr, hint=None)
        return size.node.has_hint() and size.node.hint <= limit and guard_or_false(size <= limit)
