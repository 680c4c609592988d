"""Products of a sum of attention weights with a value, as in differential attention, written as the
sum of the products: (a - c * b) @ v = a @ v - c * b @ v.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import Tensor, fx
from torch.fx.node import map_arg

from compile_passes.graph.axes import sizes_equal
from compile_passes.graph.inserter import NodeInserter
from compile_passes.graph.ir import example
from compile_passes.graph.rewritten_nodes import RewrittenNodes, attempt, replace
from compile_passes.graph.vocabulary import bind, operation

PRODUCTS = ("matmul", "einsum")
_FACTORS = ("mul", "div", "neg", "cast", "copy", "dropout")  # what weights pass through


def distribute_products(graph: fx.Graph) -> list[RewrittenNodes]:
    """Write all products of sums of weights as sums of products."""
    found: list[RewrittenNodes] = []
    pending = [node for node in graph.nodes if operation(node)[0] in PRODUCTS]
    while pending:
        product = pending.pop()
        made = attempt(_distributed, product)
        if made is not None:
            found.append(made)
            pending += [node for node in made.nodes if operation(node)[0] in PRODUCTS]
    return list(reversed(found))  # sums within sums are restored from the inside


def _distributed(product: fx.Node) -> RewrittenNodes | None:
    """The sum of two products that replaces one, or None."""
    for total in product.all_input_nodes:
        terms = _terms(total)
        softmaxes = [softmaxes_of(term) for term in terms]
        if not any(softmaxes) or list(total.users) != [product]:
            continue
        if product.all_input_nodes.count(total) > 1 or not _is_plain(product):
            continue
        inserter = NodeInserter(product.graph, product)
        parts = [with_operand(inserter, product, total, term) for term in terms]
        out = inserter.function(_function_of(total), *parts)
        return replace(out, inserter, [total, product], set().union(*softmaxes))
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
