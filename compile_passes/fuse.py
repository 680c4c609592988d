"""The pass over one graph: it is rewritten, every softmax is matched, its masks are classified, and
a call takes its place. `explain` does so without compiling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from compile_passes import report
from compile_passes.emit.masks import add_mask_blocks
from compile_passes.emit.replacement import QuantizedProducts, rewrite
from compile_passes.ir.axes import is_one
from compile_passes.ir.graph import (
    EXAMPLES,
    SOURCE_METADATA,
    GraphView,
    NodeInserter,
    Value,
    example,
    restride,
)
from compile_passes.ir.vocabulary import operation, raw_name
from compile_passes.masks.affine import Exactness
from compile_passes.masks.classification import classify_masks
from compile_passes.masks.mask_terms import (
    ClassifiedMasks,
    EmptyRows,
    NotMaskedAlike,
    with_gate_for_fill,
)
from compile_passes.masks.symbolic_evaluator import SymbolicEvaluator
from compile_passes.match.attention_site import AttentionSite, attention_site
from compile_passes.match.matcher import NO_SCORES as NO_SCORES
from compile_passes.match.matcher import Matcher
from compile_passes.match.states import Core, RowStatistic
from compile_passes.report import Finding, FusedCore, Refusal, Report
from compile_passes.rewrites import REWRITES, attention_calls, flex_attention
from compile_passes.rewrites.edit_log import AttentionCall, EditLog
from fa_ops.functions.flex_graphs import Settings
from fa_ops.functions.flex_graphs import flex_attention as of_graphs

EIGHT_BIT = "8-bit"  # the products of a finding
NO_VALUE = "its result is not multiplied with a value"
AS_FAST, WIDE = "torch computes it as fast", "the GPU kernels are made for 16 bits"


def checked_products(
    verify: bool, eight_bit: bool, sixteen_bit: Collection[str]
) -> QuantizedProducts | None:
    """The options of 8-bit products; raises TypeError or ValueError for options that are wrong."""
    if not isinstance(verify, bool):
        raise TypeError(f"verify must be a bool, got {verify!r}")
    return QuantizedProducts.of(eight_bit, sixteen_bit)


def fuse(
    graph: fx.Graph, verify: bool = False, eight_bit: bool = False,
    sixteen_bit: Collection[str] = (),
) -> list[Finding]:  # fmt: skip
    """Rewrite every attention of a graph in place.

    Args:
        graph: as Dynamo captures it, or an exported program's.
        verify: as in :func:`install`.
        eight_bit: as in :func:`install`.
        sixteen_bit: as in :func:`install`.

    Returns:
        A finding for each softmax, and each call of scaled_dot_product_attention or flex_attention,
        in graph order.
    """
    products = checked_products(verify, eight_bit, sixteen_bit)
    if not _may_hold_attention(graph):
        return []
    log = EditLog(graph)
    for step in REWRITES:
        log.attempt(step.function)
    log.close()
    try:
        view = GraphView(graph)
        matcher = Matcher(view)
    except Exception:  # a bug of the pass must not break the user's compilation
        report.log.warning("could not read a graph, nothing in it is fused", exc_info=True)
        counters["fa_ops"]["internal error"] += 1
        log.finish(fused=False)
        return []
    evaluator = SymbolicEvaluator(Exactness(graph))
    fusion = CoreFusion(view, matcher.lses, evaluator, verify, log.calls, products)
    nodes = {value: value.node for value in matcher.softmaxes}  # a rewrite changes value.node
    results: dict[Value, FusedCore | str] = dict(matcher.misses)
    for core in matcher.cores:
        softmax = core.weights.softmax
        if not isinstance(results.get(softmax), FusedCore):
            results[softmax] = fusion.fuse(core)
    findings = {node: report.make_finding(node, *reason) for node, reason in log.left.items()}
    left = {node: node for node in log.left}  # calls by the node of their finding
    for softmax, node in nodes.items():
        result = results.get(softmax, NO_VALUE)
        call = log.calls.get(node)
        origin = (call.call, result, call.operation) if call else (node, result)
        findings[node] = report.make_finding(*origin)
        if call and not findings[node].fused:
            left[node] = call.call
    log.finish(fused=any(finding.fused for finding in findings.values()))
    for node, call in left.items():
        if flex_attention.is_flex(call) and _may_be_a_program(findings[node]):
            findings[node] = take_flex_call(call, products is not None)
    add_mask_blocks(graph)
    ordered = [findings[node] for node in sorted(findings, key=log.order.__getitem__)]
    report.record(ordered)
    return ordered


def _may_be_a_program(finding: Finding) -> bool:
    """Whether a call of FlexAttention was not left because torch computes it as fast."""
    return finding.reason.partition("; products: ")[0] not in (WIDE, AS_FAST)


def keep_left_softmaxes(graph: fx.Graph) -> None:
    """Keep Inductor's own attention patterns from the softmaxes of a graph in which everything that
    :func:`fuse` can prove to be attention is fused. These patterns ignore the numbers in a graph:
    the dimension of a softmax or transposition, fills, dtypes. Scores that are negated twice have
    the same bits, cost nothing in the kernel of the softmax, and match none of them.
    """
    for node in list(graph.nodes):
        name = operation(node)[0]
        by_hand = name == "amax" and any(operation(user)[0] == "sub" for user in node.users)
        given = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
        if not (name == "softmax" or by_hand) or not isinstance(given, fx.Node):
            continue
        kept = given
        meta = {key: node.meta[key] for key in SOURCE_METADATA if key in node.meta}
        meta |= {key: given.meta[key] for key in EXAMPLES if key in given.meta}
        with graph.inserting_before(node):
            for _ in range(2):
                kept = graph.call_function(torch.neg, (kept,))
                kept.meta = {**meta}
        node.replace_input_with(given, kept)


def _may_hold_attention(graph: fx.Graph) -> bool:
    names = [raw_name(node) for node in graph.nodes]
    if any("jvp" in name or "make_dual" in name for name in names):
        return False  # tensors that carry tangents are no plain ones: their attention stays
    calls = (*attention_calls.NAMES, flex_attention.NAME)
    known = ("softmax", "softmin", "exp", "exp_", "exp2", *calls)
    softmax = any(name.endswith(known) for name in names)
    return softmax or any(map(_may_be_one, graph.nodes))


def _may_be_one(node: fx.Node) -> bool:
    """Whether a node is multi-head attention or the power of a number."""
    power = raw_name(node) == "pow" and not isinstance((*node.args, node)[0], fx.Node)
    return power or attention_calls.is_attention_call(node)


@dataclasses.dataclass(frozen=True)
class CoreFusion:
    """Fuses the cores of one graph. `calls` are the inlined calls by their softmax."""

    view: GraphView
    lses: list[RowStatistic]
    evaluator: SymbolicEvaluator
    verify: bool
    calls: dict[fx.Node | None, AttentionCall]
    eight_bit: QuantizedProducts | None = None

    def fuse(self, core: Core) -> FusedCore | str:
        """The call that replaced the core, or the reason why the core stays."""
        try:
            return self._fuse(core)
        except Refusal as refusal:
            return str(refusal)
        except Exception as error:  # a bug of the pass must not break the user's compilation
            report.log.warning("could not fuse %s", core.out, exc_info=True)
            return report.internal_error(error)

    def _fuse(self, core: Core) -> FusedCore:
        site = attention_site(core, self.lses)
        try:
            masks = classify_masks(site, self.evaluator)
        except NotMaskedAlike as refusal:
            try:
                site = attention_site(with_gate_for_fill(core), self.lses)
            except Refusal:
                raise refusal from None
            masks = classify_masks(site, self.evaluator)
        why = self._reason_to_take(site, masks)
        try:
            return self._rewritten(site, masks, why)
        except Refusal:
            if not masks.interval and not masks.conditions:
                raise
        masks = classify_masks(site, self.evaluator, intervals=False)
        why = self._reason_to_take(site, masks)
        return self._rewritten(site, masks, why)

    def _rewritten(self, site: AttentionSite, masks: ClassifiedMasks, why: str) -> FusedCore:
        products = self._products(site, masks)
        quantizes = products == EIGHT_BIT
        call, verified = rewrite(site, masks, self.view, self.verify, quantizes)
        return FusedCore(call, masks, why, verified, products)

    def _products(self, site: AttentionSite, masks: ClassifiedMasks) -> str:
        """The products of a call, in the words of `Finding.products`."""
        if self.eight_bit is None:
            return ""
        reason = self.eight_bit.refusal(site, masks)
        return f"16-bit: {reason}" if reason else EIGHT_BIT

    def _reason_to_take(self, site: AttentionSite, masks: ClassifiedMasks) -> str:
        """Why a call is replaced, empty for code written by hand. Raises Refusal where the
        call is left.
        """
        call = self.calls.get(site.core.weights.softmax.node)
        if call is None:
            return ""
        taken, reason = decide_call(site, masks, call)
        products = "" if taken else self._products(site, masks)
        if products == EIGHT_BIT:
            return "8-bit products were asked for"
        if not taken:
            raise Refusal(f"{reason}; products: {products}" if products else reason)
        return reason


def fuse_module(
    module: torch.nn.Module, verify: bool = False, eight_bit: bool = False,
    sixteen_bit: Collection[str] = (),
) -> list[Finding]:  # fmt: skip
    """Run :func:`fuse` on a graph module and on those inside it, such as checkpointed regions.

    Args:
        module: a module; those in it that are no graph modules are left as they are.
        verify: as in :func:`install`.
        eight_bit: as in :func:`install`.
        sixteen_bit: as in :func:`install`.

    Returns:
        The findings of all graphs.

    Examples:
        >>> fused = torch.export.export(model, (x,)).module()
        >>> findings = compile_passes.fuse_module(fused)
    """
    findings = []
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            found = fuse(child.graph, verify, eight_bit, sixteen_bit)
            if any(f.fused for f in found):
                child.recompile()
            findings += found
    return findings


# Whether replacing a call of scaled_dot_product_attention or FlexAttention pays: one table of
# rules, of which the first that holds decides. The measurements are those of
# docs/performance/models.md and cpu.md.


class CallCase(NamedTuple):
    """The facts by which the rules decide."""

    site: AttentionSite
    masks: ClassifiedMasks
    call: AttentionCall

    @property
    def device(self) -> torch.device:
        """The device of the call."""
        return self.site.q.value.tensor.device

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the CUDA device, (0, 0) where this machine has none."""
        known = torch.cuda.is_available()
        return torch.cuda.get_device_capability(self.device) if known else (0, 0)


class CallRule(NamedTuple):
    """A call for which `holds` is true is taken or left, for this reason."""

    holds: Callable[[CallCase], bool]
    taken: bool
    reason: str


def _reads_mask_for_gradients(case: CallCase) -> bool:
    """Whether the rows without keys, or large numbers, are to be found in a mask first."""
    return case.masks.empty_rows is EmptyRows.ABSORBED and case.site.requires_grad


def _stored(case: CallCase) -> list[Tensor]:
    """What FlexAttention computes in its kernel and the operator would read, for all queries and
    keys.
    """
    both = {*case.site.queries}, {*case.site.keys}
    leaves = [leaf for leaf in case.masks.leaves if all(leaf.axes() & axes for axes in both)]
    own = case.call.nodes if case.call.operation == "flex_attention" else ()
    return [x.value.tensor for x in leaves if x.value.op != "reshape" and x.value.node in own]


def _stores_a_small_mask(case: CallCase) -> bool:
    """Whether that is one mask of bools, no larger than the query, and Hopper's kernels read it."""
    stored, q = _stored(case), case.site.q.value.tensor
    fits = len(stored) == 1 and stored[0].dtype == torch.bool
    small = fits and statically_known_true(stored[0].numel() <= q.numel() * q.dtype.itemsize)
    return small and _is_on_hopper(case) and not _is_wide_on_gpu(case)


def _computes_scores(case: CallCase) -> bool:
    return bool(_stored(case))


def _mask_becomes_compact(case: CallCase) -> bool:
    """Whether the mask, or a part of it, needs no reading of all its elements."""
    masks = case.masks
    compact = masks.interval or masks.left is not None or masks.right is not None
    return case.call.has_mask and bool(compact or not masks.is_dense)


def _is_wide_on_gpu(case: CallCase) -> bool:
    return case.device.type == "cuda" and case.site.dtype.itemsize > 2


def _is_on_hopper(case: CallCase) -> bool:
    return case.device.type == "cuda" and case.capability[0] == 9


def _repeats_heads(case: CallCase) -> bool:
    return len(case.site.heads) > len(case.site.kv_heads)


def _is_one_query_on_cpu(case: CallCase) -> bool:
    queries = case.site.queries
    return case.device.type == "cpu" and all(is_one(axis.size) for axis in queries)


CALL_RULES = (
    CallRule(
        _reads_mask_for_gradients,
        False,
        "its mask may leave rows without keys, which training has to find first",
    ),
    # H200, causal: FlexAttention takes 3.06 and 7.63 ms forward and backward, with a mask of bools
    # the operator takes 1.69 and 4.74
    CallRule(_stores_a_small_mask, True, "its mask is stored, in no more bytes than the query"),
    CallRule(_computes_scores, False, "its scores or mask would be stored for every query and key"),
    # CPU, 2048 keys, one core: a window of 128 given as a mask takes 124 ms, the operator 24;
    # a causal mask 210 and 71
    CallRule(_mask_becomes_compact, True, "its mask becomes compact, and masked tiles are skipped"),
    CallRule(_is_wide_on_gpu, False, WIDE),
    # H200, Llama of 8B shape: SDPA takes 1.36 times as long in the prefill, 1.21 in training
    CallRule(_is_on_hopper, True, "the kernels for Hopper are faster"),
    # CPU, 8 and 2 heads, 1 query, 1024 keys: 1.9 ms with repeated keys and values, 0.45 without
    CallRule(_repeats_heads, True, "keys and values are not repeated"),
    # CPU, 8 heads, 1 query, 1024 keys: 2.2 ms and 1.2
    CallRule(_is_one_query_on_cpu, True, "for one query the keys are split among the cores"),
    CallRule(lambda case: True, False, AS_FAST),
)


def decide_call(
    site: AttentionSite, masks: ClassifiedMasks, call: AttentionCall
) -> tuple[bool, str]:
    """(whether the call is replaced, why)"""
    case = CallCase(site, masks, call)
    rule = next(rule for rule in CALL_RULES if rule.holds(case))
    return rule.taken, rule.reason


# What the pass would do to a function, without compiling it.


def explain(
    function: Callable[..., Any],
    *inputs: object,
    dynamic: bool | None = None,
    verify: bool = False,
    eight_bit: bool = False,
    sixteen_bit: Collection[str] = (),
    **kwargs: Any,
) -> Report:
    """Run the pass on what `torch.compile` captures of `function(*inputs, **kwargs)`.

    The function runs once, eagerly.

    Args:
        function: a function or module, compiled or not.
        inputs: its arguments; `kwargs` are the ones with names.
        dynamic: as in `torch.compile`.
        verify: as in :func:`install`; findings say whether they were verified.
        eight_bit: as in :func:`install`; findings say which products they have.
        sixteen_bit: as in :func:`install`.

    Returns:
        Every softmax with its source location and the call that it was fused into, or the reason
        why it was not fused. Print it, or read its `findings`.

    Raises:
        ValueError, TypeError: options that :func:`install` refuses.

    Examples:
        >>> print(compile_passes.explain(model, x))
        1 of 1 softmaxes fused, in 1 graph
        ...
    """
    options = verify, eight_bit, sixteen_bit
    checked_products(*options)  # before anything is traced
    findings: list[Finding] = []
    graphs = 0

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        nonlocal graphs
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                graphs += 1
                findings.extend(fuse(_copy(module.graph), *options))
        return gm.forward

    function = getattr(function, "_orig_mod", function)
    function = getattr(function, "_torchdynamo_orig_callable", function)
    with torch._dynamo.config.patch(recompile_limit=2**16):
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs, **kwargs)
    return Report(tuple(findings), graphs)


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph(graph.owning_module)
    outputs = copied.graph_copy(graph, {})
    copied.output(outputs)
    return copied


# Calls of FlexAttention whose functions become a program of the operator.
#
# Where the options, key ranges and masks of a call do not express its functions, the graphs of
# these are read as `fa_ops.flex_attention` reads Python functions: what depends on one index, or on
# the distance, is computed before the kernel, and a program is left, which the operator carries as
# text. The operations of both are traced on the examples of the graph and inserted before the call.

_OPTIONS = "its functions are options of the operator"
_PROGRAM = "its functions run in the kernel, which stores no scores"
_MAX_HEAD_DIM = 256
_CALLS = tuple(getattr(torch.ops.fa, name).default for name in (
    "attention", "attention_with_lse", "attention_programmed", "attention_programmed_max"
))  # fmt: skip
_PROGRAMS = _CALLS[2:]


def take_flex_call(call: fx.Node, asked_for_8_bits: bool) -> Finding:
    """Replace a call by the operator; what is found says by which call, or why it stays."""
    inserter = NodeInserter(call.graph, call)
    try:
        made = _replace_flex_call(inserter, call)
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


def _replace_flex_call(inserter: NodeInserter, call: fx.Node) -> report.ProgrammedCall:
    flex_attention.check_inputs_of(call)
    parts = {user.args[1]: user for user in call.users if user.users}
    if 0 not in parts:
        raise Refusal("its result is not read")
    statistics = [i for i in (1, 2) if i in parts]  # lse, and largest scores
    if statistics and call.args[6].get("BACKEND") == "FLASH":
        raise Refusal("its log-sum-exp is read, of a kernel with other units")
    query, key, value = (_cast_to(inserter, x, example(parts[0]).dtype) for x in call.args[:3])
    tensors = query, key, value
    results = _with_operator(
        inserter, call, tensors, with_lse=bool(statistics), with_max=2 in parts
    )
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


def _fixed_block(n: int | fx.Node) -> int:
    """The size of a block, which is a part of a program: a graph is for one."""
    return n if type(n) is int else int(example(n))


def _is_default_scale(scale: fx.Node, query: fx.Node) -> bool:
    """Whether a number is one over the root of the head dimension, which varies as well."""
    found, head_dim = example(scale), example(query).shape[-1]
    known = isinstance(found, SymFloat) and isinstance(head_dim, SymInt)
    return known and found.node.expr == (1.0 / torch.sym_sqrt(head_dim)).node.expr


def _cast_to(inserter: NodeInserter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Under autocast, the tensor in the dtype in which the call would compute."""
    return x if example(x).dtype == dtype else inserter.method("to", x, dtype)


def _with_operator(
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
        lists = *block_mask[2:6], *block_mask[:2], *map(_fixed_block, block_mask[-3:-1])
    if isinstance(scale, fx.Node):
        if not _is_default_scale(scale, tensors[0]):
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
    others = (*lists, *(None,) * 5, mask_mod)
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
