"""Products of two tensors as labelled contractions, and the alignment of operands with scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from compile_passes.ir.axes import Axis, Dims, Group, Size, broadcast_dims, is_one, resolve_dims
from compile_passes.ir.constants import constant_value, round_to
from compile_passes.ir.graph import Value, is_tensor, undo_layout
from compile_passes.ir.vocabulary import LAYOUT
from compile_passes.match.states import Leaf, MatchState
from compile_passes.report import Refusal
from compile_passes.rewrites.einsums import parsed

# Products of two tensors as labelled contractions: matmul, einsum, linear, a sum of a product.

Labels = tuple[str | None, ...]


class Contraction(NamedTuple):
    """out[out_labels] = a[a_labels] * b[b_labels], summed over the other labels. The label of a
    dimension of size 1 is None.
    """

    a: Value
    b: Value
    a_labels: Labels
    b_labels: Labels
    out_labels: Labels
    sizes: dict[str, Size]
    through: tuple[Value, ...] = ()  # the node that multiplied, if the summing one did not

    @property
    def summed(self) -> tuple[str, ...]:
        """The labels that are summed over."""
        shared = (x for x in self.a_labels if x is not None and x in self.b_labels)
        return tuple(x for x in shared if x not in self.out_labels)


def contraction(value: Value) -> Contraction | None:
    """The contraction that a node computes, or None."""
    if value.writes:
        return None
    if value.op == "einsum":
        return _einsum(value)
    if value.op == "sum":
        return _sum_of_product(value)
    a, b = (value.args.get(name) for name in _OPERANDS.get(value.op, ("", "")))
    if not (is_tensor(a) and is_tensor(b) and len(a.shape) and len(b.shape)):
        return None
    if value.op == "tensordot":
        return _tensordot(a, b, value.args.get("dims", 2))
    if value.op in ("linear", "inner"):
        return None if value.op == "linear" and _is_parameter(b) else _inner(a, b)
    return _matmul(a, b, value.op == "addbmm")


_OPERANDS = {
    **dict.fromkeys(("matmul", "linear", "inner", "tensordot"), ("input", "other")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    "addmm": ("mat1", "other"),
}


class Addition(NamedTuple):
    """factor * (the product) + coefficient * term"""

    term: object
    coefficient: float | None  # None: not a number
    factor: float | None


def addition(value: Value) -> Addition | None:
    """The tensor that a product's node adds to it, or None."""
    if value.op == "linear" and value.args.get("bias") is not None:
        return Addition(value.args["bias"], 1.0, 1.0)
    if value.op in ("baddbmm", "addmm", "addbmm"):
        numbers = (constant_value(value.args.get(x, 1)) for x in ("beta", "alpha"))
        return Addition(value.args["input"], *numbers)
    return None


def _is_parameter(x: Value) -> bool:
    """Whether a tensor is a layer's weight, whose product with the input is no scores."""
    while x.op in LAYOUT and is_tensor(x.args.get("input")):
        x = x.args["input"]
    return x.node.op == "get_attr" or isinstance(x.tensor, nn.Parameter)


def _matmul(a: Value, b: Value, over_batch: bool = False) -> Contraction | None:
    """A product of matrices, of which either may be a vector; `over_batch`: summed over them."""
    names = [f"batch{i}" for i in range(max(len(a.shape), len(b.shape), 2) - 2)]
    la = (*names, "row", "inner")[-len(a.shape) :]
    lb = (*names, "inner", "column")[-len(b.shape) :] if len(b.shape) > 1 else ("inner",)
    rows, columns = la[-2:-1], lb[-1:] if len(lb) > 1 else ()
    return _checked(a, b, la, lb, (*([] if over_batch else names), *rows, *columns))


def _inner(a: Value, b: Value) -> Contraction | None:
    """A sum over the last dimension of both."""
    rows = [f"row{i}" for i in range(len(a.shape) - 1)]
    columns = [f"column{i}" for i in range(len(b.shape) - 1)]
    return _checked(a, b, (*rows, "inner"), (*columns, "inner"), (*rows, *columns))


def _tensordot(a: Value, b: Value, dims: object) -> Contraction | None:
    """A sum over the given dimensions of both, or over so many: the last of a, the first of b."""
    rank = len(a.shape)
    if isinstance(dims, int):
        dims = range(rank - dims, rank), range(dims)
    if not isinstance(dims, (tuple, list)) or len(dims) != 2 or len(dims[0]) != len(dims[1]):
        return None
    la = [f"row{i}" for i in range(rank)]
    lb = [f"column{i}" for i in range(len(b.shape))]
    for i, (m, n) in enumerate(zip(*dims)):
        la[m] = lb[n] = f"inner{i}"
    out = [x for x in (*la, *lb) if not x.startswith("inner")]
    return _checked(a, b, tuple(la), tuple(lb), tuple(out))


def _sum_of_product(value: Value) -> Contraction | None:
    """(a * b).sum(dims) of tensors that were broadcast against each other."""
    product, dims = value.args.get("input"), value.args.get("dim")
    if not isinstance(product, Value) or product.op != "mul" or product.writes:
        return None
    a, b = (product.args.get(name) for name in ("input", "other"))
    dims = (dims,) if isinstance(dims, int) else dims
    if not (is_tensor(a) and is_tensor(b) and isinstance(dims, (tuple, list)) and dims):
        return None
    if product.dtype != value.dtype or not a.dtype == b.dtype == value.dtype:
        return None
    rank = len(product.shape)
    names = [f"dim{i}" for i in range(rank)]
    summed = {names[dim] for dim in dims}
    keepdim = bool(value.args.get("keepdim"))
    la, lb = (names[rank - len(x.shape) :] for x in (a, b))
    made = _checked(a, b, tuple(la), tuple(lb), tuple(x for x in names if x not in summed))
    if made is None or set(made.a_labels) == set(made.b_labels):
        return None  # no outer product
    if keepdim:
        kept = iter(made.out_labels)
        labels = tuple(None if x in summed else next(kept) for x in names)
        made = made._replace(out_labels=labels)
    return made._replace(through=(product,))


def _einsum(value: Value) -> Contraction | None:
    given = value.args.get("equation"), value.args.get("operands", ())
    e = parsed(*given, lambda x: len(x.shape) if is_tensor(x) else None)
    if e is None or len(e.operands) != 2 or any(len(set(t)) < len(t) for t in e.terms):
        return None  # the diagonal of an operand is taken
    return _checked(*e.operands, *e.terms, e.out)


def _checked(a: Value, b: Value, la: tuple, lb: tuple, lo: tuple) -> Contraction | None:
    if len(la) != len(a.shape) or len(lb) != len(b.shape):
        return None
    sizes: dict[str, Size] = {}
    for labels, x in ((la, a), (lb, b)):
        for label, n in zip(labels, x.shape, strict=True):
            if label not in sizes or is_one(sizes[label]):
                sizes[label] = n
    if any(label not in sizes for label in lo):
        return None
    alone = (set(la) ^ set(lb)) - set(lo)
    if any(not is_one(sizes[label]) for label in alone):
        return None  # summed over one operand only
    la = tuple(None if is_one(n) else x for x, n in zip(la, a.shape, strict=True))
    lb = tuple(None if is_one(n) else x for x, n in zip(lb, b.shape, strict=True))
    lo = tuple(None if is_one(sizes[x]) else x for x in lo)
    return Contraction(a, b, la, lb, lo, sizes)


# Aligning operands and reductions with the dimensions of scores and weights.


def other_operand(value: Value, name: str) -> object:
    """The operand of a binary operation that is not called `name`."""
    return value.args.get("other" if name == "input" else "input")


def align(value: Value, state: MatchState, x: object) -> tuple[Leaf, Dims]:
    """(x aligned with the dims of a state, these dims after broadcasting against x)"""
    constant = constant_value(x)
    if constant is not None:
        in_16_bits = is_tensor(x) and x.dtype in (torch.float16, torch.bfloat16)
        return Leaf(round_to(constant, x.dtype) if in_16_bits else float(constant)), state.dims
    if not is_tensor(x):
        scalar = isinstance(x, Value) and isinstance(x.tensor, (torch.SymFloat, torch.SymInt))
        if not scalar:
            raise Refusal("they are combined with something unknown")
        return Leaf(x), state.dims
    if x in state.path:
        raise Refusal("they are combined with themselves")
    dims = _broadcast_dims(value.shape, x.shape, state.dims)
    # a mask that was expanded to the scores' shape is used in its original size
    leaf = Leaf(*undo_layout(x, broadcast_dims(x.shape, dims), x.dtype, value))
    return leaf, dims


def reduced(value: Value, dims: Dims, reason: str) -> tuple[Group, Dims]:
    """(axes that a reduction runs over, dims of its result). Raises Refusal if there are no axes or
    several dimensions.
    """
    dim = value.args.get("dim", value.args.get("other"))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or not dims[dim]:
        raise Refusal(reason)
    result = list(resolve_dims(dims))
    axes, result[dim] = result[dim], ()
    if not value.args.get("keepdim"):
        del result[dim]
    return axes, tuple(result)


def summed_by_einsum(value: Value, dims: Dims) -> tuple[Group, Dims]:
    """`reduced` of an einsum of one operand."""
    given = value.args.get("equation"), value.args.get("operands", ())
    e = parsed(*given, lambda x: len(x.shape) if is_tensor(x) else None)
    reason = "their exponentials are not summed over one dimension"
    if e is None or len(e.operands) != 1:
        raise Refusal(reason)
    (names,), kept = e.terms, e.out
    groups = dict(zip(names, resolve_dims(dims), strict=True))
    summed = groups.keys() - set(kept)
    if len(groups) < len(dims) or len(summed) != 1 or not groups.keys() >= set(kept):
        raise Refusal(reason)
    (name,) = summed
    return groups[name], tuple(groups[x] for x in kept)


def without_inversion(mask: object, when: bool = True) -> tuple[object, bool]:
    """(the mask before any logical nots, the value that it has where the given one is `when`)"""
    while isinstance(mask, Value) and mask.op == "not":
        inner = mask.args.get("input")
        if not isinstance(inner, Value) or inner.dtype != torch.bool:
            break
        mask, when = inner, not when
    return mask, when


def _broadcast_dims(shape: torch.Size, other: torch.Size, dims: Dims) -> Dims:
    """Dims of scores after broadcasting against a tensor of shape `other`."""
    dims = ((),) * (len(shape) - len(dims)) + dims
    sizes = (1,) * (len(shape) - len(other)) + tuple(other)
    pairs = zip(dims, sizes, strict=True)
    return tuple((Axis(n, "bias"),) if not g and not is_one(n) else g for g, n in pairs)
