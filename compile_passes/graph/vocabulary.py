"""Canonical names of operations: functions, methods, operators and aten overloads with the same
meaning share one name.
"""

from __future__ import annotations

import torch
from torch import fx

# A function is recognised by name only if it is from one of these: users define a `softmax` too.
_MODULES = frozenset(
    "torch torch.functional torch.nn.functional torch._C torch._C._nn torch._C._special "
    "torch._C._linalg torch._tensor torch._refs _operator".split()
)

_ALIASES = {
    "absolute": "abs",
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "floor_divide": "floordiv",
    "__floordiv__": "floordiv",
    "bmm": "matmul",
    "mm": "matmul",
    "linalg_matmul": "matmul",
    "special_softmax": "softmax",
    "_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    "_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp",
    "native_dropout": "",
    "feature_dropout": "",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "_to_copy": "cast",
    "_unsafe_view": "reshape",
    "and_": "and",
    "or_": "or",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "logical_and": "and",
    "logical_or": "or",
    "bitwise_not": "not",
    "logical_not": "not",
    "invert": "not",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "__and__": "and",
    "__or__": "or",
    "__invert__": "not",
}
_ALIASES |= dict.fromkeys(
    "to float half bfloat16 double type type_as long int bool".split(), "cast"
)
# torch 2.11 captures some comparisons as methods of Tensor
_ALIASES |= {
    f"__{name}__": name for name in "eq ne le lt ge gt add sub mul matmul neg abs getitem".split()
}
_ALIASES |= {"__radd__": "add", "__rmul__": "mul", "__truediv__": "div"}
_ALIASES |= dict.fromkeys("contiguous clone alias lift_fresh_copy".split(), "copy")
# The shape of the result determines these.
_ALIASES |= dict.fromkeys(
    "view reshape view_as reshape_as flatten unflatten unsqueeze squeeze".split(), "reshape"
)
_ALIASES |= dict.fromkeys("expand expand_as broadcast_to".split(), "expand")
_ALIASES |= dict.fromkeys(
    "transpose swapaxes swapdims permute movedim moveaxis t mT T adjoint mH H".split(), "permute"
)

# `operator.imul(x, y)`, `x.__imul__(y)` and the like write to x.
_INPLACE_OPERATORS = {
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "itruediv": "div",
    "iand": "and",
    "ior": "or",
    "ipow": "pow",
    "imatmul": "",
    "ifloordiv": "",
    "imod": "",
    "ixor": "",
    "ilshift": "",
    "irshift": "",
    "setitem": "",
}

# Parameter names by position; a trailing * collects the rest.
_PARAMETERS = {
    "add": "input other",
    "sub": "input other",
    "mul": "input other",
    "div": "input other",
    "pow": "input other",
    "floordiv": "input other",
    "minimum": "input other",
    "maximum": "input other",
    "matmul": "input other",
    "baddbmm": "input batch1 batch2",
    "einsum": "equation operands*",
    "softmax": "input dim dtype",
    "log_softmax": "input dim dtype",
    "logsumexp": "input dim keepdim",
    "sum": "input dim keepdim",
    "amax": "input dim keepdim",
    "max": "input dim keepdim",
    "nan_to_num": "input nan",
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
    "cat": "tensors dim",
    "pad": "input pad mode value",
    "full": "size fill_value",
    "full_like": "input fill_value",
    "new_full": "input size fill_value",
    "tensor": "data",
    "scalar_tensor": "data",
    "arange": "bounds*",
    "tril": "input diagonal",
    "triu": "input diagonal",
    "cumsum": "input dim",
    "diff": "input n dim prepend append",
}
# Callables of these names with other positions.
_FUNCTIONAL = {
    torch.nn.functional.softmax: "input dim _stacklevel dtype",
    torch.nn.functional.log_softmax: "input dim _stacklevel dtype",
}
_METHODS = {"where": "input condition other"}
_OVERLOADS = {"_softmax": "input dim", "_log_softmax": "input dim"}

_KEYWORDS = {
    "self": "input",
    "x": "input",
    "axis": "dim",
    "mat2": "other",
    "tensor2": "other",
    "train": "training",
    "condition": "condition",
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


def read_elsewhere(what: str, reader: fx.Node) -> str:
    """The reason not to fuse where `reader` needs what fused attention never computes."""
    how = "returned" if reader.op == "output" else f"also read by {raw_name(reader)}"
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
