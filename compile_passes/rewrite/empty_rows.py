"""The call where finite fills that absorb the scores may mask all keys of a row.

Beside a fill such as finfo.min real scores vanish: the row averages its keys, yet its gradient
reaches every score. `fa::attention_averaging_rows` computes both.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from compile_passes.graph.axes import is_one
from compile_passes.graph.ir import example, requires_grad
from compile_passes.masks.classified_masks import ClassifiedMasks, EmptyRows
from compile_passes.match.attention_site import AttentionSite
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.mask_nodes import MaskNodes, biases_require_grad
from compile_passes.rewrite.operands import only_backward

AVERAGING = torch.ops.fa.attention_averaging_rows.default


def has_averaging_rows(site: AttentionSite, masks: ClassifiedMasks) -> bool:
    """Whether rows that average their keys have a gradient that reaches their scores."""
    if masks.empty_rows is not EmptyRows.ABSORBED:
        return False
    of_products = requires_grad(site.q.value) or requires_grad(site.k.value)
    return of_products or biases_require_grad(masks)


def averaging_options(emitter: Emitter, masks: ClassifiedMasks, emitted: MaskNodes) -> dict:
    """The arguments of the call in addition to the options of attention."""
    rows = emitter.method("squeeze", emitted.empty_rows, -1)
    options: dict[str, object] = {"averaging_rows": rows}
    if emitted.filled is not None:
        options["filled_keys"] = emitted.filled
    if masks.grad_share != 1.0:
        options["grad_share"] = masks.grad_share
    return options


def with_lse_gradients(
    emitter: Emitter, emitted: MaskNodes, k: fx.Node, given: fx.Node, lse: fx.Node
) -> fx.Node:
    """`lse`, that of eager mode, with the gradient of `given`, the operator's, in empty rows. There
    eager mode sums n gradients: beside the fill its log-sum-exp cannot hold log n.
    """
    empty = emitter.method("squeeze", emitted.empty_rows, -1)
    other = emitter.method("logical_not", empty)
    given = emitter.method("masked_fill", given, other, 0.0)
    given = emitter.function(operator.mul, given, _key_count(emitter, emitted, k))
    return emitter.function(operator.add, lse, only_backward(emitter, given))


def _key_count(emitter: Emitter, emitted: MaskNodes, k: fx.Node) -> fx.Node:
    """The number of keys that an empty row averages."""
    if emitted.averaged is None or is_one(example(emitted.averaged).shape[-1]):
        return emitter.method("size", k, 2)
    return emitter.method("sum", emitted.averaged, -1)
