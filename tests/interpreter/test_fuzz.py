"""Random calls of the Triton kernels in the interpreter: the smallest of many cases."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fa_ops.backends.triton import launch
from fa_ops.cli.fuzz import KINDS, Target, family_of, has_gradients, refusal, strict
from fa_ops.testing import Arena, CacheCase, PackedCase, assert_right
from fa_ops.testing.quantized import QuantizedCase
from fa_ops.testing.random_calls import AnyCase

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

TRITON = Target("triton", "cpu", (torch.float32, torch.float16))
EDGES = TRITON._replace(arena=True)


def work(case: AnyCase) -> float:
    """About how many scores a case has."""
    if isinstance(case, PackedCase):
        pairs = zip(case.lengths_q, case.lengths_k)
        return case.features.Hq * sum((q + 16) * (k + 16) for q, k in pairs)
    if isinstance(case, QuantizedCase):
        case = case.case
    if isinstance(case, CacheCase) and case.fp8 and case.new:
        return math.inf  # the interpreter rounds 1.99 to an fp8 number of 1
    keys = case.S if isinstance(case, CacheCase) else case.Sk
    return case.B * case.Hq * (case.Sq + 16) * (keys + 16)


@pytest.mark.parametrize("target", [TRITON, EDGES], ids=["anywhere", "edges"])
@pytest.mark.parametrize("kind", sorted({*KINDS}))
def test_smallest(kind, target):
    """At the edges in an arena: whatever is written outside of a result is found."""
    numbers = [n for n in range(100) if KINDS[n % len(KINDS)] == kind]
    with strict(target):
        cases = [family_of(target, n).case(random.Random(f"{n}.0.0").choice) for n in numbers]
        cases = sorted((x for x in cases if refusal("triton", x) is None), key=work)
        for n, case in enumerate(cases[: 4 if target.arena else 2]):
            arena = Arena() if target.arena else None
            # public functions are called repeatedly for one case, which takes seven times as long
            assert_right(case, "triton", arena, n == 0, has_gradients("triton", case))
