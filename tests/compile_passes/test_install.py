"""The pass inside Inductor: the calls in compiled code, the counters and the caches."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.utils import fresh_cache

import compile_passes
from compile_passes.install import HASHED_SOURCES, FusionPass, fa_ops
from tests.compile_passes.helpers import qkv, results

CALL = "torch.ops.fa.call_site('attention'"


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
    without = {"__init__", "install", "explain", "report", "__pycache__"}
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
    compile_passes.install(eight_bit=True)
    with pytest.raises(ValueError, match="eight_bit must be True"):
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


N = 4  # all sizes, which then identify no dimension


def scaled(dim):
    return lambda q, k, v: ((q @ k.mT) * 0.3).softmax(dim) @ v


def divided(dim):
    return lambda q, k, v: torch.matmul(q, k.transpose(-2, -1)).div(1.7).softmax(dim).matmul(v)


def masked(dim):
    def function(q, k, v):
        mask = torch.zeros(N, N).masked_fill(torch.ones(N, N).tril() == 0, -1e4)
        return torch.softmax(q @ k.transpose(-2, -1) / 1.7 + mask, dim) @ v

    return function


def dropped(dim):
    def function(q, k, v):
        weights = (torch.matmul(q, k.mT) * 0.3).softmax(dim)
        return F.dropout(weights, 0.23, training=False) @ v

    return function


def unscaled(dim):
    return lambda q, k, v: F.dropout((q @ k.mT).softmax(dim), 0.23, training=False) @ v


def permuted(dim):
    def function(q, k, v):
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        return torch.matmul(q, k.transpose(-2, -1)).div(1.7).softmax(dim).matmul(v)

    return function


def by_hand(dim):
    def function(q, k, v):
        s = q @ k.mT * 0.3
        e = (s - s.amax(dim, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True) @ v

    return function


def other_transposition(dim):
    """The sum runs over no feature dimension of the key."""
    return lambda q, k, v: ((q @ k.transpose(-3, -1)) * 0.3).softmax(dim) @ v


def other_fill(dim):
    def function(q, k, v):
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)).div(torch.full((), 1.7))
        keep = torch.ones(N, N, dtype=torch.bool).tril()
        return torch.where(keep, scores, torch.full((), 2.0)).softmax(dim).matmul(v)

    return function


FORMS = (
    scaled, divided, masked, dropped, unscaled, permuted, by_hand, other_transposition, other_fill,
)  # fmt: skip


def with_torch_patterns(gm, example_inputs, fusion=None):
    """A backend of the fusion pass and Inductor's passes over the joint graph, without its code."""
    if fusion:
        fusion(gm.graph)
        gm.recompile()

    def rewritten(gm, inputs):
        joint_graph_passes(gm)
        return make_boxed_func(gm.forward)

    def partitioned(gm, inputs, **options):
        joint_graph_passes(gm)
        return min_cut_rematerialization_partition(gm, inputs, **options)

    return aot_autograd(
        fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward), inference_compiler=rewritten,
        partition_fn=partitioned, decompositions=select_decomp_table(),
    )(gm, example_inputs)  # fmt: skip


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rank", [3, 4])
def test_torch_rewrites_no_softmax_that_is_left(rank, train):
    """Inductor's patterns ignore dimensions and fills."""
    functions = [form(dim) for form in FORMS for dim in range(-rank, 0)]

    def function(q, k, v):
        return [f(q + i, k, v) for i, f in enumerate(functions)]

    def compiled(fusion):
        torch._dynamo.reset()
        counters.clear()
        backend = functools.partial(with_torch_patterns, fusion=fusion)
        return results(torch.compile(function, backend=backend), inputs, train)

    seeds = (torch.Generator().manual_seed(i) for i in range(3))
    inputs = tuple(torch.randn([N] * rank, generator=seed) for seed in seeds)
    actual = compiled(FusionPass())
    assert counters["inductor"]["fuse_attention"] == 0
    for a, e in zip(actual, results(function, inputs, train), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    compiled(None)
    taken = counters["inductor"]["fuse_attention"] > 0
    assert taken or rank == 3, "torch's own pass is as it was"
