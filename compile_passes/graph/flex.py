"""Calls of FlexAttention, written out as products, scale, the operations of score_mod and mask_mod,
and softmax.

A BlockMask lists the blocks of keys that a kernel visits. It may leave out blocks that mask_mod
would keep, and mask_mod is not applied in those that it lists as full. The lists have no effect
where one block holds all scores and is listed as one in which mask_mod applies (without a
BlockMask, or with one of so large a block), or where the lists are made of mask_mod in the graph.
Elsewhere they are usually inputs of the graph, of unknown content, and become a part of the mask.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.fx.node import map_arg

from compile_passes.graph import block_masks
from compile_passes.graph.axes import sizes_equal
from compile_passes.graph.block_lists import kept_by_blocks
from compile_passes.graph.inlined_call import (
    Inlined,
    InlinedAttention,
    attempt,
    check_inputs,
    repeated_heads,
)
from compile_passes.graph.inserter import NodeInserter
from compile_passes.graph.ir import example
from compile_passes.graph.vocabulary import operation, raw_name
from compile_passes.report import Refused

NAME = "flex_attention"
NO_LIMIT = 2**30  # the block of a call without a BlockMask
# Operations that compute each element from the elements of their inputs.
_ELEMENTWISE = frozenset(
    """
    add sub mul div floordiv neg abs exp log sqrt rsqrt pow tanh sigmoid clamp minimum maximum where
    eq ne lt le gt ge and or not cast detach new_ones new_zeros new_full ones zeros full tensor
    scalar_tensor remainder mod fmod xor square exp2 sign floor ceil round trunc rshift lshift
    bitwise_right_shift bitwise_left_shift
    """.split()
)


def is_flex(node: fx.Node) -> bool:
    """Whether a node is a call of FlexAttention."""
    higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
    return higher_order and raw_name(node) == NAME


def inline_flex(graph: fx.Graph) -> Inlined:
    """The inlined calls, and the reasons why others are left as they are."""
    return {node: attempt(_inlined, node) for node in filter(is_flex, list(graph.nodes))}


def _inlined(call: fx.Node) -> InlinedAttention:
    q, k, v, _, block_mask, scale, _, score_buffers, mask_buffers = call.args
    score_mod, mask_mod = (_subgraph(call, x) for x in (call.args[3], block_mask[-1]))
    _check(call, block_mask)
    part = next((user for user in call.users if user.args[1] == 0), None)
    if part is None:
        raise Refused("its result is not read")
    inserter = NodeInserter(call.graph, call)
    dtype = example(q).dtype
    try:
        k, v = (repeated_heads(inserter, q, x) for x in (k, v))
        scores = inserter.method("matmul", q, inserter.method("transpose", k, -1, -2))
        if dtype.itemsize < 4:  # score_mod is given the sum in float32
            scores = inserter.method("to", scores, torch.float32)
        scores = inserter.function(operator.mul, scores, scale)
        indices = _indices(inserter, scores)
        scores = _applied(inserter, score_mod, (scores, *indices), score_buffers)
        kept = _applied(inserter, mask_mod, indices, mask_buffers)
        if not _mask_mod_decides(call, block_mask, mask_mod):
            kept = kept_by_blocks(inserter, kept, indices, block_mask)
        hidden = inserter.function(torch.logical_not, kept)
        scores = inserter.method("masked_fill", scores, hidden, -torch.inf)
        softmax = weights = inserter.method("softmax", scores, -1)
        if example(weights).dtype != dtype:
            weights = inserter.method("to", weights, dtype)
        out = inserter.method("matmul", weights, v)
        if example(out).shape != example(part).shape or example(out).dtype != dtype:
            raise Refused("score_mod changes the shape or dtype of the scores")
    except BaseException:
        inserter.undo()
        raise
    out.meta.update(part.meta)
    part.replace_all_uses_with(out)
    has_mask = _computes(score_mod) or _computes(mask_mod)
    return InlinedAttention(call, inserter.nodes, out, part, softmax, NAME, has_mask)


def _check(call: fx.Node, block_mask: tuple) -> None:
    given = [*call.args[:3], *block_mask, *call.args[-2], *call.args[-1]]
    check_inputs(x for x in given if isinstance(x, fx.Node) and x is not block_mask[-1])
    q, k, v = (example(x) for x in call.args[:3])
    if not q.dtype == k.dtype == v.dtype:
        raise Refused("query, key and value differ in dtype")
    if not sizes_equal(q.shape[0], k.shape[0]):
        raise Refused("key and value have another batch size than the query")
    for user in call.users:
        if user.args[1] != 0 and user.users:
            raise Refused("its log-sum-exp or maximum is read")


def _mask_mod_decides(call: fx.Node, block_mask: tuple, mask_mod: fx.Graph) -> bool:
    """Whether the lists of the BlockMask neither leave out nor add anything."""
    q, k = (example(x) for x in call.args[:2])
    counts, indices, *others = block_mask[2:-3]
    q_block, k_block = block_mask[-3:-1]
    one_block = _at_most(q.shape[-2], q_block) and _at_most(k.shape[-2], k_block)
    whole = (
        others[:2] == [None, None] and _is_filled(counts, "ones") and _is_filled(indices, "zeros")
    )
    reads_inputs = _reads_inputs([x for x in others if isinstance(x, fx.Node)])
    known = one_block and whole and not reads_inputs
    return known or block_masks.is_made_of(call, block_mask, mask_mod)


def _at_most(n: int | torch.SymInt, limit: object) -> bool:
    """Whether a size is within a limit; one that no length reaches is guarded."""
    if type(limit) is not int:
        return False
    if statically_known_true(n <= limit):
        return True
    guarded = limit >= NO_LIMIT and isinstance(n, torch.SymInt) and n.node.has_hint()
    return guarded and guard_or_false(n <= limit)


def _is_filled(node: object, name: str) -> bool:
    """Whether a node is torch.ones or torch.zeros."""
    return isinstance(node, fx.Node) and node.op == "call_function" and raw_name(node) == name


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _reads_inputs(nodes: list[fx.Node]) -> bool:
    """Whether any of the nodes depends on an input of the graph."""
    seen: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if _is_input(node) or node.op == "call_module":
            return True
        if node not in seen:
            seen.add(node)
            nodes += node.all_input_nodes
    return False


def _subgraph(call: fx.Node, attribute: object) -> fx.Graph:
    owner = call.graph.owning_module
    if owner is None or not isinstance(attribute, fx.Node) or attribute.op != "get_attr":
        raise Refused("score_mod or mask_mod is not a graph")
    return owner.get_submodule(attribute.target).graph


def _computes(graph: fx.Graph) -> bool:
    """Whether a score_mod or mask_mod is not the one that changes nothing."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return any(raw_name(node) != "new_ones" for node in calls)


def _indices(inserter: NodeInserter, scores: fx.Node) -> list[fx.Node]:
    """The indices of batch, head, query and key, int32 as kernels have them."""
    indices = []
    for dim in range(4):
        n, device = example(scores).shape[dim], example(scores).device
        size = n if type(n) is int else inserter.method("size", scores, dim)
        index = inserter.function(torch.arange, size, dtype=torch.int32, device=device)
        for _ in range(3 - dim):
            index = inserter.method("unsqueeze", index, -1)
        indices.append(index)
    return indices


def _applied(inserter: NodeInserter, graph: fx.Graph, given: tuple, buffers: tuple) -> fx.Node:
    """The result of a function of single elements, applied to all of them by broadcasting."""
    inputs = iter((*given, *buffers))
    indices = list(given[-4:])
    copies: dict[fx.Node, object] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(inputs)
        elif node.op == "output":
            return map_arg(node.args[0], copies.__getitem__)
        else:
            copies[node] = _copied(inserter, node, copies, indices)
    raise Refused("score_mod or mask_mod has no result")


def _copied(inserter: NodeInserter, node: fx.Node, copies: dict, indices: list) -> object:
    name, _, writes = operation(node)
    args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
    if name == "getitem":
        return _element(inserter, *args, indices)
    if node.op not in ("call_function", "call_method") or writes or name not in _ELEMENTWISE:
        raise Refused(f"score_mod or mask_mod calls {raw_name(node)}")
    if node.op == "call_method":
        return inserter.method(node.target, *args, **kwargs)
    return inserter.function(node.target, *args, **kwargs)


def _element(inserter: NodeInserter, x: fx.Node, index: object, indices: list) -> fx.Node:
    """An element of a captured tensor; the tensor itself where it is indexed by all positions."""
    index = index if isinstance(index, tuple) else (index,)
    tensor = example(x)
    known = all(isinstance(i, int) or _is_tensor(i) for i in index)
    if not known or len(index) != tensor.dim():
        raise Refused("score_mod or mask_mod reads a part of a tensor that is not an element")
    order = [indices.index(i) if i in indices else -1 for i in index]
    sizes = zip(order, tensor.shape, strict=True)
    if order != sorted(set(order)) or not all(
        n >= 0 and sizes_equal(size, example(indices[n]).shape[0]) for n, size in sizes
    ):
        return inserter.function(operator.getitem, x, index)
    for dim in range(order[0], 4):  # broadcast along the positions that do not index it
        if dim not in order:
            x = inserter.method("unsqueeze", x, dim - order[0])
    return x


def _is_tensor(x: object) -> bool:
    return isinstance(x, fx.Node) and isinstance(example(x), Tensor)
