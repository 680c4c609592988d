"""Whether the lists of a BlockMask are those that `create_block_mask` makes of its mask_mod, in the
same graph: blocks without a kept element are left out, and full ones have nothing else. Then
mask_mod alone decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from compile_passes.graph.axes import Size, sizes_equal
from compile_passes.graph.ir import example, written_nodes
from compile_passes.graph.vocabulary import bind, operation, raw_name

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
