"""Removal of unused nodes, such as copies of the scores or averages of the weights that the caller
ignores.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from compile_passes.graph import vocabulary
from compile_passes.graph.ir import example, written_nodes

# Operations that do nothing but compute their result. Others may draw random numbers, check
# something or write to a tensor.
_WITHOUT_EFFECT = vocabulary.LAYOUT | set(
    """
    abs add all amax amin and any arange argmax argmin baddbmm broadcast_tensors cat chunk clamp
    clamp_min cos cumsum detach diff div einsum eq exp exp2 expm1 flip floordiv full full_like
    gather ge gt index_select le log log_softmax logsumexp lt masked_fill matmul max maximum
    mean min minimum mul narrow ne neg new_empty new_full new_ones new_zeros norm not numel ones
    ones_like or outer pad permute pow prod relu repeat repeat_interleave reshape rsqrt
    scalar_tensor searchsorted select sigmoid sin size softmax split sqrt stack std sub sum
    tanh tensor topk tril triu unbind var where zeros zeros_like
    """.split()
)


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Erase unused nodes that have no effect, the last first."""
    for node in reversed(list(graph.nodes)):
        if not node.users and has_no_effect(node):
            graph.erase_node(node)


def has_no_effect(node: fx.Node) -> bool:
    """Whether a node does nothing but compute its result, the same from the same arguments."""
    name, _, writes = vocabulary.operation(node)
    if node.op not in ("call_function", "call_method") or writes or written_nodes(node, writes):
        return False
    known = name in _WITHOUT_EFFECT or vocabulary.raw_name(node) in ("size", "dim", "shape")
    result = example(node)
    return known and isinstance(result, (Tensor, int, float, tuple, list, torch.SymInt))
