"""What the operators tell the rest of torch: checkpointing, FLOPs and more."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.ops import dense, varlen
from tests.ops.cases import CASES, dense_call, packed_call, packed_case


def gradients(function, inputs):
    return torch.autograd.grad(function(*inputs).sin().sum(), inputs)


# Activation checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_checkpoint(name, reentrant):
    (q, k, v, *_), _ = dense_call(CASES[name], requires_grad=True)

    def block(q, k, v):
        return fa_ops.attention(q.sin(), k, v, dropout_p=CASES[name].dropout_p)

    torch.manual_seed(0)
    expected = gradients(block, (q, k, v))
    torch.manual_seed(0)
    out = checkpoint(block, q, k, v, use_reentrant=reentrant)
    out.sin().sum().backward()
    for x, grad in zip((q, k, v), expected):
        torch.testing.assert_close(x.grad, grad)


class Counting:
    """Counts a backend's forward calls."""

    def __init__(self, monkeypatch) -> None:
        self.calls = 0
        cpu = fa_ops.plans.dispatch.load("cpu")
        forward = cpu.forward

        def counted(*args):
            self.calls += 1
            return forward(*args)

        monkeypatch.setattr(cpu, "forward", counted)


@pytest.mark.parametrize("saved, calls", [(True, 1), (False, 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing(monkeypatch, saved, calls, compiled):
    counter = Counting(monkeypatch)
    (q, k, v, *_), _ = dense_call(CASES["causal"], requires_grad=True)
    policy = list(fa_ops.SAC_OPS) if saved else [torch.ops.aten.mm.default]
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def block(q, k, v):
        return fa_ops.attention(q.sin(), k, v).cos()

    def function(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)

    if compiled:
        function = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    grads = gradients(function, (q, k, v))
    assert counter.calls == calls
    torch.testing.assert_close(grads, gradients(block, (q, k, v)))


def test_saved_tensor_hooks_see_everything_that_is_kept():
    """All saved tensors go through the hooks, so that offloading them frees the memory."""
    packed = []
    args, options = dense_call(CASES["positions"], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        dense.WITH_LSE(*args, **options)
    given = [t for t in (*args, *options.values()) if torch.is_tensor(t)]
    pointers = {t.data_ptr() for t in packed}
    assert {t.data_ptr() for t in given} <= pointers and len(pointers) == len(given) + 2


# FLOPs


def count(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["plain", "causal", "positions"])
def test_flops(name):
    case = CASES[name]
    args, options = dense_call(case, requires_grad=True)
    pairs = case.B * case.Hq * case.Sq * case.Sk
    forward = 2 * pairs * (case.D + case.Dv)
    backward = 2 * pairs * (3 * case.D + 2 * case.Dv)
    assert count(lambda: dense.ATTENTION(*args, **options)) == forward
    both = count(lambda: dense.WITH_LSE(*args, **options)[0].sum().backward())
    assert both == forward + backward


def test_flops_are_torchs():
    """The same convention as torch's own attention on a GPU: meta tensors know."""
    q, k, v = (torch.randn(2, 4, 32, 16, device="meta", requires_grad=True) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default

    def theirs():
        flash(q, k, v, 0.0, True)

    assert count(lambda: fa_ops.attention(q, k, v, is_causal=True)) == count(theirs)


def test_flops_of_varlen_count_the_sequences():
    H, D = 4, 8
    q = torch.randn(10, H, D, requires_grad=True)
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    pairs = H * (3 * 3 + 7 * 7)
    call = lambda e: fa_ops.attention_varlen(q, q, q, e, e)  # noqa: E731
    assert count(lambda: call(ends)) == 2 * pairs * 2 * D
    assert count(lambda: call(ends).sum().backward()) == 2 * pairs * 7 * D
    q = torch.randn(10, H, D, device="meta")
    assert count(lambda: call(ends.to("meta"))) == 2 * H * 2 * 10 * 10 * 2 * D  # a bound


# The profiler, meta tensors, inference mode


def test_profiler_shows_the_operators():
    args, options = dense_call(CASES["plain"], requires_grad=True)
    with torch.profiler.profile() as profile:
        dense.ATTENTION(*args, **options).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"fa::attention", "fa::attention_backward"} <= names


@pytest.mark.parametrize("name", CASES)
def test_meta(name):
    args, options = dense_call(CASES[name])
    move = lambda x: x.to("meta") if torch.is_tensor(x) else x  # noqa: E731
    on_meta = dense.WITH_LSE(*map(move, args), **{n: move(x) for n, x in options.items()})
    for fake, real in zip(on_meta, dense.WITH_LSE(*args, **options)):
        assert fake.device.type == "meta"
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("name", CASES)
def test_inference_mode(name):
    args, options = dense_call(CASES[name])
    with torch.inference_mode():
        out = dense.ATTENTION(*args, **options)
        assert out.is_inference()
    torch.testing.assert_close(out, dense.ATTENTION(*args, **options))
    if packed_case(name):
        args, options = packed_call(CASES[name])
        expected = varlen.VARLEN(*args, **options)
        with torch.inference_mode():
            torch.testing.assert_close(varlen.VARLEN(*args, **options), expected)


def test_lse_alone_may_carry_the_gradient():
    q, k, v = (t.double().requires_grad_() for t in dense_call(CASES["plain"])[0][:3])
    lse = fa_ops.attention(q, k, v, return_lse=True)[1]
    got = torch.autograd.grad(lse.sin().sum(), (q, k))
    scores = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
    expected = torch.autograd.grad(torch.logsumexp(scores, -1).sin().sum(), (q, k))
    torch.testing.assert_close(got, expected)


def test_gradcheck():
    (q, k, v, *_), _ = dense_call(CASES["plain"])
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(1, 5, 1, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, mask, sinks):
        return fa_ops.attention(q, k, v, mask, is_causal=True, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(function, (q, k, v, mask, sinks))
