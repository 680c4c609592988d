"""Repeated backward passes run the plan of the last one where they differ in addresses alone."""

from functools import partial

import pytest
import torch

import fa_ops
from fa_ops.backends import cpu
from fa_ops.call.call import Plan
from fa_ops.plans import planning, recognition
from tests.ops.test_recording import (
    INTS,
    OPTIONS,
    assert_equal,
    assert_same,
    by_operator,
    qkv,
    results,
    with_gradients,
)


@pytest.fixture
def sought(monkeypatch):
    """How often the plan of a backward pass was looked for."""
    calls, found = [], planning.prepared_backward
    monkeypatch.setattr(
        planning, "prepared_backward", lambda *args: calls.append(args) or found(*args)
    )
    return calls


@pytest.fixture
def strict(monkeypatch):
    """A prepared backward pass accepts tensors like those it was prepared for, no other."""
    plan = cpu.plan

    def kind_of(t):
        return t if t is None else (t.shape, t.stride(), t.dtype, t.is_neg(), t._is_zerotensor())

    def spy(call):
        planned = plan(call)

        def prepare(call):
            run, saved = planned.prepare(call), call.saved
            if saved is None:
                return run
            given = saved.grad_out, saved.grad_lse, *call[:3], saved.out, saved.lse
            expected = list(map(kind_of, given))

            def checked(*given):
                assert list(map(kind_of, given[:7])) == expected
                return run(*given)

            return checked

        return Plan(planned.kernel, prepare)

    monkeypatch.setattr(cpu, "plan", spy)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_repeated_backward_pass_looks_for_no_plan(sought, name):
    options, differentiable = with_gradients(OPTIONS[name])
    for _ in range(3):
        inputs = qkv()
        found = results(fa_ops.attention, inputs, options, differentiable)
        assert len(sought) == 1
        assert_equal(found, results(by_operator, inputs, options, differentiable))
        sought.pop()  # the operator's, whose node has a plan of its own


def test_packed_sequences_of_the_same_tensor_look_for_no_plan(sought):
    ends = torch.tensor([0, 3, 7], dtype=INTS)
    for _ in range(3):
        x = torch.randn(7, 2, 8, requires_grad=True)
        fa_ops.attention_varlen(x, x, x, ends, ends).sum().backward()
    assert len(sought) == 1


def variants(inputs):
    """Losses of the same forward geometry whose backward passes differ in something."""
    q, k, v = inputs
    mask = torch.linspace(-1, 1, 35).view(5, 7)
    attend, with_lse = fa_ops.attention, partial(fa_ops.attention, return_lse=True)
    yield lambda: attend(q, k, v).sum()
    yield lambda: attend(q, k, v).mT.contiguous().sin().sum()
    yield lambda: attend(q, k, v).sin().sum()
    yield lambda: with_lse(q, k, v)[1].sin().sum()
    yield lambda: sum(t.sin().sum() for t in with_lse(q, k, v))
    yield lambda: (with_lse(q, k, v)[1].mT.contiguous() ** 2).sum()
    yield lambda: attend(q.detach(), k, v).sin().sum()
    yield lambda: attend(q, torch.nn.Parameter(k.detach()), v).sin().sum()
    yield lambda: attend(q, k, v, mask).sin().sum()
    yield lambda: attend(q, k, v, mask.requires_grad_()).sin().sum()


def test_backward_passes_that_differ_are_not_taken_for_the_last(strict):
    inputs = qkv()
    take = partial(torch.autograd.grad, inputs=inputs, allow_unused=True)
    alone = []
    for loss in variants(inputs):
        planning.forget()
        alone.append(take(loss()))
    planning.forget()
    for _ in range(2):
        for loss, expected in zip(variants(inputs), alone, strict=True):
            for x, y in zip(take(loss()), expected, strict=True):
                assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


def test_gradients_without_memory_and_lazily_negated(strict):
    inputs = qkv()
    out = fa_ops.attention(*inputs)
    take = partial(torch.autograd.grad, out, inputs, retain_graph=True)
    plain = torch.randn_like(out)
    for _ in range(2):
        expected = take(plain)
        zeros = take(torch._efficientzerotensor(out.shape))
        assert all(torch.equal(x, torch.zeros_like(x)) for x in zeros)
        for x, y in zip(take(torch._neg_view(-plain)), expected, strict=True):
            torch.testing.assert_close(x, y)


def test_tensors_whose_memory_was_exchanged_are_refused(strict):
    for _ in range(2):
        q, k, v = qkv()
        fa_ops.attention(q, k, v).sum().backward()
        out = fa_ops.attention(q, k, v)
        k.data = k.data[:, :, :3].clone()
        with pytest.raises(ValueError, match="length 7, but key's is 3"):
            out.sum().backward()


def test_torch_without_its_guards(monkeypatch, sought):
    monkeypatch.setattr(recognition, "TensorGuards", None)
    for count in (1, 2, 3):
        assert_same(fa_ops.attention, qkv(), {})
        assert len(sought) == 2 * count
