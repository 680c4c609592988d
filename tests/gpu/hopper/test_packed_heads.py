"""Forward tiles with the queries of several heads of a group, on a Hopper GPU."""

import random

import pytest
import torch

from fa_ops.backends.hopper import forward
from fa_ops.testing import Arena, Case, assert_close_to_oracle, assert_right
from fa_ops.testing.caches import CacheCase, assert_cache_close
from tests.gpu.cases import few_processors

GROUPS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24)


@pytest.fixture
def packed(monkeypatch):
    """The numbers of heads that tiles of the calls have had."""
    found, choose = [], forward.tiling_of

    def noted(*args, **options):
        tiling = choose(*args, **options)
        found.append(tiling.config.packed_heads)
        return tiling

    monkeypatch.setattr(forward, "tiling_of", noted)
    return found


def fields(seed):
    """Of a call, as far as caches and other keys have the same."""
    r = random.Random(seed)
    D = r.choice((64, 128, 80, 96, 192, 256, 40))
    return dict(
        D=D, Dv=min(D, r.choice((D, 64)) if D > 64 else D), seed=seed, device="cuda",
        dtype=(torch.bfloat16, torch.float16)[seed % 2], is_causal=r.random() < 0.6,
        window=(r.choice((-1, 40)), -1), softcap=r.choice((0.0, 20.0)), sinks=r.random() < 0.3,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(80))
def test_random(seed, packed):
    r, Hkv = random.Random(seed), 1 + seed % 3
    case = Case(
        B=2, Hq=Hkv * GROUPS[seed % 10], Hkv=Hkv, Sq=r.choice((1, 9, 17, 32, 33, 64, 77, 100)),
        Sk=r.choice((1, 64, 130, 500, 900)), kv_lens=r.random() < 0.3,
        layout=r.choice(("bhsd", "bshd", "packed")), magnitude=r.choice((1.0, 8.0, 30.0)),
        poison=r.choice((None, None, "nan key", "inf value")), **fields(seed),
    )  # fmt: skip
    with few_processors(1):
        if case.poison or seed % 4 == 0:
            assert_right(case, "hopper", None if case.poison else Arena())
        else:
            assert_close_to_oracle(case, "hopper", gradients=False)
    assert max(packed) > 1 or case.Sq > 64


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("seed", range(10))
def test_prompts(seed, page_size, packed):
    case = CacheCase(
        B=3, Hq=8 * GROUPS[seed], Hkv=8, Sq=(64, 77, 65)[seed % 3], S=300, page_size=page_size,
        **fields(seed),
    )  # fmt: skip
    with few_processors(2):
        assert_cache_close(case, "hopper")
    assert max(packed) > 1 or GROUPS[seed] in (2, 3, 6)
