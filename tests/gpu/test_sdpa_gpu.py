"""`F.scaled_dot_product_attention` on a GPU with the kernels of this package."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torchs

from fa_ops.compat import sdpa
from tests.kernels import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def attend(q, k, v, is_causal):
    with torchs.sdpa_kernel(torchs.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


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
    calls, real = [], sdpa.forward
    monkeypatch.setattr(sdpa, "forward", lambda *a, **o: calls.append(1) or real(*a, **o))
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
