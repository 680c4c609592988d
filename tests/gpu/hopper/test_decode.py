"""The Hopper decoding kernel on a GPU: cases against the oracle, small pages, graphs, streams."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper, reference
from fa_ops.call.call import attention_call
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case
from tests.gpu import hopper_calls
from tests.gpu.cases import chosen
from tests.kernels import relative_error

HALVES = (torch.bfloat16, torch.float16)


def check(case):
    reason = hopper.cache_error(case.fresh())
    if reason:
        pytest.skip(reason)
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("seed", range(3000, 3160))
def test_random(seed):
    case = random_cache_case(
        seed, dtype=HALVES[seed % 2], device="cuda", rotary=0, fp8=False, new=0, num_splits=0,
        batch_invariant=False, scale=(None, 0.3)[seed // 2 % 2], ranges=bool(seed // 4 % 2),
        unified_max=None,
        page_size=(0, 1, 16, 8, 32, 64, 256)[seed % 7], Sq=(1, 1, 2, 4)[seed % 4],
    )  # fmt: skip
    check(dataclasses.replace(case, S=case.S * (1 + seed % 19)))


@pytest.mark.parametrize("seed", range(5000, 5160))
def test_random_e4m3(seed):
    case = random_cache_case(
        seed, dtype=HALVES[seed % 2], device="cuda", rotary=0, fp8=True, new=0, num_splits=0,
        batch_invariant=False, scale=(None, 0.3)[seed // 2 % 2], ranges=bool(seed // 4 % 2),
        unified_max=None, D=(64, 128, 96, 256)[seed // 3 % 4],
        Dv=(64, 128, 128, 256)[seed // 3 % 4],
        page_size=(0, 0, 16, 16, 32, 64, 256)[seed % 7], Sq=(1, 1, 2, 4)[seed % 4],
    )  # fmt: skip
    page_scales, token_scales = case.page_size > 0 and seed % 3 == 1, seed % 3 == 2
    shape = {"S": case.S * (1 + seed % 19)}
    check(dataclasses.replace(case, **shape, page_scales=page_scales, token_scales=token_scales))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "dims",
    [(16, 16), (48, 64), (64, 128), (128, 64), (112, 80), (192, 128), (160, 192), (256, 256)],
)
@pytest.mark.parametrize(
    "page_size, scales", [(0, "row"), (0, "token"), (16, "row"), (16, "page"), (32, "token")]
)
def test_head_dims_of_e4m3(dtype, dims, page_size, scales):
    case = CacheCase(
        D=dims[0], Dv=dims[1], S=1700, dtype=dtype, device="cuda", Sq=2, is_causal=True, fp8=True,
        page_size=page_size, page_scales=scales == "page", token_scales=scales == "token",
    )  # fmt: skip
    assert hopper.cache_error(case.fresh()) is None
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("B, S", [(1, 40000), (33, 700), (150, 331)])
def test_batches_of_e4m3(B, S, bshd, group):
    lens = tuple((b * 7919 + S) % (S + 1) for b in range(B))
    for D in (64, 128):
        check(
            CacheCase(B=B, Hq=8 * group, Hkv=8, S=S, D=D, Dv=D, dtype=torch.bfloat16, bshd=bshd,
                      device="cuda", fp8=True, lens=lens, sinks=bshd)
        )  # fmt: skip


@pytest.mark.parametrize("magnitude", [1e-30, 1e9, 1e30])
def test_queries_that_float16_does_not_hold(magnitude):
    case = CacheCase(
        Hq=8, S=600, D=128, Dv=128, dtype=torch.bfloat16, device="cuda", fp8=True,
        magnitude=magnitude, scale=min(0.09 / magnitude, 2.0**24),
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize(
    "page_size, token_scales", [(16, False), (64, False), (64, True), (0, True)]
)
def test_scales_that_differ_by_powers(page_size, token_scales):
    """Also 0 and negative ones; a page of large values has small weights, or the largest."""
    case = CacheCase(
        B=3, Hq=8, S=3000, D=64, Dv=64, dtype=torch.bfloat16, device="cuda", fp8=True,
        page_scales=True, page_size=page_size, lens=(3000, 70, 1500), token_scales=token_scales,
    )  # fmt: skip
    call = case.fresh()
    v_scale = call.operands.v_scale
    draw = torch.Generator("cuda").manual_seed(1)
    powers = torch.randint(-30, 31, v_scale.shape, generator=draw, device="cuda")
    scale = v_scale * 2.0**powers
    each = scale if page_size else scale.mT.transpose(0, 1)  # from one page, or token, to the next
    each[::3] *= -1
    each[1::7] = 0
    for v_scale in (scale, scale * 2.0**-60, torch.zeros_like(scale)):
        own = call.changed(v_scale=v_scale)
        out, lse = hopper_calls.cache_forward(own)
        expected, expected_lse = reference.cached(own)
        unit = expected.abs().amax((-1, -2), keepdim=True).clamp(min=1e-25)
        assert ((out.double() - expected).abs() / unit).max() < 2e-2
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("scales", ["key", "value"])
@pytest.mark.parametrize("page_size", [0, 64])
def test_one_scale_alone(scales, page_size):
    case = CacheCase(
        Hq=8, S=900, D=64, Dv=64, dtype=torch.float16, device="cuda", fp8=True,
        page_scales=page_size > 0, page_size=page_size,
    )  # fmt: skip
    call = case.fresh().changed(**{"v_scale" if scales == "key" else "k_scale": None})
    out, _ = hopper_calls.cache_forward(call)
    expected, _ = reference.cached(call)
    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("page_size", [0, 16])
def test_head_dims(dtype, D, page_size):
    check(
        CacheCase(
            D=D, Dv=D, S=1700, dtype=dtype, device="cuda", Sq=2, is_causal=True, page_size=page_size
        )  # fmt: skip
    )


@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (72, 64), (256, 8)])
def test_value_head_dims(dims):
    D, Dv = dims
    check(CacheCase(D=D, Dv=Dv, S=900, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("Sq", [1, 2, 4, 16])
@pytest.mark.parametrize("S", [600, 20000])
def test_groups(group, Sq, S):
    check(
        CacheCase(
            Hq=2 * group,
            Sq=Sq,
            S=S,
            D=64,
            Dv=64,
            dtype=torch.bfloat16,
            device="cuda",
            is_causal=True,
            lens=(S, 20),
        )  # fmt: skip
    )


@pytest.mark.parametrize("B", [1, 3, 33, 150])
@pytest.mark.parametrize("Hkv", [1, 8])
@pytest.mark.parametrize("window", [(-1, -1), (100, -1)])
def test_batches(B, Hkv, window):
    lens = tuple((b * 7919 + 100) % 331 for b in range(B))
    check(
        CacheCase(
            B=B,
            Hq=4 * Hkv,
            Hkv=Hkv,
            S=331,
            D=64,
            Dv=64,
            dtype=torch.bfloat16,
            device="cuda",
            lens=lens,
            window=window,
        )  # fmt: skip
    )


def test_one_cuda_graph_serves_every_length():
    case = CacheCase(B=4, Hq=8, S=9000, D=64, Dv=64, dtype=torch.bfloat16, device="cuda",
                     lens=(8999, 0, 500, 3), page_size=16)  # fmt: skip
    call = case.fresh()
    q, k, v = call[:3]
    pages = torch.arange(call.operands.page_table.numel(), device="cuda", dtype=torch.int32)
    call = call.changed(page_table=pages.view_as(call.operands.page_table))
    k, v = k.nan_to_num(0.3), v.nan_to_num(0.2)
    hopper_calls.cache_forward(call._replace(key=k, value=v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper_calls.cache_forward(call._replace(key=k, value=v))
        repeated = hopper_calls.cache_forward(call._replace(key=k, value=v))
    for step in range(8):
        q.normal_()
        call.operands.kv_lens.random_(0, 9000)
        expected = reference.cache_forward(call._replace(key=k, value=v))[0]
        graph.replay()
        assert relative_error(captured[0], expected) < 1e-2, step
        assert torch.equal(captured[0], repeated[0])


@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize("S", [129, 300, 1100, 5000, 40000])
def test_rows_divided_into_many_parts(group, D, S):
    """From two parts to one for each multiprocessor."""
    check(
        CacheCase(
            B=1, Hq=group, Hkv=1, S=S, D=D, Dv=D, dtype=torch.bfloat16, device="cuda", lens=(S,)
        )  # fmt: skip
    )


@pytest.mark.parametrize("B", [1, 33, 66, 132, 140])
@pytest.mark.parametrize("S", [512, 640, 1500])
def test_dense_calls(B, S):
    """The host knows the lengths, and thus whether results of parts must be merged."""
    q = torch.randn(B, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(B, 2, S, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = hopper_calls.forward(attention_call(q, k, v))
    expected = reference.dense(attention_call(q.double(), k.double(), v.double()))
    assert relative_error(out, expected[0]) < 1e-2
    torch.testing.assert_close(lse.double(), expected[1].double(), atol=2e-4, rtol=1e-5)


def test_lengths_written_by_the_preceding_kernel():
    """Programmatic dependent launch: a kernel must not read lengths before they are written."""
    call = CacheCase(
        B=2, Hq=8, S=9000, D=64, Dv=64, dtype=torch.bfloat16, device="cuda", lens=(9000, 9000)
    ).fresh()
    lengths = torch.randint(1, 9000, (100, 2), device="cuda", dtype=torch.int32)
    lengths[::3] //= 50
    expected = []
    for n in lengths:
        torch.cuda.synchronize()
        expected.append(hopper_calls.cache_forward(call.changed(kv_lens=n.clone())))
    torch.cuda.synchronize()
    results = []
    for n in lengths:
        call.operands.kv_lens.copy_(n)
        results.append(hopper_calls.cache_forward(call))
    for result, one in zip(results, expected):
        assert all(torch.equal(a, b) for a, b in zip(result, one))


def test_concurrent_streams_give_equal_results():
    call = CacheCase(
        B=5, Hq=8, S=9000, D=128, Dv=128, dtype=torch.bfloat16, device="cuda",
        lens=(9000, 1, 0, 5000, 4097),
    ).fresh()  # fmt: skip
    expected = hopper_calls.cache_forward(call)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for step in range(200):
        with torch.cuda.stream(streams[step % 2]):
            results.append(hopper_calls.cache_forward(call))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(expected, result))


@pytest.mark.parametrize("group", [1, 4, 8, 12])
def test_earlier_contents_of_shared_memory_have_no_effect(group):
    call = CacheCase(
        B=3, Hq=2 * group, Hkv=2, S=5000, D=128, Dv=128, dtype=torch.bfloat16, device="cuda"
    ).fresh()
    filler = torch.empty(8, 16, 1024, 256, device="cuda", dtype=torch.bfloat16)
    results = []
    for value in (0.0, 100.0, -1e4, float("nan")):
        filler.fill_(value)
        # fills shared memory with the value
        hopper_calls.forward(attention_call(filler, filler, filler))
        results.append(hopper_calls.cache_forward(call))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result))


def test_public_functions_select_the_kernel():
    q = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 4000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert fa_ops.explain(q, k, v).backend == "hopper"
    many = q.repeat(1, 1, 8, 1)
    assert fa_ops.explain(many, k, v).backend == "hopper"  # more rows than decoding has: prefill
    call = attention_call(q, k, v)
    assert chosen(call) is chosen(call._replace(query=many)) is hopper
    expected = reference.dense(attention_call(q.double(), k.double(), v.double()))[0]
    for _ in range(3):
        assert relative_error(fa_ops.attention(q, k, v, backend="hopper"), expected) < 1e-2
    lens = torch.full((2,), 4000, device="cuda", dtype=torch.int32)
    odd = torch.randn(2, 2, 4000, 129, device="cuda", dtype=torch.bfloat16)[..., :128]
    with pytest.raises(NotImplementedError, match="key_cache has strides"):
        fa_ops.attention_with_kv_cache(q, odd, v, lens, backend="hopper")
    out = fa_ops.attention_with_kv_cache(q, k, v, lens, backend="hopper")
    assert relative_error(out, expected) < 1e-2
    assert relative_error(fa_ops.attention_with_kv_cache(q, odd, v, lens), expected) > 0.5
    odd.copy_(k)
    assert relative_error(fa_ops.attention_with_kv_cache(q, odd, v, lens), expected) < 1e-2


# Decoding on a Hopper GPU from pages of few keys, and of odd numbers, against the oracle.


def check_small_pages(case):
    assert hopper.cache_error(case.fresh()) is None
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 8, 24, 48])
@pytest.mark.parametrize("D, Dv", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 24)])
def test_pages(page_size, D, Dv, broken):
    """Also with lengths around the capacity, and pages that do not exist."""
    for B, S in ((3, 700), (40, 260)):
        check_small_pages(
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
    check_small_pages(
        CacheCase(
            B=3, Hq=8, Hkv=2, Sq=2, S=900, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda",
            fp8=True, page_size=page_size, page_scales=scales == "page",
            token_scales=scales == "token", is_causal=True, lens=(900, 0, 411),
        )
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_random_small_pages(seed):
    case = random_cache_case(
        seed, dtype=HALVES[seed % 2], device="cuda", rotary=0, fp8=seed % 4 == 3, new=0,
        num_splits=0, batch_invariant=False, scale=(None, 0.3)[seed // 2 % 2], unified_max=None,
        ranges=bool(seed // 4 % 2), page_size=(1, 8, 2, 4, 3, 24)[seed % 6],
        Sq=(1, 1, 2, 4)[seed % 4], page_scales=False, token_scales=False,
        D=(64, 128, 256)[seed % 3], Dv=(64, 128, 256)[seed % 3],
    )  # fmt: skip
    reason = hopper.cache_error(case.fresh())
    if reason:
        pytest.skip(reason)
    assert_cache_close(dataclasses.replace(case, S=case.S * (1 + seed % 19)), "hopper")


@pytest.mark.parametrize("page_size", [1, 8])
def test_keys_and_values_that_are_interleaved(page_size):
    """As in FlashInfer's caches, (pages, 2, page_size, heads, D): pages are not adjacent."""
    call = CacheCase(
        B=4, Hq=32, Hkv=8, S=3000, D=128, Dv=128, dtype=torch.bfloat16, device="cuda",
        page_size=page_size,
    ).fresh()  # fmt: skip
    k, v = call[1:3]
    expected = hopper_calls.cache_forward(call)
    both = torch.stack((k, v), 1)
    found = hopper_calls.cache_forward(call._replace(key=both[:, 0], value=both[:, 1]))
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
    call = case.fresh().changed(query=q, key=k, value=v, page_table=table.int())
    expected = hopper_calls.cache_forward(call)
    parts = 64 // page_size
    small = (table[..., None] * parts + torch.arange(parts, device="cuda")).flatten(1).int()
    k, v = (x.view(-1, page_size, Hkv, D) for x in (k, v))
    found = hopper_calls.cache_forward(call.changed(key=k, value=v, page_table=small))
    assert relative_error(found[0], expected[0]) < 1e-3
    torch.testing.assert_close(found[1], expected[1])
