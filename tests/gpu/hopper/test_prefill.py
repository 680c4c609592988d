"""Many queries against a cache on a Hopper GPU: cases against the oracle, missing pages."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper, reference
from fa_ops.backends.hopper import forward
from fa_ops.call.options import Cache, Spec
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case
from tests.gpu import hopper_calls
from tests.gpu.cases import chosen, few_processors
from tests.kernels import relative_error

HALVES = (torch.bfloat16, torch.float16)
READS = {"rotary": 0, "fp8": False, "new": 0, "num_splits": 0, "batch_invariant": False,
         "unified_max": None, "ranges": False}  # fmt: skip


def check(case):
    inputs = case.fresh()
    assert hopper.cache_error(*inputs) is None and hopper._cache_module(*inputs[:4]) is forward
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("seed", range(120))
def test_random(seed):
    case = random_cache_case(
        seed, dtype=HALVES[seed % 2], device="cuda", scale=(None, 0.3)[seed // 2 % 2],
        page_size=(0, 16, 32, 64, 128, 192)[seed % 6], Sq=(64, 65, 130, 300, 77)[seed % 5],
        B=(2, 5)[seed % 2], Hkv=(24, 3)[seed // 2 % 2], Hq=(48, 24)[seed // 2 % 2] * 2, **READS,
    )  # fmt: skip
    D = (64, 128, 64, 96, 256, 40, 192)[seed % 7]
    case = dataclasses.replace(case, S=case.S * (1 + seed % 7), D=D, Dv=(D, min(D, 128))[seed % 2])
    with few_processors((2, 132)[seed % 2]):  # persistent CTAs process several tiles
        check(case)


@pytest.mark.parametrize("seed", range(48))
def test_random_e4m3(seed):
    """Converted before; only bfloat16 has the range of numbers times their scales."""
    page_size, D = (0, 16, 64, 128)[seed % 4], (64, 128, 96, 256, 192)[seed % 5]
    case = random_cache_case(
        seed, dtype=torch.bfloat16, device="cuda", scale=(None, 0.3)[seed // 2 % 2], Hkv=3, Hq=48,
        page_size=page_size, Sq=(64, 130, 77)[seed % 3], B=3, **READS | {"fp8": True},
    )  # fmt: skip
    page_scales, token_scales = page_size > 0 and seed % 3 == 1, seed % 3 == 2
    shape = {"S": case.S * (1 + seed % 7), "D": D, "Dv": (D, min(D, 128))[seed % 2]}
    check(dataclasses.replace(case, **shape, page_scales=page_scales, token_scales=token_scales))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
def test_head_dims(dtype, dims, page_size):
    D, Dv = dims
    shape = dict(B=3, Hq=32, Hkv=4, Sq=128, S=900, lens=(900, 130, 1))
    check(CacheCase(D=D, Dv=Dv, dtype=dtype, device="cuda", is_causal=True,
                    page_size=page_size, **shape))  # fmt: skip


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_in_missing_pages_are_masked_out(D, page_size, is_causal):
    q, k, v, cache, spec = CacheCase(
        B=2, Hq=64, Hkv=2, Sq=64, S=600, D=D, Dv=D, dtype=torch.bfloat16, device="cuda",
        lens=(600, 500), page_size=page_size, is_causal=is_causal,
    ).fresh()  # fmt: skip
    table = cache.page_table.clone()
    table[0, 1], table[0, 3], table[1, 2:5] = -1, 10**6, -(10**6)
    out, lse = hopper_calls.cache_forward(q, k, v, cache._replace(page_table=table), spec)
    keys = torch.arange(table.shape[1] * page_size, device="cuda")
    exists = (table >= 0) & (table < len(k))
    visible = exists[:, keys // page_size] & (keys < spec.kv_lens[:, None])
    pages = torch.where(exists, table, 0).long()
    k, v = (x[pages].flatten(1, 2).transpose(1, 2).nan_to_num().double() for x in (k, v))
    mask = visible[:, None, None]
    if is_causal:
        position = spec.kv_lens.view(-1, 1, 1, 1) + torch.arange(64, device="cuda").view(-1, 1) - 64
        mask = mask & (keys <= position)
    expected = reference.dense(q.double(), k, v, Spec(attn_mask=mask))
    assert relative_error(out, expected[0]) < 1e-2
    torch.testing.assert_close(lse.double(), expected[1].double(), atol=2e-3, rtol=1e-4)


def test_one_cuda_graph_serves_every_length():
    case = CacheCase(B=4, Hq=32, S=2000, Sq=100, D=128, Dv=128, dtype=torch.bfloat16,
                     device="cuda", lens=(2000, 0, 500, 3), page_size=16)  # fmt: skip
    q, k, v, cache, spec = case.fresh()
    pages = torch.arange(cache.page_table.numel(), device="cuda", dtype=torch.int32)
    cache = cache._replace(page_table=pages.view_as(cache.page_table))
    k, v = k.nan_to_num(0.3), v.nan_to_num(0.2)
    hopper_calls.cache_forward(q, k, v, cache, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper_calls.cache_forward(q, k, v, cache, spec)
    for step in range(4):
        q.normal_()
        spec.kv_lens.random_(0, 2000)
        expected = reference.cache_forward(q, k, v, cache, spec)[0]
        graph.replay()
        assert relative_error(captured[0], expected) < 1e-2, step


@pytest.mark.parametrize("changes", [{}, {"page_size": 64}, {"page_size": 16, "rotary": 32}])
def test_new_keys_are_written_before(changes, monkeypatch):
    attended, prepare = [], forward.prepare_cached

    def prepare_and_note(call):
        run = prepare(call)
        return lambda *args: attended.append(1) or run(*args)

    monkeypatch.setattr(forward, "prepare_cached", prepare_and_note)
    assert_cache_close(
        CacheCase(B=2, Hq=64, Hkv=8, Sq=256, S=1024, D=64, Dv=64, dtype=torch.bfloat16, new=256,
                  device="cuda", is_causal=True, lens=(768, 5), **changes), "auto",
    )  # fmt: skip
    assert attended


@pytest.mark.parametrize("page_size", [0, 64])
def test_public_functions_select_the_kernel(page_size):
    case = CacheCase(B=2, Hq=64, Hkv=8, Sq=256, S=1024, D=128, Dv=128, dtype=torch.bfloat16,
                     device="cuda", is_causal=True, page_size=page_size)  # fmt: skip
    q, k, v, cache, spec = case.fresh()
    assert chosen(q, k, v, spec, cache) is hopper
    one = slice(0, 1)
    one_cache = cache._replace(page_table=cache.page_table[one]) if page_size else Cache()
    one_kv = (k, v) if page_size else (k[one], v[one])
    one_spec = spec._replace(kv_lens=spec.kv_lens[one])
    assert chosen(q[one, :8, :17], *one_kv, one_spec, one_cache) is hopper
    expected = reference.cache_forward(q, k, v, cache, spec)
    for _ in range(3):
        out, lse = fa_ops.attention_with_kv_cache(
            q, k, v, spec.kv_lens, cache.page_table, True, return_lse=True
        )
        assert relative_error(out, expected[0]) < 1e-2
        torch.testing.assert_close(lse, expected[1].float(), atol=2e-3, rtol=1e-4)
    ranges = torch.zeros(2, 1, 1, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match="no key_ranges"):
        fa_ops.attention_with_kv_cache(
            q, k, v, spec.kv_lens, cache.page_table, key_ranges=ranges, backend="hopper"
        )
