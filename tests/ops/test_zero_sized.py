"""Calls without queries, keys, sequences or batches: answered by the operators themselves.

Every combination of sizes is compared with the oracle by `tests/fuzz/test_zero_sizes.py`.
"""

from __future__ import annotations

import pytest
import torch

import fa_ops
from fa_ops.plans import dispatch

INF = float("inf")


@pytest.fixture(autouse=True)
def no_backend(monkeypatch):
    def choose(call):
        raise AssertionError("a backend was chosen for an empty call")

    monkeypatch.setattr(dispatch, "choose", choose)


def tensors(B, Sq, Sk):
    shapes = [(B, 4, Sq, 8), (B, 2, Sk, 8), (B, 2, Sk, 6), (4,)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("B, Sq, Sk", [(2, 0, 5), (2, 3, 0), (0, 3, 5), (0, 0, 0), (2, 0, 0)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_dense(B, Sq, Sk, with_sinks, with_mask):
    q, k, v, sinks = tensors(B, Sq, Sk)
    mask = torch.randn(1, 1, Sq, Sk, requires_grad=True) if with_mask else None
    out, lse = fa_ops.attention(
        q, k, v, mask, is_causal=True, sinks=sinks if with_sinks else None, return_lse=True
    )
    assert out.shape == (B, 4, Sq, 6) and (out == 0).all() and out.transpose(1, 2).is_contiguous()
    expected = sinks.detach() if with_sinks else torch.full((4,), -INF)
    assert torch.equal(lse.detach(), expected.view(-1, 1).expand(B, 4, Sq))
    weights = torch.randn_like(lse)
    finite = lse.masked_fill(lse == -INF, 0.0)
    inputs = [q, k, v, *([mask] if with_mask else []), *([sinks] if with_sinks else [])]
    grads = torch.autograd.grad(out.sum() + (finite * weights).sum(), inputs)
    for grad, x in zip(grads, inputs):
        assert grad.shape == x.shape
    for grad in grads[: 3 + with_mask]:
        assert (grad == 0).all()
    if with_sinks:
        torch.testing.assert_close(grads[-1], weights.sum((0, 2)))


@pytest.mark.parametrize("Tq, Tk", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_varlen(Tq, Tk, with_sinks):
    q, k, v = (torch.randn(T, H, 8, requires_grad=True) for T, H in ((Tq, 4), (Tk, 2), (Tk, 2)))
    sinks = torch.randn(4, requires_grad=True)
    ends_q, ends_k = (torch.tensor([0, T // 2, T], dtype=torch.int32) for T in (Tq, Tk))
    ends_q = ends_q.clamp(max=max(Tq - 1, 0))  # the last query is in no sequence
    given = {"sinks": sinks} if with_sinks else {}
    out, lse = fa_ops.attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **given)
    assert out.shape == (Tq, 4, 8) and (out == 0).all()
    assert lse.shape == (4, Tq) and (lse[:, -1:] == -INF).all()
    inside = slice(0, max(Tq - 1, 0))
    if with_sinks and Tq:
        assert torch.equal(lse[:, inside], sinks.view(-1, 1).expand(4, Tq - 1))
    else:
        assert (lse == -INF).all()
    inputs = [q, k, v, *given.values()]
    finite = lse.masked_fill(lse == -INF, 0.0)
    grads = torch.autograd.grad(out.sum() + finite.sum(), inputs)
    assert all((grad == 0).all() for grad in grads[:3])
    if with_sinks:
        assert (grads[3] == max(Tq - 1, 0)).all()


def test_no_sequences():
    q = torch.randn(0, 2, 4)
    ends = torch.zeros(1, dtype=torch.int32)
    assert fa_ops.attention_varlen(q, q, q, ends, ends).shape == (0, 2, 4)


def test_merge():
    out, lse = fa_ops.merge_states(torch.randn(2, 0, 4), torch.randn(2, 0))
    assert out.shape == (0, 4) and lse.shape == (0,)


@pytest.mark.parametrize("B, Sq, Sk", [(2, 0, 5), (2, 3, 0), (0, 3, 5)])
def test_compiled(B, Sq, Sk):
    q, k, v, sinks = tensors(B, Sq, Sk)
    compiled = torch.compile(fa_ops.attention, backend="aot_eager", fullgraph=True)
    out = compiled(q, k, v, sinks=sinks)
    assert out.shape == (B, 4, Sq, 6) and (out == 0).all()
    grads = torch.autograd.grad(out.sum(), [q, k, v, sinks])
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("B, Sq, Sk", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_tensors_without_elements_may_have_any_strides(B, Sq, Sk):
    q, k, v = (torch.randn(B, 2, 8, S + 2).mT[:, :, :S] for S in (Sq, Sk, Sk))
    q, k, v = (x.contiguous() for x in (q, k, v))
    assert any(x.stride(3) != 1 for x in (q, k, v))  # contiguous() changes no empty tensor
    out = fa_ops.attention(q, k, v)
    assert out.shape == (B, 2, Sq, 8) and (out == 0).all()
