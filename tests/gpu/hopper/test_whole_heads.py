"""Backward passes on a Hopper GPU whose CTAs have all keys of a head, or two slots for keys."""

import dataclasses

import pytest
import torch

from fa_ops.backends import hopper
from fa_ops.backends.hopper import backward
from fa_ops.testing import Arena, Case, assert_right, random_case
from tests.gpu import hopper_calls
from tests.gpu.cases import check, few_processors
from tests.gpu.hopper import test_backward_isolation as isolation

pytestmark = pytest.mark.skipif(
    hopper.available_error() is not None, reason=str(hopper.available_error())
)
DIMS = (64, 128, 40, 120)


@pytest.fixture(autouse=True, params=[(1, True), (4, True), (4, False)], ids=str)
def taken(request, monkeypatch):
    """Each answer of the rule, with so few multiprocessors that it prefers whole heads.

    Parameters are their number, and whether the products sum rows themselves.
    """
    processors, sums_rows = request.param
    answers, rule = [], backward.prefers_whole_heads
    monkeypatch.setattr(backward, "prefers_own_row_sums", lambda *args: sums_rows)
    monkeypatch.setattr(
        backward,
        "prefers_whole_heads",
        lambda *args: answers.append(rule(*args)) or answers[-1],
    )
    with few_processors(processors):
        yield answers


def case_of(seed, **fixed):
    D, dtype = DIMS[seed % 4], (torch.bfloat16, torch.float16)[seed // 4 % 2]
    plain = {
        "mask": None, "softcap": 0.0, "dropout_p": 0.0, "key_ranges": None, "kv_lens": False,
        "D": D, "Dv": D, "dtype": dtype, "device": "cuda",
    }  # fmt: skip
    return random_case(seed, **plain | fixed)


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    check(case_of(seed, B=3, Hq=8, Hkv=(8, 4, 2)[seed % 3], Sk=(100, 300, 777)[seed // 4 % 3]))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_outside_the_tensors_is_written(seed):
    assert_right(case_of(seed + 500, Hq=6, Hkv=6), "hopper", Arena())


@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1, 700), (129, 129), (300, 1000), (1300, 700), (64, 128), (512, 512), (65, 64)],
    ids=str,
)
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"window": (100, 30)}], ids=str)
def test_lengths(changes, lengths, D, taken):
    case = Case(
        B=2, Hq=4, Hkv=2, Sq=lengths[0], Sk=lengths[1], D=D, Dv=D, dtype=torch.bfloat16,
        device="cuda", **changes,
    )  # fmt: skip
    check(case)
    check(dataclasses.replace(case, B=5, Hq=3, Hkv=3))
    assert any(taken) or (lengths[0] > lengths[1] and changes)


@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize(
    "B, Hq, Hkv, Sq, Sk", [(1, 8, 8, 64, 64), (2, 8, 2, 60, 100), (3, 5, 5, 200, 256)]
)
def test_small_problems_on_many_processors(B, Hq, Hkv, Sq, Sk, D, taken):
    with few_processors(132):
        for is_causal in (False, True):
            check(
                Case(
                    B=B, Hq=Hq, Hkv=Hkv, Sq=Sq, Sk=Sk, D=D, Dv=D, dtype=torch.float16,
                    device="cuda", is_causal=is_causal, sinks=True,
                )
            )  # fmt: skip
    assert D > 64 or all(taken)


@pytest.mark.parametrize("D", DIMS)
def test_bits_repeat(D):
    """Each thread adds its sums in one order, so `deterministic` needs no other kernel."""
    case = Case(
        B=5, Hq=8, Hkv=8, Sq=600, Sk=600, D=D, Dv=D, dtype=torch.bfloat16, device="cuda",
        is_causal=True, deterministic=True,
    )  # fmt: skip
    q, k, v, spec = case.fresh()
    out, lse = hopper_calls.forward(q, k, v, spec)
    grad = torch.randn_like(out)
    first, *more = (
        hopper_calls.backward(grad, None, q, k, v, out, lse, spec)[:3] for _ in range(5)
    )
    for again in more:
        assert all(torch.equal(x, y) for x, y in zip(first, again))


@pytest.mark.parametrize("operand", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("feature", ["causal", "window"])
def test_nan_and_inf(feature, D, operand, taken):
    isolation.test_dense(D, D, False, feature, operand, None)
    assert any(taken)


@pytest.mark.parametrize("D", [64, 40])
@pytest.mark.parametrize(
    "changes",
    [{}, {"is_causal": True}, {"window": (100, 30)}, {"kv_lens": True}, {"alibi": "heads"}],
    ids=str,
)
def test_two_slots_for_keys(changes, D, monkeypatch):
    """Also of CTAs that take blocks of keys of several heads, and parts of a group's queries."""
    monkeypatch.setattr(backward, "prefers_whole_heads", lambda *args: False)
    base = Case(
        B=2, Hq=6, Hkv=6, Sq=300, Sk=450, D=D, Dv=D, dtype=torch.bfloat16, device="cuda", **changes
    )
    check(base)
    check(dataclasses.replace(base, Hkv=1))
    check(dataclasses.replace(base, Sq=700, Sk=600))
