"""Products of a sum of attention weights with a value, as in differential attention, written as the
sum of the products: (a - c * b) @ v = a @ v - c * b @ v.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx
from torch.fx.node import map_arg

from compile_passes.graph.axes import sizes_equal
from compile_passes.graph.inserter import NodeInserter
from compile_passes.graph.ir import example
from compile_passes.graph.rewritten_nodes import RewrittenNodes, replace
from compile_passes.graph.vocabulary import bind, operation

PRODUCTS = ("matmul", "einsum")
_FACTORS = ("mul", "div", "neg", "cast", "copy", "dropout")  # what weights pass through


def distribute_products(graph: fx.Graph) -> list[RewrittenNodes]:
    """Write all products of sums of weights as sums of products."""
    found: list[RewrittenNodes] = []
    pending = [node for node in graph.nodes if operation(node)[0] in PRODUCTS]
    while pending:
        product = pending.pop()
        made = _distributed(product)
        if made is not None:
            found.append(made)
            pending += [node for node in made.nodes if operation(node)[0] in PRODUCTS]
    return list(reversed(found))  # sums within sums are restored from the inside


def _distributed(product: fx.Node) -> RewrittenNodes | None:
    """The sum of two products that replaces one, or None."""
    for total in product.all_input_nodes:
        terms = _terms(total)
        softmaxes = [softmax_of(term) for term in terms]
        if not any(softmaxes) or list(total.users) != [product]:
            continue
        if product.all_input_nodes.count(total) > 1 or not _is_plain(product):
            continue
        inserter = NodeInserter(product.graph, product)
        parts = [with_operand(inserter, product, total, term) for term in terms]
        out = inserter.function(_function_of(total), *parts)
        return replace(out, inserter, [total, product], filter(None, softmaxes))
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
    return terms if _alike(a, out) and _alike(b, out) else []


def _alike(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and a.dim() == b.dim()
    return same and all(sizes_equal(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def _function_of(total: fx.Node) -> object:
    """The function that adds or subtracts as a node does."""
    return operator.add if operation(total)[0] == "add" else operator.sub


def softmax_of(node: object, depth: int = 8) -> fx.Node | None:
    """The softmax whose weights a node holds, scaled or dropped."""
    if not isinstance(node, fx.Node) or depth == 0:
        return None
    name, _, writes = operation(node)
    if name == "softmax":
        return node
    if writes or name not in (*_FACTORS, "add", "sub"):
        return None
    inputs = node.all_input_nodes if name in ("mul", "add", "sub") else node.all_input_nodes[:1]
    return next(filter(None, (softmax_of(x, depth - 1) for x in inputs)), None)


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
