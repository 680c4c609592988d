"""The kernels with 8-bit products in the interpreter against the oracle (TRITON_INTERPRET=1)."""

import importlib

import pytest
import torch

from fa_ops.backends import quantization
from fa_ops.backends.triton import launch
from fa_ops.call.call import attention_call
from fa_ops.testing import make_case
from fa_ops.testing.quantized import QuantizedCase, assert_quantized_close, random_quantized_case
from tests.dominant_keys import relative_error
from tests.quantized_calls import run

host = importlib.import_module("fa_ops.backends.triton.eight_bit")

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]
E4M3 = torch.float8_e4m3fn

SEVERAL = dict(B=1, Hq=2, Hkv=1, Sq=150, Sk=300, D=64, Dv=64)
CASES = {
    "several tiles": QuantizedCase(make_case(**SEVERAL), key_mean=2.0),
    "causal": QuantizedCase(make_case(**SEVERAL, is_causal=True), E4M3, rotate=True),
    "window": QuantizedCase(make_case(**SEVERAL, window=(20, 5), sinks=True), rotate=True),
    "many keys": QuantizedCase(
        make_case(B=2, Hq=1, Hkv=1, Sq=2, Sk=2100, D=8, Dv=8, kv_lens=True), key_mean=4.0
    ),
    "e4m3": QuantizedCase(
        make_case(**SEVERAL, is_causal=True, kv_lens=True), scales=("tokens", "blocks", "channels"),
        poison=True,
    ),
    "e4m3 softcap": QuantizedCase(
        make_case(B=1, Hq=2, Hkv=2, Sq=5, Sk=70, D=40, Dv=24, softcap=2.0, key_ranges=(1, 1, 1)),
        scales=("one", "heads", "one"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    assert_quantized_close(*run(CASES[name], "triton"), CASES[name])


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed):
    case = random_quantized_case(seed)
    assert_quantized_close(*run(case, "triton"), case)


@pytest.mark.parametrize("position", ["first", "middle"])  # blocks after it have a larger maximum
def test_weights_beside_a_dominant_key_are_kept(position):
    assert relative_error("triton", 16384, position, share=0.95, Sq=4) < 0.005


@pytest.mark.parametrize("qk_dtype", [torch.int8, E4M3])
def test_numbers_and_scales_are_those_of_the_definition(qk_dtype):
    q, k, v = make_case(B=2, Hq=4, Hkv=2, Sq=70, Sk=130, D=48, Dv=24).fresh()[:3]
    call = attention_call(
        q, k, v, kv_lens=torch.tensor([130, 77], dtype=torch.int32), qk_dtype=qk_dtype,
        eight_bits=True,
    )  # fmt: skip
    wanted = quantization.quantised(call, torch.float32)
    found = host.quantise(call)
    same = found.query[..., :48].float() == wanted.query
    assert same.float().mean() > 0.999 and not found.query[..., 48:].float().any()
    assert (found.key[..., :48].float() == wanted.key).float().mean() > 0.999
    assert torch.equal(found.value[..., :130].float().transpose(2, 3), wanted.value)
    assert torch.equal(found.v_scale, wanted.v_scale.squeeze(2))
    assert not found.value[..., 130:].float().any()
    torch.testing.assert_close(found.q_scale, wanted.q_scale.squeeze(-1))
    torch.testing.assert_close(found.k_scale[:, :, 1], wanted.k_scale[:, :, 64, 0])
    torch.testing.assert_close(found.offset, wanted.offset.squeeze(-1), atol=1e-5, rtol=1e-4)
