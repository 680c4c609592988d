"""Common spellings of attention: each becomes one call with the same results and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.compile_passes.helpers import check, fuse, qkv, results


def weights(q, k):
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)


def in_place(q, k, v):
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores *= 0.5
    scores.div_(2.0)
    scores += 1.0
    weights = scores.view(*q.shape[:2], *scores.shape[1:]).softmax(3)
    return torch.matmul(weights, v)


def scale_split_between_query_and_key(q, k, v):
    scale = q.shape[-1] ** -0.25
    return torch.einsum("bhij,bhjd->bihd", (q * scale @ (k * scale).mT).softmax(-1), v)


def negative_scale(q, k, v):
    return (-(q @ k.mT) * 0.3).softmax(-1) @ v


def temperature_per_head(q, k, v):
    temperature = torch.linspace(0.1, 0.4, q.shape[1])[:, None, None]
    return (q @ k.mT * temperature).softmax(-1) @ v


def temperature_per_key(q, k, v):
    divisor = torch.linspace(0.1, 0.4, k.shape[2])
    return (q @ k.mT / divisor).softmax(-1) @ v


def value_on_the_left(q, k, v):
    return (v.mT @ weights(q, k).mT).mT


def keys_stored_transposed(q, k, v):
    stored = k.mT.contiguous()
    return F.softmax(torch.matmul(q, stored), dim=-1) @ v


def weights_over_keys_first(q, k, v):
    scores = torch.einsum("bhjd,bhid->bhji", k, q)
    return torch.einsum("bhji,bhjd->bhid", scores.softmax(2), v)


def upcast_and_back(q, k, v):
    scores = (q.float() @ k.float().transpose(-2, -1)) * 0.25
    return scores.softmax(-1).to(v.dtype) @ v


def baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = torch.linspace(-1, 1, k.shape[1], dtype=k.dtype)[None, None]
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.25)
    return torch.bmm(scores.softmax(-1), v)


def softcap(q, k, v):
    return (torch.tanh(q @ k.mT * 0.25 / 30.0) * 30.0).softmax(-1) @ v


def windows_of_five_dimensions(q, k, v):
    q, k, v = (x.unflatten(2, (3, -1)).transpose(1, 2) for x in (q, k, v))
    bias = torch.linspace(-1, 1, q.shape[3])[:, None] * torch.ones(q.shape[2], 1, k.shape[3])
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def head_mask_after(q, k, v):
    mask = torch.linspace(0, 1, q.shape[1])[None, :, None, None]
    return (weights(q, k) * mask * 2.0) @ v


def merged_heads(q, k, v):
    out = weights(q, k) @ v
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def exp_over_sum(q, k, v):
    scores = q @ k.mT * 0.3
    e = (scores - scores.max(-1, keepdim=True).values.detach()).exp()
    return (e / e.sum(dim=-1, keepdim=True)) @ v


def divided_after_the_value(q, k, v):
    e = torch.exp(q @ k.mT * 0.1)
    return torch.matmul(e, v) / e.sum(-1)[..., None]


def exp_minus_logsumexp(q, k, v):
    scores = q @ k.mT
    return torch.einsum("bhij,bhjd->bhid", torch.exp(scores - scores.logsumexp(-1, True)), v)


def one_more_in_the_denominator(q, k, v):
    e = (q @ k.mT * 0.2).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def sink_logits(q, k, v):
    """As in gpt-oss."""
    sinks = torch.linspace(-1, 1, q.shape[1]).reshape(1, -1, 1, 1)
    scores = torch.cat([q @ k.mT * 0.3, sinks.expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1)[..., :-1] @ v


SPELLINGS = [
    in_place,
    scale_split_between_query_and_key,
    negative_scale,
    temperature_per_head,
    temperature_per_key,
    value_on_the_left,
    keys_stored_transposed,
    weights_over_keys_first,
    upcast_and_back,
    baddbmm,
    softcap,
    windows_of_five_dimensions,
    head_mask_after,
    merged_heads,
    exp_over_sum,
    divided_after_the_value,
    exp_minus_logsumexp,
    one_more_in_the_denominator,
    sink_logits,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_become_one_call(spelling, dynamic):
    check(spelling, qkv(), dynamic=dynamic)


def repeated_inside(q, k, v):
    B, H, S, D = k.shape
    k, v = (x[:, :, None].expand(B, H, 2, S, x.shape[-1]).reshape(B, 2 * H, S, -1) for x in (k, v))
    return weights(q, k) @ v


def interleaved(q, k, v):
    return weights(q, k.repeat_interleave(2, dim=1)) @ torch.repeat_interleave(v, 2, 1)


def grouped_query(q, k, v):
    grouped = q.unflatten(1, (k.shape[1], -1))
    return (weights(grouped, k[:, :, None]) @ v[:, :, None]).flatten(1, 2)


def one_key_head(q, k, v):
    k, v = k[:, 0], v[:, 0]
    scores = torch.einsum("b h i d, b j d -> b h i j", q, k)
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "spelling",
    [repeated_inside, interleaved, grouped_query, one_key_head],
    ids=lambda f: f.__name__,
)
def test_repeated_heads_become_grouped_query_attention(spelling, dynamic):
    fusion = check(spelling, qkv(Hkv=2, Sq=10, Dv=16), dynamic=dynamic)
    (call,) = fusion.graphs[-1].find_nodes(
        op="call_function", target=torch.ops.fa.attention.default
    )
    key, value = (call.args[i].meta["example_value"] for i in (1, 2))
    heads = 1 if spelling is one_key_head else 2
    assert key.shape[1] == value.shape[1] == heads


def test_repetition_in_blocks_is_not_grouped():
    """`repeat` gives key head h to query heads h, h + Hkv, ..., unlike the operator's groups."""

    def function(q, k, v):
        return weights(q, k.repeat(1, 2, 1, 1)) @ v.repeat(1, 2, 1, 1)

    check(function, qkv(Hkv=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_matches_eager(dtype):
    def function(q, k, v):
        scores = q @ k.transpose(2, 3) * 0.35
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    check(function, qkv(dtype))


def test_autocast_keeps_dtypes():
    def function(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return weights(q, k) @ v

    inputs = qkv()
    fusion = fuse(function, aot=True)
    for a, b in zip(
        results(fusion.run, inputs, True), results(function, inputs, True), strict=True
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    assert fusion.fused == 1


def test_checkpointed_regions_are_fused():
    def function(q, k, v):
        return checkpoint(lambda q, k, v: weights(q, k) @ v, q, k, v, use_reentrant=False)

    check(function, qkv(), aot=True)


@pytest.mark.parametrize("keep", ["dropout", "bernoulli", "rand"])
def test_dropout_draws_its_seed_in_the_graph(keep):
    def drop(p):
        if keep == "dropout":
            return F.dropout(p, 0.25)
        if keep == "bernoulli":
            return p * torch.bernoulli(torch.full_like(p, 0.75)) / 0.75
        return p * (torch.rand_like(p) < 0.75) / 0.75

    def function(q, k, v):
        return drop(weights(q, k)) @ v

    inputs = qkv(Sq=64, Sk=64)
    fusion = fuse(function, aot=True)
    first, second = (fusion.run(*inputs) for _ in range(2))
    assert fusion.fused == 1 and not torch.equal(first, second)
    mean = torch.stack([fusion.run(*inputs) for _ in range(100)]).mean(0)
    expected = weights(*inputs[:2]) @ inputs[2]
    assert (mean - expected).abs().max() < 0.3  # 100 draws, weights of a 48th on average
    results(fusion.run, inputs, True)


DRAWN = {
    "bernoulli": lambda p: torch.bernoulli(torch.full_like(p, 0.7)),
    "<": lambda p: torch.rand_like(p) < 0.7,
    "<=": lambda p: torch.rand_like(p) <= 0.7,
    ">": lambda p: torch.rand_like(p) > 0.3,
    ">=": lambda p: torch.rand_like(p) >= 0.3,
}


@pytest.mark.parametrize("drawn", DRAWN)
def test_masks_drawn_by_hand_keep_their_probability(drawn):
    def function(q, k, v):
        p = weights(q, k)
        return (p * DRAWN[drawn](p) / 0.7) @ v

    inputs = qkv()
    fusion = fuse(function)
    fusion.run(*inputs)
    (call,) = fusion.graphs[-1].find_nodes(
        op="call_function", target=torch.ops.fa.attention.default
    )
    assert call.args[4] == pytest.approx(0.3)


def test_one_graph_serves_every_length():
    fusion = fuse(merged_heads, dynamic=True, aot=True)
    for S in (5, 9, 17, 32):
        inputs = qkv(Sq=S, Sk=S)
        torch.testing.assert_close(fusion.run(*inputs), merged_heads(*inputs), rtol=1e-4, atol=1e-5)
    assert len(fusion.graphs) == 1 and fusion.fused == 1


def test_float64_stays_float64():
    check(merged_heads, qkv(torch.float64))


def test_a_scale_in_16_bits_is_rounded():
    """The tensor holds 1.296875."""
    scale = lambda: torch.tensor(1.3, dtype=torch.bfloat16)  # noqa: E731
    fusion = fuse(lambda q, k, v: (q @ k.mT * scale()).softmax(-1) @ v)
    fusion.run(*qkv(torch.bfloat16))
    assert "scale = 1.296875)" in fusion.code
