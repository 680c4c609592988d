"""Gradient modes inside a graph, and what transforms make of tensors."""

import pytest
import torch

from tests.compile_passes.helpers import check, fuse, qkv, results


def key_turned(mode, q, k, v, bias):
    with mode():
        turned = k.transpose(-1, -2)
    return (q @ turned).softmax(-1) @ v


def heads_repeated(mode, q, k, v, bias):
    with mode():
        repeated = k.repeat_interleave(1, 1), v[:, :, None].expand(2, 4, 1, 12, 8).flatten(1, 2)
    return (q @ repeated[0].mT).softmax(-1) @ repeated[1]


def bias_turned(mode, q, k, v, bias):
    with mode():
        turned = bias.transpose(0, 1)
    return (q @ k.mT + turned).softmax(-1) @ v


def biases_summed(mode, q, k, v, bias):
    with mode():
        total = bias + bias.mT
    return (q @ k.mT + total).softmax(-1) @ v


def whole(mode, q, k, v, bias):
    with mode():
        out = (q @ k.mT + bias).softmax(-1) @ v
    return out * v


PREPARED = (key_turned, heads_repeated, bias_turned, biases_summed, whole)


@pytest.mark.parametrize("function", PREPARED, ids=lambda f: f.__name__)
def test_no_gradient_passes_what_was_made_without(function):
    check(lambda *inputs: function(torch.no_grad, *inputs), (*qkv(), torch.randn(12, 12)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_made_without_gradients(mode):
    def attend(q, k, v):
        with mode():
            weights = (q @ k.mT).softmax(-1)
        return weights @ v

    q, k, v = qkv()
    fusion = fuse(attend)
    made = fusion.run(q.requires_grad_(), k, v)
    assert not made.requires_grad and not fusion.fused
    torch.testing.assert_close(made, attend(q, k, v))


def mapped_mask(q, k, v, masks):
    return torch.vmap(lambda mask: (q @ k.mT + mask).softmax(-1) @ v)(masks)


def mapped_lengths(q, k, v, masks):
    def one(length):
        return (q @ k.mT).masked_fill(torch.arange(12) >= length, -1e9).softmax(-1) @ v

    return torch.vmap(one)(masks[0, 0].long())


def differentiated(q, k, v, masks):
    return torch.func.grad(lambda q: ((q @ k.mT).softmax(-1) @ v).sum())(q)


@pytest.mark.parametrize("function", [mapped_mask, mapped_lengths, differentiated])
def test_what_a_transform_wraps_stays(function):
    inputs = (*qkv(), torch.randn(3, 12, 12))
    fusion = fuse(function)
    (made,) = results(fusion.run, inputs, train=False)
    torch.testing.assert_close(made, function(*inputs))
    assert "plain tensor" in fusion.reasons[0]
