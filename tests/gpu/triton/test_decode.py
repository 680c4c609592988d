"""The Triton kernels over caches on a GPU: decoding, prompts, CUDA graphs, streams."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends import reference, triton
from fa_ops.backends.triton import decode
from fa_ops.call.call import attention_call
from fa_ops.plans import planning
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case
from tests.kernels import DTYPES, assert_batch_invariant, relative_error


@pytest.mark.parametrize("seed", range(2000, 2120))
def test_random(seed):
    dtype = DTYPES[seed % 3]
    case = random_cache_case(seed, dtype=dtype, device="cuda", rotary=0)
    fp8 = case.fp8 and dtype != torch.float32
    S = case.S * (1 + seed % 9)
    assert_cache_close(dataclasses.replace(case, S=S, fp8=fp8), "triton")


@pytest.mark.parametrize("seed", range(20))
def test_rotary(seed):
    case = random_cache_case(seed, dtype=DTYPES[seed % 3], device="cuda", rotary=16, fp8=False)
    assert_cache_close(case, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 80, 96, 128, 160, 192, 256])
def test_head_dims(dtype, D):
    case = CacheCase(D=D, Dv=D, S=700, dtype=dtype, device="cuda", Sq=2, is_causal=True)
    assert_cache_close(case, "triton")
    assert_cache_close(dataclasses.replace(case, page_size=16), "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Hq", [16, 64, 128])
@pytest.mark.parametrize("page_size", [0, 64])
def test_mla(Hq, page_size, dtype):
    case = CacheCase(
        Hq=Hq, Hkv=1, D=576, Dv=512, S=500, shared=True, page_size=page_size, dtype=dtype,
        device="cuda",
    )  # fmt: skip
    assert_cache_close(case, "triton")


@pytest.mark.parametrize("page_size", [0, 64])
def test_appends_to_a_latent_cache(page_size):
    """Keys and values are written to the same memory, which other pairs of caches are refused."""
    case = CacheCase(
        Hq=16, Hkv=1, D=576, Dv=512, S=500, new=3, Sq=3, shared=True, page_size=page_size,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    assert_cache_close(case, "triton")
    given = case.fresh()
    (q, k, v), t = given[:3], given.operands

    def call(v, value):
        lens, table = t.kv_lens, t.page_table
        return fa_ops.attention_with_kv_cache(q, k, v, lens, table, key=t.new_key, value=value)

    for _ in range(2):  # the second time with a plan
        kept = k.clone()
        with pytest.raises(ValueError, match="value must be the same features of key"):
            call(v, t.new_value.clone())
        with pytest.raises(ValueError, match="value_cache shares memory with key_cache"):
            call(k[..., 64:], t.new_value)
        assert torch.equal(k.nan_to_num(), kept.nan_to_num())
        call(v, t.new_value)


@pytest.mark.parametrize("group", [1, 4, 8, 16, 40])
@pytest.mark.parametrize("Sq", [1, 4, 16, 33])
def test_groups(group, Sq):
    case = CacheCase(
        Hq=2 * group, Sq=Sq, S=600, D=64, Dv=64, dtype=torch.bfloat16, device="cuda",
        is_causal=True, lens=(600, 20),
    )  # fmt: skip
    assert_cache_close(case, "triton")


@pytest.mark.parametrize("offset", [1, 4])
def test_unaligned_addresses(offset):
    call = CacheCase(D=64, Dv=64, dtype=torch.bfloat16, device="cuda").fresh()
    expected = decode.cache_forward(call)[0]
    q, k, v = (
        torch.cat([x.contiguous().flatten()[:offset], x.contiguous().flatten()])[offset:].view_as(x)
        for x in call[:3]
    )
    out = decode.cache_forward(call._replace(query=q, key=k, value=v))[0]
    assert relative_error(out, expected) < 1e-2


def test_page_offsets_beyond_32_bits():
    """The keys have more than 2**31 elements."""
    k = torch.empty(2**18 + 2**7, 64, 1, 128, device="cuda", dtype=torch.bfloat16).normal_()
    last = k.shape[0] - 1
    table = torch.tensor([[last, 0, last - 1]], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 4, 1, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([150], dtype=torch.int32, device="cuda")
    out = fa_ops.attention_with_kv_cache(q, k, k, lens, table, backend="triton")
    near = k[table[0].long()].flatten(0, 1)[None, :150].transpose(1, 2).double()
    assert relative_error(out, reference.dense(attention_call(q.double(), near, near))[0]) < 1e-2


def test_one_cuda_graph_serves_every_length():
    case = CacheCase(B=4, Hq=8, S=900, D=64, Dv=64, dtype=torch.bfloat16, device="cuda", new=1,
                     lens=(899, 0, 500, 3), page_size=16)  # fmt: skip
    call = case.fresh()
    q, k, v = call[:3]
    pages = torch.arange(call.operands.page_table.numel(), device="cuda", dtype=torch.int32)
    call = call.changed(page_table=pages.view_as(call.operands.page_table))
    k, v = k.nan_to_num(0.3), v.nan_to_num(0.2)
    decode.cache_forward(call._replace(key=k, value=v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode.cache_forward(call._replace(key=k, value=v))
    for step in range(5):
        q.normal_()
        call.operands.new_key.normal_()
        call.operands.kv_lens.random_(0, 899)
        expected = reference.cache_forward(call._replace(key=k.clone(), value=v.clone()))[0]
        graph.replay()
        assert relative_error(captured[0], expected) < 1e-2, step


def test_results_are_repeatable_and_batch_invariant():
    case = CacheCase(
        B=5, Hq=8, S=9000, D=128, Dv=128, dtype=torch.bfloat16, device="cuda",
        lens=(9000, 1, 0, 5000, 4097),
    )  # fmt: skip
    call = case.fresh()
    first, second = (decode.cache_forward(call) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    together = assert_batch_invariant(decode, case)
    assert relative_error(together[0], first[0]) < 1e-2


@pytest.mark.parametrize("B", [1, 3, 200, 1000])
@pytest.mark.parametrize("Hkv", [1, 8])
def test_batches(B, Hkv):
    lens = tuple((b * 7919 + 100) % 331 for b in range(B))
    call = CacheCase(
        B=B, Hq=4 * Hkv, Hkv=Hkv, S=331, D=64, Dv=64, dtype=torch.bfloat16, device="cuda",
        lens=lens,
    ).fresh()  # fmt: skip
    out, lse = decode.cache_forward(call)
    clean = (x.nan_to_num(0.0).double() for x in call[:3])
    dense = attention_call(*clean, kv_lens=call.operands.kv_lens)
    expected, expected_lse = reference.dense(dense)
    assert relative_error(out, expected) < 1e-2
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-3, rtol=1e-3)


def test_concurrent_streams():
    problems = [
        CacheCase(S=4000, D=64, Dv=64, dtype=torch.bfloat16, device="cuda", seed=n).fresh()
        for n in range(2)
    ]
    expected = [decode.cache_forward(call)[0] for call in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(decode.cache_forward(problems[n])[0])
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected[n]) for n in range(2) for x in results[n])


def test_debugging_reports_pages_that_do_not_exist(monkeypatch):
    call = CacheCase(page_size=16, device="cuda", lens=(20, 20)).fresh()
    q, k, v = call[:3]
    t = call.operands
    table = t.page_table.clone()
    table[1, 1] = 10**6
    fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, table)
    monkeypatch.setattr(planning, "DEBUG", True)
    planning.forget()
    with pytest.raises(ValueError, match=r"page_table\[1, 1\] is 1000000"):
        fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, table)


def test_attention_with_few_queries_selects_the_decoding_kernel():
    q = torch.randn(1, 8, 2, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, 5000, 128, device="cuda", dtype=torch.bfloat16)
    options = {"is_causal": True, "backend": "triton"}
    assert fa_ops.explain(q, k, k, **options).kernel == "split-KV decoding"
    call = attention_call(q.double(), k.double(), k.double(), is_causal=True)
    expected = reference.dense(call)[0]
    for _ in range(2):
        assert relative_error(fa_ops.attention(q, k, k, **options), expected) < 1e-2
    lens = torch.tensor([300], device="cuda", dtype=torch.int32)
    k[:, :, 300:] = float("nan")
    out = fa_ops.attention(q, k, k, kv_lens=lens, **options)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("page_size", [5, 16, 64])
def test_fp8_scales_for_each_page(page_size, dtype):
    case = CacheCase(
        Hq=8, S=2000, D=128, Dv=128, dtype=dtype, device="cuda", fp8=True, page_scales=True,
        page_size=page_size, new=3, Sq=3, is_causal=True, lens=(1997, 70),
    )  # fmt: skip
    assert_cache_close(case, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("estimate", [3.0, -100.0, 1e4, float("nan"), float("inf")])
@pytest.mark.parametrize("magnitude", [1.0, 3e3])  # with 3e3, scores are up to 1e4
def test_a_unified_maximum_does_not_change_results(magnitude, estimate, dtype):
    case = CacheCase(
        Hq=8, S=3000, D=128, Dv=128, dtype=dtype, device="cuda", unified_max=estimate,
        magnitude=magnitude, lens=(3000, 70), sinks=estimate < 0,
    )  # fmt: skip
    assert_cache_close(case, "triton")


@pytest.mark.parametrize("Sq", [1, 4])
def test_left_padded_batches_select_the_decoding_kernel(Sq):
    q = torch.randn(3, 8, Sq, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(3, 2, 3000, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([3000, 1700, 2999], device="cuda", dtype=torch.int32)
    padding = torch.tensor([0, 1600, 2990], device="cuda", dtype=torch.int32)
    ranges = torch.stack([padding, lens], -1).view(3, 1, 1, 2)
    options = {"key_ranges": ranges, "backend": "triton"}

    def oracle():
        exact = q.double(), k.double(), k.double()
        return reference.dense(
            attention_call(*exact, is_causal=True, kv_lens=lens, key_ranges=ranges)
        )

    explained = fa_ops.explain(q, k, k, is_causal=True, kv_lens=lens, **options)
    assert explained.kernel == "split-KV decoding"
    expected = oracle()[0]
    k[1, :, :1600] = float("nan")
    for _ in range(2):
        out = fa_ops.attention(q, k, k, is_causal=True, kv_lens=lens, **options)
        assert relative_error(out, expected) < 1e-2
        out = fa_ops.attention_with_kv_cache(q, k, k, lens, None, True, **options)
        assert relative_error(out, expected) < 1e-2
    ranges[1, 0, 0, 0] = 1690  # a repeated call reads it anew
    k = k.nan_to_num(0.0)
    expected = oracle()[0]
    out = fa_ops.attention_with_kv_cache(q, k, k, lens, None, True, **options)
    assert relative_error(out, expected) < 1e-2
    out = fa_ops.attention(q, k, k, is_causal=True, kv_lens=lens, **options)
    assert relative_error(out, expected) < 1e-2


def test_repeated_calls_read_new_values():
    case = CacheCase(dtype=torch.bfloat16, D=64, Dv=64, device="cuda", new=1, S=900)
    call = case.fresh()
    q, k, v = call[:3]
    t = call.operands
    k, v = k.nan_to_num(0.1), v.nan_to_num(0.1)
    versions = k._version
    for step in range(3):
        q.normal_()
        t.kv_lens.fill_(10 * step + 5)
        plain = reference.cache_forward(call._replace(key=k.clone(), value=v.clone()))[0]
        out = fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, key=t.new_key, value=t.new_value)
        assert relative_error(out, plain) < 1e-2
    assert k._version >= versions + 3


def test_fp8_with_odd_strides_is_refused():
    k = torch.zeros(1, 2, 64, 33, device="cuda").to(torch.float8_e4m3fn)[..., :32]
    q = torch.randn(1, 2, 1, 32, device="cuda", dtype=torch.bfloat16)
    lens = torch.ones(1, device="cuda", dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="even strides"):
        fa_ops.attention_with_kv_cache(q, k, k, lens)


# Many queries against a cache on the Triton backend: cases against the oracle, missing pages.

PROMPT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
READS = {"rotary": 0, "fp8": False, "num_splits": 0, "batch_invariant": False, "unified_max": None,
         "ranges": False}  # fmt: skip


def check(case):
    call = case.fresh()
    assert triton.plan(call).kernel.endswith("forward")
    assert_cache_close(case, "triton")


@pytest.mark.parametrize("seed", range(90))
def test_random_prompts(seed):
    D = (64, 128, 72, 96, 256, 40, 192)[seed % 7]
    case = random_cache_case(
        seed, dtype=PROMPT_DTYPES[seed // 6 % 3], device="cuda",
        page_size=(16, 64, 128, 8, 256, 0)[seed % 6], Sq=(64, 65, 130, 300, 77)[seed % 5],
        B=(2, 5)[seed % 2], Hkv=(24, 3)[seed // 2 % 2],
        Hq=(48, 24)[seed // 2 % 2] * 2, D=D, Dv=(D, min(D, 128))[seed % 2], **READS,
    )  # fmt: skip
    check(dataclasses.replace(case, S=case.S * (1 + seed % 7)))


@pytest.mark.parametrize("dtype", PROMPT_DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_head_dims_of_prompts(D, page_size, dtype):
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
