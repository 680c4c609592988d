"""fa::attention_averaging_rows: rows that average their keys, and the gradients of their scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fa_ops
from fa_ops.testing import assert_within_budget

OPERATOR = torch.ops.fa.attention_averaging_rows
LOWEST = torch.finfo(torch.float32).min
B, Hq, Hkv, Sq, Sk, D = 2, 4, 2, 5, 7, 8
SHAPES = ((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, D))


def drawn(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(query, key and value, tensors that options are made of)"""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in SHAPES]
    kept = torch.rand(B, 1, Sq, Sk, generator=generator) > 0.3
    kept[:, :, 1] = False
    return qkv, {
        "rows": torch.rand(B, 1, Sq, generator=generator) > 0.5,
        "filled": torch.rand(B, Hq, 1, Sk, generator=generator) > 0.6,
        "bool": kept,
        "float": torch.zeros(kept.shape).masked_fill(~kept, -math.inf),
    }


def by_hand(q, k, v, rows, mask=None, softcap=0.0, filled=None, share=1.0):
    """(out, lse) as docs/semantics.md defines them. Rows without keys give (0, -inf)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s, rows = q @ k.mT * q.shape[-1] ** -0.5, rows[..., None]
    s = softcap * torch.tanh(s / softcap) if softcap else s
    without_value = share * (s - s.detach())
    if filled is not None:
        without_value = torch.where(filled, without_value.detach(), without_value)
    s = torch.where(rows, without_value, s)
    if mask is not None and mask.dtype == torch.bool:
        s = s.masked_fill(~(mask | rows), -math.inf)
    elif mask is not None:
        s = s + mask
    dead = (s == -math.inf).all(-1)
    s = s.masked_fill(dead[..., None], 0.0)
    out, lse = s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)
    return out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -math.inf)


def with_gradients(function, qkv: list[Tensor], *args, **options) -> list[Tensor]:
    out, lse = function(*qkv, *args, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out.double() * weight).sum() + (finite.double() * weight[..., 0]).sum()
    return [out, finite, *torch.autograd.grad(loss, qkv)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "mask, softcap, filled, share",
    [(None, 0.0, False, 1.0), ("bool", 3.0, False, 0.5), ("float", 0.0, True, 1.0)],
)
def test_results_and_gradients_are_as_defined(dtype, mask, softcap, filled, share):
    qkv, given = drawn(dtype)
    mask, filled = given.get(mask), given["filled"] if filled else None
    options = {"softcap": softcap}
    actual = with_gradients(
        OPERATOR, qkv, mask, averaging_rows=given["rows"], filled_keys=filled, grad_share=share,
        **options,
    )  # fmt: skip
    wide = [x.detach().double().requires_grad_() for x in qkv]
    expected = [given["rows"], mask, softcap, filled, share]
    oracle, baseline = (with_gradients(by_hand, x, *expected) for x in (wide, qkv))
    for name, *results in zip("out lse dq dk dv".split(), actual, oracle, baseline, strict=True):
        assert_within_budget(name, *results)


def test_a_mask_of_finite_numbers_gives_these_gradients():
    """In eager mode, beside finfo.min."""
    qkv, given = drawn()
    rows = given["rows"].expand(B, Hq, Sq)

    def eager(q, k, v):
        k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))
        s = q @ k.mT * D**-0.5 + torch.zeros(rows.shape).masked_fill(rows, LOWEST)[..., None]
        return s.softmax(-1) @ v

    weight = torch.randn(B, Hq, Sq, D, generator=torch.Generator().manual_seed(1))
    outs = eager(*qkv), OPERATOR(*qkv, averaging_rows=rows)[0]
    grads = [torch.autograd.grad((x * weight).sum(), qkv) for x in outs]
    for actual, expected in zip((outs[1], *grads[1]), (outs[0], *grads[0]), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_gradients_of_the_mask_are_those_of_added_numbers():
    (q, k, v), given = drawn()
    bias = torch.zeros(Hq, Sq, Sk, requires_grad=True)
    out, _ = OPERATOR(q, k, v, bias, averaging_rows=given["rows"])
    expected, _ = by_hand(q, k, v, given["rows"], bias)
    weight = torch.randn(out.shape)
    grads = [torch.autograd.grad((x * weight).sum(), bias)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_key_ranges_and_sinks_apply_in_averaging_rows():
    (q, k, v), given = drawn()
    sinks = torch.randn(Hq, requires_grad=True)
    j = torch.arange(Sk)
    ranges = torch.tensor([[0, 3], [2, 7], [0, 0], [1, 6], [4, 5]], dtype=torch.int32)
    inside = (j >= ranges[:, :1]) & (j < ranges[:, 1:])
    mask = torch.zeros(Sq, Sk).masked_fill(~inside, -math.inf)[None, None]
    rows = given["rows"]
    options = {"sinks": sinks, "averaging_rows": rows}
    outs = (
        OPERATOR(q, k, v, key_ranges=ranges[None, None], **options)[0],
        OPERATOR(q, k, v, mask, **options)[0],
    )
    weight = torch.randn(outs[0].shape)
    grads = [torch.autograd.grad((x * weight).sum(), (q, k, v, sinks)) for x in outs]
    for a, e in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-4)
    assert not torch.equal(outs[0], OPERATOR(q, k, v, mask, averaging_rows=rows)[0])


def test_mask_blocks_of_the_mask_hide_no_key_of_an_averaging_row():
    q, k, v = (torch.randn(1, 2, S, D, requires_grad=True) for S in (130, 300, 300))
    mask = torch.ones(130, 300, dtype=torch.bool).tril(40)
    mask[:128] = False  # a row of empty tiles
    rows = torch.zeros(1, 1, 130, dtype=torch.bool)
    rows[..., 3] = rows[..., 129] = True
    results = []
    for blocks in (None, fa_ops.mask_blocks(mask)):
        out, lse = OPERATOR(q, k, v, mask, averaging_rows=rows, mask_blocks=blocks)
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        grads = torch.autograd.grad(out.square().sum() + finite.sum(), (q, k, v))
        results.append((out, lse, *grads))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(out[:, :, 3], v.mean(2))


def test_nan_in_the_query_of_an_averaging_row_does_not_reach_its_result():
    (q, k, v), given = drawn()
    broken = q.detach().masked_fill(given["rows"][..., None], math.nan)
    expected = OPERATOR(q, k, v, averaging_rows=given["rows"])[0]
    assert torch.equal(OPERATOR(broken, k, v, averaging_rows=given["rows"])[0], expected)


def test_dropout_drops_the_weights_of_attention():
    (q, k, v), given = drawn()
    rows, seed = given["rows"], torch.tensor([3])
    zeroed = q.masked_fill(rows[..., None], 0.0)
    expected = torch.ops.fa.attention(zeroed, k, v, None, 0.4, dropout_seed=seed)
    actual, _ = OPERATOR(q, k, v, None, 0.4, dropout_seed=seed, averaging_rows=rows)
    assert torch.equal(actual, expected)
    dv = [torch.autograd.grad(x.sum(), v)[0] for x in (actual, expected)]
    assert torch.equal(*dv)


def test_vmap_maps_every_argument():
    qkv, given = drawn()
    samples = [torch.stack([x, x * 0.5]).detach() for x in qkv]
    rows = torch.stack([given["rows"], ~given["rows"]])

    def one(q, k, v, rows):
        return OPERATOR(q, k, v, averaging_rows=rows)[0]

    mapped = torch.func.vmap(one)(*samples, rows)
    for i, out in enumerate(mapped):
        torch.testing.assert_close(out, one(*(x[i] for x in samples), rows[i]))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    qkv, given = drawn()
    qkv = [x.detach().requires_grad_(requires_grad) for x in qkv]
    options = {"averaging_rows": given["rows"], "filled_keys": given["filled"]}
    opcheck(OPERATOR.default, (*qkv, given["float"]), options)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        (
            "averaging_rows", torch.ones(B, Hq, Sq), TypeError,
            "averaging_rows must be bool, got float32: pass averaging_rows.bool()",
        ),
        (
            "averaging_rows", torch.ones(Sq, dtype=torch.bool), ValueError,
            "averaging_rows must have the dimensions (B, Hq, Sq) = (2, 4, 5), or 1 in place of any,"
            " got shape (5,)",
        ),
        (
            "filled_keys", torch.ones(1, 1, 1, 6, dtype=torch.bool), ValueError,
            "filled_keys must have the dimensions (B, Hq, Sq, Sk) = (2, 4, 5, 7), or 1 in place of "
            "any, got shape (1, 1, 1, 6)",
        ),
        ("grad_share", math.nan, ValueError, "grad_share must be finite, got nan"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_the_rule_and_the_value(name, value, error, message):
    qkv, given = drawn()
    with pytest.raises(error) as raised:
        OPERATOR(*qkv, **{"averaging_rows": given["rows"], name: value})
    assert str(raised.value) == message


def test_forward_mode_and_second_derivatives_raise():
    (q, k, v), given = drawn()
    rows = given["rows"]
    (dq,) = torch.autograd.grad(
        OPERATOR(q, k, v, averaging_rows=rows)[0].sum(), q, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: OPERATOR(x, k, v, averaging_rows=rows)[0], (q,), (q,))
