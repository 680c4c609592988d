"""Hand-written attention through the pass: fused code keeps its numbers, the rest is unchanged."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor import config

import compile_passes


def fused(graph: fx.Graph) -> int:
    packets = (torch.ops.fa.attention, torch.ops.fa.attention_with_lse)
    overloads = {p.default for p in packets} | set(packets)
    return sum(node.op == "call_function" and node.target in overloads for node in graph.nodes)


def through_the_pass(function, *inputs, dynamic=None):
    """(outputs of the rewritten graph, cores fused), run by the graph's own interpreter."""
    count = 0

    def backend(gm, example_inputs):
        nonlocal count
        count += sum(finding.fused for finding in compile_passes.fuse(gm.graph))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic)(*inputs), count


def qkv(B=2, H=4, Hkv=4, S=12, T=None, D=8):
    T = T or S
    return torch.randn(B, H, S, D), torch.randn(B, Hkv, T, D), torch.randn(B, Hkv, T, D)


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def scaled_before(q, k, v):
    return (torch.matmul(q * q.shape[-1] ** -0.5, k.mT)).softmax(dim=-1) @ v


def einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.3
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def causal_fill(q, k, v):
    S = q.shape[-2]
    keep = torch.tril(torch.ones(S, S, dtype=torch.bool))
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~keep, float("-inf"))
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def softcapped(q, k, v):
    scores = q @ k.transpose(-1, -2) * 0.4
    return (20.0 * torch.tanh(scores / 20.0)).softmax(-1) @ v


def grouped(q, k, v):
    B, Hkv, T, D = k.shape
    group = q.shape[1] // Hkv
    k = k[:, :, None].expand(B, Hkv, group, T, D).reshape(B, Hkv * group, T, D)
    v = v[:, :, None].expand(B, Hkv, group, T, D).reshape(B, Hkv * group, T, D)
    return F.softmax(q @ k.transpose(2, 3) * 0.2, dim=-1) @ v


SPELLINGS = [plain, scaled_before, einsum, causal_fill, softcapped, grouped]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("train", [False, True])
def test_spellings_fuse_and_keep_their_numbers(spelling, train):
    inputs = qkv(Hkv=2 if spelling is grouped else 4)
    leaves = [t.detach().requires_grad_(train) for t in inputs]
    out, count = through_the_pass(spelling, *leaves)
    expected = spelling(*leaves)
    assert count == 1
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    if train:
        grad = torch.randn_like(expected)
        got = torch.autograd.grad(out, leaves, grad)
        for a, b in zip(got, torch.autograd.grad(expected, leaves, grad), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def weights_returned(q, k, v):
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return weights @ v, weights


def over_heads(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(1) @ v


def over_queries(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(-2) @ v


NOT_ATTENTION = [weights_returned, over_heads, over_queries]


@pytest.mark.parametrize("function", NOT_ATTENTION, ids=lambda f: f.__name__)
def test_other_functions_are_unchanged(function):
    inputs = qkv(S=8, D=8)  # square, so that sizes do not identify dimensions
    out, count = through_the_pass(function, *inputs)
    assert count == 0
    torch.testing.assert_close(out, function(*inputs))
    (finding,) = compile_passes.explain(function, *inputs).findings
    assert "fused into" not in str(finding)


def test_dynamic_lengths_share_a_graph():
    graphs = 0

    def backend(gm, example_inputs):
        nonlocal graphs
        graphs += 1
        compile_passes.fuse(gm.graph)
        gm.recompile()
        assert fused(gm.graph) == 1
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(plain, backend=backend, dynamic=True, fullgraph=True)
    for S in (5, 9, 16, 31):
        inputs = qkv(S=S)
        torch.testing.assert_close(compiled(*inputs), plain(*inputs), rtol=1e-4, atol=1e-5)
    assert graphs == 1


class TestLlama:
    @pytest.fixture(scope="class")
    def model(self):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        shape = {
            "vocab_size": 99,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**shape, **heads, attn_implementation="eager")
        return transformers.LlamaForCausalLM(config).eval()

    def test_every_core_is_fused_as_causal(self, model):
        ids = torch.randint(0, 99, (2, 11))
        report = compile_passes.explain(lambda ids: model(ids, use_cache=False).logits, ids)
        assert [str(f).count("fused into fa::attention") for f in report.findings] == [1, 1]
        assert all("is_causal" in str(f) for f in report.findings)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_logits_and_gradients_with_padding_match_eager(self, model, dynamic):
        ids = torch.randint(0, 99, (2, 11))
        mask = torch.ones_like(ids)
        mask[0, :4] = 0

        def logits(ids, mask):
            return model(ids, attention_mask=mask, use_cache=False).logits

        expected = logits(ids, mask)
        out, count = through_the_pass(logits, ids, mask, dynamic=dynamic)
        assert count == 2
        real = mask.bool()
        torch.testing.assert_close(out[real], expected[real], rtol=1e-3, atol=1e-4)
        weight = model.model.layers[0].self_attn.q_proj.weight
        grads = [torch.autograd.grad(x[real].square().sum(), weight)[0] for x in (out, expected)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


class TestInstall:
    def test_install_chains_and_uninstall_restores(self):
        class Other(torch._inductor.custom_graph_pass.CustomGraphPass):
            seen = 0

            def __call__(self, graph):
                Other.seen += 1

            def uuid(self):
                return "other"

        before, other = config.pre_grad_custom_pass, Other()
        config.pre_grad_custom_pass = other
        try:
            with compile_passes.install():
                installed = config.pre_grad_custom_pass
                assert installed is not other
                assert installed.uuid() == installed.uuid() and "other" in installed.uuid()
                inputs = qkv()
                gm = fx.symbolic_trace(lambda x: x + 1)
                installed(gm.graph)
                assert Other.seen == 1 and len(inputs) == 3
            assert config.pre_grad_custom_pass is other
        finally:
            config.pre_grad_custom_pass = before
