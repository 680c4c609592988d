"""Fusion with other parts of the compiler: checkpointing, autocast, modes, export."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compile_passes
from compile_passes.emit import emitter as operands
from tests.compile_passes.helpers import assert_same, check, fuse, qkv

ATTENTION = torch.ops.fa.attention.default


def attend(q, k, v):
    S, T = q.shape[2], k.shape[2]
    keep = torch.ones(S, T, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~keep, float("-inf"))
    return scores.softmax(-1) @ v


def test_checkpointed_regions_are_fused():
    def function(q, k, v):
        return checkpoint(attend, q * 1.0, k, v, use_reentrant=False)

    check(function, qkv(), aot=True)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_keeps_the_result_dtype(outside):
    def inside(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(q, k, v)

    function = attend if outside else inside
    fusion = fuse(function)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        inputs = qkv()
        actual, expected = fusion.run(*inputs), function(*inputs)
    assert fusion.fused == 1
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_are_fused(mode):
    fusion = fuse(attend)
    with mode():
        inputs = qkv()
        torch.testing.assert_close(fusion.run(*inputs), attend(*inputs), rtol=1e-4, atol=1e-5)
    assert fusion.fused == 1


def test_one_graph_for_all_lengths_and_batches():
    fusion = fuse(attend, dynamic=True)
    for B, S in ((2, 5), (2, 9), (3, 16), (5, 31)):
        inputs = qkv(B=B, Sq=S, Sk=S)
        torch.testing.assert_close(fusion.run(*inputs), attend(*inputs), rtol=1e-4, atol=1e-5)
    assert len(fusion.graphs) == fusion.fused == 1


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, q, k, v):
        return attend(self.project(q), k, v)


@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_programs_are_fused(dynamic):
    layer, inputs = Layer().eval(), qkv()
    S = torch.export.Dim("S", min=2, max=64)
    shapes = {name: {2: S} for name in "qkv"} if dynamic else None
    with torch.no_grad():
        module = torch.export.export(layer, inputs, dynamic_shapes=shapes).module()
        (finding,) = compile_passes.fuse_module(module)
        assert finding.fused and finding.location.file == __file__
        assert len(module.graph.find_nodes(op="call_function", target=ATTENTION)) == 1
        for length in (12, 7) if dynamic else (12,):
            inputs = qkv(Sq=length, Sk=length)
            torch.testing.assert_close(module(*inputs), layer(*inputs), rtol=1e-4, atol=1e-5)


def test_views_of_the_result_keep_their_strides():
    def function(q, k, v):
        return ((q @ k.mT).softmax(-1) @ v).view(8, -1)

    check(function, qkv())


def test_fills_known_only_at_run_time_are_refused():
    def function(q, k, v, fill):
        hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
        first = (q @ k.mT).masked_fill(hidden, fill.item()).softmax(-1) @ v
        return (first @ k.mT).softmax(-1) @ v

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        fusion = fuse(function)
        assert_same(function, (*qkv(), torch.tensor(-1e9)), fusion, train=False)
    assert fusion.fused == 1 and "not one number" in fusion.reasons[0]


def rows_without_keys(q, k, v):
    """The first row averages in fp32, where -1e9 absorbs its scores, but not in fp64."""
    hidden = torch.ones(q.shape[2], k.shape[2]).triu()
    return (q @ k.mT + hidden * -1e9).softmax(-1) @ v


def random_mask(q, k, v):
    """As DropKey."""
    scores = q @ k.mT
    return (scores + torch.bernoulli(torch.full_like(scores, 0.3)) * -1e12).softmax(-1) @ v


def value_doubled(q, k, v):
    v = v * 1.5
    weights = (q @ k.mT).softmax(-1)
    v.mul_(2.0)
    return weights @ v


class TestVerification:
    def findings(self, function, *inputs):
        found = []

        def backend(gm, example_inputs):
            found.extend(compile_passes.fuse_module(gm, verify=True))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(function, backend=backend)(*inputs)
        return found

    @pytest.mark.parametrize("train", [False, True])
    def test_correct_rewrites_pass(self, train):
        before = torch._dynamo.utils.counters["fa_ops"]["verified"]
        (finding,) = self.findings(attend, *(x.requires_grad_(train) for x in qkv()))
        assert finding.fused
        assert torch._dynamo.utils.counters["fa_ops"]["verified"] == before + 1

    @pytest.mark.parametrize(
        "function", [rows_without_keys, random_mask, value_doubled], ids=lambda f: f.__name__
    )
    def test_rewrites_pass_whatever_their_dtypes_writes_and_random_numbers(self, function):
        before = torch._dynamo.utils.counters["fa_ops"]["verified"]
        (finding,) = self.findings(function, *(x.requires_grad_() for x in qkv()))
        assert finding.fused, finding.reason
        assert torch._dynamo.utils.counters["fa_ops"]["verified"] == before + 1

    def test_wrong_rewrites_are_refused_with_their_error(self, monkeypatch):
        from compile_passes.emit import replacement as rewrite

        right = rewrite._scale

        def wrong(*args):
            q, k, scale = right(*args)
            return q, k, 1.5 * scale

        monkeypatch.setattr(rewrite, "_scale", wrong)
        inputs = qkv()
        (finding,) = self.findings(attend, *inputs)
        assert not finding.fused and "verification failed" in finding.reason
        assert "differs by" in finding.reason

    def test_wrong_gradients_are_refused(self, monkeypatch):
        from compile_passes.emit import replacement as rewrite

        monkeypatch.setattr(rewrite, "operand", _detached)
        (finding,) = self.findings(attend, *(x.requires_grad_() for x in qkv()))
        assert not finding.fused and "gradient" in finding.reason


def _detached(emitter, leaf, dims, dtype):
    node = emitter.arrange(leaf.value.node, leaf.dims, dims, full=True)
    return operands.cast(emitter, emitter.method("detach", node), dtype)
