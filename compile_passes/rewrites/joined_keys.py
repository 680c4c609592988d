"""One softmax over two sets of keys, each with its own values, as the attention over each set: with
the log-sum-exp of its scores, each has the share sigmoid(lse - other lse) of the result.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from compile_passes.ir.axes import is_one, sizes_equal
from compile_passes.ir.edits import NodeInserter
from compile_passes.ir.graph import example
from compile_passes.ir.vocabulary import bind, operation
from compile_passes.rewrites.rewritten_nodes import RewrittenNodes, attempt, replace
from compile_passes.rewrites.weight_sums import is_product_of, with_operand, with_rows

_BETWEEN = ("cast", "copy", "dropout")  # operations on single weights


class JoinedKeys(NamedTuple):
    """Two tensors of scores, the operations on their concatenation (biases, then the softmax), and
    the products of the two parts of the weights with values, which are added.
    """

    scores: list[fx.Node]
    joined: fx.Node
    chain: list[fx.Node]
    parts: list[fx.Node]
    products: list[fx.Node]
    total: fx.Node


def split_joined_keys(graph: fx.Graph) -> list[RewrittenNodes]:
    """Write every softmax over two sets of keys as one over each."""
    concatenations = [node for node in graph.nodes if operation(node)[0] == "cat"]
    found = (attempt(_joined_and_split, node) for node in concatenations)
    return [made for made in found if made is not None]


def _joined_and_split(node: fx.Node) -> RewrittenNodes | None:
    joined = _joined_keys(node)
    return None if joined is None else _split(joined)


def _joined_keys(node: fx.Node) -> JoinedKeys | None:
    given = bind(node, "tensors dim")
    scores, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(scores, (tuple, list)) or len(scores) != 2 or not _is_tensor(node):
        return None
    rank = example(node).dim()
    if dim not in (-1, rank - 1) or any(is_one(example(x).shape[-1]) for x in scores):
        return None
    chain = _chain(node, rank)
    parts = _parts(chain[-1], scores, rank) if chain else None
    if not parts or any(len(part.users) != 1 for part in parts):
        return None
    products = [next(iter(part.users)) for part in parts]
    totals = {user for product in products for user in product.users}
    if not all(map(is_product_of, products, parts)) or len(totals) != 1 or len({*products}) != 2:
        return None
    (total,) = totals
    is_sum = operation(total)[0] == "add" and not total.kwargs and not operation(total)[2]
    both = set(total.args) == set(products)
    return JoinedKeys(scores, node, chain, parts, products, total) if is_sum and both else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(example(node), Tensor)


def _chain(node: fx.Node, rank: int) -> list[fx.Node]:
    """The operations between the joined scores and the parts of the weights; [] if unknown."""
    chain: list[fx.Node] = []
    softmaxes = 0
    while len(node.users) == 1:
        (user,) = node.users
        name, parameters, writes = operation(user)
        if name == "softmax" and bind(user, parameters).get("dim") in (-1, rank - 1):
            softmaxes += 1
        elif name not in _BETWEEN and not (_is_bias(user, node) and not softmaxes):
            break
        if writes or user.args[:1] != (node,):
            return []
        chain.append(user)
        node = user
    return chain if softmaxes == 1 else []


def _is_bias(user: fx.Node, node: fx.Node) -> bool:
    """Whether a tensor of as many keys is added to the scores."""
    x = user.args[1] if operation(user)[0] == "add" and len(user.args) == 2 else None
    keys = example(node).shape[-1]
    bias = isinstance(x, fx.Node) and isinstance(example(x), Tensor) and not user.kwargs
    return bias and example(x).dim() > 0 and sizes_equal(example(x).shape[-1], keys)


def _parts(weights: fx.Node, scores: list[fx.Node], rank: int) -> list[fx.Node] | None:
    """The slices of the weights that belong to each set of keys; None if there are others."""
    first = example(scores[0]).shape[-1]
    found: dict[int, fx.Node] = {}
    for user in weights.users:
        index = user.args[1] if operation(user)[0] == "getitem" else None
        index = index if isinstance(index, tuple) else (index,)
        last = index[-1]
        whole = all(i is Ellipsis or i == slice(None) for i in index[:-1])
        full = Ellipsis in index[:-1] or len(index) == rank
        if not isinstance(last, slice) or last.step not in (None, 1) or not (whole and full):
            return None
        start, stop = (_size(x) for x in (last.start, last.stop))
        if start in (None, 0) and _equal(stop, first):
            found[0] = user
        elif _equal(start, first) and (stop is None or _equal(stop, example(weights).shape[-1])):
            found[1] = user
    return [found[0], found[1]] if len(found) == len(weights.users) == 2 else None


def _size(x: object) -> object:
    return example(x) if isinstance(x, fx.Node) else x


def _equal(a: object, b: object) -> bool:
    return isinstance(a, (int, torch.SymInt)) and sizes_equal(a, b)


def _split(joined: JoinedKeys) -> RewrittenNodes:
    inserter = NodeInserter(joined.total.graph, joined.total)
    softmaxes, products, lses = [], [], []
    for index, part in enumerate(joined.parts):
        node = scores = joined.scores[index]
        for step in joined.chain:
            if operation(step)[0] == "softmax":
                scores = node
            node = _again(inserter, step, step.args[0], node, part)
            if operation(step)[0] == "softmax":
                softmaxes.append(node)
        products.append(with_operand(inserter, joined.products[index], part, node))
        lses.append(scores)
    lses = [inserter.method("logsumexp", scores, -1) for scores in lses]
    first = inserter.method("sigmoid", inserter.function(operator.sub, *lses))
    shares = first, inserter.function(operator.sub, 1.0, first)
    outs = [
        with_rows(inserter, operator.mul, product, like, share)
        for product, like, share in zip(products, joined.products, shares, strict=True)
    ]
    out = inserter.function(operator.add, *outs)
    removed = [joined.joined, *joined.chain, *joined.parts, *joined.products, joined.total]
    return replace(out, inserter, removed, softmaxes)


def _again(
    inserter: NodeInserter, node: fx.Node, old: fx.Node, new: fx.Node, part: fx.Node
) -> fx.Node:
    """An operation of the chain on one part of the keys, which the slice `part` selects."""
    if operation(node)[0] == "add":
        bias = inserter.function(operator.getitem, node.args[1], (Ellipsis, part.args[1][-1]))
        return inserter.function(operator.add, new, bias)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: new if n is old else n)
    insert = inserter.method if node.op == "call_method" else inserter.function
    return insert(node.target, *args, **kwargs)
