"""The pass over one graph: match, classify the masks, rewrite, and report what happened."""

from __future__ import annotations

import torch
from torch import fx
from torch._dynamo.utils import counters

from compile_passes import report
from compile_passes.graph import multi_head
from compile_passes.graph.ir import Value, View
from compile_passes.graph.vocabulary import raw_name
from compile_passes.masks.classify import Masks, classify_masks
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
    if not any(map(_may_hold_attention, graph.nodes)):
        return []
    if any("jvp" in raw_name(node) or "make_dual" in raw_name(node) for node in graph.nodes):
        return []  # the operator has no forward-mode derivative
    opened, closed = multi_head.open_calls(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    view = View(graph)
    try:
        matcher = Matcher(view)
    except Exception:  # a bug of ours must not break the user's compilation
        report.log.warning("could not read a graph, nothing in it is fused", exc_info=True)
        counters["fa_ops"]["internal error"] += 1
        _settle(opened, set())
        return []
    evaluator = SymbolicEvaluator(Exactness(graph))
    origins = {value: value.node for value in matcher.softmaxes}
    results: dict[Value, tuple[fx.Node, Masks] | str] = dict(matcher.misses)
    for core in matcher.cores:
        softmax = core.weights.softmax
        if not isinstance(results.get(softmax), tuple):
            results[softmax] = _try(core, view, matcher.sums, evaluator, verify)
    found = {node: _finding(node, reason) for node, reason in closed.items()}
    found |= {node: _finding(node, results.get(x, NO_VALUE)) for x, node in origins.items()}
    _settle(opened, {node for node, finding in found.items() if finding.fused})
    findings = [found[node] for node in sorted(found, key=order.__getitem__)]
    report.record(findings)
    return findings


def _may_hold_attention(node: fx.Node) -> bool:
    named = raw_name(node).endswith(("softmax", "exp", "exp_"))
    return named or multi_head.holds_attention(node)


def _settle(opened: list[multi_head.Opened], fused: set[fx.Node]) -> None:
    for one in opened:
        if fused.isdisjoint(one.made):
            one.undo()
        else:
            one.keep()


def _finding(softmax: fx.Node, result: tuple[fx.Node, Masks] | str) -> Finding:
    place = report.locate(softmax)
    if isinstance(result, str):
        return Finding(softmax.name, place, False, reason=result)
    call, masks = result
    return Finding(softmax.name, place, True, describe(call), masks.describe())


def _try(
    core: Core, view: View, sums: list[RowStatistic], evaluator: SymbolicEvaluator, verify: bool
) -> tuple[fx.Node, Masks] | str:
    try:
        site = attention_site(core, sums)
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
    except Exception as error:  # the same
        report.log.warning("could not fuse %s", core.out, exc_info=True)
        return f"internal error, please report: {type(error).__name__}: {error}"


def describe(call: fx.Node) -> str:
    """The call as one would write it, without what is at its default."""
    q, k, v, *rest = call.args
    mask, dropout_p, is_causal = rest
    options = {"attn_mask": mask, "dropout_p": dropout_p or None, "is_causal": is_causal or None}
    options |= call.kwargs
    given = [f"{k}={_short(v)}" for k, v in options.items() if v is not None]
    name = call.target._schema.name
    return f"{name}({', '.join([q.name, k.name, v.name, *given])})"


def _short(x: object) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def fuse_module(module: torch.nn.Module, verify: bool = False) -> list[Finding]:
    """`fuse` on a graph module and on the graph modules inside it (bodies of checkpointed
    regions).
    """
    findings = []
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            found = fuse(child.graph, verify)
            if any(f.fused for f in found):
                child.recompile()
            findings += found
    return findings
