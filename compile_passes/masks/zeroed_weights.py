"""The mask of the scores that is applied to the weights again, after the softmax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from compile_passes.graph.axes import resolve_dims
from compile_passes.graph.constants import constant_value
from compile_passes.graph.ir import Value, same_contents
from compile_passes.masks.mask_terms import Term
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import MAX_MASK_FILL, BiasTerm, Core, FillTerm
from compile_passes.match.zero_one import is_zero_or_one, number_beside_zeros
from compile_passes.report import Refused


def mask_applied_twice(
    site: AttentionSite, terms: list[Term], may_hide_keys: Callable[[Term], bool]
) -> Term | None:
    """The term whose mask also zeroes the weights after the softmax; None if none are zeroed.

    A finite fill must be the only mask: beside it, keys that another mask hides with a lower number
    would be averaged. Raises Refused where the weights are masked in another way than the scores.
    """
    zero = site.core.weights.zero_fill
    if zero is None:
        return None
    fills = [t for t in terms if isinstance(t, FillTerm)]
    biases = [t for t in terms if isinstance(t, BiasTerm)]
    equal = [t for t in fills if _is_same_mask(t, zero)]
    equal += [t for t in biases if _number_added(t, zero) is not None]
    if len(equal) == 1 and set(fills) <= set(equal):
        (found,) = equal
        fill = found.value if isinstance(found, FillTerm) else _number_added(found, zero)
        others = any(may_hide_keys(t) for t in biases if t is not found)
        if fill == -math.inf or (fill <= MAX_MASK_FILL and not others):
            return found
    raise NotMaskedAlike(
        "the attention weights are masked after the softmax, not as the scores were"
    )


class NotMaskedAlike(Refused):
    """Weights are masked after the softmax in another way than the scores were."""


def with_gate_for_fill(core: Core) -> Core:
    """The core with the mask of its weights as a gate of the values, which it is if it is the same
    for every query.
    """
    weights = core.weights
    gates = (*weights.gates, weights.zero_fill)
    return dataclasses.replace(
        core, weights=dataclasses.replace(weights, zero_fill=None, gates=gates)
    )


def _is_same_mask(fill: FillTerm, zero: FillTerm) -> bool:
    (x, when), (y, other) = (_zero_one(t.mask.value, t.where) for t in (fill, zero))
    equal = same_contents(x, y) and when == other
    return equal and resolve_dims(fill.mask.dims) == resolve_dims(zero.mask.dims)


def _zero_one(x: Value, when: bool) -> tuple[Value, bool]:
    """The tensor of 0 and 1 behind casts and comparisons, and its value where x is `when`."""
    while x.op in ("cast", "eq", "ne") and not x.writes and is_zero_or_one(x.args.get("input")):
        number = constant_value(x.args.get("other"))
        if x.op != "cast" and number not in (0, 1):
            break
        flips = x.op != "cast" and (x.op == "eq") == (number == 0)
        x, when = x.args["input"], when != flips
    return x, when


def _number_added(bias: BiasTerm, zero: FillTerm) -> float | None:
    """The number that is added where weights are multiplied by 0, if nothing is added elsewhere."""
    if zero.factor is None or resolve_dims(bias.leaf.dims) != resolve_dims(zero.mask.dims):
        return None
    number = number_beside_zeros(bias.leaf.value, zero.factor)
    return None if number is None else number * bias.coefficient
