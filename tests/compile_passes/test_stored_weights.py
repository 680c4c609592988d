"""Weights that a model stores in its attributes: dropped on request, and only where nothing else
receives them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

import compile_passes
from tests.compile_passes.helpers import qkv, results


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.others = how, []
        if how == "a buffer":
            self.register_buffer("state", torch.zeros(1), persistent=False)

    def forward(self, q, k, v):
        weights = (q @ k.mT).softmax(-1)
        if self.how == "listed":
            self.others = [weights]
        elif self.how == "a buffer":
            self.state = weights
        else:
            self.map = weights.detach() if self.how == "detached" else weights
            self.mean = weights.mean(1) if self.how == "averaged" else None
        out = weights @ v
        return (out, weights) if self.how == "returned" else out


def compiled(module: nn.Module, drop: bool):
    """The module compiled with the pass alone."""

    def backend(gm, example_inputs):
        compile_passes.fuse_module(gm, drop_stored_weights=drop)
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    counters.clear()
    return torch.compile(module, backend=backend, fullgraph=True)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("how", ["stored", "detached", "averaged"])
def test_stored_weights_are_none_on_request(how, train):
    module, inputs = Attention(how), qkv()
    expected = results(module, inputs, train)
    module.map = None
    actual = results(compiled(module, True), inputs, train)
    for x, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-5)
    assert counters["fa_ops"]["fused"] == 1
    assert module.map is None and module.mean is None
    with torch.no_grad():
        compiled(module, False)(*inputs)
    assert counters["fa_ops"]["fused"] == 0 and module.map.shape == (2, 4, 12, 12)


@pytest.mark.parametrize("how", ["returned", "listed", "a buffer"])
def test_weights_that_are_used_elsewhere_are_kept(how):
    module, inputs = Attention(how), qkv()
    with torch.no_grad():
        compiled(module, True)(*inputs)
    weights = (inputs[0] @ inputs[1].mT).softmax(-1)
    kept = {"listed": lambda: module.others[0], "a buffer": lambda: module.state}
    torch.testing.assert_close(kept.get(how, lambda: module.map)(), weights)
    assert counters["fa_ops"]["fused"] == 0


def test_outputs_are_kept_where_attention_is_not_fused():
    class Sideways(Attention):
        def forward(self, q, k, v):
            self.map = (q @ k.mT).softmax(-2)
            return self.map @ v

    module = Sideways("stored")
    compiled(module, True)(*qkv())
    assert module.map.shape == (2, 4, 12, 12)


def test_the_report_names_the_attributes():
    module, inputs = Attention("averaged"), qkv()
    (finding,) = compile_passes.explain(module, *inputs, drop_stored_weights=True).findings
    assert finding.fused and set(finding.dropped) == {"Attention.map", "Attention.mean"}
    assert "Attention.map is None instead of the weights" in str(finding)
    assert not compile_passes.explain(module, *inputs).fused


def test_an_installed_pass_drops_them_and_caches_nothing():
    def backend(gm, example_inputs):
        inner = lambda gm, *_, **__: make_boxed_func(gm.forward)  # noqa: E731
        return compile_fx(gm, example_inputs, inner_compile=inner)

    torch._dynamo.reset()
    module, inputs = Attention("stored"), qkv()
    with compile_passes.install(drop_stored_weights=True):
        assert config.pre_grad_custom_pass.uuid() is None
        out = torch.compile(module, backend=backend)(*inputs)
    assert module.map is None
    torch.testing.assert_close(out, module(*inputs), rtol=1e-4, atol=1e-5)
