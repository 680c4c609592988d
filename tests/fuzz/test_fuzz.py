"""Random attention problems, forward and backward, against the fp64 oracle.

FA_OPS_FUZZ_CASES=20000 pytest tests/fuzz                       more cases
FA_OPS_FUZZ_SEED=7 pytest tests/fuzz                            other cases
FA_OPS_FUZZ_BACKEND=triton FA_OPS_FUZZ_DEVICE=cuda pytest tests/fuzz

A failure prints the case, which `assert_right(case, backend)` repeats.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_ops.cli.fuzz import Target, refusal, strict
from fa_ops.testing import Arena, assert_right, random_calls
from fa_ops.testing.tangents import assert_tangents_close, tangents_refusal
from tests.fuzz.strategies import cases

BACKEND = os.environ.get("FA_OPS_FUZZ_BACKEND", "cpu")
DEVICE = os.environ.get("FA_OPS_FUZZ_DEVICE", "cpu")
CASES = int(os.environ.get("FA_OPS_FUZZ_CASES", "400"))
SEED = os.environ.get("FA_OPS_FUZZ_SEED")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
if DEVICE == "cpu":
    DTYPES.append(torch.float64)


def fuzz(
    strategy: st.SearchStrategy, share: float, arena: bool = False, tangents: bool = False
) -> None:
    """Run `share` of the cases, without randomness unless a seed is set.

    With `arena`, calls are repeated, and margins around all tensors are checked. `tangents`:
    compare those of results and gradients.
    """

    @settings(
        max_examples=max(1, round(CASES * share / len(DTYPES))),
        deadline=None,
        derandomize=SEED is None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(strategy)
    def compare(case: random_calls.AnyCase) -> None:
        hypothesis.assume(refusal(BACKEND, case) is None)
        if tangents:
            hypothesis.assume(tangents_refusal(case.fresh().changed(backend=BACKEND)) is None)
            assert_tangents_close(case, BACKEND)
        else:
            assert_right(case, BACKEND, Arena() if arena else None, repeated=arena)

    if SEED is not None:
        compare = hypothesis.seed(int(SEED))(compare)
    with strict(Target(BACKEND, DEVICE, tuple(DTYPES))):
        compare()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense(dtype):
    fuzz(cases("dense", dtype, DEVICE, edges=False), share=0.8)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype):
    fuzz(cases("packed", dtype, DEVICE, edges=False), share=0.2)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind, share", [("dense", 0.03), ("packed", 0.015)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tangents(kind, share, dtype):
    fuzz(cases(kind, dtype, DEVICE, edges=False), share, tangents=True)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", random_calls.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_cases(kind, dtype):
    """Extreme options, NaN and Inf, invalid lengths, overlapping memory."""
    fuzz(cases(kind, dtype, DEVICE, edges=True), share=0.02, arena=True)
