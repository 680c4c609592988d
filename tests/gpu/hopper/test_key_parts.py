"""Few tiles of queries over many keys on a Hopper GPU: each tile attends a part of the keys."""

import random

import pytest
import torch

import fa_ops
from fa_ops.backends.hopper import forward
from fa_ops.testing import Case, assert_close_to_oracle, assert_right
from fa_ops.testing.caches import CacheCase, assert_cache_close
from tests.gpu.cases import few_processors

DIMS = (64, 128, 80, 96, 192, 256, 40)


@pytest.fixture
def parts(monkeypatch):
    """Cuts the keys of every call that allows it into 2 to 7 parts; the numbers are returned."""
    found, choose = [], forward.tiling_of

    def cut(config, shape, processors, can_pack, can_split):
        chosen = choose(config, shape, processors, can_pack, can_split)
        splits = 2 + (shape.Sq + shape.Hq + shape.Dv // 8) % 6
        found.append(splits if can_split else 1)
        return chosen._replace(splits=found[-1])

    monkeypatch.setattr(forward, "tiling_of", cut)
    return found


def fields(seed):
    """Of a call, as far as caches and other keys have the same."""
    r = random.Random(seed)
    D = DIMS[seed % 7]
    return dict(
        D=D, Dv=min(D, r.choice((D, 64)) if D > 64 else D), seed=seed, device="cuda",
        dtype=(torch.bfloat16, torch.float16)[seed % 2], is_causal=r.random() < 0.6,
        window=(r.choice((-1, -1, 100)), -1), softcap=r.choice((0.0, 20.0)),
        sinks=r.random() < 0.3, alibi="heads" if r.random() < 0.2 else None,
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("seed", range(14))
def test_caches(seed, page_size, parts):
    r = random.Random(seed)
    case = CacheCase(
        B=2, Hq=r.choice((2, 6, 8, 12)), Hkv=2, Sq=r.choice((17, 24, 33, 64, 100)), S=1500,
        page_size=page_size, magnitude=r.choice((1.0, 8.0)), **fields(seed),
    )  # fmt: skip
    if case.Hq // 2 * case.Sq <= 16:
        pytest.skip("is decoding")
    with few_processors((132, 16)[seed % 2]):
        assert_cache_close(case, "hopper")
    assert max(parts) > 1


@pytest.mark.parametrize("seed", range(21))
def test_dense_calls(seed, parts):
    r = random.Random(seed)
    case = Case(
        B=2, Hq=4, Hkv=r.choice((1, 2, 4)), Sq=r.choice((20, 33, 64, 130)), Sk=1300,
        kv_lens=r.random() < 0.3, layout=r.choice(("bhsd", "bshd")),
        poison=r.choice((None, "nan key", "inf value", "nan value")), **fields(seed),
    )  # fmt: skip
    with few_processors((132, 16)[seed % 2]):
        if case.poison:
            assert_right(case, "hopper", None)
        else:
            assert_close_to_oracle(case, "hopper", gradients=False)
    assert max(parts) > 1


def test_one_graph_serves_every_length():
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 32, 24, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = (
        torch.randn(2, 8, 8192, 128, device="cuda", dtype=torch.bfloat16, generator=g) for _ in "kv"
    )
    lens = torch.tensor([8192, 5], dtype=torch.int32, device="cuda")

    def attend(backend="hopper"):
        return fa_ops.attention_with_kv_cache(q, k, v, lens, is_causal=True, backend=backend)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for first, second in ((8192, 5), (700, 8000), (24, 0)):
        lens.copy_(torch.tensor([first, second]))
        graph.replay()
        torch.testing.assert_close(captured, attend("reference"), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page_size", [0, 16])
def test_new_keys_are_appended_before(page_size):
    """A chunk of a prompt is written to the cache, rotated, and attended."""
    assert_cache_close(
        CacheCase(
            B=2, Hq=32, Hkv=8, Sq=24, S=2048, D=128, Dv=128, dtype=torch.bfloat16, new=24,
            device="cuda", is_causal=True, lens=(2000, 5), page_size=page_size, rotary=64,
        ),
        "auto",
    )  # fmt: skip
