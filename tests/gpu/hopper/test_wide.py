"""The Hopper kernels of heads over 256 wide on a GPU, against the oracle."""

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper, reference
from fa_ops.call.options import Spec
from fa_ops.testing import Case, assert_close_to_oracle
from tests.gpu import hopper_calls

pytestmark = pytest.mark.skipif(hopper.available_error() is not None, reason="needs a Hopper GPU")

WIDE = {"D": 512, "Dv": 512, "Hq": 4, "Hkv": 2, "dtype": torch.bfloat16, "device": "cuda"}
CASES = {
    "one block": {"Sq": 64, "Sk": 64},
    "two blocks": {"Sq": 128, "Sk": 128},
    "three blocks": {"Sq": 128, "Sk": 192},
    "ragged": {"Sq": 250, "Sk": 1000},
    "causal": {"Sq": 333, "Sk": 777, "is_causal": True},
    "causal without keys": {"Sq": 333, "Sk": 100, "is_causal": True},
    "window": {"Sq": 600, "Sk": 777, "window": (100, 20)},
    "lengths and sinks": {"Sq": 130, "Sk": 300, "kv_lens": True, "sinks": True, "is_causal": True},
    "ranges": {"Sq": 130, "Sk": 300, "key_ranges": (1, 1, 1)},
    "float16": {"Sq": 200, "Sk": 300, "dtype": torch.float16, "is_causal": True},
    "320 features": {"Sq": 200, "Sk": 300, "D": 320, "Dv": 320},
    "wide keys": {"Sq": 200, "Sk": 300, "D": 512, "Dv": 136, "is_causal": True},
    "wide values": {"Sq": 200, "Sk": 300, "D": 72, "Dv": 400, "is_causal": True},
    "large scores": {"Sq": 200, "Sk": 300, "magnitude": 1000.0, "is_causal": True},
}


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    assert_close_to_oracle(Case(**WIDE | CASES[name]), "hopper", gradients=False)


@pytest.mark.parametrize("name", CASES)
def test_backward(name):
    assert_close_to_oracle(Case(**WIDE | CASES[name]), "hopper")


@pytest.mark.parametrize("Hq, Hkv", [(8, 1), (6, 2), (16, 2)])
def test_groups_in_parts(Hq, Hkv):
    heads = {"Hq": Hq, "Hkv": Hkv, "is_causal": True}
    assert_close_to_oracle(Case(**WIDE | heads, Sq=300, Sk=300), "hopper")


def test_gradients_repeat_bitwise():
    q, k, v = (torch.randn(2, 4, 1024, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = hopper_calls.forward(q, k, v, Spec(is_causal=True))
    first = hopper_calls.backward(q, None, q, k, v, out, lse, Spec(is_causal=True))
    for _ in range(20):
        again = hopper_calls.backward(q, None, q, k, v, out, lse, Spec(is_causal=True))
        assert all(map(torch.equal, again[:3], first[:3]))


def test_a_nan_reaches_only_gradients_of_what_attends_it():
    case = Case(**WIDE, Sq=300, Sk=300, is_causal=True)
    q, k, v, _ = case.fresh()
    grad_out = torch.randn_like(q)
    k[:, :, 250], v[:, :, 260] = float("nan"), float("inf")
    spec = Spec(is_causal=True)
    out, lse = hopper_calls.forward(q, k, v, spec)
    dq, dk, dv = hopper_calls.backward(grad_out, None, q, k, v, out, lse, spec)[:3]
    inputs = (x[:, :, :250].cpu() for x in (grad_out, q, k, v, out))
    grad_out, q, k, v, out = inputs
    expected = reference.backward(
        grad_out, None, q, k, v, out, lse[:, :, :250].cpu().contiguous(), spec
    )
    assert (dq[:, :, :250].cpu().float() - expected[0].float()).abs().max() < 5e-2
    assert not dk[:, :, :250].isfinite().all()  # queries from 250 on attend these keys


def test_an_infinity_changes_only_rows_that_attend_it():
    q, k, v, _ = Case(**WIDE, Sq=300, Sk=300).fresh()
    v[:, :, 250] = float("inf")
    spec = Spec(is_causal=True)
    out, _ = hopper_calls.forward(q, k, v, spec)
    expected = reference.forward(q.cpu(), k.cpu(), v.cpu(), spec)[0][:, :, :250]
    assert (out[:, :, :250].cpu().float() - expected.float()).abs().max() < 2e-2


def test_training_by_default():
    q, k, v, _ = Case(**WIDE, Sq=301, Sk=301).fresh()
    assert fa_ops.explain(q, k, v, is_causal=True).backend == "hopper"
    assert_close_to_oracle(Case(**WIDE, Sq=301, Sk=301, is_causal=True), "auto")


def test_repeated_calls_are_bitwise_equal():
    q, k, v = (torch.randn(2, 8, 2048, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first = fa_ops.attention(q, k, v, backend="hopper")
    for _ in range(20):
        assert torch.equal(fa_ops.attention(q, k, v, backend="hopper"), first)
