"""What every backend must give back: shapes, dtypes, layouts, no aliases, repeatable bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fa_ops.call import backend_option
from fa_ops.call.call import general
from fa_ops.ops import dense, merge, varlen
from fa_ops.plans import dispatch
from fa_ops.testing import assert_close_to_oracle
from tests.ops.cases import CASES, dense_call, packed_call, packed_case

BACKENDS = ["cpu", "reference"]  # the GPU backends meet the same tests in tests/gpu


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request):
    with backend_option.use_backend(request.param):
        yield request.param


def storages(tensors) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if torch.is_tensor(t) and t.numel()}


def forward_and_backward(name: str, call, operators):
    """(inputs, outputs, gradients by name) of a case, through the raw operators."""
    args, options = call(CASES[name])
    out, lse = operators.forward.operator(*args, **options)
    if CASES[name].mask_grad and call is dense_call:
        options["mask_grad"] = True
    saved = (torch.randn_like(out), torch.randn_like(lse), *args[:3], out, lse, *args[3:])
    grads = operators.backward.operator(*saved, **options)
    return [*saved, *options.values()], (out, lse), grads


@pytest.mark.parametrize("name", CASES)
def test_dense(name):
    case = CASES[name]
    inputs, (out, lse), grads = forward_and_backward(name, dense_call, dense.OPERATORS)
    assert out.shape == (case.B, case.Hq, case.Sq, case.Dv)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.shape == (case.B, case.Hq, case.Sq) and lse.is_contiguous()
    assert lse.dtype == torch.float32
    for grad, x in zip(grads, inputs[2:5], strict=False):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert grad.stride() == torch.empty_like(x).stride()
    results = [out, lse, *grads]
    assert len(storages(results)) == sum(1 for t in results if t.numel())
    assert not storages(grads) & storages(inputs)
    for t in results:
        assert not (t.numel() and torch.isnan(t).any())


@pytest.mark.parametrize("name", [name for name in CASES if packed_case(name)])
def test_varlen(name):
    case = CASES[name]
    inputs, (out, lse), grads = forward_and_backward(name, packed_call, varlen.OPERATORS)
    T = case.B * case.Sq + 2
    assert out.shape == (T, case.Hq, case.Dv) and out.is_contiguous()
    assert lse.shape == (case.Hq, T) and lse.is_contiguous()
    assert (out[-2:] == 0).all() and (lse[:, -2:] == float("-inf")).all()
    results = [out, lse, *grads]
    assert len(storages(results)) == sum(1 for t in results if t.numel())
    assert not storages(grads) & storages(inputs)
    for grad, x in zip(grads, inputs[2:5], strict=False):
        assert (grad[-2:] == 0).all()
        assert grad.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("name", [name for name in CASES if packed_case(name)])
def test_varlen_is_attention_per_sequence(name):
    (q, k, v, *rest), options = dense_call(CASES[name])
    out, lse = dense.WITH_LSE(q, k, v, *rest, **options)
    args, options = packed_call(CASES[name])
    packed_out, packed_lse = varlen.VARLEN(*args, **options)
    torch.testing.assert_close(packed_out[:-2].unflatten(0, (2, -1)).transpose(1, 2), out)
    torch.testing.assert_close(packed_lse[:, :-2].unflatten(1, (2, -1)).transpose(0, 1), lse)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_oracle(name, backend):
    assert_close_to_oracle(CASES[name], backend)


def test_tokens_of_no_sequence():
    q = torch.randn(3, 2, 4, requires_grad=True)
    ends = torch.zeros(1, dtype=torch.int32)
    out, lse = varlen.VARLEN(q, q, q, ends, ends)
    assert (out == 0).all() and (lse == -torch.inf).all()
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert (grad == 0).all()


def test_outputs_can_be_changed_in_place():
    """They are tensors of their own, not views that autograd protects."""
    for requires_grad in (True, False):
        (q, *rest), options = dense_call(CASES["causal"], requires_grad)
        out, lse = dense.WITH_LSE(q, *rest, **options)
        assert not out._is_view() and not lse._is_view()
        out.mul_(2.0).add_(torch.ones(1, requires_grad=True))
        if not requires_grad:
            out.sum().backward()


def test_merge_states_gives_the_whole():
    (q, k, v, *_), _ = dense_call(CASES["plain"])
    halves = [(k[:, :, :3], v[:, :, :3]), (k[:, :, 3:], v[:, :, 3:])]
    states = [dense.WITH_LSE(q, k, v) for k, v in halves]
    outs, lses = (torch.stack(x) for x in zip(*states))
    merged, whole = merge.MERGE(outs, lses), dense.WITH_LSE(q, k, v)
    torch.testing.assert_close(merged, whole)
    assert not storages(merged) & storages([outs, lses])


def test_merge_states_of_nothing():
    outs, lses = torch.randn(2, 3, 4), torch.full((2, 3), float("-inf"))
    lses[0, 0] = 1.0
    outs, lses = outs.requires_grad_(), lses.requires_grad_()
    out, lse = merge.MERGE(outs, lses)
    torch.testing.assert_close(out[0], outs[0, 0])
    assert (out[1:] == 0).all() and (lse[1:] == float("-inf")).all()
    grads = torch.autograd.grad([out.sum(), lse[0]], [outs, lses])
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][:, 1:] == 0).all() and (grads[1][:, 1:] == 0).all()


def test_merge_states_gradient():
    outs = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(merge.MERGE, (outs, lses))
    assert torch.autograd.gradgradcheck(merge.MERGE, (outs, lses))


def test_the_out_of_a_state_without_keys_is_ignored():
    outs, lses = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5)
    outs[1, 0], lses[1, 0] = float("nan"), float("-inf")
    outs, lses = outs.requires_grad_(), lses.requires_grad_()
    out, lse = merge.MERGE(outs, lses)
    assert torch.equal(out[0], outs[0, 0]) and torch.equal(lse[0], lses[0, 0])
    grads = torch.autograd.grad(out.sin().sum() + lse.sum(), (outs, lses))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][1, 0].any() and not grads[1][1, 0].any()


def test_deterministic_by_torchs_switch():
    (q, k, v, *_), _ = dense_call(CASES["causal"])
    seen = []
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None

    def plan(call):
        return general("spy", lambda call: seen.append(call.options.deterministic) or grads)

    out, lse = dense.WITH_LSE(q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose", lambda call: SimpleNamespace(plan=plan))
        dense.BACKWARD(out, None, q, k, v, out, lse)
        torch.use_deterministic_algorithms(True)
        try:
            dense.BACKWARD(out, None, q, k, v, out, lse)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]
