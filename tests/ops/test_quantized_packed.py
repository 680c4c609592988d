"""attention_varlen of e4m3 tensors: each sequence as a row of its own; errors."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.testing import make_case, quantized
from fa_ops.testing.quantized import QuantizedCase, assert_quantized_right, random_quantized_case

E4M3 = torch.float8_e4m3fn
CASES = [case for case in map(random_quantized_case, range(120)) if case.page is not None]
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
ONE = torch.ones(1)


@pytest.mark.parametrize("case", CASES[:30], ids=lambda case: f"{case.page}-{case.case.seed}")
def test_random(case):
    assert_quantized_right(case, "cpu", calls=2)


@pytest.mark.parametrize("page", [0, 16])
def test_the_comparison_finds_another_alignment(page, monkeypatch):
    inner = make_case(B=3, Hq=2, Hkv=1, Sq=40, Sk=70, D=16, Dv=16, is_causal=True, kv_lens=True)
    case = QuantizedCase(inner, scales=("heads",) * 3, page=page)
    assert_quantized_right(case, "cpu")
    call = fa_ops.attention_varlen
    shifted = lambda q, k, v, ends, *rest, **kw: call(q, k, v, ends - 1, *rest, **kw)  # noqa: E731
    monkeypatch.setattr(quantized, "GAP", 1)
    monkeypatch.setattr(fa_ops, "attention_varlen", shifted)
    with pytest.raises(AssertionError):
        assert_quantized_right(case, "cpu")


def numbers(*shape):
    return torch.randn(shape).to(E4M3)


def attend(**changes):
    given = {"query": numbers(5, 4, 16), "key": numbers(5, 2, 16), "value": numbers(5, 2, 16),
             "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}  # fmt: skip
    scales = {"q_scale": ONE, "k_scale": ONE, "v_scale": ONE}
    return fa_ops.attention_varlen(**given | scales | changes)


def test_sequences_without_queries_or_keys():
    none = torch.tensor([0, 0, 0], dtype=torch.int32)
    assert not attend(cu_seqlens_q=none).any() and not attend(cu_seqlens_k=none).any()
    sinks = torch.arange(4.0)
    for keys in ({}, {"key": numbers(0, 2, 16), "value": numbers(0, 2, 16)}):
        out, lse = attend(cu_seqlens_k=none, sinks=sinks, return_lse=True, **keys)
        assert not out.any() and torch.equal(lse, sinks[:, None].expand(4, 5))
    out, lse = attend(query=numbers(0, 4, 16), cu_seqlens_q=none, return_lse=True)
    assert out.shape == (0, 4, 16) and out.dtype == torch.bfloat16 and lse.shape == (4, 0)


def test_compiled_code_gives_the_same():
    q, k = numbers(5, 4, 16), numbers(5, 2, 16)

    def attention(q, k, ends, scale):
        return fa_ops.attention_varlen(
            q, k, k, ends, ends, 3, 3, is_causal=True, q_scale=scale, k_scale=scale, v_scale=scale
        )

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, ENDS, ONE), attention(q, k, ENDS, ONE))


PAGES = {"key": numbers(3, 16, 2, 16), "value": numbers(3, 16, 2, 16), "cu_seqlens_k": None,
         "page_table": torch.tensor([[0], [2]], dtype=torch.int32)}  # fmt: skip
ERRORS = {
    "v_scale is missing": {"v_scale": None},
    "dropout_p must not be given with q_scale": {"dropout_p": 0.5},
    "key must be float8_e4m3fn with q_scale, got float32": {"key": torch.zeros(5, 2, 16)},
    r"k_scale must have one element, or shape \(B, H\) with 2 sequences": {
        "k_scale": torch.ones(2, 4)
    },
    r"cu_seqlens_q\[2\] is 9, but there are 5 tokens": {
        "cu_seqlens_q": torch.tensor([0, 2, 9], dtype=torch.int32)
    },
    "kv_lens or cu_seqlens_k must be given with page_table, one of them, got neither": PAGES,
    r"kv_lens\[0\] is 17, which with 0 new keys is past the cache's 16": PAGES
    | {"kv_lens": torch.tensor([17, 3], dtype=torch.int32)},
    "max_seqlen_q must not be negative, got -1": {"max_seqlen_q": -1},
    r"value has shape \(3, 8, 2, 16\), but key has \(3, 16, 2, 16\)": PAGES
    | {"kv_lens": torch.tensor([3, 3], dtype=torch.int32), "value": numbers(3, 8, 2, 16)},
    r"value has shape \(4, 2, 16\), but key has \(5, 2, 16\)": {"value": numbers(4, 2, 16)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=message):
            attend(**ERRORS[message])
        attend()


def test_an_argument_that_requires_grad_is_refused():
    with pytest.raises(ValueError, match="8-bit products has no gradient"):
        attend(sinks=torch.zeros(4, requires_grad=True))


def test_a_scale_of_one_tensor_is_that_of_all():
    case = dataclasses.replace(CASES[0], scales=("one",) * 3)
    assert_quantized_right(case, "reference")
