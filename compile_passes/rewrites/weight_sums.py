"""Sums and quotients of attention weights, and weights over two sets of keys, written so that each
softmax has a product with its value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_arg

from compile_passes.ir.axes import is_one, sizes_equal
from compile_passes.ir.graph import NodeInserter, example, restride
from compile_passes.ir.vocabulary import bind, operation
from compile_passes.rewrites.edit_log import Edit, EditLog

# Products of a sum of attention weights with a value, as in differential attention, written as the
# sum of the products: (a - c * b) @ v = a @ v - c * b @ v.

PRODUCTS = ("matmul", "einsum")
_FACTORS = ("mul", "div", "neg", "cast", "copy", "dropout")  # what weights pass through


def distribute_products(log: EditLog) -> None:
    """Write all products of sums of weights as sums of products."""
    pending = [node for node in log.graph.nodes if operation(node)[0] in PRODUCTS]
    while pending:
        edit = log.attempt(_distributed, pending.pop())
        if edit is not None:  # sums within sums follow
            pending += [node for node in edit.nodes if operation(node)[0] in PRODUCTS]


def _distributed(log: EditLog, product: fx.Node) -> Edit | None:
    """The sum of two products that replaces one, or None."""
    for total in product.all_input_nodes:
        terms = _terms(total)
        if not any(map(softmaxes_of, terms)) or list(total.users) != [product]:
            continue
        if product.all_input_nodes.count(total) > 1 or not _is_plain(product):
            continue
        edit = log.edit(product)
        parts = [with_operand(edit, product, total, term) for term in terms]
        return edit.replace(edit.function(_function_of(total), *parts), [total, product])
    return None


def _terms(total: fx.Node) -> list[fx.Node]:
    """The two terms of a sum or difference of tensors of one shape and dtype; [] if it is none."""
    name, parameters, writes = operation(total)
    if name not in ("add", "sub") or writes or total.kwargs:
        return []
    given = bind(total, parameters)
    terms = [given.get(x) for x in ("input", "other")]
    examples = [example(x) for x in (*terms, total) if isinstance(x, fx.Node)]
    if len(examples) < 3 or not all(isinstance(x, Tensor) for x in examples):
        return []
    a, b, out = examples
    return terms if are_alike(a, out) and are_alike(b, out) else []


def are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype and shape."""
    same = a.dtype == b.dtype and a.dim() == b.dim()
    return same and all(sizes_equal(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def _function_of(total: fx.Node) -> object:
    """The function that adds or subtracts as a node does."""
    return operator.add if operation(total)[0] == "add" else operator.sub


def softmaxes_of(node: object, depth: int = 8) -> set[fx.Node]:
    """The softmaxes whose weights a node holds, scaled, dropped or added."""
    if not isinstance(node, fx.Node) or depth == 0:
        return set()
    name, _, writes = operation(node)
    if name == "softmax":
        return {node}
    if writes or name not in (*_FACTORS, "add", "sub"):
        return set()
    inputs = node.all_input_nodes if name in ("mul", "add", "sub") else node.all_input_nodes[:1]
    return {softmax for x in inputs for softmax in softmaxes_of(x, depth - 1)}


def _is_plain(product: fx.Node) -> bool:
    """Whether a product writes nothing and has a tensor as result."""
    return not operation(product)[2] and isinstance(example(product), Tensor)


def with_operand(inserter: NodeInserter, product: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    """A product with another operand of the same shape and dtype in the place of `old`."""
    args, kwargs = map_arg((product.args, product.kwargs), lambda n: new if n is old else n)
    insert = inserter.method if product.op == "call_method" else inserter.function
    made = insert(product.target, *args, **kwargs)
    made.meta.update(product.meta)
    return made


def is_product_of(product: fx.Node, weights: fx.Node) -> bool:
    """Whether weights are multiplied with a value, the weights first."""
    name, _, writes = operation(product)
    given = product.args[1:] if name == "einsum" else product.args
    return name in PRODUCTS and not writes and not product.kwargs and given[:1] == (weights,)


def with_rows(
    inserter: NodeInserter, function: Callable, product: fx.Node, like: fx.Node, rows: fx.Node
) -> fx.Node:
    """A function (operator.mul, say) of a product of weights and a tensor that has the dimensions
    of the weights without the keys; `like` is the product as the model wrote it.
    """
    labels = _row_labels(like)
    if labels is not None:
        known, out = labels
        order = [known.index(x) for x in out if x in known]
        rows = inserter.method("permute", rows, order)
        for dim, label in enumerate(out):
            if label not in known:
                rows = inserter.method("unsqueeze", rows, dim)
    else:
        rows = inserter.method("unsqueeze", rows, -1)
    dtype = example(product).dtype
    if example(rows).dtype != dtype:
        rows = inserter.method("to", rows, dtype)
    return inserter.function(function, product, rows)


def _row_labels(product: fx.Node) -> tuple[str, str] | None:
    """(labels of the rows of weights, labels of the result) of an einsum."""
    if operation(product)[0] != "einsum":
        return None
    left, out = product.args[0].replace(" ", "").split("->")
    return left.split(",")[0][:-1], out


# Attention weights that are divided by their sum over the keys, as in ConViT: (w / sum(w)) @ v = (w
# @ v) / sum(w). A softmax sums to 1, so that no weights are read for it. Any other sum is one more
# feature of the product, whose values are ones. A softmax times a gate that is an exponential or a
# sigmoid is that of the scores plus the logarithm of the gate.

# Operations whose result is a new tensor, so that a division in place changes no other.
_NEW_TENSORS = ("softmax", "add", "sub", "mul", "div")


def divide_products(log: EditLog) -> None:
    """Write all divisions of weights by their sum as divisions of the product with a value."""
    for node in [node for node in log.graph.nodes if operation(node)[0] == "div"]:
        log.attempt(_divided_later, node)


def _divided_later(log: EditLog, division: fx.Node) -> Edit | None:
    _, parameters, writes = operation(division)
    given = bind(division, parameters)
    weights = given.get("input")
    if given.keys() != {"input", "other"} or not softmaxes_of(weights):
        return None
    if writes and (operation(weights)[0] not in _NEW_TENSORS or operation(weights)[2]):
        return None
    found = _sum_over_keys(given["other"], weights)
    if found is None or set(weights.users) != {found.nodes[0], division}:
        return None
    chain = _until_product(division)
    inserter = log.edit(chain[-1] if chain else division)
    total = _total(inserter, weights)
    if isinstance(total, float) and found.of(total):
        inserter.undo()
        inserter = log.edit(division)
        out = inserter.function(operator.mul, weights, 1.0 / found.of(total))
        return inserter.replace(out, [*found.nodes, division])
    if isinstance(total, fx.Node) and chain:
        rows = _without_keys(inserter, found.of(total, inserter), example(weights).dim())
        made = _undivided_product(inserter, weights, division, chain)
        out = with_rows(inserter, operator.truediv, made, chain[-1], rows)
        return inserter.replace(out, [*found.nodes, division, *chain])
    inserter.undo()
    if total is not None:
        return None
    by_logarithm = _by_logarithm(log, division, weights, found)
    return by_logarithm or _by_feature(log, division, weights, found, chain)


def _undivided_product(
    inserter: NodeInserter, weights: fx.Node, division: fx.Node, chain: list[fx.Node]
) -> fx.Node:
    """The product at the end of a chain, of the weights as they were before the division."""
    made = weights
    for before, node in zip([division, *chain], chain, strict=False):
        if not _is_off(node):
            made = with_operand(inserter, node, before, made)
    return made


def _by_feature(
    log: EditLog, division: fx.Node, weights: fx.Node, total: Total, chain: list[fx.Node]
) -> Edit | None:
    """(w / sum(w)) @ v, where the sum is that of the product with ones, a further feature of v.
    Weights that are dropped out after the division have another sum.
    """
    dropped = any(operation(x)[0] == "dropout" and not _is_off(x) for x in chain)
    where = _feature_dims(chain[-1]) if chain and not dropped else None
    if where is None:
        return None
    inserter, product = log.edit(chain[-1]), chain[-1]
    value = product.args[-1]
    one = inserter.function(operator.getitem, value, _at(value, where[0], slice(0, 1)))
    ones = inserter.function(torch.ones_like, one)
    value = inserter.function(torch.cat, [value, ones], where[0])
    made = _undivided_product(inserter, weights, division, chain[:-1])
    args = map_arg(product.args[:-1], lambda n: made)
    insert = inserter.method if product.op == "call_method" else inserter.function
    both = insert(product.target, *args, value)
    parts = (slice(None, -1), slice(-1, None))
    rows, sums = (inserter.function(operator.getitem, both, _at(both, where[1], x)) for x in parts)
    out = inserter.function(operator.truediv, rows, total.of(sums, inserter))
    out = restride(inserter, out, product)
    return inserter.replace(out, [*total.nodes, division, *chain])


def _feature_dims(product: fx.Node) -> tuple[int, int] | None:
    """The dimension of the features in the value and in the product of weights with it; None where
    there are none, or several.
    """
    x = product.args[-1]
    if operation(product)[0] == "matmul":
        return (-1, -1) if isinstance(x, fx.Node) and example(x).dim() > 1 else None
    left, _, out = product.args[0].replace(" ", "").partition("->")
    of_weights, _, of_value = left.partition(",")
    features = [label for label in of_value if label not in of_weights]
    if "." in left or len(features) != 1 or out.count(features[0]) != 1:
        return None
    return of_value.index(features[0]), out.index(features[0])


def _at(x: fx.Node, dim: int, index: slice) -> tuple:
    full = [slice(None)] * example(x).dim()
    full[dim] = index
    return tuple(full)


def _by_logarithm(log: EditLog, division: fx.Node, weights: fx.Node, total: Total) -> Edit | None:
    """softmax(s) * g / sum(softmax(s) * g) as softmax(s + log(g)), for positive gates g."""
    name, parameters, writes = operation(weights)
    given = bind(weights, parameters)
    factors = [given.get(x) for x in ("input", "other")]
    if name != "mul" or writes or (total.added, total.least) != (0.0, None):
        return None
    softmax, gate = factors if operation(factors[0])[0] == "softmax" else reversed(factors)
    if operation(softmax)[0] != "softmax" or list(softmax.users) != [weights]:
        return None
    scores = softmax.args[0] if softmax.args else None
    inserter = log.edit(division)
    shift = _logarithm(inserter, gate) if isinstance(gate, fx.Node) and scores else None
    if shift is None or example(shift).dtype != example(scores).dtype:
        inserter.undo()
        return None
    added = inserter.function(operator.add, scores, shift)
    if not are_alike(example(added), example(scores)):
        inserter.undo()
        return None
    out = with_operand(inserter, softmax, scores, added)
    if not are_alike(example(out), example(division)):
        inserter.undo()
        return None
    return inserter.replace(out, [softmax, weights, *total.nodes, division])


def _logarithm(inserter: NodeInserter, gate: fx.Node, depth: int = 4) -> fx.Node | None:
    """The logarithm of an exponential or a sigmoid, also of a view of one; else None."""
    name, _, writes = operation(gate)
    x = gate.args[0] if gate.args and isinstance(gate.args[0], fx.Node) else None
    if x is None or writes or depth == 0:
        return None
    if name in ("sigmoid", "exp"):
        return inserter.function(F.logsigmoid, x) if name == "sigmoid" else x
    if name not in ("reshape", "permute", "expand", "getitem") or len(gate.all_input_nodes) > 1:
        return None
    inner = _logarithm(inserter, x, depth - 1)
    return inner and with_operand(inserter, gate, x, inner)


class Total(NamedTuple):
    """max(sum + added, least) of weights over the keys, computed by `nodes`."""

    nodes: list[fx.Node]
    added: float = 0.0
    least: float | None = None

    def of(self, total: fx.Node | float, inserter: NodeInserter | None = None) -> fx.Node | float:
        """The number or the node for a sum that is known."""
        if isinstance(total, float):
            return max(total + self.added, -math.inf if self.least is None else self.least)
        if self.added:
            total = inserter.function(operator.add, total, self.added)
        return total if self.least is None else inserter.method("clamp", total, min=self.least)


def _sum_over_keys(node: object, weights: fx.Node) -> Total | None:
    """The sum of weights over the keys, which are kept as a dimension of size 1; None if a node is
    anything else.
    """
    if not _is_float(node) or operation(node)[2]:
        return None
    name, parameters, _ = operation(node)
    given = bind(node, parameters)
    if name == "sum":
        is_sum = _is_over_keys(given, weights) and given.keys() <= {"input", "dim", "keepdim"}
        return Total([node]) if is_sum else None
    found = _sum_over_keys(given.get("input"), weights)
    if found is None or len(found.nodes[-1].users) != 1:
        return None
    nodes = [*found.nodes, node]
    if name in ("add", "clamp", "clamp_min"):
        other = "min" if name == "clamp" or "min" in given else "other"
        known = type(given.get(other)) in (int, float) and given.keys() == {"input", other}
        if not known or found.least is not None:
            return None
        if name == "add":
            return Total(nodes, found.added + given[other])
        return Total(nodes, found.added, given[other])
    inserts = name == "reshape" or (name == "getitem" and len(node.all_input_nodes) == 1)
    return found._replace(nodes=nodes) if inserts and _has_rows_of(node, weights) else None


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


# One softmax over two sets of keys, each with its own values, as the attention over each set: with
# the log-sum-exp of its scores, each has the share sigmoid(lse - other lse) of the result.


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


def split_joined_keys(log: EditLog) -> None:
    """Write every softmax over two sets of keys as one over each."""
    for node in [node for node in log.graph.nodes if operation(node)[0] == "cat"]:
        log.attempt(_joined_and_split, node)


def _joined_and_split(log: EditLog, node: fx.Node) -> Edit | None:
    joined = _joined_keys(node)
    return None if joined is None else _split(log.edit(joined.total), joined)


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


def _split(inserter: Edit, joined: JoinedKeys) -> Edit:
    products, lses = [], []
    for index, part in enumerate(joined.parts):
        node = scores = joined.scores[index]
        for step in joined.chain:
            if operation(step)[0] == "softmax":
                scores = node
            node = _again(inserter, step, step.args[0], node, part)
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
    return inserter.replace(out, removed)


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
