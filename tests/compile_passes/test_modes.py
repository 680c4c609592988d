"""Gradient modes inside a graph, and tensors that functional transforms wrap."""

import pytest
import torch

from tests.compile_passes.helpers import check, fuse, qkv, results


def key_transposed(mode, q, k, v, bias):
    with mode():
        transposed = k.transpose(-1, -2)
    return (q @ transposed).softmax(-1) @ v


def heads_repeated(mode, q, k, v, bias):
    with mode():
        repeated = k.repeat_interleave(1, 1), v[:, :, None].expand(2, 4, 1, 12, 8).flatten(1, 2)
    return (q @ repeated[0].mT).softmax(-1) @ repeated[1]


def bias_transposed(mode, q, k, v, bias):
    with mode():
        transposed = bias.transpose(0, 1)
    return (q @ k.mT + transposed).softmax(-1) @ v


def biases_summed(mode, q, k, v, bias):
    with mode():
        total = bias + bias.mT
    return (q @ k.mT + total).softmax(-1) @ v


def whole(mode, q, k, v, bias):
    with mode():
        out = (q @ k.mT + bias).softmax(-1) @ v
    return out * v


REGIONS = (key_transposed, heads_repeated, bias_transposed, biases_summed, whole)


@pytest.mark.parametrize("function", REGIONS, ids=lambda f: f.__name__)
def test_no_gradient_flows_through_no_grad_regions(function):
    check(lambda *inputs: function(torch.no_grad, *inputs), (*qkv(), torch.randn(12, 12)))


def hidden_after_the_product(mode, q, k, v):
    scores = q @ k.mT
    with mode():
        hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_region_between_product_and_softmax_changes_nothing(train, mode):
    inputs = [x.requires_grad_(train) for x in qkv()]
    with torch.set_grad_enabled(train):
        fusion = fuse(lambda *inputs: hidden_after_the_product(mode, *inputs))
        out, expected = fusion.run(*inputs), hidden_after_the_product(mode, *inputs)
    assert fusion.fused == 1 and out.requires_grad == train
    torch.testing.assert_close(out, expected)


def test_bias_without_gradient_gets_none():
    def attend(q, k, v, bias):
        with torch.no_grad():
            scores = q @ k.mT + bias
        return scores.softmax(-1) @ v

    q, k, v = qkv()
    bias = torch.randn(12, 12, requires_grad=True)
    fusion = fuse(attend)
    fusion.run(q, k, v.requires_grad_(), bias).sum().backward()
    assert bias.grad is None and v.grad is not None and not fusion.fused


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_without_gradients_are_not_fused(mode):
    def attend(q, k, v):
        with mode():
            weights = (q @ k.mT).softmax(-1)
        return weights @ v

    q, k, v = qkv()
    fusion = fuse(attend)
    out = fusion.run(q.requires_grad_(), k, v)
    assert not out.requires_grad and not fusion.fused
    torch.testing.assert_close(out, attend(q, k, v))


def mapped_mask(q, k, v, masks):
    return torch.vmap(lambda mask: (q @ k.mT + mask).softmax(-1) @ v)(masks)


def mapped_lengths(q, k, v, masks):
    def one(length):
        return (q @ k.mT).masked_fill(torch.arange(12) >= length, -1e9).softmax(-1) @ v

    return torch.vmap(one)(masks[0, 0].long())


def differentiated(q, k, v, masks):
    return torch.func.grad(lambda q: ((q @ k.mT).softmax(-1) @ v).sum())(q)


@pytest.mark.parametrize("function", [mapped_mask, mapped_lengths, differentiated])
def test_functional_transforms_are_not_fused(function):
    inputs = (*qkv(), torch.randn(3, 12, 12))
    fusion = fuse(function)
    (out,) = results(fusion.run, inputs, train=False)
    torch.testing.assert_close(out, function(*inputs))
    assert "plain tensor" in fusion.reasons[0]
