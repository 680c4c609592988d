"""Float masks on a Hopper GPU: every broadcast shape, dtype and layout, with gradients."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.call.options import Spec
from tests.gpu import hopper_calls
from tests.gpu.cases import MaskedCase, check, masked_case, random_masked_case


@pytest.mark.parametrize("seed", range(256))
def test_gradients(seed):
    fields = {"mask_holes": seed % 5 < 2, "mask_grad": seed % 3 < 2, "is_wide": seed // 2 % 3 == 0}
    check(masked_case(seed, mask="float", **fields))


@pytest.mark.parametrize("seed", range(48))
def test_random(seed):
    check(random_masked_case(seed, "float", {}, is_wide=seed % 4 == 0))


@pytest.mark.parametrize("shape", [(0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (1, 1, 1, 0)], ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_long(dims, is_wide, shape):
    D, Dv = dims
    base = MaskedCase(
        B=2, Hq=4, Hkv=2, Sq=1500, Sk=2100, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda",
        mask="float", mask_shape=shape, mask_grad=True, is_wide=is_wide, deterministic=is_wide,
    )  # fmt: skip
    for is_causal in (False, True):
        check(dataclasses.replace(base, is_causal=is_causal))


def test_more_tiles_than_processors():
    base = MaskedCase(
        B=20, Hq=4, Hkv=4, Sq=300, Sk=300, D=64, Dv=64, dtype=torch.bfloat16, device="cuda",
        mask="float", is_causal=True, mask_grad=True,
    )  # fmt: skip
    for shape in ((0, 0, 1, 1), (1, 1, 1, 1)):
        check(dataclasses.replace(base, mask_shape=shape))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_finite_fill_values_are_scores(D, dtype):
    """Rows with only filled keys average all values, and do not affect gradients of other rows."""
    q, k, v = (
        torch.randn(1, 2, 200, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    for fill in (-1e9, torch.finfo(dtype).min):
        mask = torch.zeros(200, 200, device="cuda", dtype=dtype)
        mask[3], mask[:, 50:] = fill, fill
        out, lse = fa_ops.attention(q, k, v, mask, return_lse=True, backend="hopper")
        mean = v.double().mean(2)
        torch.testing.assert_close(out[:, :, 3].double(), mean, atol=4e-3, rtol=2e-2)
        torch.testing.assert_close(lse[:, :, 3], mask[3, 0].float().expand_as(lse[:, :, 3]))
        seed = torch.randn_like(out)
        seed[:, :, 3] = 0
        grads = torch.autograd.grad(out, (q, k, v), seed)
        expected = fa_ops.attention(q, k, v, mask == 0, backend="hopper")
        for actual, wanted in zip(grads, torch.autograd.grad(expected, (q, k, v), seed)):
            torch.testing.assert_close(actual, wanted, atol=2e-2, rtol=2e-2)


def test_fully_masked_rows_give_zero():
    q = torch.randn(2, 4, 100, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.randn(100, 100, device="cuda")
    mask[7] = mask[64:] = float("-inf")
    mask.requires_grad_()
    out, lse = fa_ops.attention(q, q, q, mask, return_lse=True, backend="hopper")
    empty = torch.isneginf(mask).all(1)
    assert (out[:, :, empty] == 0).all() and torch.isneginf(lse[:, :, empty]).all()
    assert not out.isnan().any() and not lse[:, :, ~empty].isinf().any()
    dq, dmask = torch.autograd.grad(out.float().sum(), (q, mask))
    assert not dq.isnan().any() and (dmask[empty] == 0).all() and not dmask.isnan().any()


def test_deterministic_gradients_of_masks_are_bitwise_equal():
    q, k, v = (
        torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn_like(q)
    for shape in ((1000, 1000), (2, 1, 1, 1000), (1, 8, 1000, 1)):
        mask = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options = {"is_causal": True, "deterministic": True, "backend": "hopper"}
        first, *others = (
            torch.autograd.grad(fa_ops.attention(q, k, v, mask, **options), (q, k, v, mask), grad)
            for _ in range(3)
        )
        for grads in others:
            assert all(map(torch.equal, grads, first))


def test_plans_are_reused_for_masks_at_other_addresses():
    """A plan depends on the mask's layout; its address is read on every call."""
    q = torch.randn(1, 2, 130, 64, device="cuda", dtype=torch.bfloat16)
    masks = [torch.randn(130, 136, device="cuda", dtype=torch.bfloat16)[:, :130] for _ in range(3)]
    for mask in masks:
        out, _ = hopper_calls.forward(q, q, q, Spec(attn_mask=mask))
        expected = fa_ops.attention(q.float(), q.float(), q.float(), mask.float())
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
