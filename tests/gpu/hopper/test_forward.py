"""Forward passes on a Hopper GPU: rare large scores, parts of keys, heads in tiles, wide heads."""

import random

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.backends.hopper import forward
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Arena, Case, assert_close_to_oracle, assert_right
from fa_ops.testing.caches import CacheCase, assert_cache_close
from tests.gpu import hopper_calls
from tests.gpu.cases import few_processors
from tests.kernels import relative_error

# Few tiles of queries over many keys on a Hopper GPU: each tile attends a part of the keys.

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


def fields_of_parts(seed):
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
        page_size=page_size, magnitude=r.choice((1.0, 8.0)), **fields_of_parts(seed),
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
        poison=r.choice((None, "nan key", "inf value", "nan value")), **fields_of_parts(seed),
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


# Forward tiles with the queries of several heads of a group, on a Hopper GPU.

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


def fields_of_heads(seed):
    """Of a call, as far as caches and other keys have the same."""
    r = random.Random(seed)
    D = r.choice((64, 128, 80, 96, 192, 256, 40))
    return dict(
        D=D, Dv=min(D, r.choice((D, 64)) if D > 64 else D), seed=seed, device="cuda",
        dtype=(torch.bfloat16, torch.float16)[seed % 2], is_causal=r.random() < 0.6,
        window=(r.choice((-1, 40)), -1), softcap=r.choice((0.0, 20.0)), sinks=r.random() < 0.3,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(80))
def test_random_heads_in_tiles(seed, packed):
    r, Hkv = random.Random(seed), 1 + seed % 3
    case = Case(
        B=2, Hq=Hkv * GROUPS[seed % 10], Hkv=Hkv, Sq=r.choice((1, 9, 17, 32, 33, 64, 77, 100)),
        Sk=r.choice((1, 64, 130, 500, 900)), kv_lens=r.random() < 0.3,
        layout=r.choice(("bhsd", "bshd", "packed")), magnitude=r.choice((1.0, 8.0, 30.0)),
        poison=r.choice((None, None, "nan key", "inf value")), **fields_of_heads(seed),
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
        **fields_of_heads(seed),
    )  # fmt: skip
    with few_processors(2):
        assert_cache_close(case, "hopper")
    assert max(packed) > 1 or GROUPS[seed] in (2, 3, 6)


# Scores far above those of earlier blocks, for the speculative maximum of the Hopper forward.

S = 1000


def _grow(k):
    """Scores that grow from block to block; blocks are processed from the last key to the first."""
    return k * torch.linspace(12, 0.1, S, device=k.device).to(k.dtype)[:, None]


def _rare(k, every, factor):
    k = k.clone()
    k[:, :, ::every] *= factor
    return k


# factors of scores with standard deviation 1; exp overflows in float32 beyond 88
KEYS = {
    "unchanged": lambda k: k,
    "wide": lambda k: k * 8,
    "growing": _grow,
    "some tens apart": lambda k: _rare(k, 97, 30),
    "hundreds apart": lambda k: _rare(k, 197, 200),
    "all but one far below": lambda k: torch.cat(
        [k[:, :, :37], k[:, :, 37:38] * 500, k[:, :, 38:]], 2
    ),
}
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_left": 130},
    "softcap": {"softcap": 300.0},
}


def _problem(D, dtype, keys):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, S, D, device="cuda", dtype=dtype, generator=generator) for _ in range(3)
    )
    return q, KEYS[keys](k).contiguous(), v


def _assert_close(actual, expected, dtype):
    (out, lse), (exact, exact_lse) = actual, expected
    assert relative_error(out, exact) < (4e-3 if dtype == torch.bfloat16 else 6e-4)
    # float32 rounds large scores
    assert (lse.double() - exact_lse).abs().max() < 1e-5 * exact_lse.abs().max().clamp(min=10)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_dense(D, keys, options, dtype):
    q, k, v = _problem(D, dtype, keys)
    options = OPTIONS[options]
    exact = reference.forward(attention_call(q.double(), k.double(), v.double(), **options))
    _assert_close(hopper_calls.forward(attention_call(q, k, v, **options)), exact, dtype)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("D", [64, 128])
def test_packed(D, keys):
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in _problem(D, torch.bfloat16, keys))
    ends = torch.tensor([0, 1, 130, 600, S], dtype=torch.int32, device="cuda")
    options = {"is_causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    exact = reference.varlen_forward(attention_call(q.double(), k.double(), v.double(), **options))
    found = hopper_calls.varlen_forward(attention_call(q, k, v, **options))
    _assert_close(found, exact, torch.bfloat16)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nan_and_inf_affect_only_rows_that_attend_them(value):
    """NaN in a query affects its row; NaN in a key affects the queries that attend it."""
    q, k, v = _problem(128, torch.bfloat16, "unchanged")
    clean, _ = hopper_calls.forward(attention_call(q, k, v, is_causal=True))
    q[0, 0, 700, 5] = value
    k[0, 0, 900, 7] = value
    out, _ = hopper_calls.forward(attention_call(q, k, v, is_causal=True))
    exact, _ = reference.forward(attention_call(q.double(), k.double(), v.double(), is_causal=True))
    assert torch.equal(out.isnan(), exact.isnan()) and 102 > exact.isnan().any(-1).sum() > 1
    torch.testing.assert_close(out, exact.to(out.dtype), atol=2e-2, rtol=2e-2, equal_nan=True)
    assert torch.equal(out[:, 1:], clean[:, 1:])


# The Hopper kernels of heads over 256 wide on a GPU, against the oracle.

WIDE = {"D": 512, "Dv": 512, "Hq": 4, "Hkv": 2, "dtype": torch.bfloat16, "device": "cuda"}
CASES = {
    "one block": {"Sq": 64, "Sk": 64},
    "two blocks": {"Sq": 128, "Sk": 128},
    "three blocks": {"Sq": 128, "Sk": 192},
    "ragged": {"Sq": 250, "Sk": 1000},
    "causal": {"Sq": 333, "Sk": 777, "is_causal": True},
    "causal without keys": {"Sq": 333, "Sk": 100, "is_causal": True},
    "window": {"Sq": 600, "Sk": 777, "window": (100, 20)},
    "lengths and sinks": {"Sq": 130, "Sk": 300, "kv_lens": True, "sinks": True, "is_causal": True},
    "ranges": {"Sq": 130, "Sk": 300, "key_ranges": (1, 1, 1)},
    "float16": {"Sq": 200, "Sk": 300, "dtype": torch.float16, "is_causal": True},
    "320 features": {"Sq": 200, "Sk": 300, "D": 320, "Dv": 320},
    "wide keys": {"Sq": 200, "Sk": 300, "D": 512, "Dv": 136, "is_causal": True},
    "wide values": {"Sq": 200, "Sk": 300, "D": 72, "Dv": 400, "is_causal": True},
    "large scores": {"Sq": 200, "Sk": 300, "magnitude": 1000.0, "is_causal": True},
}


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    assert_close_to_oracle(Case(**WIDE | CASES[name]), "hopper", gradients=False)


@pytest.mark.parametrize("name", CASES)
def test_backward(name):
    assert_close_to_oracle(Case(**WIDE | CASES[name]), "hopper")


@pytest.mark.parametrize("Hq, Hkv", [(8, 1), (6, 2), (16, 2)])
def test_groups_in_parts(Hq, Hkv):
    heads = {"Hq": Hq, "Hkv": Hkv, "is_causal": True}
    assert_close_to_oracle(Case(**WIDE | heads, Sq=300, Sk=300), "hopper")


def test_gradients_repeat_bitwise():
    q, k, v = (torch.randn(2, 4, 1024, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = hopper_calls.forward(attention_call(q, k, v, is_causal=True))
    first = hopper_calls.backward(
        attention_call(q, k, v, is_causal=True, saved=Saved(q, None, out, lse))
    )
    for _ in range(20):
        again = hopper_calls.backward(
            attention_call(q, k, v, is_causal=True, saved=Saved(q, None, out, lse))
        )
        assert all(map(torch.equal, again[:3], first[:3]))


def test_a_nan_reaches_only_gradients_of_what_attends_it():
    case = Case(**WIDE, Sq=300, Sk=300, is_causal=True)
    q, k, v = case.fresh()[:3]
    grad_out = torch.randn_like(q)
    k[:, :, 250], v[:, :, 260] = float("nan"), float("inf")
    out, lse = hopper_calls.forward(attention_call(q, k, v, is_causal=True))
    dq, dk, dv = hopper_calls.backward(
        attention_call(q, k, v, is_causal=True, saved=Saved(grad_out, None, out, lse))
    )[:3]
    grad_out, q, k, v, out = (x[:, :, :250].cpu() for x in (grad_out, q, k, v, out))
    saved = Saved(grad_out, None, out, lse[:, :, :250].cpu().contiguous())
    expected = reference.backward(attention_call(q, k, v, is_causal=True, saved=saved))
    assert (dq[:, :, :250].cpu().float() - expected[0].float()).abs().max() < 5e-2
    assert not dk[:, :, :250].isfinite().all()  # queries from 250 on attend these keys


def test_an_infinity_changes_only_rows_that_attend_it():
    q, k, v = Case(**WIDE, Sq=300, Sk=300).fresh()[:3]
    v[:, :, 250] = float("inf")
    out, _ = hopper_calls.forward(attention_call(q, k, v, is_causal=True))
    expected, _ = reference.forward(attention_call(q.cpu(), k.cpu(), v.cpu(), is_causal=True))
    assert (out.cpu().float() - expected.float())[:, :, :250].abs().max() < 2e-2


def test_training_by_default():
    q, k, v = Case(**WIDE, Sq=301, Sk=301).fresh()[:3]
    assert fa_ops.explain(q, k, v, is_causal=True).backend == "hopper"
    assert_close_to_oracle(Case(**WIDE, Sq=301, Sk=301, is_causal=True), "auto")


def test_repeated_calls_are_bitwise_equal():
    q, k, v = (torch.randn(2, 8, 2048, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first = fa_ops.attention(q, k, v, backend="hopper")
    for _ in range(20):
        assert torch.equal(fa_ops.attention(q, k, v, backend="hopper"), first)
