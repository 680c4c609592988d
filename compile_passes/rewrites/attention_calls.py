"""Calls of torch that are attention, written out: `F.multi_head_attention_forward` and SDPA."""

from __future__ import annotations

import contextlib
import math
import operator
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from compile_passes.ir.axes import sizes_equal
from compile_passes.ir.graph import SOURCE_METADATA, NodeInserter, example, meta_key
from compile_passes.ir.vocabulary import bind, operation, raw_name, read_elsewhere
from compile_passes.report import Refusal
from compile_passes.rewrites.edit_log import AttentionCall, Edit, EditLog

# `F.multi_head_attention_forward`, which Dynamo captures as one call.
#
# torch's own function is traced with the arguments of the call, so that every option keeps its
# meaning. The traced operations are inserted before the call.

FORWARD = F.multi_head_attention_forward
# Operators that modules of torch.nn call in eval mode without gradients.
_OPERATORS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")


def is_attention_call(node: fx.Node) -> bool:
    """Whether a node is one call of attention together with its projections."""
    return node.op == "call_function" and (node.target is FORWARD or raw_name(node) in _OPERATORS)


def write_out_multi_head(log: EditLog) -> None:
    """Write out the calls of multi-head attention."""
    for call in filter(is_attention_call, list(log.graph.nodes)):
        log.write_out(call, _write_out_multi_head, "softmax")


def _check_multi_head(call: fx.Node) -> None:
    if call.target is not FORWARD:
        raise Refusal(
            f"torch.{raw_name(call)} is one operator; "
            "torch.backends.mha.set_fastpath_enabled(False) selects the code that can be fused"
        )
    check_inputs(call.all_input_nodes)
    for user in call.users:
        part = user.args[1] if user.target is operator.getitem else None
        readers = () if part == 0 else user.users if part == 1 else (user,)
        for reader in readers:
            raise Refusal(read_elsewhere("the attention weights are", reader))


def _write_out_multi_head(log: EditLog, call: fx.Node) -> None:
    _check_multi_head(call)
    edit = log.edit(call)
    (mode,) = {x.fake_mode for x in map(example, call.all_input_nodes) if isinstance(x, Tensor)}
    with mode, enable_python_dispatcher(), _modes(call), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the original call has issued them
        result = _copy_nodes(_traced(call), edit)
    out, wanted = example(result), example(call)[0]
    if (out.shape, out.dtype) != (wanted.shape, wanted.dtype):
        raise AssertionError(f"{out.shape} {out.dtype}, not {wanted.shape} {wanted.dtype}")
    if not any(raw_name(node) == "softmax" for node in edit.nodes):
        raise AssertionError("no softmax was traced")
    edit.supersede(call, result)


def _traced(call: fx.Node) -> fx.Graph:
    """The first result as a graph of aten operators; its placeholders are the call's inputs."""
    given = call.all_input_nodes

    def first_result(*values: object) -> Tensor:
        by_node = dict(zip(given, values, strict=True))
        args, kwargs = map_arg((call.args, call.kwargs), by_node.__getitem__)
        return FORWARD(*args, **kwargs)[0]

    table = {torch.ops.aten.scaled_dot_product_attention.default: _decomposed_sdpa}
    traced = make_fx(first_result, table, pre_dispatch=True)(*map(example, given)).graph
    traced.eliminate_dead_code()
    return traced


def _decomposed_sdpa(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """F.scaled_dot_product_attention written out, with the defaults of multi-head attention."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return F.dropout(weights, dropout_p) @ v if dropout_p > 0 else weights @ v


def _copy_nodes(traced: fx.Graph, edit: Edit) -> fx.Node:
    """Copy the traced operations to before the call, each with its example; returns the result."""
    call = edit.anchor
    key = meta_key(call.graph)
    place = {k: call.meta[k] for k in SOURCE_METADATA if k in call.meta}
    copies: dict[fx.Node, fx.Node] = {}
    given = iter(call.all_input_nodes)
    for node in traced.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            return copies[node.args[0]]
        elif node.op == "call_function":
            with call.graph.inserting_before(call):
                copies[node] = copy = call.graph.node_copy(node, copies.__getitem__)
            edit.nodes.append(copy)
            args, kwargs = map_arg((copy.args, copy.kwargs), example)
            copy.meta = {**place, key: copy.target(*args, **kwargs)}
        else:
            raise AssertionError(f"{node.op} {node.target} was traced")
    raise AssertionError("nothing was traced")


@contextlib.contextmanager
def _modes(call: fx.Node) -> Iterator[None]:
    """The autocast and gradient modes of the call, inferred from its example, since an enclosing
    graph may have set them.
    """
    out = example(call)[0]
    given = [x for x in map(example, call.all_input_nodes) if isinstance(x, Tensor)]
    floats = {x.dtype for x in given if x.is_floating_point()}
    lowered = out.dtype in (torch.bfloat16, torch.float16) and floats != {out.dtype}
    autocast = contextlib.nullcontext()
    if torch.amp.is_autocast_available(out.device.type):
        autocast = torch.autocast(out.device.type, out.dtype if lowered else None, lowered)
    with autocast, torch.set_grad_enabled(out.requires_grad):
        yield


# Calls of `F.scaled_dot_product_attention`, as a function or an operator, and of the operators of
# its kernels, written out as products, scale, mask, softmax and dropout.
#
# Its causality is aligned at the top left: query i attends the keys up to i. With fewer queries
# than keys the call therefore reads only as many keys as there are queries.

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


def write_out_sdpa(log: EditLog) -> None:
    """Write out the calls of scaled_dot_product_attention."""
    math_only = not any(
        (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )
    )
    for node in list(log.graph.nodes):
        if raw_name(node) == "_sdpa_kernel":
            math_only = _permits_math_only(node)
        elif is_sdpa(node) and (math_only or operation(node)[0] == MATH):
            log.left[node] = MATH_ONLY, NAME
        elif is_sdpa(node):
            log.write_out(node, _write_out, NAME)


def _permits_math_only(node: fx.Node) -> bool:
    """Whether a node that Dynamo captures of `sdpa_kernel` permits nothing but MATH."""
    names = [b.args[0] if isinstance(b, fx.Node) else b for b in node.args[0]]
    return {str(name).split(".")[-1] for name in names} == {"MATH"}


def _write_out(log: EditLog, call: fx.Node) -> None:
    name = operation(call)[0]
    args = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False} | bind(call, _PARAMETERS[name])
    args.setdefault("enable_gqa", name != NAME)
    args["attn_mask"] = args.pop("attn_bias", args["attn_mask"])
    result = call if name == NAME else _result_of_kernel(call)
    _check(call, args)
    edit = log.edit(call)
    wanted = example(result)
    softmax, weights, value = _weights(edit, args, wanted.dtype)
    out = edit.method("matmul", weights, value)
    if example(out).shape != wanted.shape or example(out).dtype != wanted.dtype:
        raise Refusal("its result has another shape or dtype than the product of its inputs")
    edit.supersede(call, out)
    has_mask = args["attn_mask"] is not None
    log.calls[softmax] = AttentionCall(call, NAME, edit.nodes, softmax, has_mask)


def _result_of_kernel(call: fx.Node) -> fx.Node:
    """The output of an operator that also returns what the backward pass needs."""
    overload = call.target
    if isinstance(overload, torch._ops.OpOverload) and overload._overloadname != "default":
        raise Refusal(f"it is the overload {overload._overloadname} of torch's kernel")
    read = [part for part in call.users if part.users]
    if len(read) != 1 or read[0].target is not operator.getitem or read[0].args[1] != 0:
        raise Refusal("its log-sum-exp is read, or its result is not")
    return read[0]


def _check(call: fx.Node, args: dict) -> None:
    check_inputs(call.all_input_nodes)
    if call.users and operation(call)[0] == NAME and not isinstance(example(call), Tensor):
        raise Refusal("its result is not one tensor")
    mask, causal, dropout_p = args["attn_mask"], args["is_causal"], args["dropout_p"]
    if not isinstance(causal, bool) or not isinstance(dropout_p, (int, float)):
        raise Refusal("is_causal or dropout_p is not a constant of the graph")
    q, k = (example(args[name]) for name in ("query", "key"))
    aligned = operation(call)[0] != FLASH or sizes_equal(q.shape[-2], k.shape[-2])
    if causal and not aligned:  # where it is aligned differs between versions of the kernel
        raise Refusal("it is causal, with other numbers of queries and keys")
    if mask is not None and causal:
        raise Refusal("it has both a mask and is_causal")
    if not 0 <= dropout_p < 1:
        raise Refusal(f"dropout_p is {dropout_p}")
    exact = torch.are_deterministic_algorithms_enabled() or inductor_config.fallback_random
    if dropout_p > 0 and exact:
        raise Refusal("its dropout would draw other random numbers than torch was asked to repeat")


def _weights(
    inserter: NodeInserter, args: dict, dtype: torch.dtype
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(the softmax, the weights, the value) as nodes"""
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
    softmax = weights = inserter.method("softmax", scores, -1)
    if example(weights).dtype != dtype:
        weights = inserter.method("to", weights, dtype)
    if args["dropout_p"] > 0:
        weights = inserter.function(F.dropout, weights, args["dropout_p"], True)
    return softmax, weights, v


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


# What the calls of SDPA and FlexAttention have in common.


def repeated_heads(inserter: NodeInserter, q: fx.Node, x: fx.Node) -> fx.Node:
    """Keys or values with as many heads as the query."""
    heads, kv_heads = example(q).shape[-3], example(x).shape[-3]
    if sizes_equal(heads, kv_heads):
        return x
    if type(heads) is int and type(kv_heads) is int:
        return inserter.method("repeat_interleave", x, heads // kv_heads, -3)
    sizes = (inserter.method("size", y, -3) for y in (q, x))
    repeats = inserter.function(operator.floordiv, *sizes)
    return inserter.method("repeat_interleave", x, repeats, -3)


def check_inputs(nodes: Iterable[fx.Node]) -> None:
    """Raises Refusal where an input of a call is not a plain tensor."""
    for node in nodes:
        x = example(node)
        if x is None or (isinstance(x, Tensor) and not isinstance(x, FakeTensor)):
            raise Refusal(f"{node.name} is not a plain tensor: {type(x).__name__}")
