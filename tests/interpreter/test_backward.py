"""The Triton backward kernels in the interpreter against the oracle, feature by feature."""

import pytest
import torch

from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, make_case, random_case
from fa_ops.testing.budget import by_operator
from tests.backends.test_dropout import check_part
from tests.kernels import alternating_dtype

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, more queries than keys": {"is_causal": True, "Sq": 70, "Sk": 40},
    "window": {"window": (5, 7)},
    "window beyond every key": {"window": (0, 0), "Sq": 80, "Sk": 20},
    "softcap": {"softcap": 1.5},
    "softcap and scale": {"softcap": 20.0, "scale": 0.9},
    "alibi": {"alibi": "heads"},
    "alibi per batch": {"alibi": "batch_heads", "is_causal": True},
    "bool mask": {"mask": "bool", "mask_holes": True},
    "broadcast bool mask": {"mask": "bool", "mask_shape": (0, 1, 0, 1)},
    "float mask": {"mask": "float"},
    "sinks": {"sinks": True},
    "sinks of dead rows": {"sinks": True, "kv_lens": True, "seed": 3},
    "kv_lens": {"kv_lens": True},
    "causal kv_lens": {"kv_lens": True, "is_causal": True, "Sq": 70, "Sk": 90},
    "key ranges": {"key_ranges": (1, 1, 1)},
    "key ranges of a batch": {"key_ranges": (1, 0, 0), "Sq": 90, "Sk": 100},
    "key ranges of all rows alike": {"key_ranges": (0, 0, 0)},
    "causal key ranges": {"key_ranges": (1, 0, 1), "is_causal": True, "Sq": 150, "Sk": 150},
    "dropout": {"dropout_p": 0.3},
    "one head for all": {"Hq": 6, "Hkv": 1},
    "no gradient of lse": {"lse_grad": False},
    "narrow values": {"D": 40, "Dv": 24},
    "wide values": {"D": 16, "Dv": 40},
    "head dim 128": {"D": 128, "Dv": 128, "B": 1},
    "head dim 256": {"D": 256, "Dv": 200, "B": 1, "Hq": 2, "Hkv": 1},
    "one query": {"Sq": 1, "Sk": 200},
    "one key": {"Sq": 150, "Sk": 1},
    "whole blocks": {"Sq": 128, "Sk": 256, "is_causal": True, "B": 1},
    "strided": {"layout": "packed"},
    "batch stride 0": {"layout": "expanded"},
    "overlapping rows": {"layout": "frames"},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    case = make_case(dtype=alternating_dtype(feature, FEATURES), **FEATURES[feature])
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("option", [{"is_causal": True}, {"window": (9, 5)}, {"alibi": "heads"}])
def test_lengths_outside_the_keys_are_clamped(option):
    """Positions too: the rows of such a batch stand at the end of the keys that are there."""
    case = make_case(mask="float", mask_shape=(0, 0, 1, 1), mask_grad=True, **option)
    call, results = case.fresh(requires_grad=True), []
    for lens in ([-5, 99], [0, 47]):
        lens = torch.tensor(lens, dtype=torch.int32)
        out, lse = by_operator(call.changed(kv_lens=lens, backend="triton"))
        grads = torch.autograd.grad(out.square().sum(), (*call[:3], call.operands.attn_mask))
        results.append((out, lse, *grads))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("bits", range(16))
def test_gradient_of_a_mask(bits):
    shape = tuple(bits >> place & 1 for place in range(4))
    options = {"is_causal": bits % 2 == 1, "mask_holes": bits % 3 == 0, "Hq": 2, "Hkv": 1}
    case = make_case(mask="float", mask_shape=shape, mask_grad=True, **options)
    assert_close_to_oracle(case, "triton")


def test_gradient_of_a_mask_with_everything_else():
    case = make_case(
        mask="float", mask_shape=(1, 0, 1, 1), mask_grad=True, softcap=2.0, dropout_p=0.2,
        sinks=True, kv_lens=True, alibi="heads", key_ranges=(1, 1, 1), window=(30, 20), Hq=6, Hkv=2,
    )  # fmt: skip
    assert_close_to_oracle(case, "triton")


def test_gradient_of_a_mask_with_few_dimensions():
    call = make_case(mask="float", mask_shape=(0, 0, 1, 1)).fresh(requires_grad=True)
    q, k, v = call[:3]
    mask = call.operands.attn_mask[0, 0].detach().requires_grad_()
    grads = {}
    for name in ("triton", "reference"):
        out = torch.ops.fa.attention(q, k, v, mask, backend=name)
        (grads[name],) = torch.autograd.grad(out.sum(), [mask])
    assert grads["triton"].shape == mask.shape
    torch.testing.assert_close(grads["triton"], grads["reference"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_random(seed):
    dtype = (torch.float32, torch.float16)[seed % 2]
    assert_close_to_oracle(random_case(seed, dtype=dtype), "triton")


def test_dropout_of_a_part():
    check_part("triton", torch.float32)


PACKED = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (3, 2)},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
    "alibi": {"alibi": "batch_heads"},
    "dropout": {"dropout_p": 0.3},
    "kv_lens": {"kv_lens": True, "is_causal": True},
    "one head for all": {"Hq": 6, "Hkv": 1},
    "fp16": {"dtype": torch.float16, "D": 40, "Dv": 24},
}


@pytest.mark.parametrize("number, feature", enumerate(PACKED))
def test_packed(number, feature):
    case = PackedCase(margin=number % 2 * 3, features=Case(**PACKED[feature]))
    assert_close_to_oracle(case, "triton")


def test_packed_sequences_longer_than_a_block():
    case = PackedCase((150, 1, 130), (140, 260, 3), features=Case(is_causal=True, Hq=2, Hkv=1))
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("option", ["kv_lens", "key_ranges"])
def test_nan_beyond_the_key_length_reaches_no_gradient(option):
    q, k, v = make_case(Sq=128, Sk=256, Hq=2, Hkv=1).fresh()[:3]
    first, last = [0, 0], [70, 129]
    if option == "kv_lens":
        options = {"kv_lens": torch.tensor(last, dtype=torch.int32)}
    else:
        first = [33, 0]
        ends = torch.tensor([first, last], dtype=torch.int32).T.view(2, 1, 1, 2)
        options = {"key_ranges": ends.expand(2, 1, 128, 2)}
    excluded = torch.ones(2, 256, dtype=torch.bool)
    for b in range(2):
        excluded[b, first[b] : last[b]] = False
    k[excluded.view(2, 1, 256).expand(k.shape[:3])] = float("nan")
    v[excluded.view(2, 1, 256).expand(v.shape[:3])] = float("inf")
    out, lse = backend.forward(attention_call(q, k, v, **options))
    grads = backend.backward(
        attention_call(q, k, v, **options, saved=Saved(torch.ones_like(out), None, out, lse))
    )
    assert all(bool(x.isfinite().all()) for x in grads[:3])
    for x in (grads.key, grads.value):
        assert not x[excluded.view(2, 1, 256).expand(x.shape[:3])].any()


def test_gradients_have_the_layout_of_their_inputs():
    for layout in ("bhsd", "bshd", "packed", "expanded"):
        call = make_case(layout=layout).fresh()
        q, k, v = call[:3]
        out, lse = backend.forward(call)
        grads = backend.backward(call._replace(saved=Saved(torch.ones_like(out), None, out, lse)))
        for grad, x in zip(grads, (q, k, v)):
            assert grad.stride() == torch.empty_like(x).stride(), layout


def test_a_gradient_of_out_with_zero_strides():
    q, k, v = make_case().fresh(requires_grad=True)[:3]
    out = torch.ops.fa.attention(q, k, v, backend="triton")
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    expected = torch.autograd.grad(
        torch.ops.fa.attention(q, k, v, backend="reference").sum(), [q, k, v]
    )
    for actual, right in zip(grads, expected):
        torch.testing.assert_close(actual, right, atol=1e-5, rtol=1e-4)
