"""Helpers that run a function through the pass and compare it with eager mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._pytree import tree_leaves

import compile_passes
from compile_passes import Finding
from fa_ops.testing import assert_within_budget, make_case


@dataclasses.dataclass
class Fusion:
    """A function compiled with the pass, and what the pass found and rewrote."""

    run: Callable
    findings: list[Finding] = dataclasses.field(default_factory=list)
    graphs: list[fx.Graph] = dataclasses.field(default_factory=list)

    @property
    def fused(self) -> int:
        return sum(f.fused for f in self.findings)

    @property
    def reasons(self) -> list[str]:
        return [f.reason for f in self.findings if not f.fused]

    @property
    def code(self) -> str:
        """The rewritten graph as Python, its placeholders numbered as the function's arguments."""
        return self.graphs[-1].python_code("self").src.strip()


def fuse(function: Callable, dynamic: bool | None = None, aot: bool = False) -> Fusion:
    """Compile with the pass alone; with `aot`, AOTAutograd traces the result."""

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        captured = printed(gm)
        findings = compile_passes.fuse_module(gm)
        if not any(finding.fused for finding in findings):
            assert printed(gm) == captured, "a graph without fusion is left as it was captured"
        fusion.findings += findings
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                module.graph.lint()
        fusion.graphs.append(gm.graph)
        gm.recompile()
        return aot_eager(gm, example_inputs) if aot else gm.forward

    torch._dynamo.reset()
    fusion = Fusion(torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True))
    return fusion


def printed(module: fx.GraphModule) -> list[str]:
    """Every node with its name and arguments in order, also those of graphs inside."""
    graphs = (x.graph for x in module.modules() if isinstance(x, fx.GraphModule))
    nodes = (node for graph in graphs for node in graph.nodes)
    return [f"{node.name} = {node.target} {node.args} {node.kwargs}" for node in nodes]


def qkv(dtype: torch.dtype = torch.float32, **shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)"""
    sizes = {"B": 2, "Hq": 4, "Hkv": 4, "Sq": 12, "Sk": 12, "D": 8, "Dv": 8} | shape
    return make_case(**sizes, dtype=dtype).fresh()[:3]


def results(function: Callable, inputs: tuple, train: bool, dtype: torch.dtype | None = None):
    """Outputs, and the gradients of every floating point input."""
    inputs = tuple(
        x.to(dtype or x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    )
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    leaves = [x.detach().requires_grad_(train) for x in leaves]
    rest = iter(leaves)
    floats = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
    inputs = tuple(next(rest) if f else x for f, x in zip(floats, inputs, strict=True))
    outputs = [x for x in tree_leaves(function(*inputs)) if isinstance(x, Tensor)]
    if not train:
        return outputs
    seeds = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x.dtype)
        for i, x in enumerate(outputs)
    ]
    grads = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True, materialize_grads=True)
    return [*outputs, *(g.contiguous() for g in grads)]


def assert_same(function: Callable, inputs: tuple, fusion: Fusion, train: bool = True) -> None:
    """The fused function's outputs and gradients against eager ones, within the error budget."""
    oracle = results(function, inputs, train, torch.float64)
    baseline = results(function, inputs, train)
    actual = results(fusion.run, inputs, train)
    for i, (a, o, b) in enumerate(zip(actual, oracle, baseline, strict=True)):
        assert (a.dtype, strides(a)) == (b.dtype, strides(b)), f"result {i} is laid out differently"
        assert_within_budget(f"result {i}", a, o, b)


def strides(x: Tensor) -> list[int]:
    """The strides of dimensions that are not of size 1; others have no meaning."""
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n != 1]


def check(function: Callable, inputs: tuple, cores: int = 1, **options) -> Fusion:
    """Fuse a function, compare outputs and gradients with eager mode, and count the attentions."""
    fusion = fuse(function, **options)
    assert_same(function, inputs, fusion)
    assert fusion.fused == cores, [str(f) for f in fusion.findings]
    return fusion


def verified(function: Callable, inputs: tuple) -> list[Finding]:
    """The findings with `verify=True`, in training; every rewrite has to be verified."""
    findings: list[Finding] = []

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        findings.extend(compile_passes.fuse_module(gm, verify=True))
        return gm.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters["fa_ops"].clear()
    results(torch.compile(function, backend=backend), inputs, True)
    assert "not verified" not in torch._dynamo.utils.counters["fa_ops"]
    return findings
