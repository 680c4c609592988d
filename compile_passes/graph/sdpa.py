"""Calls of `F.scaled_dot_product_attention`, as a function or an operator, and of the operators of
its kernels, written out as products, scale, mask, softmax and dropout.

Its causality is aligned at the top left: query i attends the keys up to i. With fewer queries than
keys the call therefore reads only as many keys as there are queries.
"""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_passes.graph.axes import sizes_equal
from compile_passes.graph.inlined_call import (
    Inlined,
    InlinedAttention,
    attempt,
    check_inputs,
    repeated_heads,
)
from compile_passes.graph.inserter import NodeInserter
from compile_passes.graph.ir import example
from compile_passes.graph.vocabulary import bind, operation, raw_name
from compile_passes.report import Refused

NAME = "scaled_dot_product_attention"
MATH = "_scaled_dot_product_attention_math"
FLASH = "_scaled_dot_product_flash_attention"
_CALL = "query key value attn_mask dropout_p is_causal"
_KERNEL = "query key value dropout_p is_causal"
_KERNEL_WITH_MASK = "query key value attn_mask compute_log_sumexp dropout_p is_causal"
_PARAMETERS = {
    NAME: _CALL,
    MATH: _CALL,
    FLASH: _KERNEL,
    "_scaled_dot_product_flash_attention_for_cpu": _KERNEL,
    "_scaled_dot_product_efficient_attention": _KERNEL_WITH_MASK,
    "_scaled_dot_product_cudnn_attention": _KERNEL_WITH_MASK,
    "_scaled_dot_product_fused_attention_overrideable": _CALL,
}
NAMES = tuple(_PARAMETERS)
MATH_ONLY = "sdpa_kernel permits torch's own arithmetic alone"


def is_sdpa(node: fx.Node) -> bool:
    """Whether a node is a call of scaled_dot_product_attention."""
    return node.op == "call_function" and operation(node)[0] in NAMES


def inline_sdpa(graph: fx.Graph) -> Inlined:
    """The inlined calls, and the reasons why others are left as they are."""
    found: Inlined = {}
    math_only = not any(
        (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )
    )
    for node in list(graph.nodes):
        if raw_name(node) == "_sdpa_kernel":
            math_only = _permits_math_only(node)
        elif is_sdpa(node):
            math = math_only or operation(node)[0] == MATH
            found[node] = MATH_ONLY if math else attempt(_inlined, node)
    return found


def _permits_math_only(node: fx.Node) -> bool:
    """Whether a node that Dynamo captures of `sdpa_kernel` permits nothing but MATH."""
    names = [b.args[0] if isinstance(b, fx.Node) else b for b in node.args[0]]
    return {str(name).split(".")[-1] for name in names} == {"MATH"}


def _inlined(call: fx.Node) -> InlinedAttention:
    name = operation(call)[0]
    args = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False} | bind(call, _PARAMETERS[name])
    args.setdefault("enable_gqa", name != NAME)
    args["attn_mask"] = args.pop("attn_bias", args["attn_mask"])
    result = call if name == NAME else _result_of_kernel(call)
    _check(call, args)
    inserter = NodeInserter(call.graph, call)
    has_mask = args["attn_mask"] is not None
    inlined = InlinedAttention(call, result=result, operation=NAME, has_mask=has_mask)
    wanted = example(result)
    try:
        weights, value = _weights(inserter, args, wanted.dtype, inlined)
        out = inserter.method("matmul", weights, value)
        if example(out).shape != wanted.shape or example(out).dtype != wanted.dtype:
            raise Refused("its result has another shape or dtype than the product of its inputs")
    except BaseException:
        inserter.undo()
        raise
    out.meta.update(result.meta)  # the example has the strides of the call's result
    inlined.nodes, inlined.out = inserter.nodes, out
    result.replace_all_uses_with(out)
    return inlined


def _result_of_kernel(call: fx.Node) -> fx.Node:
    """The output of an operator that also returns what the backward pass needs."""
    overload = call.target
    if isinstance(overload, torch._ops.OpOverload) and overload._overloadname != "default":
        raise Refused(f"it is the overload {overload._overloadname} of torch's kernel")
    read = [part for part in call.users if part.users]
    if len(read) != 1 or read[0].target is not operator.getitem or read[0].args[1] != 0:
        raise Refused("its log-sum-exp is read, or its result is not")
    return read[0]


def _check(call: fx.Node, args: dict) -> None:
    check_inputs(call.all_input_nodes)
    if call.users and operation(call)[0] == NAME and not isinstance(example(call), Tensor):
        raise Refused("its result is not one tensor")
    mask, causal, dropout_p = args["attn_mask"], args["is_causal"], args["dropout_p"]
    if not isinstance(causal, bool) or not isinstance(dropout_p, (int, float)):
        raise Refused("is_causal or dropout_p is not a constant of the graph")
    q, k = (example(args[name]) for name in ("query", "key"))
    aligned = operation(call)[0] != FLASH or sizes_equal(q.shape[-2], k.shape[-2])
    if causal and not aligned:  # where it is aligned differs between versions of the kernel
        raise Refused("it is causal, with other numbers of queries and keys")
    if mask is not None and causal:
        raise Refused("it has both a mask and is_causal")
    if not 0 <= dropout_p < 1:
        raise Refused(f"dropout_p is {dropout_p}")
    exact = torch.are_deterministic_algorithms_enabled() or inductor_config.fallback_random
    if dropout_p > 0 and exact:
        raise Refused("its dropout would draw other random numbers than torch was asked to repeat")


def _weights(
    inserter: NodeInserter, args: dict, dtype: torch.dtype, inlined: InlinedAttention
) -> tuple[fx.Node, fx.Node]:
    """(the weights, the value) as nodes"""
    q, k, v, mask = (
        _under_autocast(inserter, args[name], dtype)
        for name in ("query", "key", "value", "attn_mask")
    )
    causal = args["is_causal"]
    if causal:
        k, v = (_first_keys(inserter, q, x) for x in (k, v))
    if args.get("enable_gqa"):
        k, v = (repeated_heads(inserter, q, x) for x in (k, v))
    scores = inserter.method("matmul", q, inserter.method("transpose", k, -1, -2))
    scores = inserter.function(operator.mul, scores, _scale(inserter, args, q))
    if causal:
        mask = _kept_by_causality(inserter, q, k)
    if mask is not None and example(mask).dtype == torch.bool:
        hidden = inserter.function(torch.logical_not, mask)
        scores = inserter.method("masked_fill", scores, hidden, -math.inf)
    elif mask is not None:
        scores = inserter.function(operator.add, scores, mask)
    weights = inlined.softmax = inserter.method("softmax", scores, -1)
    if example(weights).dtype != dtype:
        weights = inserter.method("to", weights, dtype)
    if args["dropout_p"] > 0:
        weights = inserter.function(F.dropout, weights, args["dropout_p"], True)
    return weights, v


def _scale(inserter: NodeInserter, args: dict, q: fx.Node) -> float | fx.Node:
    """The scale, by default one over the root of the head dimension."""
    if args.get("scale") is not None:
        return args["scale"]
    head_dim = example(q).shape[-1]
    if type(head_dim) is int:
        return 1.0 / math.sqrt(head_dim)
    return inserter.function(operator.pow, inserter.method("size", q, -1), -0.5)


def _under_autocast(
    inserter: NodeInserter, x: fx.Node | None, dtype: torch.dtype
) -> fx.Node | None:
    """An argument in the result's dtype, to which autocast converts it; masks may be wider."""
    if x is None or example(x).dtype in (dtype, torch.bool):
        return x
    return inserter.method("to", x, dtype)


def _first_keys(inserter: NodeInserter, q: fx.Node, x: fx.Node) -> fx.Node:
    """The keys or values that causality leaves where there are fewer queries than keys."""
    queries, keys = example(q).shape[-2], example(x).shape[-2]
    if not statically_known_true(queries < keys):
        return x
    count = queries if type(queries) is int else inserter.method("size", q, -2)
    return inserter.method("narrow", x, -2, 0, count)


def _kept_by_causality(inserter: NodeInserter, q: fx.Node, k: fx.Node) -> fx.Node:
    sizes = [
        n if type(n) is int else inserter.method("size", x, -2)
        for x in (q, k)
        for n in (example(x).shape[-2],)
    ]
    device = example(q).device
    ones = inserter.function(torch.ones, tuple(sizes), dtype=torch.bool, device=device)
    return inserter.method("tril", ones)
