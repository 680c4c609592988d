"""Gradients of empty rows, whose keys are all masked, under finite fills that absorb the scores.

Beside a fill such as finfo.min real scores vanish: the row averages its keys, yet its gradient
reaches every score. The call gives such rows a query of 0, which averages as well but has no
gradient. The missing gradient comes from a second call, over these rows alone, at so low a
temperature T that its weights are those of the average: softmax(T s) v = mean v + T d(out)/d(s) s
to first order, so that its gradient divided by T is the one wanted. Its forward value is subtracted
again. Where no row is empty the second call attends no keys.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import torch
from torch import fx

from compile_passes.graph.axes import is_one
from compile_passes.graph.ir import example, requires_grad
from compile_passes.masks.classified_masks import ClassifiedMasks
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import BiasTerm
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.mask_nodes import MaskNodes
from compile_passes.rewrite.operands import cast, fill_where, inverted

TEMPERATURE = 2.0**-30  # exact in float32 and bfloat16; the error is T times the scores
WITH_LSE = torch.ops.fa.attention_with_lse.default


def scores_require_grad(site: AttentionSite, masks: ClassifiedMasks) -> bool:
    """Whether any input of the scores requires grad."""
    return requires_grad(site.q.value) or requires_grad(site.k.value) or _biases_require_grad(masks)


def _biases_require_grad(masks: ClassifiedMasks) -> bool:
    terms = masks.float_terms
    return any(requires_grad(t.leaf.value) for t in terms if isinstance(t, BiasTerm))


@dataclasses.dataclass(frozen=True)
class EmittedCall:
    """The arguments and results of the first call; empty rows of the query are not yet zeroed."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    dropout_p: float
    options: dict
    result: fx.Node
    lse: fx.Node | None


def add_gradients(
    emitter: Emitter, masks: ClassifiedMasks, emitted: MaskNodes, call: EmittedCall
) -> tuple[fx.Node, fx.Node | None]:
    """(result, lse) with the gradients of empty rows, the lse only if the model reads it."""
    site, lse = emitter.site, call.lse
    q, k, v = call.q, call.k, emitter.method("detach", call.v)
    if example(q).dtype == torch.float16:  # which cannot hold a gradient divided by T
        q, k, v = (emitter.method("to", x, torch.float32) for x in (q, k, v))
    options = {n: x for n, x in call.options.items() if n in ("scale", "softcap", "dropout_seed")}
    if "scale" not in options:
        q = emitter.function(operator.mul, q, TEMPERATURE)
    options |= {n: options[n] * TEMPERATURE for n in ("scale", "softcap") if n in options}
    options["key_ranges"] = _all_keys(emitter, emitted.empty_rows, k)
    mask = _mask(emitter, masks, emitted)
    second = emitter.function(WITH_LSE, q, k, v, mask, call.dropout_p, False, **options)
    out = emitter.function(operator.getitem, second, 0)
    if site.lses or emitted.filled is not None:
        second_lse = emitter.function(operator.getitem, second, 1)
        no_keys = emitter.function(operator.eq, second_lse, -math.inf)
        second_lse = emitter.method("masked_fill", second_lse, no_keys, 0.0)
    if emitted.filled is not None:
        out = _with_filled_keys(emitter, emitted, out, second_lse, call.result)
    factor = masks.grad_share / TEMPERATURE
    out = _only_backward(emitter, emitter.function(operator.mul, out, factor))
    if site.lses:  # eager mode sums n gradients there: beside the fill its lse cannot hold log n
        second_lse = emitter.function(operator.mul, second_lse, _key_count(emitter, emitted, k))
        second_lse = emitter.function(operator.mul, second_lse, factor)
        second_lse = _only_backward(emitter, second_lse)
    result = cast(emitter, emitter.function(operator.add, call.result, out), site.dtype)
    return result, emitter.function(operator.add, lse, second_lse) if site.lses else lse


def _key_count(emitter: Emitter, emitted: MaskNodes, k: fx.Node) -> fx.Node:
    """The number of keys that an empty row averages."""
    if emitted.averaged is None or is_one(example(emitted.averaged).shape[-1]):
        return emitter.method("size", k, 2)
    return emitter.method("sum", emitted.averaged, -1)


def _only_backward(emitter: Emitter, x: fx.Node) -> fx.Node:
    """0 with the gradient of x."""
    return emitter.function(operator.sub, x, emitter.method("detach", x))


def _all_keys(emitter: Emitter, empty_rows: fx.Node, k: fx.Node) -> fx.Node:
    """key_ranges: all keys for an empty row, none for another."""
    high = emitter.method("to", emitter.method("squeeze", empty_rows, -1), torch.int32)
    high = emitter.function(operator.mul, high, emitter.method("size", k, 2))
    low = emitter.function(torch.zeros_like, high)
    return emitter.function(torch.stack, (low, high), -1)


def _mask(emitter: Emitter, masks: ClassifiedMasks, emitted: MaskNodes) -> fx.Node | None:
    """The keys that an empty row averages and whose scores were not filled; a mask that requires
    grad is added there as 0 with its gradient.
    """
    keys = emitted.averaged
    if keys is None:
        return None
    if emitted.filled is not None:
        keys = emitter.function(operator.and_, keys, inverted(emitter, emitted.filled))
    if not _biases_require_grad(masks):  # float, because the call has key_ranges too
        return fill_where(emitter, keys, None, -math.inf, torch.float32)
    zero = cast(emitter, _only_backward(emitter, emitted.total), torch.float32)
    zero = emitter.function(operator.mul, zero, TEMPERATURE)
    return emitter.method("masked_fill", zero, inverted(emitter, keys), -math.inf)


def _with_filled_keys(
    emitter: Emitter, emitted: MaskNodes, out: fx.Node, lse: fx.Node, result: fx.Node
) -> fx.Node:
    """`out` is over the keys that kept their scores, the average over these and the filled ones: if
    w is the share of the former, d(average) = w (d(out) + d(lse) (out - average)).
    """
    kept = emitter.function(operator.and_, emitted.averaged, inverted(emitter, emitted.filled))
    counts = [emitter.method("sum", x, -1, keepdim=True) for x in (kept, emitted.averaged)]
    share = emitter.function(operator.truediv, counts[0], emitter.method("clamp", counts[1], min=1))
    apart = emitter.function(operator.sub, out, result)
    lse = emitter.method("unsqueeze", lse, -1)
    apart = emitter.function(operator.mul, emitter.method("detach", apart), lse)
    moved = emitter.function(operator.add, out, apart)
    return emitter.function(operator.mul, moved, share)
