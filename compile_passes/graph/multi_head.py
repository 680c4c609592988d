"""`F.multi_head_attention_forward`, one call in Dynamo's graphs, as the operations it is made of.

The function is traced with the call's own arguments, so that its meaning is torch's, whatever the
options. The operations stand in the graph ahead of the call until the pass has fused them; then
they take its place, and otherwise they go and the call stays as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from compile_passes.graph.ir import PLACE, example, meta_key
from compile_passes.graph.vocabulary import raw_name
from compile_passes.report import Refused, log

FORWARD = F.multi_head_attention_forward
# What the modules of torch.nn call in eval mode without gradients.
_WHOLE = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")


def holds_attention(node: fx.Node) -> bool:
    """Whether a node is one call around attention with its projections."""
    return node.op == "call_function" and (node.target is FORWARD or raw_name(node) in _WHOLE)


@dataclasses.dataclass
class Opened:
    """A call and what it is made of, in order; `out` is what replaces the first of its results."""

    call: fx.Node
    made: list[fx.Node] = dataclasses.field(default_factory=list)
    out: fx.Node | None = None

    def keep(self) -> None:
        """Put the operations in the call's place."""
        for part in list(self.call.users):
            part.replace_all_uses_with(self.out)
            part.graph.erase_node(part)
        self.call.graph.erase_node(self.call)

    def undo(self) -> None:
        for node in reversed(self.made):
            node.graph.erase_node(node)
        self.made.clear()


def open_calls(graph: fx.Graph) -> tuple[list[Opened], dict[fx.Node, str]]:
    """Every call whose weights are unused, opened, and the reasons why the others are not."""
    opened: list[Opened] = []
    closed: dict[fx.Node, str] = {}
    for call in filter(holds_attention, list(graph.nodes)):
        try:
            _check(call)
            opened.append(_open(call))
        except Refused as refusal:
            closed[call] = str(refusal)
        except Exception as error:  # a bug of ours must not break the user's compilation
            log.warning("could not open %s", call, exc_info=True)
            closed[call] = f"internal error, please report: {type(error).__name__}: {error}"
    return opened, closed


def _check(call: fx.Node) -> None:
    if call.target is not FORWARD:
        raise Refused(
            f"torch.{raw_name(call)} is one operator; "
            "torch.backends.mha.set_fastpath_enabled(False) takes what can be fused"
        )
    for node in call.all_input_nodes:
        x = example(node)
        if x is None or (isinstance(x, Tensor) and not isinstance(x, FakeTensor)):
            raise Refused(f"{node.name} is not a plain tensor: {type(x).__name__}")
    for user in call.users:
        part = user.args[1] if user.target is operator.getitem else None
        readers = () if part == 0 else user.users if part == 1 else (user,)
        for reader in readers:
            used = "returned" if reader.op == "output" else f"also read by {raw_name(reader)}"
            raise Refused(f"the attention weights are {used}; fused attention never computes them")


def _open(call: fx.Node) -> Opened:
    opened = Opened(call)
    (mode,) = {x.fake_mode for x in map(example, call.all_input_nodes) if isinstance(x, Tensor)}
    try:
        with mode, enable_python_dispatcher(), _modes(call), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the call itself gave them
            _inline(_traced(call), opened)
        made, wanted = example(opened.out), example(call)[0]
        if (made.shape, made.dtype) != (wanted.shape, wanted.dtype):
            raise AssertionError(f"{made.shape} {made.dtype}, not {wanted.shape} {wanted.dtype}")
        if not any(raw_name(node) == "softmax" for node in opened.made):
            raise AssertionError("no softmax was traced")
    except BaseException:
        opened.undo()
        raise
    return opened


def _traced(call: fx.Node) -> fx.Graph:
    """The first result as a graph of aten operators, its placeholders the call's input nodes."""
    given = call.all_input_nodes

    def first_result(*values: object) -> Tensor:
        by_node = dict(zip(given, values, strict=True))
        args, kwargs = map_arg((call.args, call.kwargs), by_node.__getitem__)
        return FORWARD(*args, **kwargs)[0]

    table = {torch.ops.aten.scaled_dot_product_attention.default: _written_out}
    traced = make_fx(first_result, table, pre_dispatch=True)(*map(example, given)).graph
    traced.eliminate_dead_code()
    return traced


def _written_out(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """F.scaled_dot_product_attention as the function above calls it."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return F.dropout(weights, dropout_p) @ v if dropout_p > 0 else weights @ v


def _inline(traced: fx.Graph, opened: Opened) -> None:
    """Copy the operations to where the call is, each with its example."""
    call = opened.call
    key = meta_key(call.graph)
    place = {k: call.meta[k] for k in PLACE if k in call.meta}
    copies: dict[fx.Node, fx.Node] = {}
    given = iter(call.all_input_nodes)
    for node in traced.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            opened.out = copies[node.args[0]]
        elif node.op == "call_function":
            with call.graph.inserting_before(call):
                copies[node] = copy = call.graph.node_copy(node, copies.__getitem__)
            opened.made.append(copy)
            args, kwargs = map_arg((copy.args, copy.kwargs), example)
            copy.meta = {**place, key: copy.target(*args, **kwargs)}
        else:
            raise AssertionError(f"{node.op} {node.target} was traced")


@contextlib.contextmanager
def _modes(call: fx.Node) -> Iterator[None]:
    """The modes under which the call gave its example. The graph alone does not tell: it may be
    the body of a region inside another.
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
