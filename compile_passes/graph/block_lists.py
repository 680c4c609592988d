"""The mask of a FlexAttention call whose BlockMask is known at run time only.

The lists of a BlockMask name the blocks of keys that each block of queries attends: those in which
mask_mod applies, and full ones, in which it does not. The mask is computed from both, so that no
call depends on how the lists were made.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from compile_passes.graph.axes import is_one, sizes_equal
from compile_passes.graph.inserter import NodeInserter
from compile_passes.graph.ir import example
from compile_passes.report import Refused


def kept_by_blocks(
    inserter: NodeInserter, kept: fx.Node, indices: list[fx.Node], block_mask: tuple
) -> fx.Node:
    """The scores that are attended: `kept` by mask_mod in the listed blocks, all in full ones.

    `indices` are those of batch, head, query and key.
    """
    lists, block = block_mask[2:6], block_mask[-3:-1]
    _check(lists, block, indices)
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


def _check(lists: tuple, block: tuple, indices: list[fx.Node]) -> None:
    if not all(type(n) is int for n in block):
        raise Refused("the size of its BlockMask's blocks is not fixed")
    given = [x for x in lists if x is not None]
    pairs = len(given) in (2, 4) and all(isinstance(x, fx.Node) for x in given)
    if not pairs or not all(isinstance(example(x), Tensor) for x in given):
        raise Refused("the lists of its BlockMask are not tensors")
    for tensor in map(example, given):
        sizes = zip(tensor.shape[:2], indices[:2], strict=True)
        if not all(is_one(n) or sizes_equal(n, example(i).shape[0]) for n, i in sizes):
            raise Refused("its BlockMask has another number of texts or heads")


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
