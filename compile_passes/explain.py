"""`explain`: what the pass would do to a function, without compiling it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from compile_passes.fuse import checked_products, fuse
from compile_passes.report import Finding, Report


def explain(
    function: Callable,
    *inputs: object,
    dynamic: bool | None = None,
    verify: bool = False,
    eight_bit: bool = False,
    sixteen_bit: Collection[str] = (),
    **kwargs,
) -> Report:
    """Run the pass on what `torch.compile` captures of `function(*inputs, **kwargs)`.

    The function runs once, eagerly.

    Args:
        function: a function or module, compiled or not.
        inputs, kwargs: its arguments.
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
