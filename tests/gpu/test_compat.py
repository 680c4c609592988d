"""The functions of flash-attn and torch's attention on a GPU, with the kernels of this package."""

import inspect
import warnings

import pytest
import torch
import torch.nn.attention.bias  # torch 2.11 does not import it with torch.nn.attention
import torch.nn.functional as F
from torch.nn import attention as torchs

from fa_ops.compat import flash_attn, flash_attn_interface, sdpa
from tests.compat.test_flash_attn_3 import naive
from tests.kernels import relative_error

# flash-attn: pages, appended tokens and chunks, without waiting.

QUERIES, KEYS = [1, 300, 0, 77, 129], [513, 300, 64, 1000, 130]


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def borders(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")


@pytest.fixture
def pages():
    """Caches for sequences of up to 1024 keys, in pages of 64, and their table."""
    table = torch.randperm(5 * 16, device="cuda").view(5, 16).int()
    return randn(80, 64, 2, 128), randn(80, 64, 2, 128), table


def rows(cache, table, b, n):
    return cache[table[b].long()].flatten(0, 1)[:n].float()


@pytest.fixture
def not_waiting():
    """A function after which waiting for the GPU is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (99, 0)}], ids=str
)
def test_packed_queries_over_pages(options, pages, not_waiting):
    k, v, table = pages
    q, ends_q, ends_k = randn(sum(QUERIES), 8, 128), borders(QUERIES), borders(KEYS)
    attend = flash_attn.flash_attn_varlen_func
    attend(q, k, v, ends_q, ends_k, 300, 1000, **options, block_table=table)
    not_waiting()
    out = attend(q, k, v, ends_q, ends_k, 300, 1000, **options, block_table=table)
    torch.cuda.set_sync_debug_mode("default")
    for b, (part, n) in enumerate(zip(out.split(QUERIES), KEYS, strict=True)):
        queries = q.split(QUERIES)[b].float().cpu()
        held = (rows(x, table, b, n).cpu() for x in (k, v))
        if len(part):
            assert relative_error(part.cpu(), naive(queries, *held, **options)[0]) < 1e-2


@pytest.mark.parametrize("options", [{"causal": True}, {"attention_chunk": 100}], ids=str)
def test_packed_queries_and_new_keys(options, pages, not_waiting):
    k, v, table = pages
    new = [3, 0, 40, 1, 24]
    q, new_k, new_v = randn(sum(QUERIES), 8, 128), randn(sum(new), 2, 128), randn(sum(new), 2, 128)
    lens = torch.tensor(KEYS, device="cuda", dtype=torch.int32)
    arguments = {
        "cache_seqlens": lens, "page_table": table, "cu_seqlens_q": borders(QUERIES),
        "cu_seqlens_k_new": borders(new), "max_seqlen_q": 300, **options,
    }  # fmt: skip
    attend = flash_attn_interface.flash_attn_with_kvcache
    attend(q, k.clone(), v.clone(), new_k, new_v, **arguments)
    not_waiting()
    out = attend(q, k, v, new_k, new_v, **arguments)
    torch.cuda.set_sync_debug_mode("default")
    for b, (part, n, m) in enumerate(zip(out.split(QUERIES), KEYS, new, strict=True)):
        held = [rows(x, table, b, n + m) for x in (k, v)]
        assert torch.equal(held[0][n:], new_k.split(new)[b].float())
        queries = q.split(QUERIES)[b].float().cpu()
        if len(part):
            expected = naive(queries, *(x.cpu() for x in held), **options)[0]
            assert relative_error(part.cpu(), expected) < 1e-2


@pytest.mark.parametrize("Sq", [1, 100])
def test_rows_of_a_cache_by_index(Sq, not_waiting):
    k, v, q = randn(6, 500, 2, 128), randn(6, 500, 2, 128), randn(3, Sq, 8, 128)
    index = torch.tensor([4, 0, 3], device="cuda", dtype=torch.int32)
    lens = torch.tensor([500, 101, 256], device="cuda", dtype=torch.int32)
    arguments = {"cache_seqlens": lens, "cache_batch_idx": index, "causal": True}
    flash_attn.flash_attn_with_kvcache(q, k, v, **arguments)
    not_waiting()
    out = flash_attn.flash_attn_with_kvcache(q, k, v, **arguments)
    torch.cuda.set_sync_debug_mode("default")
    expected = flash_attn.flash_attn_with_kvcache(
        q, k[index.long()], v[index.long()], cache_seqlens=lens, causal=True
    )
    assert relative_error(out, expected) < 1e-2


def test_dropped_weights(not_waiting):
    q, k, v = randn(2, 200, 8, 64), randn(2, 300, 2, 64), randn(2, 300, 2, 64)
    not_waiting()
    out, lse, weights = flash_attn.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
    torch.cuda.set_sync_debug_mode("default")
    weights = weights[:, :, :200, :300].float()
    kept = weights.clamp(min=0) / weights.abs().sum(-1, keepdim=True) / 0.8
    expected = kept @ v.float().repeat_interleave(4, 2).transpose(1, 2)
    assert relative_error(out, expected.transpose(1, 2)) < 1e-2


@pytest.mark.parametrize("Dv", [256, 512])
def test_wide_values(Dv):
    q, k, v = (
        randn(2, n, H, D).requires_grad_() for n, H, D in ((300, 8, 64), (300, 2, 64), (300, 2, Dv))
    )
    out = flash_attn_interface.flash_attn_func(q, k, v, causal=True)
    inputs = [x.detach().float().cpu().requires_grad_() for x in (q, k, v)]
    expected = torch.stack([naive(*row, causal=True)[0] for row in zip(*inputs)])
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    wanted = [expected, *torch.autograd.grad(expected, inputs, grad.float().cpu())]
    for one, other in zip(found, wanted):
        assert relative_error(one.cpu(), other) < 2e-2


@pytest.mark.parametrize("Dv", [256, 512])
@torch.no_grad()
def test_queries_of_values(Dv):
    """Batches and packed sequences whose products have more features than the dense kernels."""
    q, k, v, qv = (
        randn(2, 77, 8, 64),
        randn(2, 300, 2, 64),
        randn(2, 300, 2, Dv),
        randn(2, 77, 8, Dv),
    )
    out = flash_attn_interface.flash_attn_func(q, k, v, causal=True, qv=qv)
    packed = flash_attn_interface.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), borders([77, 77]), borders([300, 300]), 77, 300,
        causal=True, qv=qv.flatten(0, 1),
    )  # fmt: skip
    for b in range(2):
        joined = (torch.cat(pair, -1).float().cpu() for pair in ((q[b], qv[b]), (k[b], v[b])))
        expected = naive(*joined, v[b].float().cpu(), causal=True)[0]
        for found in (out[b], packed.view_as(out)[b]):
            assert relative_error(found.cpu(), expected) < 1e-2


# `F.scaled_dot_product_attention` on a GPU with the kernels of this package.


def attend(q, k, v, is_causal):
    with torchs.sdpa_kernel(torchs.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def counted(operator, monkeypatch):
    """A list that grows with every call of the kernel for an operator."""
    calls, real = [], sdpa.KERNELS[operator]
    monkeypatch.setitem(sdpa.KERNELS, operator, lambda *a, **o: calls.append(1) or real(*a, **o))
    return calls


@pytest.fixture
def active():
    """A function that activates the kernels, which are restored after the test."""
    yield lambda: torchs.activate_flash_attention_impl("fa_ops")
    torchs.restore_flash_attention_impl()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("D", [64, 100, 128])
@pytest.mark.parametrize("bshd", [False, True])
def test_results_and_gradients(D, is_causal, bshd, compiled, monkeypatch):
    torch._dynamo.reset()
    shape = (2, 300, 4, D) if bshd else (2, 4, 300, D)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )
    tensors = [x.transpose(1, 2) if bshd else x for x in (q, k, v)]
    grad = torch.randn_like(tensors[0])
    out = attend(*tensors, is_causal)
    expected = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    calls = counted("_scaled_dot_product_flash_attention", monkeypatch)
    torchs.activate_flash_attention_impl("fa_ops")
    try:
        out = (torch.compile(attend, fullgraph=True) if compiled else attend)(*tensors, is_causal)
        actual = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    finally:
        torchs.restore_flash_attention_impl()
    assert len(calls) == 1
    for x, y in zip(actual, expected):
        assert relative_error(x, y) < 2e-2
    attend(*tensors, is_causal)
    assert len(calls) == 1


def sdpa_randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def test_dropout_is_torchs_and_is_said_once(active, monkeypatch):
    monkeypatch.setattr(sdpa, "_said", set())
    q, k, v = (sdpa_randn(2, 4, 300, 64) for _ in "qkv")

    def results():
        torch.manual_seed(5)
        with torchs.sdpa_kernel(torchs.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    expected = results()
    active()
    with pytest.warns(UserWarning, match="dropout draws the weights"):
        found = results()
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results()


@pytest.mark.parametrize("Sq, Sk", [(128, 300), (1, 77)])
def test_causal_lower_right(Sq, Sk, active, monkeypatch):
    q, k, v = sdpa_randn(2, 4, Sq, 64), sdpa_randn(2, 4, Sk, 64), sdpa_randn(2, 4, Sk, 64)
    mask = torchs.bias.causal_lower_right(Sq, Sk)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    calls = counted("_scaled_dot_product_flash_attention", monkeypatch)
    active()
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert len(calls) == 1 and relative_error(found, expected) < 2e-2


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (70, 0)])
def test_varlen_attn(window, active, monkeypatch):
    from torch.nn.attention.varlen import varlen_attn

    options = {"window_size": window}
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        if window[0] >= 0:
            pytest.skip("this release of torch has no windows")
        options = {"is_causal": window == (-1, 0)}
    q, k, v = (sdpa_randn(700, 4, 128) for _ in "qkv")
    ends = torch.tensor([0, 100, 100, 433, 700], device="cuda", dtype=torch.int32)

    def results():
        out = varlen_attn(q, k, v, ends, ends, 333, 333, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    expected = results()
    calls = counted("_flash_attention_forward", monkeypatch)
    grads = counted("_flash_attention_backward", monkeypatch)
    active()
    found = results()
    assert len(calls) == len(grads) == 1
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 2e-2


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_tensors(is_causal, active, monkeypatch):
    lengths = (100, 333, 7)

    def results():
        torch.manual_seed(0)
        q, k, v = (
            torch.nested.nested_tensor(
                [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in lengths],
                layout=torch.jagged, requires_grad=True,
            )
            for _ in "qkv"
        )  # fmt: skip
        with torchs.sdpa_kernel(torchs.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal
            )
        grads = torch.autograd.grad(out.values().float().square().sum(), (q, k, v))
        return [out.values(), *(grad.values() for grad in grads)]

    expected = results()
    calls = counted("_flash_attention_forward", monkeypatch)
    active()
    found = results()
    assert len(calls) == 1
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 2e-2


def test_calls_can_be_captured(active):
    q, k, v = (sdpa_randn(2, 4, 256, 64).detach() for _ in "qkv")
    active()
    attend(q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert relative_error(out, attend(q, k, v, True)) < 1e-6


@pytest.mark.parametrize("S", [1, 3, 200])
def test_huge_inputs_give_no_nan(S, active):
    """Scores of 1.4e11, as in torch's test of its flash kernel."""
    x = torch.full((1, 1, S, 64), 133120.0, device="cuda", dtype=torch.bfloat16)
    active()
    assert torch.equal(attend(x, x, x, True), x)
