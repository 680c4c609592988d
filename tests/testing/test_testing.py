"""`fa_ops.testing`: input factories, baselines and the error budget."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends.cpu import dense
from fa_ops.plans import planning
from fa_ops.testing import (
    Case,
    PackedCase,
    assert_close_to_oracle,
    assert_within_budget,
    budget,
    make_case,
    naive,
    random_case,
)
from fa_ops.testing.budget import flash

NAMES = {"Case": Case, "PackedCase": PackedCase, "torch": torch}


@pytest.mark.parametrize("seed", range(20))
def test_repr_recreates_the_case(seed):
    case = random_case(seed, dtype=torch.bfloat16)
    assert eval(repr(case), NAMES) == case  # noqa: S307
    packed = PackedCase((1, 2), (3, 0), 1, case)
    assert eval(repr(packed), NAMES) == packed  # noqa: S307


@pytest.mark.parametrize("seed", range(20))
def test_fresh_gives_equal_values_every_time_and_in_every_dtype(seed):
    case = random_case(seed, dtype=torch.float16)
    first, second, wide = case.fresh(), case.fresh(), case.fresh(torch.float64)
    flat = [[t for t in (*x[:3], *x.operands) if t is not None] for x in (first, second, wide)]
    for a, b, c in zip(*flat):
        assert a is not b and torch.equal(a, b)
        assert torch.equal(a.double(), c.double())
    for x in wide[:3]:
        assert x.dtype == torch.float64


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed", "expanded"])
def test_layouts(layout):
    q, k, v = make_case(layout=layout).fresh()[:3]
    for x in (q, k, v):
        assert x.stride(3) == 1
        assert x.is_contiguous() == (layout == "bhsd")
        assert x.transpose(1, 2).is_contiguous() == (layout == "bshd")
        assert (x.stride(0) == 0) == (layout == "expanded")


def test_every_feature_has_its_input():
    case = make_case(
        mask="float", mask_shape=(1, 0, 1, 1), mask_holes=True, mask_grad=True, alibi="batch_heads",
        sinks=True, kv_lens=True, key_ranges=(0, 0, 1), dropout_p=0.5, magnitude=0.0,
    )  # fmt: skip
    call = case.fresh(requires_grad=True)
    t = call.operands
    assert (call.query == 0).all()
    assert t.attn_mask.shape == (2, 1, 33, 47) and t.attn_mask.requires_grad
    assert (t.attn_mask == -math.inf).all(-1).any()
    assert t.alibi_slopes.shape == (2, 4) and t.sinks.requires_grad
    assert t.kv_lens.dtype == t.key_ranges.dtype == torch.int32
    assert t.key_ranges.shape == (1, 1, 33, 2)
    assert (t.key_ranges[..., 0] <= t.key_ranges[..., 1]).all()
    holes = make_case(mask="bool", mask_holes=True).fresh().operands.attn_mask
    assert (~holes).all(-1).any() and not (~holes).all()


def test_packed_case():
    features = make_case(kv_lens=True, alibi="batch_heads", seed=5)
    case = PackedCase((3, 0, 4), (2, 6, 0), margin=2, features=features)
    call = case.fresh(requires_grad=True)
    q, k, v = call[:3]
    t = call.operands
    assert (len(q), len(k), len(v)) == (11, 12, 12)
    assert q.is_leaf and q.requires_grad
    assert [ends.tolist() for ends in case.packing()] == [[2, 5, 5, 9], [2, 4, 10, 10]]
    assert (t.kv_lens <= torch.tensor(case.lengths_k)).all()
    assert t.alibi_slopes.shape == (3, 4)


def test_random_cases_vary_every_field():
    cases = [random_case(seed) for seed in range(200)]
    for field in Case.__dataclass_fields__:
        fixed = ("dtype", "device", "magnitude", "integers", "poison", "lists", "documents")
        assert len({getattr(c, field) for c in cases}) > 1 or field in fixed, field
    assert random_case(3, Sq=7).Sq == 7


ORACLE = torch.tensor([1.0, 2.0, math.nan, -math.inf])


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ([1.0, 2.0, math.nan, -math.inf], None),
        ([1.0, 2.00021, math.nan, -math.inf], None),  # 2 * 1e-4 + 1e-5 * 2
        ([1.0, 2.00023, math.nan, -math.inf], "x: error 2.3.*e-04 over the budget 2.2"),
        ([1.0, math.nan, math.nan, -math.inf], "x: isnan differs at \\[1\\]"),
        ([1.0, 2.0, 0.0, -math.inf], "x: isnan differs at \\[2\\]"),
        ([1.0, 2.0, math.nan, math.inf], "x: isposinf differs at \\[3\\]"),
        ([1.0, 2.0, math.nan, -1e9], "x: isneginf differs at \\[3\\]"),
        ([1.0, 2.0], "x: shape \\(2,\\), expected \\(4,\\)"),
    ],
)
def test_assert_within_budget(actual, message):
    baseline = ORACLE + 1e-4
    if message is None:
        assert_within_budget("x", torch.tensor(actual), ORACLE, baseline)
        return
    with pytest.raises(AssertionError, match=message):
        assert_within_budget("x", torch.tensor(actual), ORACLE, baseline)


@pytest.mark.parametrize("seed", range(30))
def test_the_flash_baseline_without_rounding_equals_the_oracle(seed):
    case = random_case(seed, dtype=torch.float64)
    solutions = []
    for attend in (reference.dense, functools.partial(flash, dtype=torch.float64)):
        call = case.fresh(requires_grad=True)
        q, k, v = call[:3]
        out, lse = attend(call)
        seeds = case.grad_outputs(out, lse)
        outputs = [out, lse.masked_fill(lse == -math.inf, 0.0)]
        grads = torch.autograd.grad(outputs, (q, k, v), seeds, materialize_grads=True)
        solutions.append((out, lse, *grads))
    for actual, expected in zip(*solutions):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


def test_the_budget_is_tight_in_fp64():
    x = torch.ones(3, dtype=torch.float64)
    assert_within_budget("x", x + 1e-12, x, x)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget("x", x + 1e-9, x, x)


def test_noise_raises_the_budget_of_an_exact_baseline():
    x = torch.ones(1)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget("x", x + 1e-3, x, x)
    assert_within_budget("x", x + 1e-3, x, x, noise=torch.tensor([1e-3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_naive_equals_the_oracle_up_to_rounding(dtype):
    case = make_case(dtype=dtype, is_causal=True, softcap=2.0, dropout_p=0.2, sinks=True)
    out, lse = naive(case.fresh())
    expected_out, expected_lse = reference.dense(case.fresh(torch.float64))
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tolerance)


CASE = make_case(is_causal=True, sinks=True, mask="float", mask_grad=True)
WRONG = {
    "out": lambda out, lse, grads: out.add_(1e-3),
    "lse": lambda out, lse, grads: lse[0, 0].add_(1e-3),
    "grad_q": lambda out, lse, grads: grads.query[-1, -1, -1].mul_(1.01),
    "grad_k": lambda out, lse, grads: grads.key[0, 0, 3].zero_(),
    "grad_v": lambda out, lse, grads: grads.value.mul_(1.001),
    "grad_attn_mask": lambda out, lse, grads: grads.attn_mask[0, 0, 20, 5].add_(1e-3),
    "grad_sinks": lambda out, lse, grads: grads.sinks[1].add_(1e-3),
}


@pytest.mark.parametrize("name", WRONG)
def test_slightly_wrong_results_are_named(name, monkeypatch):
    from fa_ops.backends import cpu

    def forward(call):
        out, lse = dense.forward(call)
        if not name.startswith("grad"):
            WRONG[name](out, lse, None)
        return out, lse

    def backward(call):
        grads = dense.backward(call)
        if name.startswith("grad"):
            WRONG[name](None, None, grads)
        return grads

    assert_close_to_oracle(CASE, "cpu")
    monkeypatch.setattr(cpu, "forward", forward)
    monkeypatch.setattr(cpu, "backward", backward)
    planning.forget()
    with pytest.raises(AssertionError) as error:
        assert_close_to_oracle(CASE, "cpu")
    assert str(error.value).startswith(f"{CASE!r}: {name}: error")


def test_naive_gradients_are_finite_where_a_sink_has_all_the_weight():
    case = make_case(D=8, Dv=8, Hq=4, Hkv=2, sinks="3e38", dtype=torch.float16)
    call = case.fresh(requires_grad=True)
    solution = budget._Solution("naive", case, budget._copies(call, torch.float16))
    solution.differentiate(case.grad_outputs(*solution.results.values()))
    assert all(x.isfinite().all() for x in solution.results.values())


def test_the_flash_baseline_rounds_weights_relative_to_the_largest():
    """One key beside a sink: its weight is less than one, and not rounded."""
    case = make_case(Sk=1, D=8, Dv=8, sinks=True, dtype=torch.float64)
    exact, _ = reference.dense(case.fresh())
    rounded, _ = flash(case.fresh(), dtype=torch.bfloat16)
    torch.testing.assert_close(rounded, exact, atol=1e-14, rtol=1e-14)
    assert (naive(case.fresh(torch.bfloat16))[0] - exact).abs().max() > 1e-4
    without_keys, _ = flash(make_case(Sk=0, D=8, Dv=8).fresh(), dtype=torch.bfloat16)
    assert not without_keys.any()


def test_the_noise_of_few_gradients_of_values_is_that_of_rounded_weights():
    case = make_case(
        B=1, Hq=2, Hkv=1, Sq=30, Sk=4, D=8, Dv=2, dropout_p=0.5, dtype=torch.float16
    )  # fmt: skip
    call = case.fresh(requires_grad=True)
    solution = budget._Solution("oracle", case, budget._copies(call, torch.float64))
    grad_out = case.grad_outputs(*solution.results.values())[0].double()
    exact = case.fresh(torch.float64)
    weights, _ = reference.weights(exact.query @ exact.key.transpose(-1, -2) * 8**-0.5, None)
    weights = weights * reference.dropout_factor(exact)
    g = torch.Generator().manual_seed(0)
    errors = torch.rand(2000, *weights.shape, generator=g, dtype=torch.float64) - 0.5
    errors = errors * weights * torch.finfo(torch.float16).eps
    sampled = (errors.transpose(-1, -2) @ grad_out).sum(2, keepdim=True).square().mean(0).sqrt()
    torch.testing.assert_close(solution.noise_of_grad_v(grad_out), sampled, rtol=0.1, atol=0.0)
    assert_close_to_oracle(case, "cpu")
