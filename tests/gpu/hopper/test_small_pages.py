"""Decoding on a Hopper GPU from pages of few keys, and of odd numbers, against the oracle."""

import dataclasses

import pytest
import torch

from fa_ops.backends import hopper
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case
from tests.gpu import hopper_calls
from tests.kernels import relative_error

HALVES = (torch.bfloat16, torch.float16)


def check(case):
    assert hopper.cache_error(*case.fresh()) is None
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 8, 24, 48])
@pytest.mark.parametrize("D, Dv", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 24)])
def test_pages(page_size, D, Dv, broken):
    """Also with lengths around the capacity, and pages that do not exist."""
    for B, S in ((3, 700), (40, 260)):
        check(
            CacheCase(
                B=B, Hq=16, Hkv=2, S=S, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda",
                page_size=page_size, broken=broken, seed=page_size + D,
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    "D, Dv, page_size, scales",
    [
        *((64, 64, 1, "row"), (64, 64, 2, "page"), (64, 64, 12, "token"), (64, 64, 8, "page")),
        *((128, 128, 8, "token"), (192, 256, 1, "page"), (48, 80, 4, "row")),
    ],
)
def test_e4m3(D, Dv, page_size, scales):
    check(
        CacheCase(
            B=3, Hq=8, Hkv=2, Sq=2, S=900, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda",
            fp8=True, page_size=page_size, page_scales=scales == "page",
            token_scales=scales == "token", is_causal=True, lens=(900, 0, 411),
        )
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_random(seed):
    case = random_cache_case(
        seed, dtype=HALVES[seed % 2], device="cuda", rotary=0, fp8=seed % 4 == 3, new=0,
        num_splits=0, batch_invariant=False, scale=(None, 0.3)[seed // 2 % 2], unified_max=None,
        ranges=bool(seed // 4 % 2), page_size=(1, 8, 2, 4, 3, 24)[seed % 6],
        Sq=(1, 1, 2, 4)[seed % 4], page_scales=False, token_scales=False,
        D=(64, 128, 256)[seed % 3], Dv=(64, 128, 256)[seed % 3],
    )  # fmt: skip
    reason = hopper.cache_error(*case.fresh())
    if reason:
        pytest.skip(reason)
    assert_cache_close(dataclasses.replace(case, S=case.S * (1 + seed % 19)), "hopper")


@pytest.mark.parametrize("page_size", [1, 8])
def test_keys_and_values_that_are_interleaved(page_size):
    """As in FlashInfer's caches, (pages, 2, page_size, heads, D): pages are not adjacent."""
    q, k, v, cache, spec = CacheCase(
        B=4, Hq=32, Hkv=8, S=3000, D=128, Dv=128, dtype=torch.bfloat16, device="cuda",
        page_size=page_size,
    ).fresh()  # fmt: skip
    expected = hopper_calls.cache_forward(q, k, v, cache, spec)
    both = torch.stack((k, v), 1)
    found = hopper_calls.cache_forward(q, both[:, 0], both[:, 1], cache, spec)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("page_size", [1, 2, 8])
def test_results_are_those_of_large_pages(page_size):
    """The same keys in the same order, copied in another way, with many tiles for each CTA."""
    g = torch.Generator("cuda").manual_seed(page_size)
    B, S, Hkv, D = 8, 8192, 8, 128
    draw = lambda *s: torch.randn(s, generator=g, device="cuda").bfloat16()  # noqa: E731
    q, k, v = draw(B, 32, 1, D), draw(B * S // 64, 64, Hkv, D), draw(B * S // 64, 64, Hkv, D)
    table = torch.randperm(len(k), generator=g, device="cuda").view(B, -1)
    case = CacheCase(B=B, dtype=torch.bfloat16, device="cuda", page_size=64, lens=(S,) * B, S=S)
    *_, cache, spec = case.fresh()
    cache = cache._replace(page_table=table.int())
    expected = hopper_calls.cache_forward(q, k, v, cache, spec)
    parts = 64 // page_size
    small = (table[..., None] * parts + torch.arange(parts, device="cuda")).flatten(1).int()
    k, v = (x.view(-1, page_size, Hkv, D) for x in (k, v))
    found = hopper_calls.cache_forward(q, k, v, cache._replace(page_table=small), spec)
    assert relative_error(found[0], expected[0]) < 1e-3
    torch.testing.assert_close(found[1], expected[1])
