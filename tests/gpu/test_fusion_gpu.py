"""Fused code on a GPU: rows without keys, where eager averages all values, forward and backward."""

import pytest
import torch

import compile_passes
from fa_ops.testing import assert_within_budget
from tests.kernels import DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOWEST = torch.finfo(torch.float32).min
KINDS = ("plain", "softcap", "two masks", "bias", "softcap bias", "log-sum-exp")


def spelled(kind):
    """Grouped attention with a causal mask and padding by finite fills."""

    def attention(q, k, v, padding, bias):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.mT * 0.3
        if q.dtype != torch.float64:
            scores = scores.float()
        at = torch.arange(q.shape[2], device=q.device)
        keep = (at[None] <= at[:, None]) & padding
        if "softcap" in kind:
            scores = torch.tanh(scores / 5.0) * 5.0
        if "bias" in kind:
            scores = scores + bias
        if kind == "two masks":
            scores = torch.where(at[None] <= at[:, None] + 1, scores, LOWEST)
        scores = scores + torch.where(keep, 0.0, LOWEST)
        out = scores.softmax(-1).to(v.dtype) @ v
        if kind == "log-sum-exp":
            gate = (scores.logsumexp(-1) - 1.0).sigmoid()[..., None]
            out = out * gate.to(out.dtype)
        return out

    return attention


def results(function, inputs, dtype):
    """The output, and the gradients of everything that has one."""
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
    function, found = spelled(kind), []

    def backend(graph, _):
        found.extend(compile_passes.fuse_module(graph))
        return graph.forward

    torch._dynamo.reset()
    fused = results(torch.compile(function, backend=backend), inputs, dtype)
    assert any(one.fused for one in found), found
    naive, oracle = results(function, inputs, dtype), results(function, inputs, torch.float64)
    for n, triple in enumerate(zip(fused, oracle, naive)):
        assert_within_budget(f"result {n} of {kind}", *triple)
