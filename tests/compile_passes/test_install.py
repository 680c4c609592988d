"""The pass inside Inductor: what compiled code calls, what is counted, what is cached."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import compile_passes
from compile_passes.backend import fa_ops
from tests.compile_passes.helpers import qkv

CALL = "torch.ops.fa.attention.default("


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v


@pytest.fixture
def empty_cache():
    """A graph that Inductor finds in its cache is fused already, and skips the pass: nothing would
    be counted.
    """
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield


def generated(compiled, *inputs):
    """(result, Inductor's code)"""
    from torch._inductor.utils import run_and_get_code

    out, code = run_and_get_code(compiled, *inputs)
    return out, "\n".join(code)


@pytest.mark.usefixtures("empty_cache")
class TestInductor:
    def test_installed(self):
        inputs = qkv()
        with compile_passes.install():
            out, code = generated(torch.compile(plain), *inputs)
        torch.testing.assert_close(out, plain(*inputs), rtol=1e-4, atol=1e-5)
        assert counters["fa_ops"]["fused"] == 1 and CALL in code

    def test_backend(self):
        inputs = qkv()
        out, code = generated(torch.compile(plain, backend=fa_ops), *inputs)
        torch.testing.assert_close(out, plain(*inputs), rtol=1e-4, atol=1e-5)
        assert counters["fa_ops"]["fused"] == 1 and CALL in code
        assert not config.pre_grad_custom_pass

    def test_a_second_process_finds_the_fused_graph_in_the_cache(self):
        inputs = qkv()
        with compile_passes.install():
            torch.compile(plain)(*inputs)
            assert counters["aot_autograd"]["autograd_cache_miss"] == 1
            torch._dynamo.reset()
            counters.clear()
            _, code = generated(torch.compile(plain), *inputs)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
        torch._dynamo.reset()
        counters.clear()
        _, code = generated(torch.compile(plain), *inputs)
        assert CALL not in code, "without the pass, its cached graph must not be found"
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0
