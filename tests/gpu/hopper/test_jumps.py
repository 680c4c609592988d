"""Scores far above those of earlier blocks, for the speculative maximum of the Hopper forward."""

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.call.options import Packing, Spec
from tests.gpu import hopper_calls
from tests.kernels import relative_error

S = 1000


def _grow(k):
    """Scores that grow from block to block; blocks are processed from the last key to the first."""
    return k * torch.linspace(12, 0.1, S, device=k.device).to(k.dtype)[:, None]


def _rare(k, every, factor):
    k = k.clone()
    k[:, :, ::every] *= factor
    return k


# factors of scores with standard deviation 1; exp overflows in float32 beyond 88
KEYS = {
    "unchanged": lambda k: k,
    "wide": lambda k: k * 8,
    "growing": _grow,
    "some tens apart": lambda k: _rare(k, 97, 30),
    "hundreds apart": lambda k: _rare(k, 197, 200),
    "all but one far below": lambda k: torch.cat(
        [k[:, :, :37], k[:, :, 37:38] * 500, k[:, :, 38:]], 2
    ),
}
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_left": 130},
    "softcap": {"softcap": 300.0},
}


def _problem(D, dtype, keys):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, S, D, device="cuda", dtype=dtype, generator=generator) for _ in range(3)
    )
    return q, KEYS[keys](k).contiguous(), v


def _assert_close(actual, expected, dtype):
    (out, lse), (exact, exact_lse) = actual, expected
    assert relative_error(out, exact) < (4e-3 if dtype == torch.bfloat16 else 6e-4)
    # float32 rounds large scores
    assert (lse.double() - exact_lse).abs().max() < 1e-5 * exact_lse.abs().max().clamp(min=10)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_dense(D, keys, options, dtype):
    q, k, v = _problem(D, dtype, keys)
    spec = Spec(**OPTIONS[options])
    exact = reference.forward(q.double(), k.double(), v.double(), spec)
    _assert_close(hopper_calls.forward(q, k, v, spec), exact, dtype)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("D", [64, 128])
def test_packed(D, keys):
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in _problem(D, torch.bfloat16, keys))
    ends = torch.tensor([0, 1, 130, 600, S], dtype=torch.int32, device="cuda")
    spec, packing = Spec(is_causal=True), Packing(ends, ends)
    exact = reference.varlen_forward(q.double(), k.double(), v.double(), packing, spec)
    _assert_close(hopper_calls.varlen_forward(q, k, v, packing, spec), exact, torch.bfloat16)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nan_and_inf_affect_only_rows_that_attend_them(value):
    """NaN in a query affects its row; NaN in a key affects the queries that attend it."""
    q, k, v = _problem(128, torch.bfloat16, "unchanged")
    spec = Spec(is_causal=True)
    clean, _ = hopper_calls.forward(q, k, v, spec)
    q[0, 0, 700, 5] = value
    k[0, 0, 900, 7] = value
    out, _ = hopper_calls.forward(q, k, v, spec)
    exact, _ = reference.forward(q.double(), k.double(), v.double(), spec)
    assert torch.equal(out.isnan(), exact.isnan()) and 102 > exact.isnan().any(-1).sum() > 1
    torch.testing.assert_close(out, exact.to(out.dtype), atol=2e-2, rtol=2e-2, equal_nan=True)
    assert torch.equal(out[:, 1:], clean[:, 1:])
