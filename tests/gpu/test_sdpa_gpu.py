"""`F.scaled_dot_product_attention` on a GPU with the kernels of this package."""

import inspect
import warnings

import pytest
import torch
import torch.nn.attention.bias  # torch 2.11 does not import it with torch.nn.attention
import torch.nn.functional as F
from torch.nn import attention as torchs

from fa_ops.compat import sdpa
from tests.kernels import relative_error


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


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def test_dropout_is_torchs_and_is_said_once(active, monkeypatch):
    monkeypatch.setattr(sdpa, "_said", set())
    q, k, v = (randn(2, 4, 300, 64) for _ in "qkv")

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
    q, k, v = randn(2, 4, Sq, 64), randn(2, 4, Sk, 64), randn(2, 4, Sk, 64)
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
    q, k, v = (randn(700, 4, 128) for _ in "qkv")
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
    q, k, v = (randn(2, 4, 256, 64).detach() for _ in "qkv")
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
