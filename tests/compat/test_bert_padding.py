"""flash_attn.bert_padding: padded batches, packed and back."""

import pytest
import torch

from fa_ops.compat.flash_attn import bert_padding

MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])


def test_unpadding_and_padding_are_inverse():
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    tokens, indices, ends, longest, used = bert_padding.unpad_input(x, MASK)
    assert torch.equal(tokens, x[MASK.bool()]) and ends.tolist() == [0, 2, 5, 5]
    assert (longest, used.tolist(), ends.dtype) == (3, [2, 3, 0], torch.int32)
    padded = bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(padded, x * MASK[..., None, None])
    (grad,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(grad, torch.ones_like(x) * MASK[..., None, None])


def test_unused_tokens_are_packed_but_not_counted():
    x, unused = torch.randn(3, 4, 2), torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    tokens, _, ends, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert torch.equal(tokens, x[(MASK + unused).bool()])
    assert (ends.tolist(), longest, used.tolist()) == ([0, 3, 7, 7], 4, [2, 3, 0])


def test_rows_of_several_sequences():
    x = torch.randn(2, 6, 3)
    lens = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, ends, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lens)
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1]]))
    assert (ends.tolist(), longest) == ([0, 2, 5, 11], 6)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def test_rows_by_index():
    x, rows = torch.randn(5, 2), torch.tensor([3, 0])
    assert torch.equal(bert_padding.index_first_axis(x, rows), x[[3, 0]])
    put = bert_padding.index_put_first_axis(x[:2], rows, 5)
    assert torch.equal(put[[3, 0]], x[:2]) and not put[[1, 2, 4]].any()
    found, kept = bert_padding.index_first_axis_residual(x, rows)
    assert torch.equal(found, x[[3, 0]]) and torch.equal(kept, x)


def test_masks_and_indices_must_fit():
    x = torch.randn(3, 4, 2)
    for call in (
        lambda: bert_padding.unpad_input(x, MASK[:, :3]),
        lambda: bert_padding.unpad_input(x, MASK, MASK[:2]),
        lambda: bert_padding.unpad_input_for_concatenated_sequences(x, MASK[0]),
        lambda: bert_padding.pad_input(x[0], torch.arange(5), 3, 4),
    ):
        with pytest.raises(
            ValueError, match=r"(mask|length|indices) must have shape \(.*\): pass "
        ):
            call()


@pytest.mark.parametrize("wrong", [-1, 12, 2**40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_outside_the_rows_are_named(wrong, dtype):
    if wrong > 2**31 and dtype is torch.int32:
        return
    x, indices = torch.randn(2, 3), torch.tensor([0, wrong], dtype=dtype)
    for call, rows in (
        (lambda: bert_padding.pad_input(x, indices, 3, 4), "the result has 12 rows"),
        (lambda: bert_padding.index_put_first_axis(x, indices, 12), "the result has 12 rows"),
        (lambda: bert_padding.index_first_axis(torch.randn(12, 3), indices), "x has 12 rows"),
    ):
        with pytest.raises(
            ValueError, match=f"indices has {wrong}, but {rows}: the first one is 0"
        ):
            call()


def test_indices_have_one_dimension_and_the_device_of_the_tokens():
    x = torch.randn(4, 3)
    with pytest.raises(
        ValueError, match=r"indices must .* \(n,\), got \(2, 2\): pass indices.flatten"
    ):
        bert_padding.index_first_axis(x, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="indices is on meta, but x is on cpu"):
        bert_padding.index_first_axis(x, torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(
        ValueError, match=r"indices must have shape \(4,\), got \(2,\): pass an index"
    ):
        bert_padding.index_put_first_axis(x, torch.zeros(2, dtype=torch.int64), 4)


def test_padding_has_sizes_and_a_device():
    x, indices = torch.randn(3, 8), torch.arange(3)
    with pytest.raises(ValueError, match="batch must not be negative, got -2"):
        bert_padding.pad_input(x, indices, -2, 4)
    rows, mask = torch.randn(3, 4, 2, device="meta"), torch.ones(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="attention_mask is on cpu, but hidden_states is on meta"):
        bert_padding.unpad_input(rows, mask)
    with pytest.raises(ValueError, match="attention_mask_in_length is on cpu, but hidden_states"):
        bert_padding.unpad_input_for_concatenated_sequences(rows, mask)
