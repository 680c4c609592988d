"""Inlining of `F.multi_head_attention_forward`, which Dynamo captures as one call.

torch's own function is traced with the arguments of the call, so that every option keeps its
meaning. The traced operations are inserted before the call. If the pass fuses them they replace the
call; otherwise they are erased and the call is left unchanged.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from compile_passes.graph.inlined_call import InlinedCall, check_inputs
from compile_passes.graph.ir import SOURCE_METADATA, example, meta_key
from compile_passes.graph.vocabulary import raw_name, read_elsewhere
from compile_passes.report import Refused, internal_error, log

FORWARD = F.multi_head_attention_forward
# Operators that modules of torch.nn call in eval mode without gradients.
_OPERATORS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")


def is_attention_call(node: fx.Node) -> bool:
    """Whether a node is one call of attention together with its projections."""
    return node.op == "call_function" and (node.target is FORWARD or raw_name(node) in _OPERATORS)


def inline_calls(graph: fx.Graph) -> tuple[list[InlinedCall], dict[fx.Node, str]]:
    """The inlined calls, and the reasons why the others cannot be inlined."""
    inlined: list[InlinedCall] = []
    not_inlined: dict[fx.Node, str] = {}
    for call in filter(is_attention_call, list(graph.nodes)):
        try:
            _check(call)
            inlined.append(_inlined(call))
        except Refused as refusal:
            not_inlined[call] = str(refusal)
        except Exception as error:  # a bug of the pass must not break the user's compilation
            log.warning("could not inline %s", call, exc_info=True)
            not_inlined[call] = internal_error(error)
    return inlined, not_inlined


def _check(call: fx.Node) -> None:
    if call.target is not FORWARD:
        raise Refused(
            f"torch.{raw_name(call)} is one operator; "
            "torch.backends.mha.set_fastpath_enabled(False) selects the code that can be fused"
        )
    check_inputs(call.all_input_nodes)
    for user in call.users:
        part = user.args[1] if user.target is operator.getitem else None
        readers = () if part == 0 else user.users if part == 1 else (user,)
        for reader in readers:
            raise Refused(read_elsewhere("the attention weights are", reader))


def _inlined(call: fx.Node) -> InlinedCall:
    inlined = InlinedCall(call)
    (mode,) = {x.fake_mode for x in map(example, call.all_input_nodes) if isinstance(x, Tensor)}
    try:
        with mode, enable_python_dispatcher(), _modes(call), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the original call has issued them
            _copy_nodes(_traced(call), inlined)
        out, wanted = example(inlined.out), example(call)[0]
        if (out.shape, out.dtype) != (wanted.shape, wanted.dtype):
            raise AssertionError(f"{out.shape} {out.dtype}, not {wanted.shape} {wanted.dtype}")
        if not any(raw_name(node) == "softmax" for node in inlined.nodes):
            raise AssertionError("no softmax was traced")
    except BaseException:
        inlined.undo()
        raise
    return inlined


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


def _copy_nodes(traced: fx.Graph, inlined: InlinedCall) -> None:
    """Copy the traced operations to before the call, each with its example."""
    call = inlined.call
    key = meta_key(call.graph)
    place = {k: call.meta[k] for k in SOURCE_METADATA if k in call.meta}
    copies: dict[fx.Node, fx.Node] = {}
    given = iter(call.all_input_nodes)
    for node in traced.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            inlined.out = copies[node.args[0]]
        elif node.op == "call_function":
            with call.graph.inserting_before(call):
                copies[node] = copy = call.graph.node_copy(node, copies.__getitem__)
            inlined.nodes.append(copy)
            args, kwargs = map_arg((copy.args, copy.kwargs), example)
            copy.meta = {**place, key: copy.target(*args, **kwargs)}
        else:
            raise AssertionError(f"{node.op} {node.target} was traced")


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
