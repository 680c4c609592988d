"""Canonical names of operations: functions, methods, operators and aten overloads with the same
meaning share one name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

# A function is recognised by name only if it is from one of these: users define a `softmax` too.
_MODULES = frozenset(
    "torch torch.functional torch.nn.functional torch._C torch._C._nn torch._C._special "
    "torch._C._linalg torch._tensor torch._refs _operator".split()
)

# The other names of each operation; some are methods that torch 2.11 captures.
_SYNONYMS = {
    "": "native_dropout feature_dropout",  # not dropout of single elements
    "abs": "absolute __abs__",
    "add": "__add__ __radd__",
    "and": "and_ bitwise_and logical_and __and__",
    "cast": "_to_copy to float half bfloat16 double type type_as long int bool",
    "cat": "concat concatenate",
    "clamp": "clip",
    "copy": "contiguous clone alias lift_fresh_copy",
    "div": "truediv divide true_divide __truediv__",
    "eq": "__eq__",
    "exp2": "special_exp2",
    "expand": "expand_as broadcast_to",
    "floordiv": "floor_divide __floordiv__",
    "ge": "greater_equal __ge__",
    "getitem": "__getitem__",
    "gt": "greater __gt__",
    "le": "less_equal __le__",
    "log_softmax": "_log_softmax special_log_softmax",
    "logsumexp": "special_logsumexp",
    "lt": "less __lt__",
    "matmul": "bmm mm mv linalg_matmul __matmul__",
    "mul": "multiply __mul__ __rmul__",
    "ne": "not_equal __ne__",
    "neg": "negative __neg__",
    "not": "bitwise_not logical_not invert __invert__",
    "or": "or_ bitwise_or logical_or __or__",
    "permute": "transpose swapaxes swapdims movedim moveaxis t mT T adjoint mH H",
    # the shape of the result determines these
    "reshape": "view view_as reshape_as flatten unflatten unsqueeze squeeze _unsafe_view",
    "norm": "linalg_norm linalg_vector_norm",
    "softmax": "_softmax _safe_softmax special_softmax",
    "sub": "subtract __sub__",
}
_ALIASES = {alias: name for name, aliases in _SYNONYMS.items() for alias in aliases.split()}

# `operator.imul(x, y)`, `x.__imul__(y)` and the like write to x.
_INPLACE_OPERATORS = {f"i{name}": name for name in "add sub mul and or pow".split()}
_INPLACE_OPERATORS |= {"itruediv": "div"}
_INPLACE_OPERATORS |= dict.fromkeys(
    "imatmul ifloordiv imod ixor ilshift irshift setitem".split(), ""
)

# Parameter names by position, "input other" by default; a trailing * collects the rest.
_PARAMETERS = {
    **dict.fromkeys(("baddbmm", "addbmm"), "input batch1 batch2"),
    "addmm": "input mat1 other",
    "linear": "input other bias",
    "tensordot": "input other dims",
    "einsum": "equation operands*",
    **dict.fromkeys(("softmax", "log_softmax"), "input dim dtype"),
    **dict.fromkeys(("logsumexp", "sum", "mean", "amax", "max", "any", "all"), "input dim keepdim"),
    "nan_to_num": "input nan",
    "norm": "input p dim keepdim",
    "normalize": "input p dim eps",
    "bernoulli": "input p",
    "rand_like": "input",
    "rand": "size*",
    "dropout": "input p training",
    "masked_fill": "input mask value",
    "where": "condition input other",
    "clamp": "input min max",
    "permute": "input dims*",
    "repeat": "input repeats*",
    "repeat_interleave": "input repeats dim",
    "getitem": "input index",
    "narrow": "input dim start length",
    "cat": "tensors dim",
    "pad": "input pad mode value",
    "full": "size fill_value",
    "full_like": "input fill_value",
    "new_full": "input size fill_value",
    **dict.fromkeys(("tensor", "scalar_tensor"), "data"),
    "arange": "bounds*",
    **dict.fromkeys(("tril", "triu"), "input diagonal"),
    "cumsum": "input dim",
    "diff": "input n dim prepend append",
}
# Callables of these names with other positions.
_FUNCTIONAL = dict.fromkeys((F.softmax, F.log_softmax, F.softmin), "input dim _stacklevel dtype")
_METHODS = {"where": "input condition other"}
_OVERLOADS = {"_softmax": "input dim", "_log_softmax": "input dim"}

_KEYWORDS = {
    "self": "input",
    "x": "input",
    "axis": "dim",
    **dict.fromkeys(("mat2", "tensor2", "vec", "weight"), "other"),
    "train": "training",
    "ord": "p",
    "exponent": "other",
}

# Operations that rearrange or convert the elements of their input.
LAYOUT = frozenset("permute reshape expand copy cast getitem".split())
# These may return their first argument, or a view of it.
MAYBE_VIEWS = LAYOUT | {"detach"}


def operation(node: fx.Node) -> tuple[str, str, bool]:
    """(canonical name, parameters, whether it writes to its first argument) of a node; the name is
    empty where the meaning is not known.
    """
    target = node.target
    if node.op == "call_method":
        name, writes = _canonical_name(target)
        return name, _METHODS.get(name) or _PARAMETERS.get(name, "input other"), writes
    if node.op != "call_function":
        return "", "", False
    if isinstance(target, torch._ops.OpOverloadPacket) and "default" in target.overloads():
        target = target.default  # torch 2.15 captures x.mT as torch.ops.aten.mT(x)
    if isinstance(target, torch._ops.OpOverload):
        namespace, raw = target._schema.name.split("::")
        name, writes = _canonical_name(raw)
        known = name if namespace == "aten" else ""
        parameters = _OVERLOADS.get(raw) or _PARAMETERS.get(name, "input other")
        return known, parameters, writes or target._schema.is_mutable
    raw = getattr(target, "__name__", "")
    if target is getattr and len(node.args) > 1 and node.args[1] in ("mT", "T"):
        return "permute", "input", False
    if getattr(target, "__module__", None) not in _MODULES:
        return "", "", _canonical_name(raw)[1]
    name, writes = _canonical_name(raw)
    return name, _FUNCTIONAL.get(target) or _PARAMETERS.get(name, "input other"), writes


def _canonical_name(raw: str) -> tuple[str, bool]:
    if raw.strip("_") in _INPLACE_OPERATORS:
        return _INPLACE_OPERATORS[raw.strip("_")], True
    if raw in _ALIASES:
        return _ALIASES[raw], False
    writes = raw.endswith("_") and not raw.startswith("__")
    raw = raw.rstrip("_") if writes else raw
    return _ALIASES.get(raw, raw), writes


def raw_name(node: fx.Node) -> str:
    """The operation's name in reports."""
    target = node.target
    if node.op == "call_function" and target is getattr:
        return str(node.args[1])
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


_SELECTIONS = frozenset("topk kthvalue sort argsort median quantile lt le gt ge".split())


def read_elsewhere(what: str, reader: fx.Node) -> str:
    """The reason not to fuse where `reader` needs what fused attention never computes."""
    name = raw_name(reader)
    how = "returned" if reader.op == "output" else f"also read by {name}"
    if name in _SELECTIONS:
        how += ", as where a mask depends on them (top-k, a threshold)"
    return f"{what} {how}; fused attention never computes them"


def bind(node: fx.Node, parameters: str) -> dict[str, object]:
    """A node's arguments by parameter name."""
    bound: dict[str, object] = {}
    names = parameters.split()
    for i, name in enumerate(names):
        if name.endswith("*"):
            rest = node.args[i:]
            if len(rest) == 1 and isinstance(rest[0], (tuple, list)):
                rest = rest[0]
            bound[name[:-1]] = tuple(rest)
        elif i < len(node.args):
            bound[name] = node.args[i]
    for key, value in node.kwargs.items():
        bound[_KEYWORDS.get(key, key)] = value
    return bound
