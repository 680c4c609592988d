"""What the Hopper backend takes and refuses, and which kernels it chooses."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fa_ops.backends import hopper
from fa_ops.backends.hopper.backward import attended_keys, prefers_pairs
from fa_ops.backends.hopper.decode import group_width
from fa_ops.backends.hopper.kernel_plan import UNBOUNDED
from fa_ops.call.call import Saved, attention_call

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture
def fake_tensors():
    with FakeTensorMode():
        yield


def qkv(D=64, Dv=None, dtype=torch.bfloat16, device="cuda"):
    dims = (D, D, Dv or D)
    return [torch.empty(2, 4, 64, width, dtype=dtype, device=device) for width in dims]


def mask(dtype, *shape):
    return torch.empty(shape or (64, 64), dtype=dtype, device="cuda")


@pytest.mark.usefixtures("fake_tensors")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("D", [8, 64, 128, 192, 256])
def test_masks_and_dropout_together(D, dtype):
    for own in (None, mask(torch.bool), mask(dtype), mask(dtype, 2, 1, 1, 64)):
        for p in (0.0, 0.1):
            for deterministic in (False, True):
                call = attention_call(
                    *qkv(D, dtype=dtype), attn_mask=own, dropout_p=p, is_causal=True, softcap=2.0,
                    deterministic=deterministic,
                )  # fmt: skip
                assert hopper.support_error(call) is None
    call = attention_call(*qkv(D, dtype=dtype), attn_mask=mask(torch.float32))
    assert hopper.support_error(call) is None


@pytest.mark.usefixtures("fake_tensors")
def test_packed_dropout_and_alibi():
    q, k, v = (torch.empty(64, 4, 64, dtype=torch.float16, device="cuda") for _ in range(3))
    assert hopper.support_error(attention_call(q, k, v, dropout_p=0.1, is_causal=True)) is None
    slopes = torch.empty(4, device="cuda")
    for tensors in ((q, k, v), qkv()):
        assert hopper.support_error(attention_call(*tensors, alibi_slopes=slopes)) is None


@pytest.mark.usefixtures("fake_tensors")
@pytest.mark.parametrize("dims", [(512,), (320, 512), (264, 64), (72, 264)])
def test_heads_over_256_wide_have_a_forward_pass(dims):
    q, k, v = qkv(*dims)
    lens, sinks = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (2, 4))
    for options in ({}, {"is_causal": True}, {"window_left": 9, "kv_lens": lens, "sinks": sinks}):
        assert hopper.support_error(attention_call(q, k, v, **options), takes_wide=True) is None
        assert "at most 256" in hopper.support_error(attention_call(q, k, v, **options))
    for name, value in {"attn_mask": mask(torch.bool), "softcap": 2.0, "dropout_p": 0.1}.items():
        error = hopper.support_error(attention_call(q, k, v, **{name: value}), takes_wide=True)
        assert error == f"has no {name} for head dims over 256; the triton backend can run it"
    error = hopper.support_error(attention_call(*qkv(520)), takes_wide=True)
    assert error.endswith("got 520 and 520; the reference backend takes any")


@pytest.mark.usefixtures("fake_tensors")
def test_what_is_named_instead_can_run_it():
    refused = {
        "got 576 and 512; the reference backend takes any": (576, 512),
        "got 512 and 512; the triton backend can run it": (512,),
        "got 60 and 60; the triton backend can run it": (60,),
        "got 64 and 128; the triton backend can run it": (64, 128),
        "query is float32; the triton backend can run it": (64, 64, torch.float32),
        "query is on cpu; the cpu backend can run it": (64, 64, torch.bfloat16, "cpu"),
    }
    for end, case in refused.items():
        assert hopper.support_error(attention_call(*qkv(*case))).endswith(end)
    q, k, v = qkv(device="cpu")
    assert hopper.cache_error(attention_call(q, k, v)).endswith("the cpu backend can run it")
    error = hopper.support_error(attention_call(*qkv(), scale=-1.0))
    assert error == "needs a positive scale, got -1.0; the triton backend can run it"


def refusal(S, D=32, backend="auto", bias=(1, 4), backward=False, **options):
    """Why hopper refuses dense attention of S tokens with a bias, or None."""
    q = torch.empty(2, 4, S, D, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(2, 4, S, device="cuda")
    saved = Saved(q, None, q, lse, True) if backward else None
    bias = mask(torch.bfloat16, *bias, S, S)
    call = attention_call(q, q, q, attn_mask=bias, saved=saved, backend=backend, **options)
    return hopper.supports(call)


@pytest.mark.usefixtures("fake_tensors")
def test_short_rows_with_a_bias_are_left_to_triton():
    slower = "is slower for short rows with a bias; the triton backend can run it"
    assert refusal(49) == refusal(64, 64) == refusal(49, bias=(2, 4)) == slower
    assert refusal(49, backward=True) == refusal(64, 64, backward=True) == slower
    assert refusal(49, bias=(2, 4), backward=True) == slower


@pytest.mark.usefixtures("fake_tensors")
def test_other_rows_with_a_bias_are_not():
    """Also those whose gradient is another kernel's, and what names the backend."""
    assert refusal(72) is refusal(128, 64) is refusal(64, 72) is None
    assert refusal(64, is_causal=True) is None
    assert refusal(128, backward=True) is refusal(64, bias=(2, 1), backward=True) is None
    assert refusal(49, backend="hopper") is refusal(49, backend="hopper", backward=True) is None


# Which backward passes run by pairs of CTAs.

FULL, CAUSAL = (UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0)


# An H200's times decided: where the two differ by 2 % and more, the faster one.
@pytest.mark.parametrize(
    "heads, lengths, sides, paired",
    [
        ((32, 8, 8), (512, 512), FULL, False),
        ((8, 8, 8), (2048, 2048), FULL, False),
        ((4, 8, 8), (4096, 4096), FULL, True),
        ((1, 8, 8), (16384, 16384), FULL, True),
        ((1, 8, 8), (1024, 1024), FULL, True),
        ((1, 8, 8), (1024, 1024), CAUSAL, False),
        ((1, 8, 8), (2048, 2048), CAUSAL, True),
        ((2, 8, 8), (2048, 2048), CAUSAL, False),
        ((4, 8, 8), (4096, 4096), CAUSAL, False),
        ((2, 8, 8), (8192, 8192), CAUSAL, True),
        ((1, 8, 1), (4096, 4096), CAUSAL, True),
        ((4, 8, 1), (4096, 4096), CAUSAL, False),
        ((1, 8, 4), (8192, 8192), CAUSAL, True),
        ((1, 8, 4), (8192, 8192), (2047, 0), False),
        ((1, 1, 1), (8192, 8192), FULL, True),
        ((1, 1, 1), (8192, 8192), CAUSAL, False),
        ((1, 8, 8), (512, 8192), CAUSAL, True),
        ((4, 8, 8), (4096, 128), FULL, False),
    ],
)
def test_the_faster_one_is_taken(heads, lengths, sides, paired):
    (B, Hq, Hkv), (Sq, Sk) = heads, lengths
    assert prefers_pairs((B, Hq, Sq, 256), (B, Hkv, Sk, 256), sides, 132) == paired


def test_packed_sequences_and_key_ranges():
    taken = (1, 8, 16384, 256), (1, 8, 16384, 256), FULL, 132
    assert prefers_pairs(*taken) and not prefers_pairs(*taken, has_ranges=True)
    assert prefers_pairs(*taken, has_ranges=True, sequences=2)
    assert not prefers_pairs(*taken, has_ranges=True, sequences=4)


@pytest.mark.parametrize(
    "Sq, Sk, left, right", [(640, 1000, 100, 7), (1000, 640, *CAUSAL), (3, 1, *FULL)]
)
def test_attended_keys(Sq, Sk, left, right):
    diagonals = (i + Sk - Sq for i in range(Sq))
    count = sum(d - left <= j <= d + right for d in diagonals for j in range(Sk))
    assert attended_keys(Sq, Sk, left, right) == pytest.approx(count / Sq, rel=0.02)


# Which calls have CTAs that attend the same tokens, each for one kv head.


@pytest.mark.parametrize(
    "B, Hkv, D, is_between, ctas, width",
    [
        (64, 8, 64, True, 132, 8),
        (64, 16, 64, True, 132, 8),
        (64, 8, 64, False, 132, 1),  # heads before tokens
        (64, 8, 128, True, 132, 1),
        (64, 4, 64, True, 132, 1),
        (8, 8, 64, True, 132, 1),  # few rows, whose keys all CTAs share
        (64, 8, 64, True, 7, 1),
    ],
)
def test_heads_between_tokens(B, Hkv, D, is_between, ctas, width):
    S = 4096
    strides = (S * Hkv * D, D, Hkv * D, 1) if is_between else (S * Hkv * D, S * D, D, 1)
    assert group_width(B, (B, Hkv, S, D), strides, ctas) == width
