"""Rows without keys: the first text is padded on the left, so its first queries attend none."""

from __future__ import annotations

import torch
import torch.nn as nn

from tests.compile_passes.cases import (
    INF,
    MIN,
    B,
    H,
    S,
    bsc,
    join,
    randn,
    registry,
    split,
    triangle,
)

CASES, case = registry()


def left_padded():
    mask = torch.ones(B, S)
    mask[0, :4] = 0
    return mask


@case("fuse", lambda: (*bsc(), left_padded(), randn(1, H, S, S)))
def learned_bias_beside_mask(q, k, v, mask, bias):
    keep = triangle() & mask.bool()[:, None, None]
    w = split(q) @ split(k).mT * 0.3 + bias
    w = w + torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
    return join(w.softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded(), randn(1, H, S, S)))
def learned_bias_with_mask_in_it(q, k, v, mask, bias):
    keep = triangle() & mask.bool()[:, None, None]
    bias = bias + torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
    return join((split(q) @ split(k).mT * 0.3 + bias).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()), tags="infer")
def causal_infinite_padding_finite(q, k, v, mask):
    bias = torch.zeros(B, 1, S, S).masked_fill(mask[:, None, None] == 0, MIN)
    bias = bias.masked_fill(~triangle(), -INF)
    return join((split(q) @ split(k).mT * 0.3 + bias).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()), tags="infer")
def two_finite_masks_added(q, k, v, mask):
    causal = torch.full((S, S), MIN).triu(1)
    padding = (1 - mask[:, None, None]) * MIN
    return join((split(q) @ split(k).mT * 0.3 + (causal + padding)).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()), tags="infer")
def filled_then_added(q, k, v, mask):
    w = torch.where(triangle(), split(q) @ split(k).mT * 0.3, MIN)
    return join((w + (1 - mask[:, None, None]) * MIN).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()))
def opt_with_rows_without_keys(q, k, v, mask):
    keep = triangle() & mask.bool()[:, None, None]
    w = split(q) @ split(k).mT * 0.3 + torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)
    return join(torch.max(w, torch.tensor(MIN)).softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()))
def minus_ten_thousand(q, k, v, mask):
    keep = triangle() & mask.bool()[:, None, None]
    w = split(q) @ split(k).mT * 0.3 + (~keep) * -10000.0
    return join(w.softmax(-1) @ split(v))


@case("fuse", lambda: (*bsc(), left_padded()))
class mask_from_another_graph(nn.Module):
    """A float mask of unknown content with rows that are finfo.min throughout."""

    def forward(self, q, k, v, mask):
        mask = mask.detach()  # an attention mask requires no grad
        keep = triangle() & mask.bool()[:, None, None]
        bias = self.outside(keep)
        return join((split(q) @ split(k).mT * 0.3 + bias).softmax(-1) @ split(v))

    @torch.compiler.disable
    def outside(self, keep):
        return torch.zeros(B, 1, S, S).masked_fill(~keep, MIN)


def two_given_masks():
    """Masks of known size and unknown content, each with rows without keys."""
    masks = [torch.zeros(B, 1, S, S).masked_fill(randn(B, 1, S, S) > 0.5, -1e9) for _ in range(2)]
    masks[0][:, :, 2], masks[1][:, :, 5] = -1e9, -1e9
    return (*bsc(), *masks)


@case("fuse", two_given_masks)
def fill_scaled_with_a_fill_after_it(q, k, v, first, second):
    scores = (split(q) @ split(k).mT).masked_fill(first != 0, -1e9) * 0.3
    return join(scores.masked_fill(second != 0, -1e9).softmax(-1) @ split(v))


@case("no_fuse", lambda: (*bsc(), randn(B, 1, S, S)))
def number_that_absorbs_before_a_scale(q, k, v, mask):
    return join(((split(q) @ split(k).mT + 1e9) * 0.3 + mask).softmax(-1) @ split(v))


@case("no_fuse", lambda: (*bsc(), left_padded()))
def lower_bound_after_two_masks(q, k, v, mask):
    """The sum of both masks is -inf, which the bound replaces by finfo.min."""
    w = split(q) @ split(k).mT * 0.3 + torch.full((S, S), MIN).triu(1)
    w = w + torch.where(mask.bool(), 0.0, MIN)[:, None, None]
    return join(torch.max(w, torch.tensor(MIN)).softmax(-1) @ split(v))


@case("no_fuse", lambda: (*bsc(), left_padded()))
def filled_rows_normalised_by_lse(q, k, v, mask):
    """Beside the fill the log-sum-exp does not hold the number of keys: rows add up their values."""
    keep = triangle() & mask.bool()[:, None, None]
    w = (split(q) @ split(k).mT * 0.3).masked_fill(~keep, -1e9)
    return join((w - w.logsumexp(-1, keepdim=True)).exp() @ split(v))


@case("fuse")
def causal_fill_normalised_by_lse(q, k, v):
    w = (split(q) @ split(k).mT * 0.3).masked_fill(~triangle(), -1e9)
    return join((w - w.logsumexp(-1, keepdim=True)).exp() @ split(v))
