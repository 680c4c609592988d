"""The findings of the pass: data, a printable report, counters and a log channel
(TORCH_LOGS=compile_passes).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from compile_passes.masks.mask_terms import ClassifiedMasks

log = logging.getLogger("compile_passes")

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)'
)
_TORCH = torch.__path__[0]


class Refusal(Exception):
    """An attention is left as written; the message is the reason in the report."""


@dataclasses.dataclass(frozen=True)
class FusedCore:
    """A call of the operator that replaced an attention; `why` if that depends on its speed.
    `verified`: the two were compared.
    `products` as in `Finding`.
    """

    call: fx.Node
    masks: ClassifiedMasks
    why: str = ""
    verified: bool = False
    products: str = ""


@dataclasses.dataclass(frozen=True)
class ProgrammedCall:
    """A call of the operator that replaced one of FlexAttention, whose functions were read; `why`
    it was.
    """

    call: fx.Node
    why: str


@dataclasses.dataclass(frozen=True)
class Location:
    """A line of the user's source; `file` is empty where the graph does not record it."""

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.file else "unknown source"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One softmax, or call of attention, that the pass found.

    Attributes:
        softmax: the name of its node in the graph.
        location: the line of the user's source.
        fused: whether it was replaced.
        call: the call of the operator that replaced it, as Python.
        masks: what became of its masks, in words.
        reason: why it was left; of a call that is replaced only where that pays, also why it was
            replaced.
        operation: "softmax", or the name of the function that is called.
        verified: whether it was compared with its replacement, and both gave the same.
        products: where 8-bit products were asked for, "8-bit", or "16-bit" and why.
    """

    softmax: str
    location: Location
    fused: bool
    call: str = ""
    masks: str = ""
    reason: str = ""
    operation: str = "softmax"
    verified: bool = False
    products: str = ""

    def __str__(self) -> str:
        left = "not fused" if self.operation == "softmax" else f"{self.operation} is left"
        verdict = f"fused into {self.call}" if self.fused else f"{left}: {self.reason}"
        lines = [f"{self.location}: {verdict}"]
        if self.fused:
            lines.append(f"    mask: {self.masks}")
            lines += [f"    {self.operation} is replaced: {self.reason}"] if self.reason else []
            lines += ["    verified"] if self.verified else []
            lines += [f"    products: {self.products}"] if self.products else []
        if self.location.code:
            lines.append(f"    > {self.location.code}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of the pass in the captured graphs; print it to see all.

    Attributes:
        findings: one for each softmax and each call of attention, in the order of the code.
        graphs: the number of graphs.
    """

    findings: tuple[Finding, ...]
    graphs: int = 1

    @property
    def fused(self) -> int:
        """The number of softmaxes and calls that were fused."""
        return sum(f.fused for f in self.findings)

    @property
    def missed(self) -> tuple[Finding, ...]:
        """The findings of the softmaxes and calls that were not fused."""
        return tuple(f for f in self.findings if not f.fused)

    def __str__(self) -> str:
        graphs = f"{self.graphs} graph" + "s" * (self.graphs != 1)
        counts = [self._count("softmax", "softmaxes")]
        others = dict.fromkeys(f.operation for f in self.findings)
        counts += [self._count(name, f"calls of {name}") for name in others if name != "softmax"]
        head = f"{'; '.join(filter(None, counts))} fused, in {graphs}"
        if not self.findings:
            head = f"no softmax and no call of attention was found, in {graphs}"
        return "\n".join([head, *map(str, self.findings)])

    def _count(self, operation: str, name: str) -> str:
        found = [f.fused for f in self.findings if f.operation == operation]
        return f"{sum(found)} of {len(found)} {name}" if found else ""


def make_finding(
    node: fx.Node, result: FusedCore | ProgrammedCall | str, operation: str = "softmax"
) -> Finding:
    """The finding for a softmax or call, from what replaced it or the reason why it stays."""
    place = locate(node)
    if isinstance(result, str):
        return Finding(node.name, place, False, reason=result, operation=operation)
    call = _describe_call(result.call)
    if isinstance(result, ProgrammedCall):
        masks = _describe_options(result.call)
        return Finding(node.name, place, True, call, masks, result.why, operation)
    masks = _describe_masks(result.masks)
    return Finding(
        node.name, place, True, call, masks, result.why, operation, result.verified,
        result.products,
    )  # fmt: skip


def internal_error(error: Exception) -> str:
    """The reason that is reported for a bug of the pass."""
    return f"internal error, please report: {type(error).__name__}: {error}"


def locate(node: fx.Node) -> Location:
    """The innermost frame of the node's stack trace that lies outside torch."""
    frames = [m.groupdict() for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    frames = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not frames:
        return Location()
    last = frames[-1]
    return Location(last["file"], int(last["line"]), last["function"], last["code"])


def record(findings: list[Finding]) -> None:
    """Update the counters and write the log lines for one graph."""
    for finding in findings:
        counted = "softmaxes" if finding.operation == "softmax" else finding.operation
        counters["fa_ops"][counted] += 1
        if finding.fused:
            counters["fa_ops"]["fused"] += 1
            log.info("%s", finding)
        else:
            counters["fa_ops"][f"not fused: {finding.reason}"] += 1
            log.debug("%s", finding)


def _describe_call(call: fx.Node) -> str:
    """The call as Python, without arguments that have their default value."""
    tensors, options = call.args[:3], options_of(call)
    given = [f"{name}={_short(x)}" for name, x in options.items()]
    return f"{call.target._schema.name}({', '.join([*(x.name for x in tensors), *given])})"


def options_of(call: fx.Node) -> dict[str, object]:
    """The arguments of a call of the operator, behind query, key and value, but for defaults."""
    arguments = call.target._schema.arguments
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in arguments}
    options = dict(zip([*defaults][3:], call.args[3:])) | call.kwargs
    return {name: x for name, x in options.items() if x is not None and x != defaults[name]}


def _short(x: object) -> str:
    if isinstance(x, str):
        return x
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def _describe_options(call: fx.Node) -> str:
    """The masks of a call that was made of functions, by its arguments."""
    options = options_of(call)
    left, right = options.get("window_left"), options.get("window_right")
    parts = ["is_causal"] if options.get("is_causal") else []
    if left is not None or right is not None:
        parts.append(f"window=({left}, {0 if 'is_causal' in options else right})")
    named = {
        "alibi_slopes": "ALiBi",
        "key_ranges": "a key range for each query",
        "attn_mask": "dense attn_mask",
    }
    parts += [words for name, words in named.items() if name in options]
    lines = str(options.get("program", "")).split("; ")
    roots = [line.split()[0] for line in lines if line.startswith(("mask ", "score "))]
    if roots:
        parts.append(f"a program of the {' and the '.join(roots)}")
    return ", ".join(parts) or "no mask"


def _describe_masks(masks: ClassifiedMasks) -> str:
    parts = []
    if masks.right == 0:
        parts.append("is_causal")
    if masks.left is not None or masks.right not in (None, 0):
        parts.append(f"window=({masks.left}, {masks.right})")
    if masks.alibi:
        parts.append("ALiBi")
    if masks.interval:
        parts.append("a key range for each query")
    if masks.conditions:
        parts.append("a mask of the keys")
    elif masks.is_dense:
        dtype = masks.inexact_dtype
        why = f" (positions may not be exact in {dtype})" if dtype else ""
        parts.append("dense attn_mask" + why)
    return ", ".join(parts) or "no mask"
