"""What operations do to attention weights. A rule returns the next state, or in words why there is
none.
"""

from __future__ import annotations

from torch import Tensor

from compile_passes.graph.axes import flat, same
from compile_passes.graph.constants import number, specialised
from compile_passes.graph.ir import Value
from compile_passes.match.joining import join, other, uninverted
from compile_passes.match.match_state import FillTerm, MatchedWeights, State


def dropout(value: Value, w: MatchedWeights, name: str) -> State | str:
    p, training = specialised(value.args.get("p", 0.5)), number(value.args.get("training", True))
    if training in (False, 0) or p == 0:
        return w.then(value)
    if p is None or training is None:
        return "the dropout probability is not a constant of the graph"
    return _dropped(value, w, float(p), 1.0, ())


def _dropped(value: Value, w: MatchedWeights, p: float, gain: float, mask: tuple) -> State | str:
    if w.dropout_p:
        return "dropout is applied twice"
    if not 0.0 < p < 1.0:
        return f"dropout with p = {p}"
    return w.then(value, dropout_p=p, gain=w.gain * gain, path=(*w.path, *mask, value))


def mul(value: Value, w: MatchedWeights, name: str) -> State | str:
    x = other(value, name)
    if value.op == "div" and (name != "input" or number(x) in (None, 0)):
        return "they are divided by something"
    manual = _drop_mask(x, w) if isinstance(x, Value) and value.op == "mul" else None
    if manual is not None:
        keep, gain, nodes = manual
        return _dropped(value, w, 1.0 - keep, keep * gain, nodes)
    joined = join(value, w, x)
    if isinstance(joined, str):
        return joined
    leaf, dims = joined
    if not isinstance(leaf.value, Value):
        c = 1.0 / leaf.value if value.op == "div" else leaf.value
        return w.then(value, gain=w.gain * c)
    if leaf.axes() & w.key_axes() or len(flat(dims)) != len(flat(w.dims)):
        return "they are multiplied by a tensor that varies along the keys"
    return w.then(value, factors=(*w.factors, leaf))


def _drop_mask(x: Value, w: MatchedWeights) -> tuple[float, float, tuple[Value, ...]] | None:
    """(probability to keep, what kept weights are multiplied by, its nodes) of a dropout mask made
    by hand.
    """
    if not isinstance(x.tensor, Tensor) or len(x.shape) != len(w.dims):
        return None
    if x.op in ("cast", "copy") and isinstance(x.args.get("input"), Value) and not x.writes:
        inner = _drop_mask(x.args["input"], w)
        return inner and (*inner[:2], (*inner[2], x))
    if x.op == "div" and isinstance(x.args.get("input"), Value):
        inner, by = _drop_mask(x.args["input"], w), number(x.args.get("other"))
        return (inner[0], inner[1] / by, (*inner[2], x)) if inner and by else None
    if not all(same(n, m) for n, m in zip(x.shape, w.path[-1].shape, strict=True)):
        return None
    keep = _keep_probability(x)
    nodes = (x,) if x.op == "bernoulli" else (x.args.get("input"), x)
    return None if keep is None or not 0.0 < keep < 1.0 else (keep, 1.0, nodes)


def _keep_probability(x: Value) -> float | None:
    if x.op == "bernoulli":
        p = x.args.get("p")
        return number(x.args.get("input") if p is None else p)
    drawn = x.args.get("input")
    if not isinstance(drawn, Value) or drawn.op not in ("rand", "rand_like"):
        return None
    bound = number(x.args.get("other"))
    if bound is None:
        return None
    return {"lt": bound, "le": bound, "gt": 1 - bound, "ge": 1 - bound}.get(x.op)


def without_sink(value: Value, w: MatchedWeights, name: str) -> State | str:
    """weights[..., :-1] or [..., 1:]: the column of the sink is dropped."""
    index = value.args.get("index")
    s = w.scores
    if not s.column or not isinstance(index, tuple) or w.keys == s.keys_before:
        return "they are sliced"
    *full, last = index
    whole = all(i is Ellipsis or i == slice(None) for i in full)
    if not whole or not isinstance(last, slice) or last.step not in (None, 1):
        return "they are sliced"
    begins = (1,) if s.ahead else (None, 0)
    if last.start not in begins or not same(value.shape[-1] + 1, w.path[-1].shape[-1]):
        return "they are sliced"
    if (Ellipsis not in full) and len(full) != len(w.dims) - 1:
        return "they are sliced"
    return w.then(value, dims=(*w.dims[:-1], s.keys_before), keys=s.keys_before)


def nan_to_num(value: Value, w: MatchedWeights, name: str) -> State | str:
    """Rows without keys are NaN in a softmax over -inf, and 0 in ours."""
    if set(value.args) - {"input", "nan"} or number(value.args.get("nan", 0.0)) != 0:
        return "nan_to_num replaces them by something else than 0"
    return w.then(value)


def masked_fill(value: Value, w: MatchedWeights, name: str) -> State | str:
    """Masked weights set to 0 again: rows without keys give 0. Whether it is the scores' mask is
    checked with the masks.
    """
    if name != "input" or number(value.args.get("value")) != 0 or w.zeroed or w.dropout_p:
        return "they are masked"
    mask, when = uninverted(value.args.get("mask"))
    if number(mask) is not None and bool(number(mask)) != when:
        return w.then(value)
    joined = join(value, w, mask)
    if isinstance(joined, str) or not isinstance(joined[0].value, Value):
        return "they are masked"
    return w.then(value, zeroed=FillTerm(joined[0], when, 0.0))


RULES = {
    "dropout": dropout,
    "mul": mul,
    "div": mul,
    "getitem": without_sink,
    "nan_to_num": nan_to_num,
    "masked_fill": masked_fill,
}
