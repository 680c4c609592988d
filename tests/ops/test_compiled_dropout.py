"""Compiled dropout: whatever is recomputed, the backward pass drops what the forward pass dropped.

The values are the identity, so that a result is the dropped weights. Gradients are compared with
those of a softmax whose weights are dropped by the pattern that is read from that result.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._functorch import config
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import compile_passes
import fa_ops
from fa_ops.compat.flash_attn import flash_attn_func

P, B, Hq, S, D = 0.4, 2, 4, 8, 8
ENDS = torch.tensor([0, S, 2 * S], dtype=torch.int32)


def fused_and_partitioned(gm, inputs):
    """The pass and the partitioner of Inductor, without its kernels."""
    findings = compile_passes.fuse_module(gm)
    assert all(finding.fused for finding in findings)
    return aot_eager_decomp_partition(gm, inputs)


def dense(q, k, v):
    return fa_ops.attention(q, k, v, dropout_p=P)


def with_lse(q, k, v):
    return fa_ops.attention(q, k, v, dropout_p=P, return_lse=True)[0]


def packed(q, k, v):
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = fa_ops.attention_varlen(q, k, v, ENDS, ENDS, S, S, P)
    return out.unflatten(0, (B, S)).transpose(1, 2)


def packed_with_lse(q, k, v):
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out, _ = fa_ops.attention_varlen(q, k, v, ENDS, ENDS, S, S, P, return_lse=True)
    return out.unflatten(0, (B, S)).transpose(1, 2)


def by_hand(q, k, v):
    k, v = (t.repeat_interleave(Hq // t.shape[1], 1) for t in (k, v))
    return F.dropout(torch.softmax(q @ k.mT / D**0.5, -1), P) @ v


def by_flash_attn(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return flash_attn_func(q, k, v, P).transpose(1, 2)


FUNCTIONS = [dense, with_lse, packed, packed_with_lse, by_flash_attn, by_hand]
BANS = [name for name in config.get_config_copy() if name.startswith("ban_recompute_")]
SETTINGS = [
    *({"activation_memory_budget": budget} for budget in (1.0, 0.9, 0.5, 1e-6, 0.0)),
    {"aggressive_recomputation": True},
    {"aggressive_recomputation": True, "activation_memory_budget": 0.5},
    {"activation_memory_budget": 0.0, "recompute_views": True},
    *({name: False} for name in BANS),
    dict.fromkeys(BANS, False),
]


def inputs(Hkv: int = Hq) -> list[torch.Tensor]:
    q, k = torch.randn(B, Hq, S, D), torch.randn(B, Hkv, S, D)
    v = torch.eye(S).expand(B, Hkv, S, S).clone()
    return [x.requires_grad_() for x in (q, k, v)]


def consistent(function, given: list[torch.Tensor]) -> torch.Tensor:
    """Assert that a function's gradients are those of its own result; returns what it kept."""
    q, k, v = given
    out = function(*given)
    kept = out.detach() != 0
    assert 0.3 < kept.double().mean() < 0.9
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, given, grad)
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    weights = torch.softmax(q @ keys.mT / D**0.5, -1) * kept / (1 - P)
    expected = weights @ values
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(expected, given, grad)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    return kept


def named(value: object) -> str:
    """The same in every process, which xdist compares."""
    return getattr(value, "__name__", None) or str(value)


EVERYWHERE = [(function, settings) for function in (dense, by_hand) for settings in SETTINGS]
LOW = [(function, settings) for function in FUNCTIONS[1:-1] for settings in SETTINGS[3:6]]


@pytest.mark.parametrize("function, settings", EVERYWHERE + LOW, ids=named)
def test_partitioners_settings(function, settings):
    compiled = torch.compile(function, backend=fused_and_partitioned, fullgraph=True)
    with config.patch(settings):
        first, second = (consistent(compiled, inputs()) for _ in range(2))
        assert not torch.equal(first, second)
        consistent(compiled, inputs(Hkv=2))


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[4], SETTINGS[5]], ids=str)
@pytest.mark.parametrize("function", [dense, packed_with_lse, by_hand])
def test_inductor(function, settings):
    compiled = torch.compile(function, backend="fa_ops", fullgraph=True)
    with config.patch(settings):
        consistent(compiled, inputs(Hkv=2))


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_regions_memory_budget(budget):
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:
        pytest.skip("this torch has no budgets of regions")

    def function(q, k, v):
        with region(budget):
            return dense(q, k, v)

    compiled = torch.compile(function, backend=fused_and_partitioned, fullgraph=True)
    consistent(compiled, inputs())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_of_one_graph_drop_different_weights(function):
    """Though their arguments are equal, so that torch would merge equal nodes."""

    def twice(q, k, v):
        return function(q, k, v), function(q, k, v)

    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        compiled = torch.compile(twice, backend=fused_and_partitioned, fullgraph=True)
        with config.patch(activation_memory_budget=budget):
            given = inputs()
            first, second = compiled(*given)
            assert not torch.equal(first == 0, second == 0)
            kept = [consistent(lambda *a, f=compiled, i=i: f(*a)[i], given) for i in range(2)]
        assert not torch.equal(*kept)


@pytest.mark.parametrize("function", [dense, packed, by_flash_attn])
def test_a_compiled_call_repeats_the_eager_one(function):
    """It draws its seed from the same generator in the same way."""
    compiled, given = torch.compile(function, backend=fused_and_partitioned), inputs()
    outs = []
    for f in (function, compiled, function):
        torch.manual_seed(5)
        outs.append(f(*given))
        outs.append(f(*given))
    for i in (2, 4):
        assert torch.equal(outs[0], outs[i]) and torch.equal(outs[1], outs[i + 1])
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_vmap(randomness):
    """The numbers of the eager call, one pattern for all samples or one for each."""

    def function(q, k, v):
        return torch.func.vmap(dense, randomness=randomness)(q, k, v)

    given = [x.detach().expand(3, *x.shape) for x in inputs()]
    compiled = torch.compile(function, backend=fused_and_partitioned)
    if randomness == "error":
        for f in (function, compiled):
            with pytest.raises(RuntimeError, match="randomness error mode"):
                f(*given)
        return
    outs = []
    for f in (function, compiled):
        torch.manual_seed(1)
        outs.append(f(*given))
    torch.testing.assert_close(*outs)
    kept = outs[0] != 0
    assert torch.equal(kept[0], kept[1]) == (randomness == "same")


@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("inner", ["same", "different"])
def test_nested_vmap_draws_torchs_numbers(outer, inner):
    def by_operator(x):
        return torch.ops.fa.dropout_seed(torch.empty(0)) + x

    def by_torch(x):
        return torch.randint(2**63 - 1, (1,)) + x

    x, drawn = torch.zeros(2, 3, 1, dtype=torch.int64), []
    for function in (by_operator, by_torch):
        torch.manual_seed(2)
        mapped = torch.func.vmap(function, randomness=inner)
        drawn.append(torch.func.vmap(mapped, randomness=outer)(x))
    assert torch.equal(*drawn)


# Checkpointed regions


def every(policy: CheckpointPolicy):
    return lambda ctx, operator, *args, **options: policy


def save_all_but_seeds(ctx, operator, *args, **options):
    is_seed = operator is torch.ops.fa.dropout_seed.default
    return CheckpointPolicy.MUST_RECOMPUTE if is_seed else CheckpointPolicy.MUST_SAVE


POLICIES = {
    "none": None,
    "fa_ops": list(fa_ops.SAC_OPS),
    "matmul": [torch.ops.aten.mm.default],
    "save all": every(CheckpointPolicy.MUST_SAVE),
    "recompute all": every(CheckpointPolicy.MUST_RECOMPUTE),
    "prefer": every(CheckpointPolicy.PREFER_RECOMPUTE),
    "all but seeds": save_all_but_seeds,
}


def in_a_region(function, policy, **options):
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return lambda *args: checkpoint(function, *args, use_reentrant=False, **options)


@pytest.mark.parametrize("budget", [None, 1.0, 0.5, 0.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", [dense, packed_with_lse, by_hand])
def test_checkpointing(function, policy, budget):
    """Eager without a budget."""
    if budget == 0.5 and "recompute" not in policy:
        pytest.skip("torch before 2.15 fails where an operator with two results is saved")
    if budget is None and function is by_hand:
        pytest.skip("torch's own dropout, which is not fused")
    region = in_a_region(function, POLICIES[policy])
    if budget is None:
        consistent(region, inputs(Hkv=2))
        return
    compiled = torch.compile(region, backend=fused_and_partitioned, fullgraph=True)
    with config.patch(activation_memory_budget=budget):
        consistent(compiled, inputs(Hkv=2))


def test_reentrant_checkpointing():
    given = inputs()
    out = checkpoint(dense, *given, use_reentrant=True)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(given[2].grad, out.detach().mT @ grad)


# Compiled autograd


@pytest.mark.parametrize("budget", [None, 0.5, 0.0])
@pytest.mark.parametrize("function", [dense, packed_with_lse, by_hand])
def test_compiled_autograd(function, budget):
    """Eager without a budget. The result is linear in the values, with the weights that it kept."""
    given = inputs(Hkv=2)
    if budget is not None:
        function = torch.compile(function, backend=fused_and_partitioned, fullgraph=True)
    with config.patch(activation_memory_budget=1.0 if budget is None else budget):
        out = function(*given)
        grad = torch.randn_like(out)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            out.backward(grad)
    weights = out.detach().unflatten(1, (2, 2))
    torch.testing.assert_close(given[2].grad, (weights.mT @ grad.unflatten(1, (2, 2))).sum(2))
