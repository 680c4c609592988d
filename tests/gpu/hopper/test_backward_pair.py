"""The backward kernel for pairs of CTAs on a Hopper GPU, for queries of any number of keys."""

import dataclasses

import pytest
import torch

from fa_ops.backends import hopper
from fa_ops.testing import Arena, Case, PackedCase, assert_right, random_case
from tests.gpu.cases import check, few_processors, lengthened, pairs_of_ctas
from tests.gpu.hopper import test_backward_isolation as isolation

pytestmark = pytest.mark.skipif(
    hopper.available_error() is not None, reason=str(hopper.available_error())
)


@pytest.fixture(autouse=True)
def pairs():
    with pairs_of_ctas():
        yield


def case_of(seed, **fixed):
    D = (256, 248)[seed % 2]
    dtype = (torch.bfloat16, torch.float16)[seed // 4 % 2]
    plain = dict(mask=None, softcap=0.0, dropout_p=0.0, deterministic=False)
    return random_case(seed, **{"D": D, "Dv": D, "dtype": dtype, "device": "cuda"} | plain | fixed)


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    check(lengthened(case_of(seed)))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_outside_the_tensors_is_written(seed):
    assert_right(case_of(seed + 500), "hopper", Arena())


@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1, 700), (129, 129), (300, 1000), (1300, 700), (64, 128), (65, 64)],
    ids=str,
)
@pytest.mark.parametrize(
    "changes", [{}, {"is_causal": True}, {"window": (100, 30)}, {"kv_lens": True}], ids=str
)
def test_lengths(changes, lengths):
    check(
        Case(
            B=2, Hq=4, Hkv=2, Sq=lengths[0], Sk=lengths[1], D=256, Dv=256, dtype=torch.bfloat16,
            device="cuda", **changes,
        )
    )  # fmt: skip


def test_groups_in_parts():
    base = Case(
        B=3, Hq=8, Hkv=1, Sq=333, Sk=430, D=256, Dv=256, dtype=torch.float16, device="cuda",
        is_causal=True,
    )  # fmt: skip
    for count in (1, 16, 132):
        with few_processors(count):
            check(base)
            check(dataclasses.replace(base, Hkv=8))


@pytest.mark.parametrize("poison", ["nan key", "inf value", "nan value", "nan query"])
def test_nothing_but_what_attends_it_becomes_nan(poison):
    assert_right(case_of(4, Sq=200, Sk=300, is_causal=True, poison=poison), "hopper", None)


@pytest.mark.parametrize("operand", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("feature", ["causal", "window", "lengths", "ranges"])
def test_nan_and_inf(feature, operand):
    for processors in (None, 1):
        isolation.test_dense(256, 256, False, feature, operand, processors)


@pytest.mark.parametrize("alibi", [None, "batch_heads"])
def test_packed(alibi):
    features = Case(
        Hq=6, Hkv=2, D=256, Dv=256, dtype=torch.bfloat16, device="cuda", is_causal=True,
        alibi=alibi,
    )  # fmt: skip
    check(PackedCase((700, 3, 129), (700, 3, 129), 0, features))
