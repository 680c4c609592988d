"""Verification of a rewrite: the original and its replacement run on the same random inputs.

They run with the example's shapes, and in fp64 unless the code fixes another dtype. Where they
differ in fp64, in which -1e9 does not absorb scores, they run again in the dtypes of the code. The
inputs are query, key and value, and the tensors that masks and biases are computed from by pure
operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from compile_passes.ir import vocabulary
from compile_passes.ir.graph import example, run
from compile_passes.ir.insertion import hint, memory_order

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
TOLERANCE_16_BIT = 5e-2


class Unverified(Exception):
    """The original and its replacement could not be run; the rewrite may be right."""


def difference(
    graph: fx.Graph, old: fx.Node, new: fx.Node, leaves: set[fx.Node], pure: Callable
) -> str:
    """A description of how two nodes or their gradients differ; empty if they agree.

    Raises Unverified where they can't be run. Where `old` is NaN or infinite, as in rows without
    keys, `new` may be anything.
    """
    nodes = _nodes_to_run(graph, old, new, leaves, pure)
    found, failure = "", None
    for dtype in (torch.float64, None):
        try:
            with unset_fake_temporarily(), torch.enable_grad(), torch.random.fork_rng():
                torch.manual_seed(0)
                found = _compare(nodes, old, new, leaves, dtype)
        except Exception as error:  # a fixed dtype, an index out of range, no memory
            failure = error
        else:
            if not found:
                return ""
    if found:
        return found
    raise Unverified(f"{type(failure).__name__}: {failure}") from failure


def _nodes_to_run(
    graph: fx.Graph, old: fx.Node, new: fx.Node, leaves: set[fx.Node], pure: Callable
) -> list[tuple[fx.Node, bool]]:
    """The nodes to run in graph order, each with whether it is an input."""
    wanted: dict[fx.Node, bool] = {}
    pending = [old, new]
    computable = _computable(graph, leaves)
    while pending:
        node = pending.pop()
        if node in wanted:
            continue
        runs = node not in leaves and (node in computable or pure(node))
        wanted[node] = not runs
        if runs:
            writers = [u for u in node.users if vocabulary.operation(u)[2]]
            pending += [*node.all_input_nodes, *(u for u in writers if u.args[:1] == (node,))]
    return [(node, wanted[node]) for node in graph.nodes if node in wanted]


def _computable(graph: fx.Graph, leaves: set[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on a leaf, or on no input of the graph."""
    dependent, constant = set(leaves), set()
    for node in graph.nodes:
        inputs, calls = node.all_input_nodes, node.op in ("call_function", "call_method")
        if not dependent.isdisjoint(inputs):
            dependent.add(node)
        elif calls and constant.issuperset(inputs):
            constant.add(node)
    return dependent | constant


def _compare(
    nodes: list, old: fx.Node, new: fx.Node, leaves: set[fx.Node], dtype: torch.dtype | None
) -> str:
    inputs = {n: _random(example(n), dtype, n in leaves) for n, given in nodes if given}
    results = [_run(nodes, inputs, node) for node in (old, new)]
    requires_grad = example(old).requires_grad
    for i, (a, b) in enumerate(itertools.zip_longest(*results)):
        if a is None or b is None:
            present = b if a is None else a
            if present is not None and present.any() and requires_grad:
                return "a gradient is missing"
            continue
        known = torch.isfinite(a)
        a, b = (torch.where(known, x, 0).double() for x in (a, b))
        error = (a - b).abs().max().item() if a.numel() else 0.0
        scale = max(1.0, a.abs().max().item()) if a.numel() else 1.0
        bound = scale * TOLERANCE.get(results[0][0].dtype, TOLERANCE_16_BIT)
        if not error <= bound and (i == 0 or requires_grad):
            name = "the result" if i == 0 else f"gradient {i}"
            return f"{name} differs by {error:.2g} where {bound:.2g} is allowed"
    return ""


def _run(nodes: list, inputs: dict[fx.Node, object], wanted: fx.Node) -> list[Tensor | None]:
    """The value of a node and its gradients. Random masks are the same in every run."""
    torch.manual_seed(1)
    values: dict[fx.Node, object] = {}
    require_grad = []
    for node, given in nodes:
        if not given:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = run(node.op, node.target, args, kwargs)
            continue
        x = inputs[node]
        if isinstance(x, Tensor) and x.is_floating_point() and example(node).requires_grad:
            x = x.detach().clone().requires_grad_()
            require_grad.append(x)
            x = x * 1.0  # in-place operations may follow
        values[node] = x.clone() if isinstance(x, Tensor) else x  # with the same strides
    out = values[wanted]
    if not require_grad or not out.requires_grad:
        return [out.detach()]
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    seed = torch.where(torch.isfinite(out).all(-1, keepdim=True), seed, 0)
    grads = torch.autograd.grad(out, require_grad, seed, allow_unused=True)
    return [out.detach(), *grads]


def _random(x: object, dtype: torch.dtype | None, leaf: bool) -> object:
    """A random value of the example's type, shape and memory order. Floats that are not query, key
    or value are 0 or 1, since masks are computed from them.
    """
    if isinstance(x, (SymInt, SymFloat, SymBool)):
        return x.node.hint
    if not isinstance(x, Tensor):
        return x
    shape = [hint(n) for n in x.shape]
    if x.dtype == torch.bool:
        return torch.rand(shape, device=x.device) > 0.3
    if not x.dtype.is_floating_point:
        return torch.randint(0, 2, shape, device=x.device, dtype=x.dtype)
    order, inverse = memory_order(x)
    drawn = torch.randn([shape[i] for i in order], device=x.device, dtype=torch.float64)
    drawn = drawn if leaf else (drawn > -0.5).double()
    return drawn.to(dtype or x.dtype).permute(inverse)
