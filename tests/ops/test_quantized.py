"""quantized_attention and attention of e4m3 tensors: results, rules of torch, errors."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.backends import quantization, reference
from fa_ops.ops import quantized
from fa_ops.testing import make_case
from fa_ops.testing.quantized import (
    QuantizedCase,
    assert_quantized_close,
    exact,
    random_quantized_case,
)
from tests.dominant_keys import POSITIONS, relative_error
from tests.quantized_calls import operator_call, public_call, run

E4M3 = torch.float8_e4m3fn
SMALL = make_case(B=2, Hq=4, Hkv=2, Sq=5, Sk=70, D=16, Dv=8)
CASES = {
    "plain": QuantizedCase(SMALL),
    "positions": QuantizedCase(
        make_case(B=2, Hq=4, Hkv=2, Sq=5, Sk=70, D=16, Dv=8, is_causal=True, window=(40, 3),
                  sinks=True, kv_lens=True, key_ranges=(1, 0, 1)), rotate=True
    ),
    "softcap": QuantizedCase(
        make_case(B=1, Hq=2, Hkv=1, Sq=3, Sk=9, D=8, Dv=8, softcap=2.0, scale=0.4), E4M3
    ),
    "scales": QuantizedCase(SMALL, scales=("one", "blocks", "channels")),
    "scales of tokens": QuantizedCase(SMALL, scales=("tokens", "heads", "heads")),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(150))
def test_cpu_computes_what_the_oracle_does(seed):
    case = random_quantized_case(seed)
    assert_quantized_close(*run(case, "cpu"), case)


@pytest.mark.parametrize("bug", ["weights", "mean", "smaller scale", "lse"])
def test_the_comparison_finds(bug, monkeypatch):
    """Weights that are not rounded, a mean that is not added again, and scales that saturate."""
    case = QuantizedCase(make_case(Sq=64, Sk=200, D=64, Dv=64), key_mean=2.0)
    out, lse = run(case, "cpu")
    if bug == "weights":
        monkeypatch.setattr(reference.quantization, "rounded", lambda x: x)
    elif bug == "smaller scale":
        monkeypatch.setattr(quantization, "INT8_LARGEST", 200.0)
    elif bug == "mean":
        mean = quantization.mean_of_keys
        monkeypatch.setattr(quantization, "mean_of_keys", lambda k, lens: 0.5 * mean(k, lens))
    else:
        lse = lse + 0.1
    with pytest.raises(AssertionError, match=r"differs by"):
        assert_quantized_close(out, lse, case)


@pytest.mark.parametrize("qk_dtype, limit", [(torch.int8, 0.045), (E4M3, 0.06)])
def test_errors_of_gaussian_inputs(qk_dtype, limit):
    case = QuantizedCase(make_case(Sq=128, Sk=512, D=64, Dv=64), qk_dtype, key_mean=5.0)
    out, _ = run(case, "cpu")
    wanted, _ = exact(case.fresh())
    error = (out - wanted).norm() / wanted.norm()
    assert 0.5 * limit < error < limit


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("position", POSITIONS)
def test_errors_beside_a_dominant_key_do_not_grow_with_length(backend, position):
    short, long = (relative_error(backend, Sk, position) for Sk in (8192, 65536))
    assert long < 1.2 * short < 0.01


def test_parts_without_keys_have_no_weight():
    t = torch.full((2, 3000), -torch.inf)
    t[0, 1500] = -30.0
    w = quantization.round_weights_(t, torch.tensor([[-30.0], [0.0]]))
    assert w[0, 1500] == 256.0 and w.sum() == 256.0


def test_rotation_and_scales_of_tokens_contain_outliers():
    case = QuantizedCase(make_case(Sq=128, Sk=512, D=64, Dv=64), outlier=20.0)
    plain, rotated = (
        _relative(QuantizedCase(case.case, outlier=20.0, rotate=rotate)) for rotate in (False, True)
    )
    assert rotated < 0.75 * plain < 0.1


def _relative(case: QuantizedCase) -> float:
    wanted, _ = exact(case.fresh())
    return ((run(case, "cpu")[0] - wanted).norm() / wanted.norm()).item()


def test_a_value_that_all_keys_share_is_exact():
    q, k = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 300, 16)
    v = torch.full((1, 2, 300, 16), 1.5)
    out = fa_ops.quantized_attention(q, k, v, True)
    assert torch.allclose(out, v[:, :, :40], rtol=1e-6)


@pytest.mark.parametrize("D", [1, 2, 12, 64, 96])
def test_the_rotation_is_symmetric_and_orthogonal(D):
    turn = quantization.rotation(D, torch.float64)
    assert torch.equal(turn, turn.T)
    assert torch.allclose(turn @ turn, torch.eye(D, dtype=torch.float64), atol=1e-12)


def test_scales_are_the_smallest_powers_of_two():
    largest = torch.tensor([448.0, 448.1, 447.9, 1.0, 1.75, 1.76, 3e38])
    scale = quantization.power_of_two(largest)
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())
    assert bool((largest / scale <= 448).all() and (largest / (scale / 2) > 448).all())


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    args, options = operator_call(CASES[name])
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if CASES[name].scales is None:  # torch's test of schemas multiplies inputs, which e4m3 cannot
        checks.append("test_schema")
    opcheck(quantized.QUANTIZED_ATTENTION, args, options, test_utils=checks)


@pytest.mark.parametrize("name", CASES)
def test_function_operator_and_compiled_code_agree(name):
    case = CASES[name]
    args, options = operator_call(case)
    out, lse = quantized.QUANTIZED_ATTENTION(*args, **options)
    again, lse_again = run(case)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    function, args, options = public_call(case)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, **options)[0], out)
    assert out.dtype == (torch.bfloat16 if case.scales else args[0].dtype)
    assert out.transpose(1, 2).is_contiguous() and lse.dtype == torch.float32


@pytest.mark.parametrize("size", ["Sq", "Sk", "B"])
@pytest.mark.parametrize("scales", [None, ("one", "one", "one")])
def test_sizes_of_zero(size, scales):
    shape = {"B": 2, "Hq": 2, "Hkv": 1, "Sq": 3, "Sk": 4, "D": 8, "Dv": 16, size: 0}
    out, lse = run(QuantizedCase(make_case(**shape), scales=scales))
    assert out.shape == (shape["B"], 2, shape["Sq"], 16) and not out.any()
    assert out.dtype == (torch.bfloat16 if scales else torch.float32)
    assert bool((lse == float("-inf")).all())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_results_do_not_depend_on_the_default_dtype(backend):
    function, args, options = public_call(CASES["positions"], backend)
    expected = function(*args, **options)
    torch.set_default_dtype(torch.bfloat16)
    try:
        results = function(*args, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert results[1].dtype == torch.float32
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_vmap():
    q, k, v = (torch.randn(3, 2, heads, 20, 8) for heads in (4, 2, 2))
    each = torch.stack([fa_ops.quantized_attention(*one) for one in zip(q, k, v)])
    folded = torch.vmap(fa_ops.quantized_attention)(q, k, v)
    assert torch.equal(each, folded)
    e4m3 = [t.to(E4M3) for t in (q, k, v)]
    scale = torch.rand(3)
    scaled = lambda q, k, v, s: fa_ops.attention(q, k, v, q_scale=s, k_scale=s, v_scale=s)  # noqa: E731
    each = torch.stack([scaled(*one) for one in zip(*e4m3, scale)])
    assert torch.equal(torch.vmap(scaled)(*e4m3, scale), each)


def test_autocast_casts_16_bit_tensors_and_no_others():
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    scale = torch.tensor(0.5)
    e4m3 = [t.to(E4M3) for t in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa_ops.quantized_attention(q, k, v)
        scaled = fa_ops.attention(*e4m3, q_scale=scale, k_scale=scale, v_scale=scale)
    assert torch.equal(out, fa_ops.quantized_attention(*(t.bfloat16() for t in (q, k, v))))
    assert torch.equal(scaled, fa_ops.attention(*e4m3, q_scale=scale, k_scale=scale, v_scale=scale))


def test_flops_are_those_of_attention():
    q, k, v = (torch.randn(2, heads, 20, 8) for heads in (4, 2, 2))
    counts = []
    for function in (fa_ops.attention, fa_ops.quantized_attention):
        with FlopCounterMode(display=False) as counter:
            function(q, k, v)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_explain_names_the_kernel():
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    found = fa_ops.explain(q, k, v, rotate=True)
    assert (found.backend, found.kernel, found.route) == ("cpu", "8-bit forward", "direct")
    one = torch.ones(())
    e4m3 = [t.to(E4M3) for t in (q, k, v)]
    found = fa_ops.explain(*e4m3, q_scale=one, k_scale=one, v_scale=one)
    assert found.kernel == "8-bit forward"


def _tensors(dtype=torch.float32):
    return {name: torch.randn(2, 4, 70, 8).to(dtype) for name in ("query", "key", "value")}


ONE = torch.ones(())
SCALES = {"q_scale": ONE, "k_scale": ONE, "v_scale": ONE}
BAD = {
    "float64": (_tensors(torch.float64), TypeError, "query must be float16, bfloat16, float32"),
    "dtypes": (_tensors() | {"key": torch.zeros(2, 4, 70, 8).half()}, TypeError, "key is float16"),
    "qk_dtype": (_tensors() | {"qk_dtype": torch.int16}, TypeError, "qk_dtype must be int8 or"),
    "no dtype": (_tensors() | {"qk_dtype": "int8"}, TypeError, "qk_dtype must be a torch.dtype"),
    "flag": (_tensors() | {"rotate": 1}, TypeError, "rotate must be a bool, got 1"),
    "window": (_tensors() | {"window": (-5, 0)}, ValueError, "(window_left) must be -1"),
    "heads": (_tensors() | {"key": torch.zeros(2, 3, 70, 8)}, ValueError, "value has 4 heads"),
    "no scale": (_tensors(E4M3) | {"rotate": False}, ValueError, "which needs q_scale"),
    "gradient": (
        _tensors() | {"query": torch.zeros(2, 4, 70, 8, requires_grad=True)}, ValueError,
        "query must not require grad: attention with 8-bit products has no gradient",
    ),
    "16 bits with scales": (_tensors() | SCALES, TypeError, "q_scale is for tensors in float8"),
    "missing": (
        _tensors(E4M3) | {"q_scale": ONE, "k_scale": ONE}, ValueError, "v_scale is missing",
    ),
    "shape": (
        _tensors(E4M3) | SCALES | {"k_scale": torch.ones(2, 4, 3)}, ValueError,
        "k_scale must have shape (2, 4, 2), got (2, 4, 3): "
        "pass a factor for each token, or for each 64 tokens",
    ),
    "channels of a key": (
        _tensors(E4M3) | SCALES | {"q_scale": torch.ones(2, 4, 8)}, ValueError,
        "q_scale must have shape (2, 4, 2), got (2, 4, 8)",
    ),
    "dtype of a scale": (
        _tensors(E4M3) | SCALES | {"v_scale": torch.ones((), dtype=torch.float64)}, TypeError,
        "v_scale must be float32, got float64",
    ),
    "e4m3 sinks": (
        _tensors(E4M3) | SCALES | {"sinks": torch.zeros(4).to(E4M3)}, TypeError,
        "sinks must be float32, got float8_e4m3fn",
    ),
    "mask": (
        _tensors(E4M3) | SCALES | {"attn_mask": torch.ones(70, 70, dtype=torch.bool)}, ValueError,
        "attn_mask must not be given with q_scale",
    ),
    "dropout": (_tensors(E4M3) | SCALES | {"dropout_p": 0.1}, ValueError, "dropout_p must not be"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    arguments, error, message = BAD[name]
    function = fa_ops.attention if "q_scale" in arguments else fa_ops.quantized_attention
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        function(**arguments)
    valid = _tensors(E4M3) | SCALES if "q_scale" in arguments else _tensors()
    function(**valid)
    with pytest.raises(error) as again:  # with a plan of a valid call too
        function(**arguments)
    assert message in str(again.value)


def test_e4m3_without_scales_is_an_error_of_attention_too():
    with pytest.raises(TypeError, match="q_scale, k_scale and v_scale"):
        fa_ops.attention(**_tensors(E4M3))
