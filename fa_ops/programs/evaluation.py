"""Values of expressions, by operations of torch on tensors that broadcast, and differentiable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fa_ops.programs.expressions import (
    BOOL,
    COLUMN,
    DISTANCE,
    FLOAT,
    INT,
    ROW,
    TILE,
    Node,
    order,
)
from fa_ops.programs.program import ScoreProgram, padding_of_distances

_OPERATIONS: dict[str, Callable] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    "neg": torch.neg, "abs": torch.abs, "min": torch.minimum, "max": torch.maximum,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "mod": torch.remainder,
    "quot": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "rem": torch.fmod,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or, "bitxor": torch.bitwise_xor, "bitnot": torch.bitwise_not,
    "eq": torch.eq, "lt": torch.lt, "le": torch.le, "and": torch.logical_and,
    "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not,
    "where": torch.where, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log, "log2": torch.log2, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin,
    "cos": torch.cos, "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil,
    "trunc": torch.trunc, "detach": torch.detach,
}  # fmt: skip


def evaluate(
    roots: Sequence[Node], leaf: Callable[[Node, list[Tensor]], Tensor], dtype: torch.dtype,
    device: torch.device, integers: torch.dtype = torch.int64,
) -> list[Tensor]:  # fmt: skip
    """The values of expressions.

    `leaf(node, index)` gives arguments, terms, and elements of tensors at an index. Floats are of
    `dtype`.
    """
    dtypes = {FLOAT: dtype, INT: integers, BOOL: torch.bool}
    values: dict[Node, Tensor] = {}
    for node in order(*roots):
        args = [values[a] for a in node.args]
        if node.op == "const":
            value = torch.full((), node.value, dtype=dtypes[node.type], device=device)
        elif node.op in ("argument", "term", "load"):
            value = leaf(node, args)
        elif node.op in ("to_float", "to_int"):
            value = args[0].to(dtypes[node.type])
        else:
            value = _OPERATIONS[node.op](*args)
        values[node] = value
    return [values[root] for root in roots]


def integers_of(roots: Iterable[Node]) -> torch.dtype:
    """The dtype that holds the integers of expressions of indices below 2**29 and of terms."""
    wide = {"mul", "shl"}
    is_wide = any(n.type == INT and n.op in wide for n in order(*roots))
    return torch.int64 if is_wide else torch.int32


class Elements:
    """Some scores of a call, and the terms that belong to them.

    `arguments` are the score, where it is read, and the indices, as tensors that broadcast to the
    scores; `dtype` is that of floats. `terms` are
    views as of `ScoreProgram.views` with the same leading dimensions. `rows` and `columns` are the
    queries and keys, slices.
    """

    def __init__(
        self, program: ScoreProgram, arguments: dict[str, Tensor], terms: Sequence[Tensor],
        rows: slice, columns: slice, Sk: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.program, self.arguments, self.dtype = program, arguments, dtype
        self.terms, self.rows, self.columns, self.Sk = terms, rows, columns, Sk
        self._values: dict[int, Tensor] = {}

    def term(self, number: int) -> Tensor:
        """A term, broadcast to the scores."""
        if number not in self._values:
            self._values[number] = self._selected(number)
        return self._values[number]

    def distances(self) -> Tensor:
        """The place of each score's distance in terms of distances, int64 (queries, keys)."""
        q, k = (self.arguments[name] for name in ("q", "k"))
        return (q - k).long() + padding_of_distances(self.Sk)

    def _by_distance(self, x: Tensor) -> Tensor:
        """The elements of a term of distances, (..., queries, keys), which repeat on diagonals."""
        rows, columns = self.rows, self.columns
        count = columns.stop - columns.start
        if min(rows.stop - rows.start, count) < 1:
            return x[..., self.distances()]
        least = padding_of_distances(self.Sk) + rows.start - (columns.stop - 1)
        used = x.narrow(-1, least, rows.stop - rows.start + count - 1)
        return used.flip(-1).unfold(-1, count, 1).flip(-2)

    def _selected(self, number: int) -> Tensor:
        x, term = self.terms[number], self.program.terms[number]
        if term.domain == TILE:
            return x.unsqueeze(-1)
        if term.domain == ROW:
            return x[..., self.rows].unsqueeze(-1)
        if term.domain == COLUMN:
            return x[..., self.columns].unsqueeze(-2)
        if term.domain == DISTANCE:
            return self._by_distance(x)
        q, k = (self.arguments[name] for name in ("q", "k"))
        across = -(-self.Sk // term.block[1])
        return x[..., (q // term.block[0] * across + k // term.block[1]).long()]

    def evaluate(self, *roots: Node) -> list[Tensor]:
        """The values of expressions of these scores."""

        def leaf(node: Node, index: list[Tensor]) -> Tensor:
            return self.arguments[node.value] if node.op == "argument" else self.term(node.value)

        q = self.arguments["q"]
        return evaluate(roots, leaf, self.dtype, q.device, q.dtype)

    def summed(self, grads: Tensor, number: int) -> Tensor:
        """The sum of the gradients of the scores' elements of a term over each element of it.

        The last dimension has the rows, the columns or all elements of the term.
        """
        domain = self.program.terms[number].domain
        if domain == TILE:
            return grads.sum((-1, -2)).unsqueeze(-1)
        if domain == ROW:
            return grads.sum(-1)
        if domain == COLUMN:
            return grads.sum(-2)
        return by_diagonal(grads)


def by_diagonal(grads: Tensor) -> Tensor:
    """Sums over equal distances, from the last key of the first query on, in a fixed order."""
    rows, columns = grads.shape[-2:]
    padded = torch.nn.functional.pad(grads.flip(-1), (0, rows))
    skewed = padded.flatten(-2)[..., : rows * (rows + columns - 1)]
    return skewed.unflatten(-1, (rows, rows + columns - 1)).sum(-2)
