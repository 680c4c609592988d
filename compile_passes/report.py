"""What the pass found: data, a printable report, counters and a log channel
(TORCH_LOGS=compile_passes).
"""

from __future__ import annotations

import dataclasses
import logging
import re

import torch
from torch import fx
from torch._dynamo.utils import counters

log = logging.getLogger("compile_passes")

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)'
)
_TORCH = torch.__path__[0]


class Refused(Exception):
    """An attention stays as it was written; the message is the reason in the report."""


@dataclasses.dataclass(frozen=True)
class Location:
    """A line of the user's source; `file` is empty where the graph does not say."""

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
    """Every softmax of the graphs that were compiled."""

    findings: tuple[Finding, ...]
    graphs: int = 1

    @property
    def fused(self) -> int:
        return sum(f.fused for f in self.findings)

    @property
    def missed(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if not f.fused)

    def __str__(self) -> str:
        graphs = f"{self.graphs} graph" + "s" * (self.graphs != 1)
        head = f"{self.fused} of {len(self.findings)} softmaxes fused, in {graphs}"
        return "\n".join([head, *map(str, self.findings)])


def locate(node: fx.Node) -> Location:
    """The innermost frame outside torch."""
    frames = [m.groupdict() for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    frames = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not frames:
        return Location()
    last = frames[-1]
    return Location(last["file"], int(last["line"]), last["function"], last["code"])


def record(findings: list[Finding]) -> None:
    """Counters and log lines for one graph."""
    for finding in findings:
        counters["fa_ops"]["softmaxes"] += 1
        if finding.fused:
            counters["fa_ops"]["fused"] += 1
            log.info("%s", finding)
        else:
            counters["fa_ops"][f"not fused: {finding.reason}"] += 1
            log.debug("%s", finding)
