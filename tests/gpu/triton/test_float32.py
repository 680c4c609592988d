"""Triton kernels on a GPU with float32 in parts, which only large calls take by themselves."""

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import configs, float32_parts, launch
from fa_ops.call.options import Spec
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, random_case
from tests.kernels import relative_error

DIMS = [(16, 16), (32, 32), (40, 24), (64, 64), (128, 128), (72, 128)]


@pytest.fixture
def in_parts(monkeypatch):
    """Calls of every size are computed in parts on GPUs that have such kernels."""
    monkeypatch.setattr(configs, "is_small", lambda scores, head_dim: False)


@pytest.mark.parametrize("seed", range(40))
def test_random(seed, in_parts):
    D, Dv = DIMS[seed % len(DIMS)]
    case = random_case(seed, D=D, Dv=Dv, dtype=torch.float32, device="cuda")
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [(256, 384), (257, 390)], ids=["whole blocks", "ragged"])
def test_head_dims(dims, causal, S, in_parts):
    D, Dv = dims
    case = Case(D=D, Dv=Dv, Sq=S[0], Sk=S[1], dtype=torch.float32, is_causal=causal, device="cuda")
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("seed", range(12))
def test_packed(seed, in_parts):
    D, Dv = DIMS[seed % len(DIMS)]
    features = random_case(
        seed, D=D, Dv=Dv, dtype=torch.float32, device="cuda", mask=None, key_ranges=None
    )
    case = PackedCase((5, 0, 317, 33, 60), (9, 4, 300, 0, 90), seed % 2 * 7, features)
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("D", [32, 64, 128])
def test_large_calls_take_parts_and_are_exact(D):
    q, k, v, grad = (torch.randn(1, 4, 2048, D, device="cuda") for _ in range(4))
    mode = float32_parts.products(q, 4 * 2048 * 2048, D, D, 0.0)
    assert (mode == "split") == float32_parts.has_fast_parts(launch.architecture(q.device))
    spec = Spec(is_causal=True)
    out, lse = backend.forward(q, k, v, spec)
    grads = backend.backward(grad, None, q, k, v, out, lse, spec)[:3]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = reference.dense(*leaves, spec)
    exact = torch.autograd.grad(expected, leaves, grad.double())
    for found, wanted in zip((out, *grads), (expected.detach(), *exact), strict=True):
        assert relative_error(found, wanted) < 2e-6


def test_nan_reaches_only_rows_that_attend_it(in_parts):
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda") for _ in range(3))
    expected = backend.forward(q, k, v, Spec(is_causal=True))[0]
    k[:, :, 200], v[:, :, 210] = float("nan"), float("inf")
    out = backend.forward(q, k, v, Spec(is_causal=True))[0]
    torch.testing.assert_close(out[:, :, :200], expected[:, :, :200], atol=2e-6, rtol=0.0)
    assert bool(out[:, :, 200:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 192])
def test_keys_far_below_a_sink_have_no_weight(D, dtype, in_parts):
    """Products that exceed a rounded maximum by more than 128 have infinite weights."""
    q = torch.randn(1, 2, 40, D, device="cuda").mul(100).round().to(dtype)
    k = torch.randn(1, 2, 70, D, device="cuda").abs().mul(100).round().to(dtype)
    q, v = -q.abs(), torch.randn_like(k)
    spec = Spec(sinks=torch.tensor([0.5, -3.0], device="cuda"), scale=1e5 / 3)
    out, lse = backend.forward(q, k, v, spec)
    assert not out.any()
    assert torch.equal(lse, spec.sinks[None, :, None].expand_as(lse))
