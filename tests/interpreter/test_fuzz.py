"""`python -m fa_ops fuzz` of the Triton kernels in the interpreter: the smallest of many cases."""

from __future__ import annotations

import random

import pytest
import torch

from fa_ops.backends.triton import launch
from fa_ops.cli.fuzz_cases import Run, Target, family_of, outcomes
from fa_ops.testing import CacheCase, PackedCase

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

TRITON = Target("triton", "cpu", (torch.float32, torch.float16))


def work(number: int) -> int:
    """About how many scores the first case of a family has."""
    pick = random.Random(f"{number}.0.0").choice
    case = family_of(TRITON, number).case(pick)
    if isinstance(case, PackedCase):
        pairs = zip(case.lengths_q, case.lengths_k)
        return case.features.Hq * sum((q + 16) * (k + 16) for q, k in pairs)
    keys = case.S if isinstance(case, CacheCase) else case.Sk
    return case.B * case.Hq * (case.Sq + 16) * (keys + 16)


@pytest.mark.parametrize("kind", range(4))
def test_smallest(kind):
    for number in sorted(range(kind, 100, 5), key=work)[:3]:
        (outcome,) = outcomes(Run(TRITON, number, 0, 1))
        assert outcome.error is None
        assert outcome.gradients == (outcome.kind != "cached")
