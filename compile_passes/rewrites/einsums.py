"""Einsums: their forms, and those of several operands as products of two, so that a product of
query and key, or of weights and value, is one node. Projections inside an einsum become products
before or after it, and masks and gates become elementwise products.
"""

from __future__ import annotations

import itertools
import math
import operator
import string
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from compile_passes.ir.graph import NodeInserter, example, restride
from compile_passes.ir.vocabulary import bind, operation
from compile_passes.rewrites.edit_log import Edit, EditLog

Labels = tuple[str, ...]
_PRODUCTS = ("matmul", "einsum", "linear", "baddbmm", "addbmm", "addmm", "inner", "tensordot")
_EXPONENTIALS = ("softmax", "softmin", "log_softmax", "exp", "exp2", "pow")
MAX_OPERANDS = 6
_SYMBOLIC = 64  # stands for a symbolic size where the sizes of intermediate results are compared


class Einsum(NamedTuple):
    """An einsum: a label for each dimension of each operand, and those of the result. The labels of
    an ellipsis are ..., ".1", ".0".
    """

    operands: tuple
    terms: tuple[Labels, ...]
    out: Labels


def parsed(
    equation: object, operands: Sequence, rank: Callable[[object], int | None]
) -> Einsum | None:
    """The einsum of an equation, with or without its right side, or of operands each followed by a
    list of numbers; None if it is none. `rank` of what is no tensor is None.
    """
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return _of_lists((equation, *operands), rank)
    left, arrow, out = equation.replace(" ", "").partition("->")
    return _of_terms(operands, left.split(","), out if arrow else None, rank)


def _of_lists(given: tuple, rank: Callable) -> Einsum | None:
    """The form with lists of numbers, whose letters have the same order."""
    operands, lists = given[:-1:2], given[1::2]
    result = given[-1] if len(given) % 2 else None
    lists = [*lists, result] if result is not None else list(lists)
    if len(given) % 2 == 0:
        operands = given[::2]
    known = all(isinstance(x, (tuple, list)) for x in lists)
    names = string.ascii_uppercase + string.ascii_lowercase
    terms = []
    for numbers in lists if known else ():
        if any(x is not Ellipsis and type(x) is not int for x in numbers):
            return None
        terms.append("".join("..." if x is Ellipsis else names[x] for x in numbers))
    out = terms.pop() if result is not None and terms else None
    return _of_terms(operands, terms, out, rank) if known else None


def _of_terms(
    operands: Sequence, terms: list[str], out: str | None, rank: Callable
) -> Einsum | None:
    ranks = [rank(x) for x in operands]
    if None in ranks or len(terms) != len(operands):
        return None
    labels = [letters(t, n) for t, n in zip(terms, ranks, strict=True)]
    if any(len(x) != n for x, n in zip(labels, ranks, strict=True)):
        return None
    dots = max(sum(x.startswith(".") for x in term) for term in labels)
    if out is None:
        every = "".join(terms).replace(".", "")
        out = "..." * (dots > 0) + "".join(sorted(x for x in set(every) if every.count(x) == 1))
    return Einsum(tuple(operands), tuple(labels), letters(out, len(out.replace("...", "")) + dots))


def letters(term: str, rank: int) -> Labels:
    """One label for each dimension; those of an ellipsis are ..., ".1", ".0"."""
    if "..." not in term:
        return tuple(term)
    before, after = term.split("...")
    dots = rank - len(before) - len(after)
    return (*before, *(f".{i}" for i in reversed(range(dots))), *after)


def split_einsums(log: EditLog) -> None:
    """Write einsums of several operands, or in other forms, as einsums of two with an equation."""
    for node in log.graph.nodes:
        if operation(node)[0] == "einsum":
            log.attempt(_rewritten, node)


def _rewritten(log: EditLog, node: fx.Node) -> Edit | None:
    name, parameters, writes = operation(node)
    given = bind(node, parameters)
    if writes or given.keys() != {"equation", "operands"}:
        return None
    e = parsed(given["equation"], given["operands"], _rank)
    if e is None or not 2 <= len(e.operands) <= MAX_OPERANDS or not _is_simple(e):
        return None
    edit = log.edit(node)
    weights = next((i for i, x in enumerate(e.operands) if _holds_exponentials(x)), None)
    writer = _Writer(edit, e)
    if weights is not None:
        out = writer.value_product(weights)
    elif len(e.operands) == 2:
        out = None if isinstance(given["equation"], str) and "->" in given["equation"] else "plain"
        out = out and writer.product(*writer.tensors, e.out)
    else:
        out = writer.score_product()
    if out is None or out.node in e.operands or (len(edit.nodes) == 1 and _is_same(node, out)):
        edit.undo()
        return None
    return edit.replace(restride(edit, out.node, node), [node])


def _rank(x: object) -> int | None:
    tensor = example(x) if isinstance(x, fx.Node) else None
    return tensor.dim() if isinstance(tensor, Tensor) else None


def _is_simple(e: Einsum) -> bool:
    """Whether no operand's diagonal is taken, and no sum runs over one operand alone."""
    counts = [x for term in e.terms for x in set(term)]
    alone = any(counts.count(x) == 1 and x not in e.out for x in counts)
    return not alone and all(len(set(term)) == len(term) for term in e.terms)


def _is_same(node: fx.Node, out: _Labelled) -> bool:
    """Whether an einsum of two operands was written as itself."""
    made = out.node
    return operation(made)[0] == "einsum" and made.args[1:] == node.args[1:]


def _holds_exponentials(node: fx.Node, depth: int = 12) -> bool:
    """Whether a node is computed from a softmax or exponential without a product in between."""
    name = operation(node)[0]
    if name in _EXPONENTIALS or depth == 0 or name in _PRODUCTS:
        return name in _EXPONENTIALS
    return any(_holds_exponentials(x, depth - 1) for x in node.all_input_nodes)


class _Labelled(NamedTuple):
    node: fx.Node
    labels: Labels


class _Writer:
    """Inserts the products that an einsum consists of."""

    def __init__(self, inserter: NodeInserter, e: Einsum) -> None:
        self.inserter, self.out = inserter, e.out
        self.tensors = [_Labelled(*x) for x in zip(e.operands, e.terms, strict=True)]
        names = dict.fromkeys(x for term in (*e.terms, e.out) for x in term)
        self._letter = dict(zip(names, string.ascii_letters, strict=False))

    def product(self, a: _Labelled, b: _Labelled, out: Labels) -> _Labelled:
        """The einsum of two operands."""
        terms = ("".join(self._letter[x] for x in labels) for labels in (a.labels, b.labels, out))
        equation = "{},{}->{}".format(*terms)
        return _Labelled(self.inserter.function(torch.einsum, equation, a.node, b.node), out)

    def elementwise(self, a: _Labelled, b: _Labelled) -> _Labelled:
        """The product of tensors, of which b has no labels that a lacks."""
        kept = [x for x in a.labels if x in b.labels]
        order = [b.labels.index(x) for x in kept]
        node = b.node
        if order != sorted(order):
            node = self.inserter.method("permute", node, *order)
        for dim, x in enumerate(a.labels):
            if x not in kept:
                node = self.inserter.method("unsqueeze", node, dim)
        return _Labelled(self.inserter.function(operator.mul, a.node, node), a.labels)

    def contracted(self, group: Sequence[_Labelled], keep: Iterable[str]) -> _Labelled | None:
        """The product of a group, with the labels that it keeps; None for an outer product."""
        keep, made = set(keep), group[0]
        for i, x in enumerate(group[1:], 1):
            if set(made.labels).isdisjoint(x.labels):
                return None
            needed = keep.union(*(y.labels for y in group[i + 1 :]))
            every = dict.fromkeys((*made.labels, *x.labels))
            made = self.product(made, x, tuple(y for y in every if y in needed))
        return made

    def value_product(self, index: int) -> _Labelled | None:
        """Weights times masks and gates, then with the value, then with what has no key."""
        weights = self.tensors[index]
        others = [x for i, x in enumerate(self.tensors) if i != index]
        gates = [x for x in others if set(x.labels) <= set(weights.labels)]
        others = [x for x in others if x not in gates]
        for gate in gates:
            weights = self.elementwise(weights, gate)
        if not others:
            order = [weights.labels.index(x) for x in self.out if x in weights.labels]
            if len(order) != len(weights.labels):
                return None
            if order == sorted(order):
                return weights
            return _Labelled(self.inserter.method("permute", weights.node, *order), self.out)
        summed = [x for x in weights.labels if x not in self.out]
        shared = [x for x in summed if any(x in y.labels for y in others)]
        if not shared:
            return None
        key = weights.labels[-1] if weights.labels[-1] in shared else shared[-1]
        rest = [x for x in others if key not in x.labels]
        needed = {*weights.labels, *self.out}.union(*(x.labels for x in rest))
        value = self.contracted([x for x in others if key in x.labels], needed)
        features = [x for x in value.labels if x not in weights.labels] if value else []
        later = {label for x in rest for label in x.labels}
        if value is None or (len(features) > 1 and not later.isdisjoint(features)):
            return None  # heads that are mixed later: each would have the values of all
        every = dict.fromkeys((*weights.labels, *value.labels))
        kept = tuple(x for x in every if x != key)
        if not rest and set(kept) == set(self.out):
            return self.product(weights, value, self.out)
        made = self.product(weights, value, kept)
        if not rest:  # the heads are summed over too
            equation = "->".join("".join(self._letter[x] for x in y) for y in (kept, self.out))
            return _Labelled(self.inserter.function(torch.einsum, equation, made.node), self.out)
        made = self.contracted([made, *rest[:-1]], {*self.out, *rest[-1].labels})
        return made and self.product(made, rest[-1], self.out)

    def score_product(self) -> _Labelled | None:
        """The product of a query and a key, each perhaps a product, times masks and factors."""
        factors = [x for x in self.tensors if set(x.labels) <= set(self.out)]
        others = [x for x in self.tensors if x not in factors]
        covered = {label for x in others for label in x.labels}
        pairs = list(self._pairs(others)) if covered.issuperset(self.out) else []
        for a, b in sorted(pairs, key=self._cost):
            inside = [{label for x in group for label in x.labels} for group in (a, b)]
            first = self.contracted(a, {*self.out, *inside[1]})
            second = self.contracted(b, {*self.out, *inside[0]}) if first else None
            if second is None:
                self.inserter.undo()
                continue
            made = self.product(first, second, self.out)
            for factor in factors:
                made = self.elementwise(made, factor)
            return made
        return None

    def _pairs(self, tensors: list[_Labelled]) -> Iterable[tuple[list, list]]:
        """The ways to divide tensors among query and key: both have dimensions of the result that
        the other lacks, and a sum in common.
        """
        for chosen in itertools.product((True, False), repeat=max(len(tensors) - 1, 0)):
            sides = (True, *chosen)
            pairs = list(zip(tensors, sides, strict=True))
            a, b = ([x for x, first in pairs if first is side] for side in (True, False))
            of_a, of_b = ({label for x in group for label in x.labels} for group in (a, b))
            out = set(self.out)
            if b and (of_a & of_b) - out and (of_a - of_b) & out and (of_b - of_a) & out:
                yield a, b

    def _cost(self, pair: tuple[list[_Labelled], list[_Labelled]]) -> int:
        """The number of elements of query and key, where these have to be computed."""
        total = 0
        for group, other in (pair, pair[::-1]):
            needed = set(self.out).union(*(x.labels for x in other))
            sizes = {
                label: n if type(n) is int else _SYMBOLIC
                for x in group
                for label, n in zip(x.labels, example(x.node).shape, strict=True)
                if label in needed
            }
            total += math.prod(sizes.values()) if len(group) > 1 else 0
        return total
