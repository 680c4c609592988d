"""`python -m fa_ops fuzz` of the Triton kernels in the interpreter: the smallest of many cases."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch

from fa_ops.backends.triton import launch
from fa_ops.cli.fuzz_cases import KINDS, FuzzRun, Target, family_of, outcomes, strict
from fa_ops.testing import CacheCase, PackedCase
from fa_ops.testing.quantized import QuantizedCase

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

TRITON = Target("triton", "cpu", (torch.float32, torch.float16))
EDGES = TRITON._replace(arena=True)


def work(target: Target, number: int) -> float:
    """About how many scores the first case of a family has."""
    pick = random.Random(f"{number}.0.0").choice
    family = family_of(target, number)
    if family.fields.get("fp8") and family.fields.get("new"):
        return math.inf  # the interpreter rounds 1.99 to an fp8 number of 1
    case = family.case(pick)
    if isinstance(case, PackedCase):
        pairs = zip(case.lengths_q, case.lengths_k)
        return case.features.Hq * sum((q + 16) * (k + 16) for q, k in pairs)
    if isinstance(case, QuantizedCase):
        case = case.case
    keys = case.S if isinstance(case, CacheCase) else case.Sk
    return case.B * case.Hq * (case.Sq + 16) * (keys + 16)


@pytest.mark.parametrize("target", [TRITON, EDGES], ids=["anywhere", "edges"])
@pytest.mark.parametrize("kind", sorted(set(KINDS)))
def test_smallest(kind, target):
    """At the edges in an arena: whatever is written outside of a result is found."""
    with strict(target):
        numbers = (n for n in range(100) if KINDS[n % len(KINDS)] == kind)
        numbers = sorted(numbers, key=functools.partial(work, target))
        for number in numbers[: 4 if target.arena else 2]:
            (outcome,) = outcomes(FuzzRun(target, number, 0, 1))
            assert outcome.error is None
            assert outcome.kind != "cached" or not outcome.gradients
