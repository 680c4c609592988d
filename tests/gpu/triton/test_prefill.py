"""Many queries against a cache on the Triton backend: cases against the oracle, missing pages."""

import dataclasses

import pytest
import torch

from fa_ops.backends import triton
from fa_ops.call.call import CACHED, Call
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
READS = {"rotary": 0, "fp8": False, "num_splits": 0, "batch_invariant": False, "unified_max": None,
         "ranges": False}  # fmt: skip


def check(case):
    q, k, v, cache, spec = case.fresh()
    assert triton.plan(Call(CACHED, q, k, v, spec, cache=cache)).kernel.endswith("forward")
    assert_cache_close(case, "triton")


@pytest.mark.parametrize("seed", range(90))
def test_random(seed):
    D = (64, 128, 72, 96, 256, 40, 192)[seed % 7]
    case = random_cache_case(
        seed, dtype=DTYPES[seed // 6 % 3], device="cuda",
        page_size=(16, 64, 128, 8, 256, 0)[seed % 6], Sq=(64, 65, 130, 300, 77)[seed % 5],
        B=(2, 5)[seed % 2], Hkv=(24, 3)[seed // 2 % 2],
        Hq=(48, 24)[seed // 2 % 2] * 2, D=D, Dv=(D, min(D, 128))[seed % 2], **READS,
    )  # fmt: skip
    check(dataclasses.replace(case, S=case.S * (1 + seed % 7)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_head_dims(D, page_size, dtype):
    shape = dict(B=3, Hq=32, Hkv=4, Sq=128, S=900, lens=(900, 130, 1), page_size=page_size)
    check(CacheCase(D=D, Dv=D, dtype=dtype, device="cuda", is_causal=True, **shape))


@pytest.mark.parametrize("seed", range(36))
def test_random_e4m3(seed):
    """The cache is converted first. Its products with scales may overflow float16."""
    page_size, D = (0, 16, 64, 5)[seed % 4], (64, 128, 96, 256, 192)[seed % 5]
    case = random_cache_case(
        seed, dtype=torch.bfloat16, device="cuda", scale=(None, 0.3)[seed // 2 % 2], Hkv=3, Hq=48,
        page_size=page_size, Sq=(64, 130, 77)[seed % 3], B=3, D=D, Dv=(D, min(D, 128))[seed % 2],
        token_scales=seed % 3 == 2, page_scales=page_size > 0 and seed % 3 == 1,
        **READS | {"fp8": True},
    )  # fmt: skip
    check(dataclasses.replace(case, S=case.S * (1 + seed % 7)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("page_size", [16, 64])
def test_lengths_and_pages_outside_the_cache(page_size, seed, is_causal):
    check(CacheCase(
        B=2, Hq=64, Hkv=2, Sq=64, S=600, D=64, Dv=64, dtype=torch.bfloat16, device="cuda",
        page_size=page_size, is_causal=is_causal, broken=True, seed=seed, new=(0, 20)[seed % 2],
        fp8=seed % 4 > 1,
    ))  # fmt: skip
