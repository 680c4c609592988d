"""ALiBi: biases of a slope for each head times a distance become an option of the operator."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.compile_passes.helpers import check, fuse, qkv, results, verified

INF = float("inf")
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def distance(q, k):
    return torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]


def hidden(q, k):
    return distance(q, k) > 0


def causal(q, k, v, slopes):
    bias = slopes.view(-1, 1, 1) * distance(q, k)
    s = q @ k.mT * 0.35 + bias[None]
    return s.masked_fill(hidden(q, k), -INF).softmax(-1) @ v


def causal_negative(q, k, v, slopes):
    s = q @ k.mT * 0.35 - slopes[None, :, None, None] * (-distance(q, k)).float() * 2.0
    return (s + torch.full(s.shape[-2:], -INF).triu(1)).softmax(-1) @ v


def absolute(q, k, v, slopes):
    s = q @ k.mT * 0.35 + distance(q, k).abs().neg() * slopes.view(1, -1, 1, 1)
    return s.softmax(-1) @ v


def with_a_window(q, k, v, slopes):
    far = distance(q, k)
    s = q @ k.mT * 0.35 - far.abs()[None] * slopes.view(-1, 1, 1)
    return s.masked_fill((far > 0) | (far < -4), -INF).softmax(-1) @ v


def with_padding(q, k, v, slopes):
    padded = torch.arange(k.shape[2]) + slopes[0] < 2
    s = q @ k.mT * 0.35 + slopes.view(-1, 1, 1) * distance(q, k)
    return s.masked_fill(hidden(q, k) | padded, -INF).softmax(-1) @ v


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [causal, causal_negative, absolute, with_a_window])
def test_alibi_becomes_slopes(function, dynamic):
    slopes = SLOPES.clone()

    def constant_slopes(q, k, v):
        return function(q, k, v, slopes)

    fusion = check(constant_slopes, qkv(), dynamic=dynamic)
    (finding,) = fusion.findings
    assert "ALiBi" in finding.masks and "dense" not in finding.masks, finding
    assert not verified(constant_slopes, qkv())[0].reason


def test_alibi_beside_a_mask_of_unknown_content():
    slopes = SLOPES.clone()
    inputs = qkv()
    fusion = fuse(lambda q, k, v: with_padding(q, k, v, slopes))
    actual = results(fusion.run, inputs, False)[0]
    expected = with_padding(*inputs, slopes).nan_to_num(0.0)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert [f.masks for f in fusion.findings] == ["is_causal, ALiBi, a mask of the keys"]


def not_causal(q, k, v, slopes):
    return (q @ k.mT + slopes.view(-1, 1, 1) * distance(q, k)).softmax(-1) @ v


def other_diagonal(q, k, v, slopes):
    far = (distance(q, k) - 1).abs()
    return (q @ k.mT - slopes.view(-1, 1, 1) * far).softmax(-1) @ v


def squared(q, k, v, slopes):
    far = distance(q, k)
    s = q @ k.mT - slopes.view(-1, 1, 1) * far * far
    return s.masked_fill(far > 0, -INF).softmax(-1) @ v


def log_sum_exp_read(q, k, v, slopes):
    s = (q @ k.mT + slopes.view(-1, 1, 1) * distance(q, k)).masked_fill(hidden(q, k), -INF)
    return s.softmax(-1) @ v, s.logsumexp(-1)


@pytest.mark.parametrize("function", [not_causal, other_diagonal, squared, log_sum_exp_read])
def test_other_biases_stay(function):
    slopes = SLOPES.clone()
    fusion = check(lambda q, k, v: function(q, k, v, slopes), qkv())
    assert "ALiBi" not in fusion.findings[0].masks


def test_slopes_that_require_grad_stay_a_bias():
    fusion = check(causal, (*qkv(), SLOPES.clone()))
    assert "ALiBi" not in fusion.findings[0].masks


def test_top_left_alignment_is_kept():
    """With fewer queries than keys, the distances of the code are not the operator's."""
    slopes = SLOPES.clone()

    def shifted(q, k, v):
        far = distance(q, k) - (k.shape[2] - q.shape[2])
        return (q @ k.mT - slopes.view(-1, 1, 1) * far.abs()).softmax(-1) @ v

    for function, found in ((lambda q, k, v: absolute(q, k, v, slopes), False), (shifted, True)):
        fusion = check(function, qkv(Sq=5))
        assert ("ALiBi" in fusion.findings[0].masks) == found


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", ["causal", "absolute"])
def test_score_mods(kind, kv_heads):
    slopes = SLOPES.clone()

    def score_mod(s, b, h, i, j):
        if kind == "causal":
            return torch.where(i >= j, s + slopes[h] * (j - i), -INF)
        return s - slopes[h] * (i - j).abs()

    def function(q, k, v):
        return flex_attention(q, k, v, score_mod=score_mod, enable_gqa=kv_heads < 4)

    inputs = qkv(Hkv=kv_heads, Sq=128, Sk=128, D=16, Dv=16)
    fusion = fuse(function)
    torch.testing.assert_close(fusion.run(*inputs), function(*inputs), atol=1e-5, rtol=1e-4)
    assert "ALiBi" in fusion.findings[0].masks, fusion.findings
