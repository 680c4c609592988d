"""Attention weights that are divided by their sum over the keys, as in ConViT:
(w / sum(w)) @ v = (w @ v) / sum(w). A softmax sums to 1, so that no weights are read for it.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from compile_passes.graph.axes import is_one, sizes_equal
from compile_passes.graph.inserter import NodeInserter
from compile_passes.graph.ir import example
from compile_passes.graph.rewritten_nodes import RewrittenNodes, attempt, replace
from compile_passes.graph.vocabulary import bind, operation
from compile_passes.graph.weight_sums import (
    is_product_of,
    softmaxes_of,
    with_operand,
    with_rows,
)

# Operations whose result is a new tensor, so that a division in place changes no other.
_NEW_TENSORS = ("softmax", "add", "sub", "mul", "div")


def divide_products(graph: fx.Graph) -> list[RewrittenNodes]:
    """Write all divisions of weights by their sum as divisions of the product with a value."""
    divisions = [node for node in graph.nodes if operation(node)[0] == "div"]
    found = (attempt(_divided_later, node) for node in divisions)
    return [made for made in found if made is not None]


def _divided_later(division: fx.Node) -> RewrittenNodes | None:
    _, parameters, writes = operation(division)
    given = bind(division, parameters)
    weights = given.get("input")
    if given.keys() != {"input", "other"} or not softmaxes_of(weights):
        return None
    if writes and (operation(weights)[0] not in _NEW_TENSORS or operation(weights)[2]):
        return None
    found = _sum_over_keys(given["other"], weights)
    if found is None or set(weights.users) != {found[0][0], division}:
        return None
    nodes, added = found
    chain = _until_product(division)
    inserter = NodeInserter(division.graph, chain[-1] if chain else division)
    total = _total(inserter, weights)
    if isinstance(total, float) and total + added:
        inserter.undo()
        inserter = NodeInserter(division.graph, division)
        out = inserter.function(operator.mul, weights, 1.0 / (total + added))
        return replace(out, inserter, [*nodes, division], softmaxes_of(weights))
    if not isinstance(total, fx.Node) or not chain:
        inserter.undo()
        return None
    total = inserter.function(operator.add, total, added) if added else total
    made = weights
    for before, node in zip([division, *chain], chain, strict=False):
        if not _is_off(node):
            made = with_operand(inserter, node, before, made)
    rows = _without_keys(inserter, total, example(weights).dim())
    out = with_rows(inserter, operator.truediv, made, chain[-1], rows)
    return replace(out, inserter, [*nodes, division, *chain], softmaxes_of(weights))


def _sum_over_keys(node: object, weights: fx.Node) -> tuple[list[fx.Node], float] | None:
    """(nodes, the number that they add) of the sum of weights over the keys, which are kept as a
    dimension of size 1; None if a node is anything else.
    """
    if not _is_float(node) or operation(node)[2]:
        return None
    name, parameters, _ = operation(node)
    given = bind(node, parameters)
    if name == "sum":
        is_sum = _is_over_keys(given, weights) and given.keys() <= {"input", "dim", "keepdim"}
        return ([node], 0.0) if is_sum else None
    found = _sum_over_keys(given.get("input"), weights)
    if found is None or len(found[0][-1].users) != 1:
        return None
    nodes, added = found
    if name == "add":
        number = given.get("other")
        known = type(number) in (int, float) and given.keys() == {"input", "other"}
        return ([*nodes, node], added + number) if known else None
    inserts = name == "reshape" or (name == "getitem" and len(node.all_input_nodes) == 1)
    return ([*nodes, node], added) if inserts and _has_rows_of(node, weights) else None


def _is_float(node: object) -> bool:
    x = example(node) if isinstance(node, fx.Node) else None
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_over_keys(given: dict[str, object], weights: fx.Node) -> bool:
    """Whether a sum or softmax is one of the weights over their last dimension."""
    dim, rank = given.get("dim"), example(weights).dim()
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return given.get("input") is weights and type(dim) is int and dim % rank == rank - 1


def _has_rows_of(node: fx.Node, weights: fx.Node) -> bool:
    """Whether a tensor has the shape of the weights with one key."""
    shape, of_weights = example(node).shape, example(weights).shape
    if len(shape) != len(of_weights) or not is_one(shape[-1]):
        return False
    return all(map(sizes_equal, shape[:-1], of_weights[:-1]))


def _until_product(node: fx.Node) -> list[fx.Node]:
    """The only readers of weights, one after the other, up to a product with a value; [] if there
    are others.
    """
    chain: list[fx.Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if is_product_of(user, node):
            return [*chain, user]
        if operation(user)[2] or operation(user)[0] not in ("cast", "copy", "dropout"):
            return []
        if user.args[:1] != (node,):
            return []
        chain.append(user)
        node = user
    return []


_FUNCTIONS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


def _total(inserter: NodeInserter, weights: fx.Node) -> fx.Node | float | None:
    """The sum over the keys of weights, of which those of softmaxes are not read; None if they
    would have to be.
    """
    name, parameters, writes = operation(weights)
    given = bind(weights, parameters)
    x, y = given.get("input"), given.get("other")
    if writes:
        return None
    if name == "softmax":
        return 1.0 if _is_over_keys({**given, "input": weights}, weights) else None
    if not softmaxes_of(weights):
        return inserter.method("sum", weights, -1, True)
    if name in ("cast", "copy") or _is_off(weights):
        return _total(inserter, x)
    if name not in _FUNCTIONS or given.keys() != {"input", "other"}:
        return None
    terms = [_term(inserter, z, weights, name in ("add", "sub")) for z in (x, y)]
    if None in terms or (name == "div" and softmaxes_of(y)):
        return None
    if all(isinstance(z, float) for z in terms):
        return _FUNCTIONS[name](*terms)
    return inserter.function(_FUNCTIONS[name], *terms)


def _is_off(node: fx.Node) -> bool:
    """Whether a node is dropout that drops nothing."""
    name, parameters, _ = operation(node)
    given = bind(node, parameters)
    off = given.get("p", 0.5) == 0 or given.get("training", True) in (False, 0)
    return name == "dropout" and off


def _term(
    inserter: NodeInserter, x: object, weights: fx.Node, added: bool
) -> fx.Node | float | None:
    """The sum over the keys of an operand of weights, or itself if it is a factor of whole rows."""
    like = example(weights)
    if not isinstance(x, fx.Node):
        return None if added else float(x)
    if not _is_float(x):
        return None
    shape = example(x).shape
    if added or softmaxes_of(x):
        alike = len(shape) == like.dim() and all(map(sizes_equal, shape, like.shape))
        return _total(inserter, x) if alike else None
    return x if not shape or is_one(shape[-1]) else None


def _without_keys(inserter: NodeInserter, total: fx.Node, rank: int) -> fx.Node:
    """Sums with a dimension of one key as tensors without it, of all other dimensions."""
    for _ in range(rank - example(total).dim()):
        total = inserter.method("unsqueeze", total, 0)
    return inserter.method("squeeze", total, -1)
