"""Calls of FlexAttention whose functions become a program of the operator.

Where the options, key ranges and masks of a call do not express its functions, the graphs of these
are read as `fa_ops.flex_attention` reads Python functions: what depends on one index, or on the
distance, is computed before the kernel, and a program is left, which the operator carries as text.
The operations of both are traced on the examples of the graph and inserted before the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator

import torch
from torch import SymFloat, SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from compile_passes import report
from compile_passes.ir.graph import NodeInserter, example, restride
from compile_passes.report import Finding, Refusal
from compile_passes.rewrites import flex_attention
from fa_ops.functions.flex_graphs import Settings
from fa_ops.functions.flex_graphs import flex_attention as of_graphs

AS_FAST, WIDE = "torch computes it as fast", "the GPU kernels are made for 16 bits"
_OPTIONS = "its functions are options of the operator"
_PROGRAM = "its functions run in the kernel, which stores no scores"
_MAX_HEAD_DIM = 256
_CALLS = tuple(getattr(torch.ops.fa, name).default for name in (
    "attention", "attention_with_lse", "attention_programmed", "attention_programmed_max"
))  # fmt: skip
_PROGRAMS = _CALLS[2:]


def take(call: fx.Node, asked_for_8_bits: bool) -> Finding:
    """Replace a call by the operator; what is found says by which call, or why it stays."""
    inserter = NodeInserter(call.graph, call)
    try:
        made = _replace(inserter, call)
    except Refusal as refusal:
        made = str(refusal)
    except NotImplementedError as refusal:  # what programs do not have, or no backend runs
        made = str(refusal)
    except Exception as error:  # a bug of the pass must not break the user's compilation
        report.log.warning("could not make a program of %s", call, exc_info=True)
        made = report.internal_error(error)
    if isinstance(made, str):
        inserter.undo()
    finding = report.make_finding(call, made, flex_attention.NAME)
    if asked_for_8_bits and finding.fused:
        return dataclasses.replace(finding, products="16-bit: its functions were read")
    return finding


def _replace(inserter: NodeInserter, call: fx.Node) -> report.ProgrammedCall:
    flex_attention.check_inputs_of(call)
    parts = {user.args[1]: user for user in call.users if user.users}
    if 0 not in parts:
        raise Refusal("its result is not read")
    statistics = [i for i in (1, 2) if i in parts]  # lse, and largest scores
    if statistics and call.args[6].get("BACKEND") == "FLASH":
        raise Refusal("its log-sum-exp is read, of a kernel with other units")
    query, key, value = (_cast(inserter, x, example(parts[0]).dtype) for x in call.args[:3])
    tensors = query, key, value
    results = _inlined(inserter, call, tensors, with_lse=bool(statistics), with_max=2 in parts)
    made = next(node for node in reversed(inserter.nodes) if node.target in _CALLS)
    is_program = made.target in _PROGRAMS
    _check_kernel(call, made if is_program else None)
    replacements = {parts[0]: restride(inserter, results[0], parts[0])}
    for i in statistics:  # to the base 2, as the call returns them
        replacements[parts[i]] = inserter.function(operator.truediv, results[i], math.log(2.0))
    for old, new in replacements.items():
        if example(old).shape != example(new).shape or example(old).dtype != example(new).dtype:
            raise Refusal("a result has another shape or dtype than the operator's")
    for old, new in replacements.items():
        new.meta.update(old.meta)  # the example has the strides, and whether it requires grad
        old.replace_all_uses_with(new)
    for user in [*call.users]:
        call.graph.erase_node(user)
    call.graph.erase_node(call)
    return report.ProgrammedCall(made, _PROGRAM if is_program else _OPTIONS)


def _check_kernel(call: fx.Node, program: fx.Node | None) -> None:
    """Raises Refusal where torch's kernel is as fast, or no kernel for GPUs runs the call."""
    query, _, value = map(example, call.args[:3])
    if query.device.type == "cpu":
        changes = any(flex_attention.computes(f.graph) for f in flex_attention.functions_of(call))
        if not changes and program is None:
            raise Refusal(AS_FAST)
        return
    if query.dtype.itemsize > 2:
        raise Refusal(WIDE)
    widest = max(query.shape[-1], value.shape[-1])
    if widest > _MAX_HEAD_DIM:
        raise Refusal(f"a head dimension is {widest}: the GPU kernels take {_MAX_HEAD_DIM}")
    if program is not None and " pow(" in report.options_of(program)["program"]:
        raise Refusal("its functions have powers, which the GPU kernels lack")


def _fixed(n: int | fx.Node) -> int:
    """The size of a block, which is a part of a program: a graph is for one."""
    return n if type(n) is int else int(example(n))


def _is_default(scale: fx.Node, query: fx.Node) -> bool:
    """Whether a number is one over the root of the head dimension, which varies as well."""
    found, head_dim = example(scale), example(query).shape[-1]
    known = isinstance(found, SymFloat) and isinstance(head_dim, SymInt)
    return known and found.node.expr == (1.0 / torch.sym_sqrt(head_dim)).node.expr


def _cast(inserter: NodeInserter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Under autocast, the tensor in the dtype in which the call would compute."""
    return x if example(x).dtype == dtype else inserter.method("to", x, dtype)


def _inlined(
    inserter: NodeInserter,
    call: fx.Node,
    tensors: tuple[fx.Node, ...],
    with_lse: bool,
    with_max: bool,
) -> list[fx.Node]:
    """The results of the operator, by nodes of all that it is given."""
    block_mask, scale = call.args[4:6]
    score_mod, mask_mod = flex_attention.functions_of(call)
    lists: tuple = (None,) * 8
    if not flex_attention.has_one_block(call):
        lists = *block_mask[2:6], *block_mask[:2], *map(_fixed, block_mask[-3:-1])
    if isinstance(scale, fx.Node):
        if not _is_default(scale, tensors[0]):
            raise Refusal("its scale is a number that varies")
        scale = None
    elif type(head_dim := example(tensors[0]).shape[-1]) is int:
        scale = None if scale == 1.0 / math.sqrt(head_dim) else scale
    settings = Settings(
        has_score=flex_attention.computes(score_mod.graph), has_mask=True, enable_gqa=True,
        is_causal=False, window=None, deterministic=False, backend=None, with_lse=with_lse,
        with_max=with_max,
        lists_decide=not flex_attention.mask_mod_decides(call),
    )  # fmt: skip
    others = (*lists, None, None, None, None, mask_mod)
    arguments = (*tensors, score_mod, others, scale, settings._asdict(), *call.args[7:9])
    inputs: dict[fx.Node, None] = {}
    map_arg(arguments, lambda node: inputs.setdefault(node))

    def attend(*values: object) -> tuple[Tensor, ...]:
        given = dict(zip(inputs, values, strict=True))
        return of_graphs(*map_arg(arguments, given.__getitem__))

    mode = inserter.fake_mode() or contextlib.nullcontext()
    with mode, enable_python_dispatcher():
        traced = make_fx(attend)(*map(example, inputs)).graph
    traced.eliminate_dead_code()
    copies = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = inserter.function(node.target, *args, **kwargs)
        elif node.op == "output":
            return list(map_arg(node.args[0], copies.__getitem__))
        elif node.op != "placeholder":
            raise Refusal(f"reading its functions gave {node.op} {node.target}")
    raise Refusal("score_mod or mask_mod has no result")
