"""The Hopper kernel for latent (MLA) caches on a GPU: one head, 576 features, values of 512."""

import pytest
import torch

from fa_ops.backends import hopper
from fa_ops.call.call import attention_call
from fa_ops.testing.caches import CacheCase, assert_cache_close
from tests.gpu import hopper_calls
from tests.gpu.cases import chosen

HALVES = (torch.bfloat16, torch.float16)


def latent(**fields):
    fixed = {"Hkv": 1, "D": 576, "Dv": 512, "shared": True, "device": "cuda"}
    return CacheCase(**({"dtype": torch.bfloat16} | fixed | fields))


def draw(lens, heads, tokens=1, page=64, S=0, dtype=torch.bfloat16):
    """q, the cache's memory, its page table and lengths; unused keys are NaN."""
    B, S = len(lens), S or max(*lens, 1)
    q = torch.randn(B, heads, tokens, 576, device="cuda", dtype=dtype)
    kv_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
    if not page:
        k = torch.randn(B, 1, S, 576, device="cuda", dtype=dtype)
        for b, n in enumerate(lens):
            k[b, :, n:] = float("nan")
        return q, k, None, kv_lens
    pages = -(-S // page)
    k = torch.full((B * pages, page, 1, 576), float("nan"), device="cuda", dtype=dtype)
    table = torch.randperm(B * pages, device="cuda", dtype=torch.int32).view(B, pages)
    for b, n in enumerate(lens):
        j = torch.arange(n, device="cuda")
        k[table[b, j // page].long(), j % page, 0] = torch.randn(n, 576, device="cuda").to(dtype)
    return q, k, table, kv_lens


def attend(q, k, table, kv_lens, causal=False):
    call = attention_call(
        q, k, k[..., :512], is_causal=causal, kv_lens=kv_lens, page_table=table, over_cache=True
    )
    return hopper_calls.cache_forward(call)


def assert_correct(actual, q, k, table, kv_lens, causal=False):
    """Compare (out, lse), row by row, with a float64 computation."""
    B, _, tokens, _ = q.shape
    for b in range(B):
        n = int(kv_lens[b])
        keys = k[b, 0] if table is None else k[table[b].long(), :, 0]
        keys = keys.flatten(0, -2)[:n].double()
        s = q[b].double() @ keys.T * 576**-0.5
        if causal:
            visible = torch.ones(tokens, n, device="cuda", dtype=torch.bool).tril(n - tokens)
            s = s.masked_fill(~visible, float("-inf"))
        lse = s.logsumexp(-1)
        expected = (s - lse[..., None]).exp().nan_to_num(0.0) @ keys[:, :512]
        error = (actual[0][b].double() - expected).norm() / expected.norm().clamp_min(1e-9)
        assert error < 1e-2, (b, n, error)
        torch.testing.assert_close(actual[1][b].double(), lse, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize("page_size", [0, 1, 5, 8, 16, 32, 64, 256])
def test_oracle(heads, page_size):
    dtype = HALVES[page_size % 3 % 2]
    assert_cache_close(latent(Hq=heads, S=500, page_size=page_size, dtype=dtype), "hopper")


@pytest.mark.parametrize("tokens", [2, 3, 4, 9])
@pytest.mark.parametrize("heads", [1, 20, 64, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_new_tokens(heads, tokens, causal):
    case = latent(Hq=heads, Sq=tokens, S=300, is_causal=causal, page_size=64, seed=heads + tokens)
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("lens", [(0, 1), (63, 64), (65, 128), (129, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("tokens", [1, 4])
def test_lengths(lens, page_size, tokens):
    case = latent(S=129, lens=lens, page_size=page_size, Hq=20, Sq=tokens, is_causal=True)
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_scale_and_strided_cache(scale):
    assert_cache_close(latent(Hq=16, S=400, scale=scale, bshd=False, magnitude=3.0), "hopper")


@pytest.mark.parametrize("seed", range(24))
def test_batches_of_random_lengths(seed):
    g = torch.Generator().manual_seed(seed)
    B = (1, 3, 12, 33, 40, 2)[seed % 6]
    longest = (9000, 3000, 2000, 700)[seed // 6]
    lens = torch.randint(longest, (B,), generator=g).tolist()
    lens[seed % B] = seed % 2
    heads, tokens = ((16, 1), (128, 1), (20, 3), (64, 2))[seed % 4]
    torch.manual_seed(seed)
    case = draw(lens, heads, tokens, page=(0, 16, 64, 1)[seed // 3 % 4], dtype=HALVES[seed % 2])
    assert_correct(attend(*case, causal=tokens > 1), *case, causal=tokens > 1)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("length", [65, 190, 1000, 8192, 40000])
def test_rows_divided_into_many_parts(heads, length):
    case = draw([length], heads)
    result = attend(*case)
    assert_correct(result, *case)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(result, attend(*case)))


@pytest.mark.parametrize(
    "dtype, largest", [(torch.bfloat16, 1e30), (torch.bfloat16, 1e-20), (torch.float16, 1e3)]
)
def test_parts_keep_columns_of_any_size(dtype, largest):
    """Partial results have a common exponent for half a row; small columns stay accurate."""
    q, k, table, lens = draw([5000, 5000], 64, page=0, dtype=dtype)
    sizes = torch.logspace(-6 if dtype == torch.bfloat16 else -4, 0, 576, device="cuda") * largest
    q, k = (q.double() / sizes).to(dtype), (k.double() * sizes).to(dtype)
    out, _ = attend(q, k, table, lens)
    for b in range(2):
        keys = k[b, 0].double()
        expected = (q[b, :, 0].double() @ keys.T * 576**-0.5).softmax(-1) @ keys[:, :512]
        errors = (out[b, :, 0].double() - expected).norm(dim=0) / expected.norm(dim=0)
        assert errors.max() < 2e-2, (b, int(errors.argmax()), float(errors.max()))


def test_rescaling_by_every_tile():
    """Scores grow from tile to tile, so that every tile raises the running maximum."""
    q, k, table, lens = draw([4000, 3999], 64, page=0)
    k *= torch.linspace(0.1, 30, 4000, device="cuda").view(1, 1, -1, 1).to(k.dtype)
    assert_correct(attend(q, k, table, lens), q, k, table, lens)


def test_concurrent_streams_give_equal_results():
    case = draw([9000, 1, 0, 5000, 4097], 128)
    expected = attend(*case)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for step in range(100):
        with torch.cuda.stream(streams[step % 2]):
            results.append(attend(*case))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(expected, result))


@pytest.mark.parametrize("B, heads", [(4, 128), (1, 16), (1, 64)])
def test_one_cuda_graph_serves_every_length(B, heads):
    q, k, table, lens = draw([6000] * B, heads)
    attend(q, k, table, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, table, lens)
        repeated = attend(q, k, table, lens)
    for step in range(6):
        q.normal_()
        lens.random_(0, 6000)
        if step == 3:
            lens[:2] = torch.tensor([0, 1])[:B]
        graph.replay()
        assert_correct(captured, q, k, table, lens)
        assert torch.equal(captured[0], repeated[0])


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_keys_in_missing_pages_are_masked_out(page_size):
    q, k, table, lens = draw([300, 200], 16, page=page_size)
    missing, pages = table.clone(), 64 // page_size
    missing[0, pages : 2 * pages], missing[1, :pages] = -1, 10**6
    k[table[0, pages : 2 * pages].long()] = 0
    k[table[1, :pages].long()] = 0
    result = attend(q, k, missing, lens)
    kept = [[j for j in range(n) if j // 64 != page] for n, page in ((300, 1), (200, 0))]
    rows = [k[table[b].long(), :, 0].flatten(0, 1)[kept[b]] for b in range(2)]
    for b, keys in enumerate(rows):
        alone = keys[None, None].contiguous()
        n = torch.tensor([keys.shape[0]], device="cuda", dtype=torch.int32)
        row = tuple(x[b : b + 1] for x in result)
        assert_correct(row, q[b : b + 1], alone, None, n)


def test_unsupported_calls_are_refused():
    call = latent(Hq=16).fresh()
    assert hopper.cache_error(call) is None and chosen(call) is hopper
    apart = call._replace(value=call.value.clone(memory_format=torch.contiguous_format))
    assert "hold its values" in hopper.cache_error(apart)
    assert chosen(apart) is not hopper
    assert "window" in hopper.cache_error(call.changed(window_left=3))
