"""Gradients of rows without keys under finite fills, or under numbers as large.

Beside a fill such as finfo.min real scores vanish: the row averages its keys, and yet its gradient
reaches every score. The call gives such rows a query of 0, which averages as well but passes
nothing on. What it would have passed on comes from a second call, over these rows alone, at so low
a temperature T that its weights are those of the average: softmax(T s) v = mean v + T d(out)/d(s) s
to first order, so that its gradient divided by T is the one wanted. Forward it is taken off again.
Where no row is without keys the second call visits no key at all.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import torch
from torch import fx

from compile_passes.graph.axes import is_one
from compile_passes.graph.ir import example, requires_grad
from compile_passes.masks.classify import Masks
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import BiasTerm
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.mask_nodes import MaskNodes
from compile_passes.rewrite.operands import cast, filled, inverted

TEMPERATURE = 2.0**-30  # exact in float32 and bfloat16; what is neglected is T times the scores
WITH_LSE = torch.ops.fa.attention_with_lse.default


def scores_require_grad(site: AttentionSite, masks: Masks) -> bool:
    """Whether anything that the scores are made of has a gradient."""
    return requires_grad(site.q.value) or requires_grad(site.k.value) or _biases_require_grad(masks)


def _biases_require_grad(masks: Masks) -> bool:
    return any(requires_grad(t.leaf.value) for t in masks.levels if isinstance(t, BiasTerm))


@dataclasses.dataclass(frozen=True)
class EmittedCall:
    """The nodes and options of the call whose rows these are, with the query as it was."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    dropout_p: float
    options: dict


def pass_on(
    masks: Masks,
    written: MaskNodes,
    emitter: Emitter,
    call: EmittedCall,
    result: fx.Node,
    with_lse: bool,
) -> tuple[fx.Node, fx.Node | None]:
    """What to add to the result and to its lse: nothing forward, the rows' gradients backward."""
    q, k, v = call.q, call.k, emitter.method("detach", call.v)
    if example(q).dtype == torch.float16:  # which cannot hold a gradient divided by T
        q, k, v = (emitter.method("to", x, torch.float32) for x in (q, k, v))
    options = {n: x for n, x in call.options.items() if n in ("scale", "softcap", "dropout_seed")}
    if "scale" not in options:
        q = emitter.function(operator.mul, q, TEMPERATURE)
    options |= {n: options[n] * TEMPERATURE for n in ("scale", "softcap") if n in options}
    options["key_ranges"] = _all_keys(emitter, written.dead, k)
    mask = _mask(masks, written, emitter)
    made = emitter.function(WITH_LSE, q, k, v, mask, call.dropout_p, False, **options)
    out, lse = emitter.function(operator.getitem, made, 0), None
    if with_lse or written.replaced is not None:
        lse = emitter.function(operator.getitem, made, 1)
        empty = emitter.function(operator.eq, lse, -math.inf)
        lse = emitter.method("masked_fill", lse, empty, 0.0)
    if written.replaced is not None:
        out = _beside_replaced(written, emitter, out, lse, result)
    share = masks.share / TEMPERATURE
    out = _only_backward(emitter, emitter.function(operator.mul, out, share))
    if with_lse:  # eager mode adds up n gradients there: its lse cannot hold log n beside the fill
        lse = emitter.function(operator.mul, lse, _count(written, emitter, k))
        lse = _only_backward(emitter, emitter.function(operator.mul, lse, share))
    return out, lse


def _count(written: MaskNodes, emitter: Emitter, k: fx.Node) -> fx.Node:
    """The keys that a dead row averages."""
    if written.best is None or is_one(example(written.best).shape[-1]):
        return emitter.method("size", k, 2)
    return emitter.method("sum", written.best, -1)


def _only_backward(emitter: Emitter, x: fx.Node) -> fx.Node:
    return emitter.function(operator.sub, x, emitter.method("detach", x))


def _all_keys(emitter: Emitter, dead: fx.Node, k: fx.Node) -> fx.Node:
    """key_ranges: every key for a dead row, none for another."""
    high = emitter.method("to", emitter.method("squeeze", dead, -1), torch.int32)
    high = emitter.function(operator.mul, high, emitter.method("size", k, 2))
    low = emitter.function(torch.zeros_like, high)
    return emitter.function(torch.stack, (low, high), -1)


def _mask(masks: Masks, written: MaskNodes, emitter: Emitter) -> fx.Node | None:
    """The keys that a dead row averages and whose scores are the model's; a mask that requires grad
    stands there as 0 with its gradient.
    """
    keys = written.best
    if keys is None:
        return None
    if written.replaced is not None:
        keys = emitter.function(operator.and_, keys, inverted(emitter, written.replaced))
    if not _biases_require_grad(masks):  # float, as key_ranges stand beside it
        return filled(emitter, keys, None, -math.inf, torch.float32)
    nothing = cast(emitter, _only_backward(emitter, written.total), torch.float32)
    nothing = emitter.function(operator.mul, nothing, TEMPERATURE)
    return emitter.method("masked_fill", nothing, inverted(emitter, keys), -math.inf)


def _beside_replaced(
    written: MaskNodes, emitter: Emitter, out: fx.Node, lse: fx.Node, result: fx.Node
) -> fx.Node:
    """`out` is over the keys that kept their scores; the average is over them and those that a fill
    replaced: with w the former's share of it,
    d(average) = w (d(out) + d(lse) (out - average)).
    """
    own = emitter.function(operator.and_, written.best, inverted(emitter, written.replaced))
    counts = [emitter.method("sum", x, -1, keepdim=True) for x in (own, written.best)]
    share = emitter.function(operator.truediv, counts[0], emitter.method("clamp", counts[1], min=1))
    apart = emitter.function(operator.sub, out, result)
    lse = emitter.method("unsqueeze", lse, -1)
    apart = emitter.function(operator.mul, emitter.method("detach", apart), lse)
    moved = emitter.function(operator.add, out, apart)
    return emitter.function(operator.mul, moved, share)
