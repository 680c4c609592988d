"""Head dimensions that are no multiple of 64, where products stop at the features that exist."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.testing import Arena, Case, PackedCase, assert_right, random_case
from tests.gpu.cases import check, few_processors, lengthened

DIMS = (
    (40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (160, 160),  # of real models
    (8, 8), (24, 40), (48, 16), (88, 88), (104, 120), (80, 96), (96, 72), (112, 64), (144, 136),
    (160, 96), (176, 128), (200, 200), (224, 208), (240, 72),
)  # fmt: skip
MODEL_DIMS = DIMS[:6]


def case_of(seed, dims, **fixed):
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    return random_case(
        seed, **{"D": dims[0], "Dv": dims[1], "dtype": dtype, "device": "cuda"} | fixed
    )


@pytest.mark.parametrize("seed", range(20 * len(DIMS)))
def test_random(seed):
    check(lengthened(case_of(seed // len(DIMS), DIMS[seed % len(DIMS)])))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_nothing_outside_the_tensors_is_written(dims):
    for seed in range(3):
        assert_right(case_of(seed + 500, dims), "hopper", Arena())


LENGTHS = pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 700), (129, 129), (300, 1000), (1300, 700), (64, 128)], ids=str
)


@LENGTHS
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"window": (100, 30)}], ids=str)
@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
def test_lengths(dims, changes, deterministic, lengths):
    check(
        Case(
            B=2, Hq=4, Hkv=2, Sq=lengths[0], Sk=lengths[1], D=dims[0], Dv=dims[1],
            dtype=torch.bfloat16, device="cuda", deterministic=deterministic, **changes,
        )
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"kv_lens": True}, {"key_ranges": (1, 0, 1)}], ids=str)
@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
def test_few_processors(dims, changes):
    """A CTA walks over several blocks of keys, and groups of query heads are divided or not."""
    base = Case(
        B=3, Hq=8, Hkv=1, Sq=333, Sk=430, D=dims[0], Dv=dims[1], dtype=torch.float16, device="cuda",
        is_causal=True, **changes,
    )  # fmt: skip
    for count in (1, 3, 132):
        with few_processors(count):
            check(base)
            check(dataclasses.replace(base, Hkv=8))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
def test_packed(dims, is_causal):
    features = Case(
        Hq=6, Hkv=2, D=dims[0], Dv=dims[1], dtype=torch.bfloat16, device="cuda",
        is_causal=is_causal,
    )  # fmt: skip
    check(PackedCase((700, 3, 129), (700, 3, 129), 0, features))


@pytest.mark.parametrize("D", [40, 80, 96, 112, 160])
def test_features_that_do_not_exist_are_not_read(D):
    """The next head's features follow those of a row, and are NaN."""
    whole = torch.randn(3, 2, 300, 3, D, device="cuda", dtype=torch.bfloat16)
    whole[:, :, :, 1] = float("nan")
    q, k, v = (x[:, :, ::2].transpose(1, 2).requires_grad_() for x in whole)
    out = fa_ops.attention(q, k, v, is_causal=True, backend="hopper")
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("D", [40, 80, 112])
def test_every_number_of_query_blocks(D):
    """The consumers may compute dQ of every second block, and the last one alone."""
    for Sq in range(64, 64 * 8, 64):
        check(
            Case(
                B=1, Hq=3, Hkv=1, Sq=Sq, Sk=260, D=D, Dv=D, dtype=torch.bfloat16, device="cuda",
                is_causal=True,
            )
        )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(8, 8, 256, 160, 160), (1, 2, 64, 256, 256), (1, 1, 1000, 192, 128)], ids=str
)
def test_the_second_pass_reads_row_sums_of_the_same_call(shape, is_causal):
    """It starts while the first pass runs. Twice the gradient of the output has twice the row sums,
    and exactly twice the gradients."""
    B, H, S, D, Dv = shape
    q, k, v = (
        torch.randn(B, H, S, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for d in (D, D, Dv)
    )
    out = fa_ops.attention(q, k, v, is_causal=is_causal)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for i in range(20):
        factor = 2.0 ** (i % 3)
        freed = torch.full((1 << 22,), float("nan"), device="cuda")
        del freed  # what the next call's workspace holds at first
        found = torch.autograd.grad(out, (q, k, v), grad * factor, retain_graph=True)
        for x, y in zip(found, expected):
            assert torch.equal(x, y * factor)
