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
from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.fx.node import map_arg

from compile_passes.ir.axes import Size, is_one, sizes_equal
from compile_passes.ir.graph import NodeInserter, example, written_nodes
from compile_passes.ir.vocabulary import bind, operation, raw_name
from compile_passes.report import Refusal
from compile_passes.rewrites.attention_calls import check_inputs, repeated_heads
from compile_passes.rewrites.edit_log import AttentionCall, EditLog

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
    """Whether a node is a call of FlexAttention, torch's own."""
    higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
    return higher_order and node.target.name() == NAME


def write_out_flex(log: EditLog) -> None:
    """Write out the calls of FlexAttention."""
    for node in filter(is_flex, list(log.graph.nodes)):
        log.write_out(node, _write_out, NAME)


def _write_out(log: EditLog, call: fx.Node) -> None:
    q, k, v, _, block_mask, scale, _, score_buffers, mask_buffers = call.args
    score_mod, mask_mod = (function.graph for function in functions_of(call))
    check_inputs_of(call)
    if not sizes_equal(example(q).shape[0], example(k).shape[0]):
        raise Refusal("key and value have another batch size than the query")
    if any(user.args[1] != 0 and user.users for user in call.users):
        raise Refusal("its log-sum-exp or maximum is read")
    part = next((user for user in call.users if user.args[1] == 0), None)
    if part is None:
        raise Refusal("its result is not read")
    inserter = log.edit(call)
    dtype = example(q).dtype
    k, v = (repeated_heads(inserter, q, x) for x in (k, v))
    scores = inserter.method("matmul", q, inserter.method("transpose", k, -1, -2))
    if dtype.itemsize < 4:  # score_mod is given the sum in float32
        scores = inserter.method("to", scores, torch.float32)
    scores = inserter.function(operator.mul, scores, scale)
    indices = _indices(inserter, scores)
    scores = _applied(inserter, score_mod, (scores, *indices), score_buffers)
    kept = _applied(inserter, mask_mod, indices, mask_buffers)
    if not mask_mod_decides(call):
        kept = kept_by_blocks(inserter, kept, indices, block_mask)
    hidden = inserter.function(torch.logical_not, kept)
    scores = inserter.method("masked_fill", scores, hidden, -torch.inf)
    softmax = weights = inserter.method("softmax", scores, -1)
    if example(weights).dtype != dtype:
        weights = inserter.method("to", weights, dtype)
    out = inserter.method("matmul", weights, v)
    if example(out).shape != example(part).shape or example(out).dtype != dtype:
        raise Refusal("score_mod changes the shape or dtype of the scores")
    inserter.supersede(call, out)
    has_mask = computes(score_mod) or computes(mask_mod)
    log.calls[softmax] = AttentionCall(call, NAME, inserter.nodes, softmax, has_mask)


def check_inputs_of(call: fx.Node) -> None:
    """Raises Refusal where an input of a call is not a plain tensor."""
    block_mask = call.args[4]
    given = [*call.args[:3], *block_mask, *call.args[-2], *call.args[-1]]
    check_inputs(x for x in given if isinstance(x, fx.Node) and x is not block_mask[-1])
    q, k, v = (example(x) for x in call.args[:3])
    if not q.dtype == k.dtype == v.dtype:
        raise Refusal("query, key and value differ in dtype")


def mask_mod_decides(call: fx.Node) -> bool:
    """Whether the lists of the BlockMask neither leave out nor add anything."""
    return has_one_block(call) or is_made_of(call, call.args[4], functions_of(call)[1].graph)


def has_one_block(call: fx.Node) -> bool:
    """Whether the lists name one block of all scores, in which mask_mod applies."""
    q, k = (example(x) for x in call.args[:2])
    block_mask = call.args[4]
    counts, indices, *others = block_mask[2:-3]
    q_block, k_block = block_mask[-3:-1]
    one_block = _at_most(q.shape[-2], q_block) and _at_most(k.shape[-2], k_block)
    whole = (
        others[:2] == [None, None] and _is_filled(counts, "ones") and _is_filled(indices, "zeros")
    )
    return one_block and whole and not _reads_inputs([x for x in others if isinstance(x, fx.Node)])


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


def functions_of(call: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The score_mod and mask_mod of a call."""
    owner, found = call.graph.owning_module, []
    for attribute in (call.args[3], call.args[4][-1]):
        if owner is None or not isinstance(attribute, fx.Node) or attribute.op != "get_attr":
            raise Refusal("score_mod or mask_mod is not a graph")
        found.append(owner.get_submodule(attribute.target))
    return found[0], found[1]


def computes(graph: fx.Graph) -> bool:
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
    raise Refusal("score_mod or mask_mod has no result")


def _copied(inserter: NodeInserter, node: fx.Node, copies: dict, indices: list) -> object:
    name, _, writes = operation(node)
    args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
    if name == "getitem":
        return _element(inserter, *args, indices)
    if node.op not in ("call_function", "call_method") or writes or name not in _ELEMENTWISE:
        raise Refusal(f"score_mod or mask_mod calls {raw_name(node)}")
    if node.op == "call_method":
        return inserter.method(node.target, *args, **kwargs)
    return inserter.function(node.target, *args, **kwargs)


def _element(inserter: NodeInserter, x: fx.Node, index: object, indices: list) -> fx.Node:
    """An element of a captured tensor; the tensor itself where it is indexed by all positions."""
    index = index if isinstance(index, tuple) else (index,)
    tensor = example(x)
    known = all(isinstance(i, int) or _is_tensor(i) for i in index)
    if not known or len(index) != tensor.dim():
        raise Refusal("score_mod or mask_mod reads a part of a tensor that is not an element")
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


# The mask of a FlexAttention call whose BlockMask is known at run time only.
#
# The lists of a BlockMask name the blocks of keys that each block of queries attends: those in
# which mask_mod applies, and full ones, in which it does not. The mask is computed from both, so
# that no call depends on how the lists were made.


def kept_by_blocks(
    inserter: NodeInserter, kept: fx.Node, indices: list[fx.Node], block_mask: tuple
) -> fx.Node:
    """The scores that are attended: `kept` by mask_mod in the listed blocks, all in full ones.

    `indices` are those of batch, head, query and key.
    """
    lists, block = block_mask[2:6], block_mask[-3:-1]
    _check_lists(lists, block, indices)
    positions = [inserter.method("flatten", index) for index in indices[2:]]
    blocks = [
        inserter.function(operator.floordiv, x, n) for x, n in zip(positions, block, strict=True)
    ]
    # the first key of each block; a last block that is shorter has one too
    first = inserter.function(operator.getitem, positions[1], slice(None, None, block[1]))
    first = inserter.function(operator.floordiv, first, block[1])
    partial = _listed(inserter, *lists[:2], first, blocks)
    kept = inserter.function(operator.and_, partial, kept)
    if lists[2] is not None:
        full = _listed(inserter, *lists[2:], first, blocks)
        kept = inserter.function(operator.or_, kept, full)
    return kept


def _check_lists(lists: tuple, block: tuple, indices: list[fx.Node]) -> None:
    if not all(type(n) is int for n in block):
        raise Refusal("the size of its BlockMask's blocks is not fixed")
    given = [x for x in lists if x is not None]
    pairs = len(given) in (2, 4) and all(isinstance(x, fx.Node) for x in given)
    if not pairs or not all(isinstance(example(x), Tensor) for x in given):
        raise Refusal("the lists of its BlockMask are not tensors")
    for tensor in map(example, given):
        sizes = zip(tensor.shape[:2], indices[:2], strict=True)
        if not all(is_one(n) or sizes_equal(n, example(i).shape[0]) for n, i in sizes):
            raise Refusal("its BlockMask has another number of texts or heads")


def _listed(
    inserter: NodeInserter, counts: fx.Node, indices: fx.Node, columns: fx.Node, blocks: list
) -> fx.Node:
    """Whether the block of each query and key is listed: bool (B or 1, H or 1, Sq, Sk).

    A row lists as many blocks as `counts` says; the numbers that follow have no meaning. A block
    that is listed twice counts once. `columns` are the blocks of keys, `blocks` those of each query
    and of each key.
    """
    slots = example(indices).shape[-1]
    if type(slots) is not int:
        slots = inserter.method("size", indices, -1)
    slot = inserter.function(torch.arange, slots, dtype=torch.int32, device=example(counts).device)
    used = inserter.function(operator.lt, slot, inserter.method("unsqueeze", counts, -1))
    given = inserter.method("unsqueeze", inserter.function(torch.where, used, indices, -1), -1)
    listed = inserter.method("any", inserter.function(operator.eq, given, columns), -2)
    for dim, block in zip((-2, -1), blocks, strict=True):
        listed = inserter.method("index_select", listed, dim, block)
    return listed


# Whether the lists of a BlockMask are those that `create_block_mask` makes of its mask_mod, in the
# same graph: blocks without a kept element are left out, and full ones have nothing else. Then
# mask_mod alone decides.

INDICES = 4  # of batch, head, query and key: the first arguments of a mask_mod
_ORDER = (0, 1, 2, 4, 3, 5)  # blocks of queries and keys before the elements of a block


class _Unknown(Exception):
    """The lists are not proved to be those of the mask_mod."""


def is_made_of(call: fx.Node, block_mask: tuple, mask_mod: fx.Graph) -> bool:
    """Whether the lists of a FlexAttention call were made of this mask_mod."""
    try:
        _check(call, block_mask, mask_mod)
    except _Unknown:
        return False
    return True


def _check(call: fx.Node, block_mask: tuple, mask_mod: fx.Graph) -> None:
    lengths, lists, others = block_mask[:2], block_mask[2:10], block_mask[10:-3]
    block = block_mask[-3:-1]
    q, k = (example(x) for x in call.args[:2])
    equal = sizes_equal(lengths[0], q.shape[-2]) and sizes_equal(lengths[1], k.shape[-2])
    _require(equal and all(x is None for x in others) and all(type(n) is int for n in block))
    _require(all(isinstance(x, fx.Node) for x in (*lists[:2], *lists[4:6])))
    partial = _blocks(*lists[:2])
    full = None if lists[2] is None else _blocks(*lists[2:4])
    mask = _padded_mask(_counted(partial, full, block[0] * block[1]), block)
    for level in range(1, INDICES + 1):
        _require(raw_name(mask) == "_remove_batch_dim")
        mask, found, _, dim = mask.args
        _require(found == level and dim == 0)
    given = [node for node in mask_mod.nodes if node.op == "placeholder"]
    copies: dict[fx.Node, object] = dict(zip(given[INDICES:], call.args[-1], strict=True))
    sizes = (q.shape[0], q.shape[1], *lengths)
    indices = {node: (level, sizes[level]) for level, node in enumerate(given[:INDICES])}
    _same(mask_mod.output_node().args[0], mask, copies, indices)
    for rows, columns in (lists[:2], lists[2:4]):
        _check_transposed(rows, columns, lists[4:6] if rows is lists[0] else lists[6:8])
    _check_unwritten(call, lists)


def _require(condition: bool) -> None:
    if not condition:
        raise _Unknown


def _input(node: object, *names: str) -> fx.Node:
    """The first argument of an operation with one of these names."""
    _require(isinstance(node, fx.Node) and node.op in ("call_function", "call_method"))
    _require(operation(node)[0] in names or raw_name(node) in names)
    _require(bool(node.args) and isinstance(node.args[0], fx.Node))
    return node.args[0]


def _uncast(node: object) -> fx.Node:
    """A tensor before it was cast to integers."""
    while isinstance(node, fx.Node) and operation(node)[0] == "cast":
        _require(not example(node).dtype.is_floating_point)
        node = node.args[0]
    _require(isinstance(node, fx.Node))
    return node


def _blocks(counts: fx.Node, indices: fx.Node) -> fx.Node:
    """The blocks, as bools, that lists of counts and indices hold."""
    counts, indices = _uncast(counts), _uncast(indices)
    counted, sorted_ = _uncast(_input(counts, "sum")), _uncast(_input(indices, "argsort"))
    _require(counted is sorted_ and example(counted).dtype == torch.bool)
    _require(bind(counts, "input dim") == {"input": counts.args[0], "dim": -1})
    wanted = {"dim": -1, "descending": True, "stable": True}
    _require(bind(indices, "input") == {"input": indices.args[0], **wanted})
    return counted


def _counted(partial: fx.Node, full: fx.Node | None, whole: int) -> fx.Node:
    """The number of kept elements of each block, of which these are more than 0 and, if full blocks
    are listed apart, less than all.
    """
    if full is None:
        return _compared(partial, "gt", 0)
    _require(operation(partial)[0] == "and" and len(partial.args) == 2)
    above, below = partial.args
    counts = {
        _compared(above, "gt", 0),
        _compared(below, "lt", whole),
        _compared(full, "eq", whole),
    }
    _require(len(counts) == 1)
    return counts.pop()


def _compared(node: object, name: str, number: int) -> fx.Node:
    counts = _input(node, name)
    _require(node.args[1:] == (number,) and not node.kwargs)
    return counts


def _padded_mask(counts: fx.Node, block: tuple) -> fx.Node:
    """The mask whose elements are counted in blocks of this size, before it was padded."""
    parts = _input(counts, "sum")
    _require(list(bind(counts, "input dim").get("dim", ())) == [-2, -1])
    views = _input(parts, "permute")
    _require(raw_name(parts) == "permute" and tuple(parts.args[1:]) == _ORDER)
    padded = _input(views, "view")
    shape = example(views).shape
    _require(len(shape) == 6 and (shape[3], shape[5]) == block)
    mask = _input(padded, "pad")
    widths, mode, value = padded.args[1], *padded.args[2:4], *(None,) * (4 - len(padded.args))
    zeros = len(widths) == 4 and widths[0] == widths[2] == 0
    _require(zeros and mode in ("constant", None) and value in (None, 0) and not padded.kwargs)
    return mask


def _same(a: object, x: object, copies: dict, indices: dict[fx.Node, tuple[int, Size]]) -> None:
    """Check that an argument in mask_mod's graph is the same as one inside vmap."""
    if isinstance(a, fx.Node) and a in copies:
        _require(copies[a] is x)
    elif isinstance(a, fx.Node) and a in indices:
        _check_index(x, *indices[a])
    elif isinstance(a, fx.Node):
        _require(isinstance(x, fx.Node))
        for b, y in zip(_operation(a), _operation(x), strict=True):
            _same(b, y, copies, indices)
    elif isinstance(a, tuple):
        _require(isinstance(x, tuple) and len(a) == len(x))
        for b, y in zip(a, x, strict=True):
            _same(b, y, copies, indices)
    else:
        _require(not isinstance(x, fx.Node) and type(a) is type(x) and a == x)
    if isinstance(a, fx.Node):
        copies[a] = x


def _operation(node: fx.Node) -> tuple[str, tuple]:
    """The name and arguments of an operation that only computes its result."""
    name, parameters, writes = operation(node)
    reads = name == "getitem" or raw_name(node) == "index"  # what indexing becomes inside vmap
    _require((bool(name) or reads) and not writes)
    if reads:
        x, index = node.args
        return "getitem", (x, tuple(index) if isinstance(index, (tuple, list)) else (index,))
    return name, tuple(sorted(bind(node, parameters).items()))


def _check_index(x: object, level: int, size: Size) -> None:
    """Check that x runs over all indices of one dimension."""
    _require(isinstance(x, fx.Node) and raw_name(x) == "_add_batch_dim")
    positions, dim, found = x.args
    _require((dim, found) == (0, level + 1) and raw_name(positions) == "arange")
    _require(positions.args[0] == 0 and len(positions.args) == 2)
    _require(sizes_equal(example(positions).shape[0], size))


def _check_transposed(rows: object, columns: object, transposed: tuple) -> None:
    """Check that the lists of queries of each block of keys are made of those of keys alone."""
    if rows is None:
        _require(tuple(transposed) == (None, None))
        return
    counts, indices = transposed
    blocks = _uncast(_input(_uncast(counts), "sum"))
    _require(blocks is _uncast(_input(_uncast(indices), "argsort")))
    _require("_transpose_ordered" in (counts.meta.get("stack_trace") or ""))
    _require(set(_sources(blocks, (rows, columns))) == {rows, columns})


def _sources(node: fx.Node, ends: tuple) -> Iterator[fx.Node]:
    """The inputs of the graph, and those of `ends`, from which a node and what is written to the
    nodes before it are computed.
    """
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node in ends or node.op not in ("call_function", "call_method"):
            yield node
        elif node not in seen:
            seen.add(node)
            writers = (u for u in node.users if operation(u)[2] and u.args[:1] == (node,))
            pending += [*node.all_input_nodes, *writers]


def _check_unwritten(call: fx.Node, lists: tuple) -> None:
    """Check that nothing before the call writes to a tensor, but where torch makes the lists."""
    for node in call.graph.nodes:
        if node is call:
            return
        for target in written_nodes(node, operation(node)[2]):
            _require(isinstance(example(target), Tensor) and raw_name(target) == "new_zeros")
