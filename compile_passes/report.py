"""What the pass found: data, a printable report, counters and a log channel
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
    from compile_passes.masks.classified_masks import ClassifiedMasks

log = logging.getLogger("compile_passes")

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)'
)
_TORCH = torch.__path__[0]


class Refused(Exception):
    """An attention is left as written; the message is the reason in the report."""


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
    """One softmax: the call that replaced its attention, or the reason why there is none."""

    softmax: str
    location: Location
    fused: bool
    call: str = ""
    masks: str = ""
    reason: str = ""

    def __str__(self) -> str:
        verdict = f"fused into {self.call}" if self.fused else f"not fused: {self.reason}"
        lines = [f"{self.location}: {verdict}"]
        if self.fused:
            lines.append(f"    mask: {self.masks}")
        if self.location.code:
            lines.append(f"    > {self.location.code}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """Every softmax of the graphs that were captured."""

    findings: tuple[Finding, ...]
    graphs: int = 1

    @property
    def fused(self) -> int:
        """The number of softmaxes that were fused."""
        return sum(f.fused for f in self.findings)

    @property
    def missed(self) -> tuple[Finding, ...]:
        """The findings of the softmaxes that were not fused."""
        return tuple(f for f in self.findings if not f.fused)

    def __str__(self) -> str:
        graphs = f"{self.graphs} graph" + "s" * (self.graphs != 1)
        head = f"{self.fused} of {len(self.findings)} softmaxes fused, in {graphs}"
        return "\n".join([head, *map(str, self.findings)])


def make_finding(softmax: fx.Node, result: tuple[fx.Node, ClassifiedMasks] | str) -> Finding:
    """The finding for a softmax, from its call and masks or the reason why it was not fused."""
    place = locate(softmax)
    if isinstance(result, str):
        return Finding(softmax.name, place, False, reason=result)
    call, masks = result
    return Finding(softmax.name, place, True, _describe_call(call), _describe_masks(masks))


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
        counters["fa_ops"]["softmaxes"] += 1
        if finding.fused:
            counters["fa_ops"]["fused"] += 1
            log.info("%s", finding)
        else:
            counters["fa_ops"][f"not fused: {finding.reason}"] += 1
            log.debug("%s", finding)


def _describe_call(call: fx.Node) -> str:
    """The call as Python, without arguments that have their default value."""
    q, k, v, mask, dropout_p, is_causal = call.args
    options = {"attn_mask": mask, "dropout_p": dropout_p or None, "is_causal": is_causal or None}
    options |= call.kwargs
    given = [f"{name}={_short(x)}" for name, x in options.items() if x is not None]
    return f"{call.target._schema.name}({', '.join([q.name, k.name, v.name, *given])})"


def _short(x: object) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def _describe_masks(masks: ClassifiedMasks) -> str:
    parts = []
    if masks.right == 0:
        parts.append("is_causal")
    if masks.left is not None or masks.right not in (None, 0):
        parts.append(f"window=({masks.left}, {masks.right})")
    if masks.interval:
        parts.append("a key range for each query")
    if masks.is_dense:
        dtype = masks.inexact_dtype
        why = f" (positions may not be exact in {dtype})" if dtype else ""
        parts.append("dense attn_mask" + why)
    return ", ".join(parts) or "no mask"
