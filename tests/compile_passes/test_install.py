"""The pass inside Inductor: the calls in compiled code, the counters and the caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import compile_passes
from compile_passes.backend import fa_ops
from compile_passes.install import HASHED_SOURCES
from tests.compile_passes.helpers import qkv

CALL = "torch.ops.fa.attention.default("


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v


@pytest.fixture
def empty_cache():
    """A graph from Inductor's cache is fused already and skips the pass, so nothing is counted."""
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield


def test_the_cache_key_covers_all_modules_that_decide_a_rewrite():
    """Only these modules, which cannot change a graph, are left out."""
    without = {"__init__", "install", "backend", "explain", "report", "__pycache__"}
    root = Path(compile_passes.__file__).parent
    decide = {part for name in HASHED_SOURCES for part in (root / name).parent.glob(name)}
    others = {path for path in root.iterdir() if path.is_dir() or path.suffix == ".py"} - decide
    assert {path.stem for path in others} <= without
    assert all(path.exists() for path in decide) and len(decide) == len(HASHED_SOURCES)


def test_options_of_an_installed_pass_are_not_ignored():
    with compile_passes.install(verify=True):
        with compile_passes.install(verify=True):
            pass
        with pytest.raises(
            ValueError, match="verify must be True, as in the pass that is installed, got F"
        ):
            compile_passes.install()
    assert not config.pre_grad_custom_pass
    compile_passes.install(drop_stored_weights=True)
    with pytest.raises(ValueError, match="drop_stored_weights must be True"):
        compile_passes.install()
    compile_passes.uninstall()
    assert not config.pre_grad_custom_pass


def generated(compiled, *inputs):
    """(result, Inductor's code)"""
    from torch._inductor.utils import run_and_get_code

    out, code = run_and_get_code(compiled, *inputs)
    return out, "\n".join(code)


@pytest.mark.usefixtures("empty_cache")
class TestInductor:
    def test_installed_pass_fuses(self):
        inputs = qkv()
        with compile_passes.install():
            out, code = generated(torch.compile(plain), *inputs)
        torch.testing.assert_close(out, plain(*inputs), rtol=1e-4, atol=1e-5)
        assert counters["fa_ops"]["fused"] == 1 and CALL in code

    def test_guards_on_sizes_survive_the_cache(self):
        """Beyond the last position that bfloat16 holds exactly the mask differs, also where the graph
        of a shorter sequence comes from the cache.
        """

        def attend(q, k, v):
            i = torch.arange(q.shape[2]).bfloat16()
            return (q @ k.mT).masked_fill(i[:, None] < i, float("-inf")).softmax(-1) @ v

        with compile_passes.install():
            for _ in range(2):
                torch._dynamo.reset()
                counters.clear()
                compiled = torch.compile(attend, dynamic=True)
                for size in (12, 250, 300):
                    inputs = qkv(B=1, Hq=1, Hkv=1, Sq=size, Sk=size)
                    torch.testing.assert_close(
                        compiled(*inputs), attend(*inputs), rtol=1e-4, atol=1e-5
                    )
        assert counters["aot_autograd"]["autograd_cache_hit"] >= 1

    def test_backend_fuses_without_installation(self):
        inputs = qkv()
        out, code = generated(torch.compile(plain, backend=fa_ops), *inputs)
        torch.testing.assert_close(out, plain(*inputs), rtol=1e-4, atol=1e-5)
        assert counters["fa_ops"]["fused"] == 1 and CALL in code
        assert not config.pre_grad_custom_pass

    def test_the_cache_returns_fused_graphs_only_with_the_pass(self):
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
