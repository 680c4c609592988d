"""Jagged NestedTensors are packed sequences."""

from __future__ import annotations

import pytest
import torch

import fa_ops

LENGTHS = (3, 5, 2)


def nested(*heads: int, D: int = 8) -> list[torch.Tensor]:
    """(B, H, lengths, D) per head count, all of one ragged structure."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    make = torch.nested.nested_tensor_from_jagged
    return [make(torch.randn(sum(LENGTHS), H, D), ends).transpose(1, 2) for H in heads]


def function(q, k, v, sinks):
    return fa_ops.attention(q, k, v, is_causal=True, sinks=sinks, return_lse=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_nested(compiled):
    q, k, v = (t.detach().requires_grad_() for t in nested(4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    out, lse = run(q, k, v, sinks)
    assert out.is_nested and out.shape[:2] == (3, 4) and out.shape[3] == 8
    (out.values().sin().sum() + lse.values().cos().sum()).backward()
    for b, _ in enumerate(LENGTHS):
        alone = [t.detach().unbind()[b][None].requires_grad_() for t in (q, k, v)]
        one_out, one_lse = function(*alone, sinks.detach())
        torch.testing.assert_close(out.unbind()[b][None], one_out)
        torch.testing.assert_close(lse.unbind()[b][None], one_lse)
        (one_out.sin().sum() + one_lse.cos().sum()).backward()
        for t, one in zip((q, k, v), alone):
            torch.testing.assert_close(t.grad.unbind()[b][None], one.grad)
    assert sinks.grad.abs().sum() > 0


def test_without_lse_and_without_gradients():
    q, k, v = nested(2, 2, 2)
    with torch.no_grad():
        out = fa_ops.attention(q, k, v)
    torch.testing.assert_close(
        out.unbind()[1][None], fa_ops.attention(*(t.unbind()[1][None] for t in (q, k, v)))
    )


def test_errors_name_the_argument():
    q, k, v = nested(2, 2, 2)
    with pytest.raises(NotImplementedError, match="attn_mask does not go with NestedTensors"):
        fa_ops.attention(q, k, v, torch.zeros(1))
    with pytest.raises(ValueError, match="key must be a jagged NestedTensor"):
        fa_ops.attention(q, k.values()[None], v)
    with pytest.raises(ValueError, match="query must be a jagged NestedTensor"):
        fa_ops.attention(q.transpose(1, 2), k, v)
    message = "must not be a NestedTensor: 8-bit products attend dense tensors"
    with torch.no_grad(), pytest.raises(ValueError, match=f"query {message}"):
        fa_ops.quantized_attention(q, k, v)
    with torch.no_grad(), pytest.raises(ValueError, match=f"value {message}"):
        fa_ops.quantized_attention(q.values()[None], k.values()[None], v)


def test_keys_and_values_have_the_same_lengths():
    q, k, _ = nested(2, 2, 2)
    ends = torch.tensor([0, 5, 8, 10])
    values = torch.randn(10, 2, 8)
    other = torch.nested.nested_tensor_from_jagged(values, ends).transpose(1, 2)
    message = r"value must have the lengths of key, \[3, 5, 2\], got \[5, 3, 2\]"
    for tensors in ((q, k, other), (q.detach().requires_grad_(), k, other)):
        with pytest.raises(ValueError, match=message):
            fa_ops.attention(*tensors)
    same = torch.nested.nested_tensor_from_jagged(values, k.offsets().clone()).transpose(1, 2)
    assert fa_ops.attention(q, k, same).is_nested
