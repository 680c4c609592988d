"""Putting the pass into Inductor: `install`, `uninstall`, and chaining with a pass that is there
already.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import fx
from torch._dynamo.utils import dynamo_timed
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from compile_passes.fuse import fuse

TIMER = "compile_passes.fuse"  # in torch._dynamo.utils.compilation_time_metrics


# What decides a rewrite: these folders and files, and the operators' schemas.
DECIDING = ("graph", "match", "masks", "rewrite", "fuse.py")
_OPERATORS = (torch.ops.fa.attention.default, torch.ops.fa.attention_with_lse.default)


@cache
def source_hash() -> str:
    """A digest of what decides a rewrite: editing it invalidates compiled caches, and editing
    reports or commands does not.
    """
    digest = hashlib.sha256("".join(str(op._schema) for op in _OPERATORS).encode())
    root = Path(__file__).parent
    for name in DECIDING:
        for path in sorted((root / name).rglob("*.py")) or [root / name]:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


class FusionPass(CustomGraphPass):
    """Inductor's `pre_grad_custom_pass`: rewrites attention in a graph as Dynamo captured it."""

    def __init__(self, verify: bool = False) -> None:
        self.verify = verify

    def __call__(self, graph: fx.Graph) -> None:
        with dynamo_timed(TIMER):
            fuse(graph, self.verify)

    def uuid(self) -> str:
        return source_hash() + "-verified" * self.verify


class Chain(CustomGraphPass):
    """Other passes first, then ours. It has no uuid where one of them has none: then nothing is
    cached, as without this pass.
    """

    def __init__(self, others: tuple, ours: FusionPass) -> None:
        self.others, self.ours = others, ours

    def __call__(self, graph: fx.Graph) -> None:
        for step in (*self.others, self.ours):
            step(graph)

    def uuid(self) -> tuple | None:
        ids = [step.uuid() if hasattr(step, "uuid") else None for step in self.others]
        return None if None in ids else (*ids, self.ours.uuid())


def chained(existing: object, verify: bool = False) -> CustomGraphPass:
    """Our pass behind what is in the slot."""
    if not existing:
        return FusionPass(verify)
    others = existing if isinstance(existing, (list, tuple)) else (existing,)
    return Chain(tuple(others), FusionPass(verify))


def holds_ours(slot: object) -> bool:
    if isinstance(slot, (list, tuple)):
        return any(map(holds_ours, slot))
    return isinstance(slot, (FusionPass, Chain))


class Installation:
    """What `install` returns; as a context manager it uninstalls at its end."""

    def __init__(self, done: bool) -> None:
        self._done = done

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._done:
            uninstall()


def install(verify: bool = False) -> Installation:
    """Make every later `torch.compile` with Inductor fuse hand-written attention.

    With `verify`, each rewrite is checked while compiling: what was written and what replaces it
    run on random inputs of the example's shapes, forward and backward, and where they differ the
    code stays as it was and `explain`'s reason says by how much. Costs their time and memory once.

    Functions compiled before keep what they have. A pass that already stands in Inductor's
    `pre_grad_custom_pass` runs first. Calling it again changes nothing. `with install(): ...`
    undoes it at the end.
    """
    slot = config.pre_grad_custom_pass
    if holds_ours(slot):
        return Installation(False)
    config.pre_grad_custom_pass = chained(slot, verify)
    return Installation(True)


def uninstall() -> None:
    """Take the pass out again; what was in the slot before stays."""
    config.pre_grad_custom_pass = _without_ours(config.pre_grad_custom_pass)


def _without_ours(slot: object) -> object:
    if isinstance(slot, FusionPass):
        return None
    if isinstance(slot, Chain):
        return slot.others[0] if len(slot.others) == 1 else list(slot.others)
    if isinstance(slot, (list, tuple)):
        kept = [x for x in map(_without_ours, slot) if x is not None]
        return type(slot)(kept) if kept else None
    return slot
