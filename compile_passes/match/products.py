"""Products of two tensors as labelled contractions: matmul, bmm, mm, baddbmm, einsum."""

from __future__ import annotations

from typing import NamedTuple

from compile_passes.graph.axes import Size, is_one
from compile_passes.graph.ir import Value, is_tensor

Labels = tuple[str | None, ...]


class Contraction(NamedTuple):
    """out[out_labels] = a[a_labels] * b[b_labels], summed over the other labels. The label of a
    dimension of size 1 is None.
    """

    a: Value
    b: Value
    a_labels: Labels
    b_labels: Labels
    out_labels: Labels
    sizes: dict[str, Size]

    @property
    def summed(self) -> tuple[str, ...]:
        """The labels that are summed over."""
        shared = (x for x in self.a_labels if x is not None and x in self.b_labels)
        return tuple(x for x in shared if x not in self.out_labels)


def contraction(value: Value) -> Contraction | None:
    """The contraction that a node computes, or None."""
    if value.writes:
        return None
    if value.op == "matmul":
        return _matmul(value.args.get("input"), value.args.get("other"))
    if value.op == "baddbmm":
        return _matmul(value.args.get("batch1"), value.args.get("batch2"))
    if value.op == "einsum":
        return _einsum(value)
    return None


def _matmul(a: object, b: object) -> Contraction | None:
    if not (is_tensor(a) and is_tensor(b)) or len(a.shape) < 2 or len(b.shape) < 2:
        return None
    rank = max(len(a.shape), len(b.shape)) - 2
    batch = [f"batch{i}" for i in range(rank)]
    la = (*batch[rank - len(a.shape) + 2 :], "row", "inner")
    lb = (*batch[rank - len(b.shape) + 2 :], "inner", "column")
    return _checked(a, b, la, lb, (*batch, "row", "column"))


def _einsum(value: Value) -> Contraction | None:
    equation, operands = value.args.get("equation"), value.args.get("operands", ())
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(map(is_tensor, operands)):
        return None
    equation = equation.replace(" ", "")
    if "->" not in equation:
        return None
    left, out = equation.split("->")
    terms = left.split(",")
    if len(terms) != 2:
        return None
    la, lb = (_letters(t, len(x.shape), equation) for t, x in zip(terms, operands, strict=True))
    rank = max(sum(x.startswith(".") for x in labels) for labels in (la, lb))
    lo = _letters(out, len(out.replace("...", "")) + rank, equation)
    if len(set(la)) < len(la) or len(set(lb)) < len(lb):
        return None  # the diagonal of an operand
    return _checked(*operands, la, lb, lo)


def _letters(term: str, rank: int, equation: str) -> tuple[str, ...]:
    """One label for each dimension; those of an ellipsis are ..., ".1", ".0"."""
    if "..." not in term:
        return tuple(term)
    before, after = term.split("...")
    dots = rank - len(before) - len(after)
    return (*before, *(f".{i}" for i in reversed(range(dots))), *after)


def _checked(a: Value, b: Value, la: tuple, lb: tuple, lo: tuple) -> Contraction | None:
    if len(la) != len(a.shape) or len(lb) != len(b.shape):
        return None
    sizes: dict[str, Size] = {}
    for labels, x in ((la, a), (lb, b)):
        for label, n in zip(labels, x.shape, strict=True):
            if label not in sizes or is_one(sizes[label]):
                sizes[label] = n
    if any(label not in sizes for label in lo):
        return None
    alone = (set(la) ^ set(lb)) - set(lo)
    if any(not is_one(sizes[label]) for label in alone):
        return None  # summed over one operand only
    la = tuple(None if is_one(n) else x for x, n in zip(la, a.shape, strict=True))
    lb = tuple(None if is_one(n) else x for x, n in zip(lb, b.shape, strict=True))
    lo = tuple(None if is_one(sizes[x]) else x for x in lo)
    return Contraction(a, b, la, lb, lo, sizes)
