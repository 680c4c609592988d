"""Dropout of a part of a call, by a word for each of its rows."""

from __future__ import annotations

import pytest
import torch

from fa_ops.backends import dropout


def check_part(backend: str, dtype: torch.dtype) -> None:
    """Some rows, keys, heads and rows of the batch drop what they drop in the whole call."""
    g = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 24))
    whole = [torch.randn(size, generator=g, dtype=dtype) for size in sizes]
    seed, rows, keys, p = torch.tensor([2**40 + 7]), slice(3, 37), slice(11, 50), 0.4
    ranges = torch.tensor([keys.start, keys.stop], dtype=torch.int32).view(1, 1, 1, 2)
    words = dropout.words_of(seed, 2, 4, 40)[1:, 2:, rows]
    weights = torch.randn(1, 2, 34, 24, generator=g, dtype=dtype)
    of_heads, of = (slice(2, 4), slice(1, 2), slice(1, 2)), (rows, keys, keys)
    part = [x[1:, h, i] for x, h, i in zip(whole, of_heads, of, strict=True)]
    found = []
    for tensors, options in (
        (whole, {"key_ranges": ranges, "dropout_seed": seed}),
        (part, {"dropout_seed": dropout.from_key(words, keys.start)}),
    ):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = torch.ops.fa.attention_with_lse(*leaves, None, p, **options, backend=backend)
        if tensors is whole:
            out, lse = (x[1:, 2:, rows] for x in (out, lse))
        grads = torch.autograd.grad((out * weights).sum() + lse.sum(), leaves)
        if tensors is whole:
            grads = [x[1:, h, i] for x, h, i in zip(grads, of_heads, of, strict=True)]
        found.append((out, lse, *grads))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_parts_of_a_call(backend):
    check_part(backend, torch.float64)


def test_words_of_another_shape_or_dtype_are_refused():
    q = torch.randn(1, 2, 8, 8)
    words = torch.zeros(1, 2, 8, dtype=torch.int32)
    attend = torch.ops.fa.attention
    with pytest.raises(ValueError, match=r"int32 must have shape \(1, 2, 8\), a word for each row"):
        attend(q, q, q, None, 0.5, dropout_seed=words[..., :1])
    with pytest.raises(TypeError, match="dropout_seed must be int64, got float32"):
        attend(q, q, q, None, 0.5, dropout_seed=words.float())
    ends, packed = torch.tensor([0, 8], dtype=torch.int32), q[0].transpose(0, 1)
    with pytest.raises(TypeError, match="dropout_seed must be int64, got int32"):
        torch.ops.fa.attention_varlen(
            packed, packed, packed, ends, ends, 8, 8, 0.5, dropout_seed=words
        )
