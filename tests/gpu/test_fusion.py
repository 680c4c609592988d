"""Fused code on a GPU, forward and backward: fully masked rows, several attentions in one product,
nn.MultiheadAttention, SDPA and FlexAttention.
"""

import pytest
import torch

import compile_passes
from fa_ops.testing import assert_within_budget
from tests.compile_passes.block_masks import kept_elements, masked, random_block_mask
from tests.kernels import DTYPES

LOWEST = torch.finfo(torch.float32).min
KINDS = ("plain", "softcap", "two masks", "bias", "softcap bias", "log-sum-exp")


def eager_attention(kind):
    """Grouped attention written by hand, with finite fills for a causal mask and padding.

    Rows without keys average all values.
    """

    def attention(q, k, v, padding, bias):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.mT * 0.3
        if q.dtype != torch.float64:
            scores = scores.float()
        position = torch.arange(q.shape[2], device=q.device)
        keep = (position[None] <= position[:, None]) & padding
        if "softcap" in kind:
            scores = torch.tanh(scores / 5.0) * 5.0
        if "bias" in kind:
            scores = scores + bias
        if kind == "two masks":
            scores = torch.where(position[None] <= position[:, None] + 1, scores, LOWEST)
        scores = scores + torch.where(keep, 0.0, LOWEST)
        out = scores.softmax(-1).to(v.dtype) @ v
        if kind == "log-sum-exp":
            gate = (scores.logsumexp(-1) - 1.0).sigmoid()[..., None]
            out = out * gate.to(out.dtype)
        return out

    return attention


def results(function, inputs, dtype):
    """The output, and the gradients of all inputs that have one."""
    cast = [x.to(dtype).detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = function(*cast)
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(out.shape, generator=generator).to(out)
    leaves = [x for x in cast if x.requires_grad]
    grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_keys(kind, dtype, device="cuda"):
    torch.manual_seed(0)
    B, H, S, D = 2, 8, 300, 64
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool, device=device)
    padding[0, ..., : S // 2] = False
    q, k, v = (
        torch.randn(B, heads, S, D, device=device).to(dtype) for heads in (H, H // 2, H // 2)
    )
    inputs = (q, k, v, padding, torch.randn(H, S, S, device=device).to(dtype))
    check(kind, eager_attention(kind), inputs, dtype)


def check(name, function, inputs, dtype):
    findings = []

    def backend(graph, _):
        findings.extend(compile_passes.fuse_module(graph))
        return graph.forward

    torch._dynamo.reset()
    fused = results(torch.compile(function, backend=backend), inputs, dtype)
    assert any(finding.fused for finding in findings), findings
    naive, oracle = results(function, inputs, dtype), results(function, inputs, torch.float64)
    for n, triple in enumerate(zip(fused, oracle, naive, strict=True)):
        assert_within_budget(f"result {n} of {name}", *triple)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_multi_head(weights, autocast, dtype, device="cuda"):
    """Parameters are passed as inputs; under autocast they stay in float32."""
    torch.manual_seed(0)
    B, S, E, H = 2, 300, 256, 4
    module = torch.nn.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True, device=device)
    names = [name for name, _ in module.named_parameters()]
    padding = torch.zeros(B, S, dtype=torch.bool, device=device)
    padding[0, S // 2 :] = True

    def attention(padding, x, *parameters):
        causal = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)
        options = {"attn_mask": causal, "key_padding_mask": padding, "need_weights": weights}
        lowered = autocast and x.dtype == torch.float32
        with torch.autocast(device, dtype, lowered and dtype != torch.float32):
            given = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(module, given, (x, x, x), options)[0]

    inputs = (padding, torch.randn(B, S, E, device=device), *module.parameters())
    check("nn.MultiheadAttention", attention, inputs, torch.float32 if autocast else dtype)


def several_attentions(kind):
    """Differences of weights, two sets of keys, and ALiBi."""

    def attention(q, k, v):
        if kind == "differential":
            a, b = ((x @ k.mT * 0.1).softmax(-1) for x in (q, q.flip(-1)))
            return (a - 0.5 * b) @ v
        if kind == "joined":
            scores = torch.cat([q @ k[:, :, :100].mT * 0.1, q @ k[:, :, 100:].mT * 0.1], -1)
            w = scores.softmax(-1)
            return w[..., :100] @ v[:, :, :100] + w[..., 100:] @ v[:, :, 100:]
        i = torch.arange(q.shape[2], device=q.device)
        slopes = 0.5 ** torch.arange(1.0, q.shape[1] + 1, device=q.device).view(-1, 1, 1)
        scores = (q @ k.mT).float() * 0.1 + slopes * (i - i[:, None])
        return scores.masked_fill(i > i[:, None], -torch.inf).softmax(-1).to(v.dtype) @ v

    return attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["differential", "joined", "alibi"])
def test_several_attentions(kind, dtype, device="cuda"):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 8, 300, 64, device=device).to(dtype) for _ in range(3)]
    check(kind, several_attentions(kind), inputs, dtype)


def sdpa_call(kind):
    """A call of SDPA with grouped heads, and a mask that becomes compact."""

    def attention(padding, q, k, v):
        i = torch.arange(q.shape[2], device=q.device)
        causal = i <= i[:, None]
        masks = {
            "causal": None,
            "padding": causal & padding,
            "window": causal & (i > i[:, None] - 40),
            "chunks": causal & (i // 64 == i[:, None] // 64),
            "documents": causal & ((i % 90 == 0).cumsum(0) == (i % 90 == 0).cumsum(0)[:, None]),
        }
        mask = masks[kind]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True
        )

    return attention


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["causal", "padding", "window", "chunks", "documents"])
def test_sdpa_calls(kind, dtype, device="cuda"):
    torch.manual_seed(0)
    B, H, S, D = 2, 8, 300, 64
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool, device=device)
    padding[0, ..., : S // 2] = False
    q, k, v = (
        torch.randn(B, heads, S, D, device=device).to(dtype) for heads in (H, H // 2, H // 2)
    )
    check(kind, sdpa_call(kind), (padding, q, k, v), dtype)


FLEX = {
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf),
    "softcap": lambda s, b, h, i, j: torch.where(i >= j, torch.tanh(s / 5) * 5, -torch.inf),
    "window": lambda s, b, h, i, j: torch.where((i >= j) & (i - j < 40), s, -torch.inf),
    "prefix": lambda s, b, h, i, j: torch.where((i >= j) | (j < 30), s, -torch.inf),
}


@pytest.mark.parametrize("kind", FLEX)
def test_flex_calls(kind, device="cuda"):
    """Forward and backward, against FlexAttention's own arithmetic in eager mode."""
    from torch.nn.attention.flex_attention import flex_attention

    def attention(q, k, v):
        return flex_attention(q, k, v, score_mod=FLEX[kind])

    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 256, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    check(kind, attention, inputs, torch.bfloat16)


@pytest.mark.parametrize("kind", ["documents", "random"])
def test_given_block_masks(kind):
    """A BlockMask made outside of the graph, of its mask_mod or of random lists: forward and
    backward, against attention of what is kept, and the forward pass of FlexAttention.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    S = 1024
    numbers = torch.arange(S, device="cuda") // 300

    def keep(b, h, i, j):
        return (i >= j) & (numbers[i] == numbers[j])

    if kind == "documents":
        block_mask = create_block_mask(keep, None, None, S, S, "cuda")
    else:
        block_mask = random_block_mask(keep, S, 128, device="cuda", distinct=True)
    kept = kept_elements(block_mask)
    torch.manual_seed(0)
    shapes = ((2, 8, S, 64), (2, 4, S, 64), (2, 4, S, 64))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    findings = []

    def backend(graph, _):
        findings.extend(compile_passes.fuse_module(graph))
        return graph.forward

    def attention(q, k, v):
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    def expected(q, k, v):
        return masked(q, k, v, kept)

    torch._dynamo.reset()
    fused = results(torch.compile(attention, backend=backend), inputs, torch.bfloat16)
    assert any(finding.fused for finding in findings), findings
    naive, oracle = (results(expected, inputs, x) for x in (torch.bfloat16, torch.float64))
    for n, triple in enumerate(zip(fused, oracle, naive, strict=True)):
        assert_within_budget(f"result {n} of {kind}", *triple)
    torch._dynamo.reset()
    with torch.no_grad():
        flex = torch.compile(attention)(*inputs)
    torch.testing.assert_close(flex, fused[0], atol=2e-2, rtol=2e-2)
