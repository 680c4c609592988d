"""Masks by arithmetic with tensors of 0 and 1."""

from __future__ import annotations

import torch
from torch import nn

from tests.compile_passes.cases import B, H, S, bhsd, padded, registry, triangle

CASES, case = registry()


def with_padding():
    return (*bhsd()(), padded())


@case("fuse", bhsd())
def gpt_ones_and_zeros(q, k, v):
    """As in the first GPT."""
    w = q @ k.mT * 0.35
    b = torch.tril(torch.ones(S, S)).view(1, 1, S, S)
    w = w * b - 1e10 * (1 - b)
    return w.softmax(-1) @ v


@case("fuse", bhsd())
def zero_one_added_in_front(q, k, v):
    b = triangle().to(q.dtype)
    return ((1.0 - b) * -1e9 + (q @ k.mT / 3) * b).softmax(-1) @ v


@case("fuse", with_padding)
def zero_one_of_two_masks(q, k, v, keep):
    b = (keep[:, None, None, :] > 0).float() * triangle().float()
    w = (q @ k.mT) * b + (1 - b) * torch.finfo(torch.float32).min
    return w.softmax(-1) @ v


@case("fuse", with_padding)
def zero_one_after_a_bias(q, k, v, keep):
    b = (triangle() & keep.bool()[:, None, None]).float()
    bias = torch.arange(S).float().view(1, 1, 1, S) / S
    w = (q @ k.mT * 0.3 + bias) * b + (b - 1) * 1e10
    return w.softmax(-1) @ v


@case("fuse", with_padding)
def zero_one_with_rows_without_keys(q, k, v, keep):
    b = (keep[:, None, :, None] * keep[:, None, None, :] > 0).to(q.dtype)
    return ((q @ k.mT) * b - 1e10 * (1 - b)).softmax(-1) @ v


@case("no_fuse", bhsd())
class ZeroOneBuffer(nn.Module):
    """The buffer of a checkpoint may hold other numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(S, S)).view(1, 1, S, S))

    def forward(self, q, k, v):
        w = q @ k.mT
        return (w * self.bias - 1e4 * (1 - self.bias)).softmax(-1) @ v


@case("no_fuse", bhsd())
def zero_one_of_another_mask(q, k, v):
    b, c = triangle().float(), torch.ones(S, S).triu()
    return ((q @ k.mT) * b - 1e10 * (1 - c)).softmax(-1) @ v


@case("no_fuse", bhsd())
def zero_two(q, k, v):
    b = triangle().float() * 2
    return ((q @ k.mT) * b - 1e10 * (1 - b)).softmax(-1) @ v


@case("no_fuse", lambda: (*bhsd()(), torch.rand(B, H, S, S)))
def gates_between_zero_and_one(q, k, v, gates):
    return ((q @ k.mT) * gates - 1e10 * (1 - gates)).softmax(-1) @ v


def with_rows_without_keys():
    keep = padded().bool()
    keep[1] = False
    return (*bhsd()(), keep)


@case("fuse", with_rows_without_keys)
def weights_multiplied_by_the_mask(q, k, v, keep):
    keep = keep[:, None, None]
    return ((q @ k.mT * 0.3).masked_fill(~keep, -1e9).softmax(-1) * keep) @ v


@case("fuse", with_rows_without_keys)
def weights_multiplied_by_the_added_mask(q, k, v, keep):
    b = (keep[:, None, None] & triangle()).float()
    return ((q @ k.mT * 0.3 + (1 - b) * -1e9).softmax(-1) * b) @ v


@case("fuse", with_rows_without_keys)
def weights_multiplied_by_the_compared_mask(q, k, v, keep):
    b = keep[:, None, None].to(q.dtype)
    return (b * (q @ k.mT * 0.3).masked_fill(b == 0, -1e9).softmax(-1)) @ v


@case("no_fuse", with_rows_without_keys)
def weights_multiplied_by_another_mask(q, k, v, keep):
    b = keep[:, None, None].float()
    return ((q @ k.mT * 0.3 + (1 - b) * -1e9).softmax(-1) * triangle()) @ v


@case("fuse", with_rows_without_keys)
def weights_multiplied_by_the_inverse_mask(q, k, v, keep):
    b = keep[:, None, None].float()
    return ((q @ k.mT * 0.3 + (1 - b) * -1e9).softmax(-1) * (1 - b)) @ v


@case("fuse", with_rows_without_keys)
def weights_multiplied_by_the_higher_of_two_masks(q, k, v, keep):
    """Rows that have only keys under the lower mask give 0, others average."""
    b = keep[:, None, None].float()
    w = q @ k.mT * 0.3 + (1 - b) * -1e9 + torch.where(triangle(), 0.0, -1e30)
    return (w.softmax(-1) * b) @ v


@case("fuse", with_rows_without_keys)
def weights_multiplied_by_a_mask_that_hides_nothing(q, k, v, keep):
    b = keep[:, None, None].float()
    return ((q @ k.mT * 0.3 + (1 - b) * -3.0).softmax(-1) * b) @ v
