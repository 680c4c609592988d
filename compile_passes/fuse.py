"""The pass over one graph: match every softmax, classify its masks, rewrite it, report it."""

from __future__ import annotations

import torch
from torch import fx
from torch._dynamo.utils import counters

from compile_passes import report
from compile_passes.graph import multi_head
from compile_passes.graph.ir import GraphView, Value
from compile_passes.graph.vocabulary import raw_name
from compile_passes.masks.classified_masks import ClassifiedMasks
from compile_passes.masks.classify import classify_masks
from compile_passes.masks.exactness import Exactness
from compile_passes.masks.symbolic_eval import SymbolicEvaluator
from compile_passes.match.attention_site import attention_site
from compile_passes.match.match_state import Core, RowStatistic
from compile_passes.match.matcher import NO_SCORES as NO_SCORES
from compile_passes.match.matcher import Matcher
from compile_passes.report import Finding, Refused
from compile_passes.rewrite.replace import rewrite

NO_VALUE = "its result is not multiplied with a value"


def fuse(graph: fx.Graph, verify: bool = False) -> list[Finding]:
    """Rewrite every attention of the graph in place. One finding per softmax, in graph order.

    With `verify`, each rewrite is first run beside what it replaces, on random inputs.
    """
    if not _may_hold_attention(graph):
        return []
    inlined, not_inlined = multi_head.inline_calls(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    try:
        view = GraphView(graph)
        matcher = Matcher(view)
    except Exception:  # a bug of the pass must not break the user's compilation
        report.log.warning("could not read a graph, nothing in it is fused", exc_info=True)
        counters["fa_ops"]["internal error"] += 1
        _finish_inlined(inlined, set())
        return []
    evaluator = SymbolicEvaluator(Exactness(graph))
    nodes = {value: value.node for value in matcher.softmaxes}  # a rewrite changes value.node
    results: dict[Value, tuple[fx.Node, ClassifiedMasks] | str] = dict(matcher.misses)
    for core in matcher.cores:
        softmax = core.weights.softmax
        if not isinstance(results.get(softmax), tuple):
            results[softmax] = _fuse_core(core, view, matcher.lses, evaluator, verify)
    found = {node: report.make_finding(node, reason) for node, reason in not_inlined.items()}
    for softmax, node in nodes.items():
        found[node] = report.make_finding(node, results.get(softmax, NO_VALUE))
    _finish_inlined(inlined, {node for node, finding in found.items() if finding.fused})
    findings = [found[node] for node in sorted(found, key=order.__getitem__)]
    report.record(findings)
    return findings


def _may_hold_attention(graph: fx.Graph) -> bool:
    names = [raw_name(node) for node in graph.nodes]
    if any("jvp" in name or "make_dual" in name for name in names):
        return False  # the operator has no forward-mode derivative
    softmax = any(name.endswith(("softmax", "exp", "exp_")) for name in names)
    return softmax or any(map(multi_head.is_attention_call, graph.nodes))


def _finish_inlined(inlined: list[multi_head.InlinedCall], fused: set[fx.Node]) -> None:
    for call in inlined:
        if fused.isdisjoint(call.nodes):
            call.undo()
        else:
            call.commit()


def _fuse_core(
    core: Core,
    view: GraphView,
    lses: list[RowStatistic],
    evaluator: SymbolicEvaluator,
    verify: bool,
) -> tuple[fx.Node, ClassifiedMasks] | str:
    """The call that replaced the core and its masks, or the reason why the core stays."""
    try:
        site = attention_site(core, lses)
        masks = classify_masks(site, evaluator)
        try:
            return rewrite(site, masks, view, verify), masks
        except Refused:
            if not masks.interval:
                raise
            masks = classify_masks(site, evaluator, intervals=False)
            return rewrite(site, masks, view, verify), masks
    except Refused as refusal:
        return str(refusal)
    except Exception as error:  # a bug of the pass must not break the user's compilation
        report.log.warning("could not fuse %s", core.out, exc_info=True)
        return report.internal_error(error)


def fuse_module(module: torch.nn.Module, verify: bool = False) -> list[Finding]:
    """Run `fuse` on a graph module and on those inside it, such as checkpointed regions."""
    findings = []
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            found = fuse(child.graph, verify)
            if any(f.fused for f in found):
                child.recompile()
            findings += found
    return findings
