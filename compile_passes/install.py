"""Adding the pass to Inductor, beside any pass that is installed already, and removing it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import fx
from torch._dynamo.utils import dynamo_timed
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from compile_passes.fuse import checked_products, fuse, keep_left_softmaxes

TIMER = "compile_passes.fuse"  # in torch._dynamo.utils.compilation_time_metrics


# The cache key covers what decides a rewrite: these sources, those of fa_ops by which functions
# become programs, and the operators' schemas.
HASHED_SOURCES = ("ir", "rewrites", "match", "masks", "emit", "fuse.py")
_READERS = ("programs", "functions/flex.py", "functions/flex_graphs.py")
_OPERATORS = (
    torch.ops.fa.attention.default,
    torch.ops.fa.attention_with_lse.default,
    torch.ops.fa.attention_averaging_rows.default,
    torch.ops.fa.attention_programmed.default,
    torch.ops.fa.attention_programmed_max.default,
    torch.ops.fa.program_tiles.default,
    torch.ops.fa.quantized_attention.default,
    torch.ops.fa.dropout_seed.default,
)


@cache
def source_hash() -> str:
    """A digest of what decides a rewrite: editing it invalidates compiled caches, and editing
    reports or the installation does not.
    """
    digest = hashlib.sha256("".join(str(op._schema) for op in _OPERATORS).encode())
    root = Path(__file__).parents[1]
    names = [f"compile_passes/{name}" for name in HASHED_SOURCES]
    for name in (*names, *(f"fa_ops/{name}" for name in _READERS)):
        for path in sorted((root / name).rglob("*.py")) or [root / name]:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


class FusionPass(CustomGraphPass):
    """Inductor's `pre_grad_custom_pass`: rewrites attention in a graph as Dynamo captured it."""

    def __init__(
        self, verify: bool = False, eight_bit: bool = False, sixteen_bit: tuple[str, ...] = ()
    ) -> None:
        self.verify, self.eight_bit, self.sixteen_bit = verify, eight_bit, sixteen_bit

    @property
    def options(self) -> dict[str, object]:
        """The options by name."""
        names = "verify", "eight_bit", "sixteen_bit"
        return {name: getattr(self, name) for name in names}

    def __call__(self, graph: fx.Graph) -> None:
        """Fuse the attention of a graph in place."""
        with dynamo_timed(TIMER):
            fuse(graph, **self.options)
            keep_left_softmaxes(graph)

    def uuid(self) -> str | None:
        """The pass's part of Inductor's cache key. None, with which nothing is cached, if modules
        are named: equal graphs may be of modules with other names.
        """
        if self.sixteen_bit:
            return None
        key = source_hash() + "-verified" * self.verify
        return key + "-8-bit" * self.eight_bit


class PassChain(CustomGraphPass):
    """Other passes, then the fusion pass."""

    def __init__(self, others: tuple, fusion: FusionPass) -> None:
        self.others, self.fusion = others, fusion

    def __call__(self, graph: fx.Graph) -> None:
        """Run all passes on a graph, in order."""
        for step in (*self.others, self.fusion):
            step(graph)

    def uuid(self) -> tuple | None:
        """All passes' keys; None where one has none, so that Inductor caches nothing."""
        steps = (*self.others, self.fusion)
        ids = tuple(step.uuid() if hasattr(step, "uuid") else None for step in steps)
        return None if None in ids else ids


def append_fusion(existing: object, fusion: FusionPass) -> CustomGraphPass:
    """The fusion pass, after the passes that the slot holds already."""
    if not existing:
        return fusion
    others = existing if isinstance(existing, (list, tuple)) else (existing,)
    return PassChain(tuple(others), fusion)


def fusion_in(slot: object) -> FusionPass | None:
    """The fusion pass that a pass, or a list of passes, includes."""
    if isinstance(slot, (list, tuple)):
        return next(filter(None, map(fusion_in, slot)), None)
    if isinstance(slot, PassChain):
        return slot.fusion
    return slot if isinstance(slot, FusionPass) else None


class Installation:
    """The result of `install`; as a context manager it uninstalls on exit."""

    def __init__(self, installed: bool) -> None:
        self._installed = installed

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._installed:
            uninstall()


def install(
    verify: bool = False, eight_bit: bool = False, sixteen_bit: Collection[str] = ()
) -> Installation:
    """Make every later `torch.compile` with Inductor fuse hand-written attention.

    Functions compiled before are unaffected. A pass that Inductor's `pre_grad_custom_pass` holds
    already runs first. A second call with the same options changes nothing.

    Args:
        verify: check each rewrite at compile time: the original and its replacement run on random
            inputs of the example's shapes, forward and backward, and where they differ the original
            is kept and the reason in the report states by how much. This costs their time and
            memory once. Calls of `flex_attention` whose functions are read are not compared.
        eight_bit: for inference: fuse into :func:`fa_ops.quantized_attention` where no gradient is
            recorded and masks become causality, windows, lengths or ranges, without dropout and
            ALiBi, for more than 16 queries or no more keys than queries. Also calls of
            `scaled_dot_product_attention` and `flex_attention` then. Reports say which products an
            attention has. `verify` does not compare these calls.
        sixteen_bit: names of modules whose attention keeps 16-bit products, such as "blocks.0", as
            `named_modules()` has them, or consecutive parts of them. With names Inductor's caches
            are not used.

    Returns:
        A context manager that uninstalls on exit, unless the pass was installed before the call.

    Raises:
        ValueError: the pass is installed with other options; `sixteen_bit` without `eight_bit`.
        TypeError: an option is not a bool, or `sixteen_bit` no collection of names.

    Examples:
        >>> with compile_passes.install():
        ...     out = torch.compile(model)(x)
    """
    products = checked_products(verify, eight_bit, sixteen_bit)
    names = products.sixteen_bit if products else ()
    fusion = FusionPass(verify, eight_bit, names)
    slot = config.pre_grad_custom_pass
    found = fusion_in(slot)
    if found is not None:
        for name, value in fusion.options.items():
            if (given := getattr(found, name)) != value:
                raise ValueError(
                    f"{name} must be {given}, as in the pass that is installed, got {value}; "
                    "call compile_passes.uninstall() first"
                )
        return Installation(False)
    config.pre_grad_custom_pass = append_fusion(slot, fusion)
    return Installation(True)


def uninstall() -> None:
    """Remove the pass from Inductor, if it is installed; other passes stay."""
    config.pre_grad_custom_pass = _without_fusion(config.pre_grad_custom_pass)


def _without_fusion(slot: object) -> object:
    if isinstance(slot, FusionPass):
        return None
    if isinstance(slot, PassChain):
        return slot.others[0] if len(slot.others) == 1 else list(slot.others)
    if isinstance(slot, (list, tuple)):
        kept = [x for x in map(_without_fusion, slot) if x is not None]
        return type(slot)(kept) if kept else None
    return slot


def _renewed(slot: object) -> object:
    """The passes of a slot, with new ones in place of those of modules that were dropped."""
    if isinstance(slot, (list, tuple)):
        return type(slot)(map(_renewed, slot))
    name = type(slot).__name__ if type(slot).__module__ == __name__ else None
    if name == FusionPass.__name__:
        return FusionPass(**slot.options)
    if name == PassChain.__name__:
        return PassChain(tuple(map(_renewed, slot.others)), _renewed(slot.fusion))
    return slot


if config.pre_grad_custom_pass:  # as where this package is imported again in a process
    config.pre_grad_custom_pass = _renewed(config.pre_grad_custom_pass)


# `torch.compile(model, backend="fa_ops")`: Inductor with the fusion pass, registered by the
# torch_dynamo_backends entry point.


def fa_ops(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: dict | None = None,
) -> Callable:
    """Compile with Inductor and the pass; `mode` and `options` are those of `torch.compile`."""
    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= options or {}
    slot = patches.get("pre_grad_custom_pass", config.pre_grad_custom_pass)
    patches["pre_grad_custom_pass"] = slot if fusion_in(slot) else append_fusion(slot, FusionPass())
    return compile_fx(gm, example_inputs, config_patches=patches)
