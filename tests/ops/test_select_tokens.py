"""select_tokens: the lists of a lightning indexer, against scores that are all stored."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.ops import token_selection
from tests.ops.test_selected import Largest

B, H, SQ, SK, D = 2, 3, 9, 50, 4


def whole_numbers(*shape: int) -> Tensor:
    """Few of them, so that scores are exact and many are equal."""
    return torch.randint(-2, 3, shape).float()


def tensors(Sq: int = SQ, Sk: int = SK) -> tuple[Tensor, Tensor, Tensor]:
    return whole_numbers(B, H, Sq, D), whole_numbers(B, 1, Sk, D), whole_numbers(B, H, Sq)


def dense(q, k, weights, count, keep: Tensor, scale: float) -> Tensor:
    """All scores, sorted so that equal ones keep their order; `keep` (B or 1, Sq, Sk)."""
    scores = (weights.unsqueeze(-1) * (scale * q @ k.transpose(2, 3)).relu()).sum(1)
    scores = scores.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-3e38)
    scores = scores.masked_fill(~keep, -math.inf)
    ranked = scores.sort(stable=True, dim=-1, descending=True)
    lists = ranked.indices.masked_fill(ranked.values == -math.inf, -1)[..., :count]
    return torch.nn.functional.pad(lists, (0, count - lists.shape[2]), value=-1)[:, None].int()


def kept(Sq, Sk, is_causal=True, kv_lens=None, key_ranges=None, attn_mask=None) -> Tensor:
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    lens = torch.full((1, 1, 1), Sk) if kv_lens is None else kv_lens.clamp(0, Sk)[:, None, None]
    keep = (j < lens) & (j <= i + lens - Sq) if is_causal else (j < lens).expand(-1, Sq, -1)
    if key_ranges is not None:
        keep = keep & (j >= key_ranges[:, 0, :, :1]) & (j < key_ranges[:, 0, :, 1:])
    return keep if attn_mask is None else keep & attn_mask[:, 0]


RANGES = torch.stack((torch.randint(0, 20, (B, 1, SQ)), torch.randint(10, 60, (B, 1, SQ))), -1)
CASES = {
    "causal": {},
    "all keys": {"is_causal": False},
    "lengths": {"kv_lens": torch.tensor([50, 7], dtype=torch.int32)},
    "lengths out of range": {"kv_lens": torch.tensor([90, -3]).int(), "is_causal": False},
    "ranges": {"key_ranges": RANGES.int()},
    "one range": {"key_ranges": RANGES[:1, :, :1].int(), "is_causal": False},
    "a mask": {"attn_mask": torch.rand(B, 1, SQ, SK) < 0.5},
    "padding": {"attn_mask": torch.rand(B, 1, 1, SK) < 0.5, "is_causal": False},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count, part", [(6, 2**21), (6, 600), (70, 2**21)])
def test_lists_are_those_of_sorted_scores(name, count, part, monkeypatch):
    monkeypatch.setitem(token_selection.PART, "cpu", part)
    monkeypatch.setattr(token_selection, "MIN_TILE", 16)
    q, k, weights = tensors()
    expected = dense(q, k, weights, count, kept(SQ, SK, **CASES[name]), 0.5)
    found = fa_ops.select_tokens(q, k, weights, count, scale=0.5, **CASES[name])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("Sq, Sk", [(1, 50), (60, 50), (9, 0), (0, 9), (3000, 1)])
def test_shapes_of_decoding_and_without_keys(Sq, Sk):
    q, k, weights = tensors(Sq, Sk)
    expected = dense(q, k, weights, 4, kept(Sq, Sk), D**-0.5)
    assert torch.equal(fa_ops.select_tokens(q, k, weights, 4), expected)


def test_equal_scores_come_in_the_order_of_keys():
    q, k = torch.zeros(1, 2, 1, 4), torch.randn(1, 1, 5000, 4)
    weights = torch.tensor([[[1.0], [-1.0]]])  # 0 times a negative weight is -0.0
    for one in (weights, -weights, weights.abs(), -weights.abs()):
        found = fa_ops.select_tokens(q, k, one, 7, is_causal=False)
        assert found.flatten().tolist() == list(range(7))


def test_values_that_are_not_finite():
    q, weights = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    k = torch.tensor([1, math.nan, math.inf, 2, -math.inf, math.nan]).view(1, 1, 6, 1)
    assert fa_ops.select_tokens(q, k, weights, 5)[0, 0, 0].tolist() == [1, 2, 5, 3, 0]
    lens = torch.tensor([4], dtype=torch.int32)  # what is behind the length is never listed
    found = fa_ops.select_tokens(q, k, -weights, 5, kv_lens=lens)
    assert found[0, 0, 0].tolist() == [1, 0, 3, 2, -1]  # -inf is the last of what is


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_lists_feed_attention(dtype):
    q, k, weights = (x.to(dtype) for x in tensors(SK))
    lists = fa_ops.select_tokens(q, k, weights, SK)
    heads = [torch.randn(B, n, SK, 16, dtype=dtype) for n in (4, 2, 2)]
    out = fa_ops.attention_selected(*heads, lists, block_size=1)
    expected = fa_ops.attention(*heads, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12 if dtype.itemsize == 8 else 2e-2)


def test_no_tensor_has_an_element_for_each_query_and_key(monkeypatch):
    monkeypatch.setitem(token_selection.PART, "cpu", 2**18)
    S = 2048
    q, k, weights = torch.randn(1, 4, S, 8), torch.randn(1, 1, S, 8), torch.rand(1, 4, S)
    with Largest() as largest:
        token_selection._select(q, k, weights, 16)
    assert largest.elements == 2**18 < S * S


# torch's own parts.


def test_opcheck():
    q, k, weights = (x.requires_grad_() for x in tensors())
    opcheck(token_selection.SELECT, (q, k, weights, 4), CASES["ranges"] | CASES["lengths"])
    opcheck(token_selection.SELECT, (q, k, weights, 4, False), CASES["a mask"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_are_eager_ones(dynamic):
    compiled = torch.compile(fa_ops.select_tokens, fullgraph=True, dynamic=dynamic)
    q, k, weights = tensors()
    assert torch.equal(compiled(q, k, weights, 4), fa_ops.select_tokens(q, k, weights, 4))


def test_vmap():
    many = [torch.stack([x, x.roll(1, -1)], 1) for x in tensors()]
    each = [fa_ops.select_tokens(*(x[:, i] for x in many), 4) for i in range(2)]
    found = torch.vmap(fa_ops.select_tokens, (1, 1, 1, None))(*many, 4)
    assert torch.equal(found, torch.stack(each))


def test_autocast_changes_nothing():
    q, k, weights = torch.randn(1, 4, 9, 8), torch.randn(1, 1, 900, 8), torch.randn(1, 4, 9)
    expected = fa_ops.select_tokens(q, k, weights, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fa_ops.select_tokens(q, k, weights, 20), expected)


def test_flops_are_those_of_products_and_sums():
    with FlopCounterMode(display=False) as counter:
        fa_ops.select_tokens(*tensors(), 4)
    assert counter.get_total_flops() == 2 * B * H * SQ * SK * (D + 1)


# Errors.

Q = torch.zeros(2, 3, 5, 8)
VALID = {"query": Q, "key": Q[:, :1], "weights": Q[..., 0], "count": 2}
BAD = {
    "no key": ({"key": None}, TypeError, "key must be a Tensor, got None"),
    "rank": ({"key": Q[:, 0]}, ValueError, "key must have shape (B, H, S, D), got (2, 5, 8)"),
    "heads": ({"key": Q}, ValueError, "key has 3 heads, but those of an indexer share their keys"),
    "dtype": ({"key": Q[:, :1].half()}, TypeError, "key is float16, but query is float32"),
    "whole numbers": ({"query": Q.int(), "key": Q[:, :1].int()}, TypeError,
                      "got int32: cast query and key, as by query.float()"),
    "weights": ({"weights": Q}, ValueError, "weights must have shape (2, 3, 5), got (2, 3, 5, 8)"),
    "count": ({"count": 0}, ValueError, "count must be at least 1, got 0"),
    "a fraction": ({"count": 2.5}, TypeError, "count must be an int, got 2.5"),
    "scale": ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    "lengths": ({"kv_lens": torch.zeros(3).int()}, ValueError, "kv_lens must have shape (2,)"),
    "ranges": ({"key_ranges": torch.zeros(2, 3, 5, 2).int()}, ValueError,
               "key_ranges must have shape (B or 1, Hq or 1, Sq or 1, 2) with (B, Hq, Sq) = "
               "(2, 1, 5), got (2, 3, 5, 2)"),
    "a float mask": ({"attn_mask": torch.zeros(1, 1, 5, 5)}, TypeError, "attn_mask must be bool"),
    "mask": ({"attn_mask": torch.ones(5, 5).bool()}, ValueError,
             "attn_mask must have shape (B or 1, 1, Sq or 1, Sk) with (B, Sq, Sk) = (2, 5, 5), got "
             "(5, 5)"),
    "unknown": ({"causal": True}, TypeError, "did you mean is_causal?"),
}  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD)
def test_errors(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fa_ops.select_tokens(**VALID | change)
