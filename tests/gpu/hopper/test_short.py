"""Short sequences of narrow heads on a Hopper GPU, whose tiles are small."""

import random

import pytest
import torch

from fa_ops.testing import Case, assert_right
from tests.gpu.cases import few_processors


@pytest.mark.parametrize("seed", range(24))
def test_tiles_of_short_sequences(seed):
    """Several CTAs of a multiprocessor, each with queries of a head."""
    S, r = (50, 64, 77, 100, 128, 257)[seed % 6], random.Random(seed)
    case = Case(
        B=9, Hq=16, Hkv=16, Sq=S, Sk=r.choice((S, S, 33, 300)), D=(64, 40)[seed % 4 == 3],
        Dv=(64, 40)[seed % 4 == 3], dtype=(torch.bfloat16, torch.float16)[seed % 2], device="cuda",
        is_causal=r.random() < 0.5, softcap=r.choice((0.0, 0.0, 20.0)), sinks=r.random() < 0.3,
        kv_lens=r.random() < 0.3, layout=r.choice(("bhsd", "bshd")), seed=seed,
        poison=r.choice((None, "nan key", "inf value")), magnitude=r.choice((1.0, 30.0)),
    )  # fmt: skip
    with few_processors((132, 20)[seed % 2]):
        assert_right(case, "hopper", None)
